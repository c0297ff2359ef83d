"""How many models that fit are loaded, without the shim and with it, and what planning costs.

    python tests/benchmarks/loadability.py RESULT.json          in a cell: count and time
    python tests/benchmarks/loadability.py --table RESULT.json …   the measured tables

Six real configurations, nf4, on 2, 3, 4, 6 and 8 like GPUs whose usable memory (budget × 0.9) is
1.02 to 6 times the model together. Of these 420 instances, those count that fit in device order.
Beside them 200 planted ones: a random cut of a model, devices in random order, each with 0.2–5 %
more usable memory than its part. A model is loaded where the planner raises nothing, leaves nothing
to the CPU, and no device gets more than is usable of it: transformers 4.x counts too little.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from pathlib import Path

GPUS = (2, 3, 4, 6, 8)
TIMES_THE_MODEL = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2, 2.5, 3, 4, 6)
STRATEGIES = ("auto", "balanced_low_0", "sequential")
MODES = {"without": None, "backport": ["backport"], "all": ["backport", "rescue", "explain"]}
SHARE = 0.9
PLANTED = 200
ROUNDS = 5
HOST = 2**45


def main(target):
    import real_models
    import transformers

    import bnb_dispatch_fix

    logging.disable(logging.WARNING)
    counts = {
        kind: {mode: dict.fromkeys(STRATEGIES, 0) for mode in MODES}
        for kind in ("in device order", "planted")
    }
    totals = dict.fromkeys(counts, 0)
    left, draw = [], random.Random(200)
    planted = [name for index, name in zip(range(PLANTED), list(real_models.CONFIGS) * PLANTED)]
    for name in real_models.CONFIGS:
        model, quantizer = real_models.build(name)
        parts = real_models.parts(model)
        sizes = [size for _, size in parts]
        cases = {
            "in device order": list(like_gpus(sizes)),
            "planted": [planted_budgets(sizes, draw) for _ in range(planted.count(name))],
        }
        for kind, budgets in cases.items():
            totals[kind] += len(budgets)
            for mode, features in MODES.items():
                bnb_dispatch_fix.deactivate()
                if features:
                    bnb_dispatch_fix.activate(features)
                for strategy in STRATEGIES:
                    for max_memory in budgets:
                        device_map = plan(model, strategy, max_memory, quantizer)
                        loaded = placed(device_map) and within(parts, device_map, max_memory)
                        counts[kind][mode][strategy] += loaded
                        if mode == "all" and not loaded:
                            left.append([name, strategy, list(max_memory.items())])
        print(name, "done", file=sys.stderr, flush=True)
    result = {
        "transformers": transformers.__version__,
        "loaded": counts,
        "of": totals,
        "left": left,
        "times": times(real_models),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table([result]))


def like_gpus(sizes):
    """`max_memory` of the instances that fit in device order."""
    from real_models import fits_in_device_order

    for count in GPUS:
        for times_the_model in TIMES_THE_MODEL:
            budget = int(times_the_model * sum(sizes) / count / SHARE) + 1
            if fits_in_device_order(sizes, int(budget * SHARE), count):
                yield {**dict.fromkeys(range(count), budget), "cpu": HOST}


def planted_budgets(sizes, draw):
    """Budgets around a random contiguous placement; the devices come in another order."""
    count = draw.choice(GPUS)
    cuts = [0, *sorted(draw.sample(range(1, len(sizes)), count - 1)), len(sizes)]
    slack = draw.uniform(1.002, 1.05)
    parts = [sum(sizes[start:end]) for start, end in zip(cuts, cuts[1:])]
    draw.shuffle(parts)
    budgets = {gpu: int(part * slack / SHARE) + 1 for gpu, part in enumerate(parts)}
    return {**budgets, "cpu": HOST}


def within(parts, device_map, max_memory):
    """Whether each device holds no more than is usable of it; no part is split."""
    loads = {}
    for name, size in parts:
        keys = [key for key in device_map if key in ("", name) or name.startswith(f"{key}.")]
        device = device_map[max(keys, key=len)]
        loads[device] = loads.get(device, 0) + size
    return all(load <= max_memory[device] * SHARE for device, load in loads.items())


def placed(device_map):
    return device_map is not None and not {"cpu", "disk"} & {str(d) for d in device_map.values()}


def plan(model, strategy, max_memory, quantizer):
    """The installed planner's answer on simulated GPUs; None where it raises."""
    import torch
    from transformers.modeling_utils import _get_device_map

    from bnb_dispatch_fix.planning.simulation import simulated_gpus

    old = (torch.float16, None) if hasattr(quantizer, "get_special_dtypes_update") else ()
    with simulated_gpus():
        try:
            return _get_device_map(model, strategy, dict(max_memory), quantizer, *old)
        except (ValueError, KeyError, IndexError):
            return None


# --- what planning costs --------------------------------------------------------------------


def times(real_models):
    """Seconds of a plan without the shim, and what it takes with it, by model and outcome."""
    import bnb_dispatch_fix

    answer = {}
    for name, make in {
        "Llama-3-8B": lambda: real_models.build("Llama-3-8B"),
        "Mixtral-8x7B": lambda: real_models.build("Mixtral-8x7B"),
        "60,000 modules": many_modules,
    }.items():
        model, quantizer = make()
        budgets = list(like_gpus([size for _, size in real_models.parts(model)]))
        accepted = budgets[-1]  # eight GPUs with plenty of room
        bnb_dispatch_fix.activate(["backport"])
        refused = next(m for m in budgets if not placed(plan(model, "sequential", m, quantizer)))
        for case, strategy, max_memory in [
            ("accepted", "auto", accepted),
            ("placed by rescue", "sequential", refused),
        ]:
            answer[f"{name}, {case}"] = compare((model, strategy, max_memory, quantizer))
    return answer


def compare(asked):
    """The best of a few rounds each, taken in turns."""
    import bnb_dispatch_fix

    best = {"without": float("inf"), "with": float("inf")}
    outcomes = {}
    for _ in range(ROUNDS):
        for mode in best:
            bnb_dispatch_fix.deactivate()
            if mode == "with":
                bnb_dispatch_fix.activate()
            started = time.perf_counter()
            device_map = plan(*asked)
            best[mode] = min(best[mode], time.perf_counter() - started)
            outcomes[mode] = placed(device_map)
    return {
        **{mode: round(seconds, 4) for mode, seconds in best.items()},
        "ratio": round(best["with"] / best["without"], 2),
        "loaded": outcomes,
    }


def many_modules():
    import bench_units
    import real_models
    import torch

    class Big(bench_units.Model):
        _no_split_modules = ("Layer",)
        all_tied_weights_keys = {}  # noqa: RUF012  # read by transformers 5

        def _get_no_split_modules(self, device_map):
            return list(self._no_split_modules)

    _, quantizer = real_models.build("OPT-125m")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            return Big(), quantizer
    finally:
        torch.set_default_dtype(before)


# --- as text --------------------------------------------------------------------------------


def table(results):
    """The counts and the ratios of several cells as Markdown."""
    lines = []
    for kind in ("in device order", "planted"):
        of = sorted({str(result["of"][kind]) for result in results})
        lines += [
            f"Loaded, of {'/'.join(of)} instances {kind}"
            " (transformers as it is → with backport → with rescue):",
            "",
            f"| transformers | {' | '.join(STRATEGIES)} |",
            "|---" * (1 + len(STRATEGIES)) + "|",
        ]
        for result in results:
            loaded = result["loaded"][kind]
            cells = [" → ".join(str(loaded[mode][s]) for mode in MODES) for s in STRATEGIES]
            lines.append(f"| {result['transformers']} | {' | '.join(cells)} |")
        lines.append("")
    cases = list(results[0]["times"])
    lines += [
        "Time of a plan with the shim ÷ without it:",
        "",
        f"| transformers | {' | '.join(cases)} |",
        "|---" * (1 + len(cases)) + "|",
    ]
    for result in results:
        ratios = " | ".join(f"{result['times'][case]['ratio']:.2f}" for case in cases)
        lines.append(f"| {result['transformers']} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table([json.loads(Path(path).read_text("utf-8")) for path in sys.argv[2:]]))
    else:
        main(Path(sys.argv[1]))
