"""Writes what accelerate 1.16.0 itself answers to "balanced_low_0" where device ids have gaps.

`tests/data/caps_by_id_1.16.0.json` holds one case per line: a model of models.py, the budgets, the
no-split classes, and the caps. That release reads the budgets by device id (#4298); the buffer it
gets from a model in which the largest block and the largest leaf come first, as its own function
does not look for them (#47203, #47211).
"""

from __future__ import annotations

import json
from pathlib import Path

import accelerate
import models
from accelerate.utils.modeling import compute_module_sizes, get_balanced_memory

from bnb_dispatch_fix.planning.simulation import simulated_gpus

DATA = Path(__file__).parent.parent / "data" / "caps_by_id_1.16.0.json"
CLASSES = ([models.BLOCK], [])


def budgets(total):
    """max_memory with GPUs that are missing or have nothing, scaled to a model of `total` bytes."""
    half, much = total // 2, 2 * total
    yield {0: much, 3: much}
    yield {0: much, 3: half, "cpu": total}
    yield {0: much, 1: 0, 2: much}
    yield {0: much, 1: 0, 2: half, "cpu": total}
    yield {0: total, 1: half, 2: 0, 3: half}
    yield {0: 0, 1: much, 2: much}
    yield {0: 0, 1: half, 5: half}
    yield {0: much, 2: total // 3, 5: total // 3, 7: total // 5, "cpu": much}
    yield {5: total, 0: much, 2: half}
    yield {"cpu": total, 4: half, 0: total}
    for empty in range(1, 8):
        yield {**dict.fromkeys(range(8), total // 4), empty: 0, "cpu": total}
    yield {0: "22GiB", 2: "1MB", 3: "1MiB", "cpu": "64GiB"}
    # Without gaps the id is the position, and the answer that of every release.
    yield {0: total, 1: half, 2: total // 3}


def cases(name):
    plain = models.build(name)
    sizing = models.sizing(plain)
    sizes = compute_module_sizes(plain, **sizing)
    for classes in CLASSES:
        model, labels = models.largest_made_first(name, classes, sizes)
        for max_memory in budgets(int(sizes[""]) or 2**20):
            given = [[key, size] for key, size in max_memory.items()]
            caps = get_balanced_memory(model, dict(max_memory), labels, low_zero=True, **sizing)
            answer = [[key, size] for key, size in caps.items()]
            yield {"model": name, "classes": classes, "max_memory": given, "caps": answer}


def main():
    with simulated_gpus():
        found = [json.dumps(case) for name in models.MODELS for case in cases(name)]
    head = json.dumps({"accelerate": accelerate.__version__})[:-1]
    DATA.write_text(head + ', "cases": [\n' + ",\n".join(found) + "\n]}\n", encoding="utf-8")
    print(f"{len(found)} cases in {DATA.name}")
