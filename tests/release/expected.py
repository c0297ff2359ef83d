"""Writes what transformers 5.24.0 itself answers; run by `nox -s expected` in a cell of its own.

`tests/data/caps_5.24.0.json` holds one case per line: a model of models.py, the budgets, the
no-split classes and the form they are passed in, and the caps. Where 5.24.0 raises for a no-split
class without an instance, "caps" are those without that class, next to "raises"; where it raises
for another reason there are no caps. In a cell with accelerate 1.16.0 it is expected_by_id.py that
writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accelerate
import expected_by_id
import models
import transformers
from transformers.integrations.accelerate import compute_module_sizes, get_balanced_memory

from bnb_dispatch_fix.planning.simulation import simulated_gpus

DATA = Path(__file__).parent.parent / "data" / "caps_5.24.0.json"
ABSENT = "NoSuchBlock"
#: (form, classes): how callers pass the classes that may not be split.
CLASSES = [
    ("list", [models.BLOCK]),
    ("tuple", [models.BLOCK]),
    ("set", [models.BLOCK, "Embedding"]),
    ("str", [models.BLOCK]),
    ("None", []),
    ("list", []),
    ("list", [ABSENT]),
    ("set", [ABSENT, models.BLOCK]),
]


def budgets(total):
    """max_memory in the shapes people write, scaled to a model of `total` bytes."""
    for count in (1, 2, 3, 4, 8):
        tight, roomy = int(total / count * 1.1), 2 * total  # only roomy ones are capped
        yield dict.fromkeys(range(count), tight)
        yield {**dict.fromkeys(range(count), roomy), "cpu": 2 * total}
        whole = count * (count + 1) / 2
        yield {device: int(total * 4 * (device + 1) / whole) for device in range(count)}
        yield {device: int(total * 4 * (count - device) / whole) for device in range(count)}
        if count > 2:
            yield {**dict.fromkeys(range(count), roomy), 0: 0}
            yield {**dict.fromkeys(range(count), roomy), count // 2: 0, "disk": total}
    yield {0: 2 * total, 3: 2 * total}
    yield {1: 2 * total, 2: total, "cpu": total}
    yield {2: total, 5: total // 2, 7: total}
    yield {"cpu": total, 1: total, 0: 2 * total}
    yield {"cpu": total}
    yield {0: 0, 1: 0, "cpu": total}
    yield {0: "22GiB", 1: "2GB", "cpu": "64GiB"}
    yield {**dict.fromkeys(range(8), "10MiB"), "disk": "900GB"}


def free_memory(total):
    """What accelerators report as free, for calls without max_memory."""
    for count in (1, 2, 3, 4, 8):
        yield {**{device: int(total / count * 2) + device for device in range(count)}, "cpu": total}


def case(model, quantizer, max_memory, free, form, classes, low_zero):
    """One call; `max_memory` is copied first, because string budgets are converted in place."""

    def caps(names):
        given = None if max_memory is None else dict(max_memory)
        with simulated_gpus(free):
            return pairs(
                get_balanced_memory(
                    model, given, models.FORMS[form](names), quantizer, low_zero=low_zero
                )
            )

    answer = {
        "max_memory": pairs(max_memory),
        "free": pairs(free),
        "form": form,
        "classes": classes,
        "low_zero": low_zero,
    }
    try:
        return {**answer, "caps": caps(classes)}
    except (ValueError, KeyError) as error:
        answer["raises"] = type(error).__name__
    instances = {type(module).__name__ for module in model.modules()}
    if not instances.issuperset(classes):
        try:
            answer["caps"] = caps([name for name in classes if name in instances])
        except KeyError:
            answer["raises"] = "KeyError"
    return answer


def pairs(mapping):
    """A dict as JSON can hold it, with the order and the types of its keys."""
    return None if mapping is None else [[key, value] for key, value in mapping.items()]


def cases(name):
    model = models.build(name)
    quantizer = models.quantizer() if name.endswith("nf4") else None
    total = int(compute_module_sizes(model, quantizer)[0][""]) or 2**20
    grid = [(max_memory, None) for max_memory in budgets(total)]
    grid += [(None, free) for free in free_memory(total)]
    for index, (max_memory, free) in enumerate(grid):
        # The plain form everywhere; the others with a sixth of the budgets each.
        for position, (form, classes) in enumerate(CLASSES):
            if position and (index + position) % 6:
                continue
            for low_zero in (False, True):
                yield case(model, quantizer, max_memory, free, form, classes, low_zero)


def main():
    if accelerate.__version__ == "1.16.0":
        expected_by_id.main()
        return
    if transformers.__version__ != "5.24.0":
        sys.exit(f"expected values come from transformers 5.24.0, not {transformers.__version__}")
    lines = [
        json.dumps({"model": name, **found}, separators=(",", ":"))
        for name in models.MODELS
        for found in cases(name)
    ]
    head = {"transformers": transformers.__version__, "accelerate": accelerate.__version__}
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(
        json.dumps(head)[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8"
    )
    print(f"{len(lines)} cases in {DATA.name}")


if __name__ == "__main__":
    main()
