"""How even the spread of a model is: as installed, with the shim, with even, and as others plan.

    python tests/benchmarks/even_spread.py RESULT.json          in a cell: plan all of it
    python tests/benchmarks/even_spread.py --table RESULT.json …   the measured tables

Six real configurations, nf4. On 2, 4 and 8 like GPUs with 1.5 and 3 times the room that the model
takes, those of the 36 that fit in device order; and 20 on unlike ones. The number is the largest
load ÷ usable budget, divided by the smallest that the largest can be with one run of the model per
device in device order, which an oracle of the tests finds (tests/release/evenness.py). Sizes are
those of real_models.py, not those that the shim counts.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent.parent / "release"))

from evenness import largest_fill, smallest_largest_fill

SHARE = 0.9
GIB = 2**30
HOST = 2**45
LIKE = [(count, times) for count in (2, 4, 8) for times in (1.5, 3)]
#: GiB of each card.
UNLIKE = {
    "24+12": (24, 12),
    "24+24+8": (24, 24, 8),
    "80+8": (80, 8),
    "11x8+24": (*[8] * 11, 24),
}
#: 5.x keeps Mixtral's experts in 16 bits.
LARGE = {
    "80+24": (80, 24),
    "80+24+24": (80, 24, 24),
    "48+48+24": (48, 48, 24),
    "24+80+48": (24, 80, 48),
}
CARDS = {
    **dict.fromkeys(("Llama-3-8B", "Qwen2.5-7B", "Gemma-2-27B", "DeepSeek-V2-Lite"), UNLIKE),
    "Mixtral-8x7B": LARGE,
}
MODES = {
    "as installed": None,
    "backport": ["backport"],
    "rescue": ["backport", "rescue", "explain"],
    "even": ["backport", "rescue", "explain", "even"],
}
#: A peer's planner, looked for in the environment; it needs a GPU to be imported as a package.
PEER = ("unsloth_zoo", "device_map_planner.py")
ROUNDS = 5


def main(target):
    import real_models
    import transformers

    logging.disable(logging.WARNING)
    peer = load_peer()
    plans = []
    for name in real_models.CONFIGS:
        model, quantizer = real_models.build(name)
        parts = real_models.parts(model)
        for cards, max_memory in budgets_of(name, parts):
            maps = {mode: plan(mode, model, max_memory, quantizer) for mode in MODES}
            if peer is not None:
                maps[PEER[0]] = ask_peer(peer, model, max_memory, quantizer)
                # Without what it keeps back for logits: only the spread is compared.
                maps[f"{PEER[0]}, headroom 0"] = ask_peer(
                    peer, model, max_memory, quantizer, headroom_bytes=0
                )
            found = {mode: told(parts, max_memory, planned) for mode, planned in maps.items()}
            plans.append({"model": name, "cards": cards, "evenness": found})
        print(name, "done", file=sys.stderr, flush=True)
    result = {"transformers": transformers.__version__, "plans": plans, "time": times()}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table([result]))


def budgets_of(name, parts):
    """(what is said of them, `max_memory`) of the instances that fit in device order."""
    total = sum(size for _, size in parts)
    cases = [
        (f"{count} like, {times:g}x", [int(times * total / count / SHARE) + 1] * count)
        for count, times in LIKE
    ]
    unlike = CARDS.get(name, {})
    cases += [(cards, [size * GIB for size in sizes]) for cards, sizes in unlike.items()]
    for cards, sizes in cases:
        max_memory = {**dict(enumerate(sizes)), "cpu": HOST}
        if optimum(parts, max_memory) is not None:
            yield cards, max_memory


def usable(max_memory):
    return {gpu: int(size * SHARE) for gpu, size in max_memory.items() if gpu != "cpu"}


def optimum(parts, max_memory):
    """The least largest fill; where the head is the embedding's tensor, it may follow either."""
    sizes = [size for _, size in parts]
    lines = [sizes]
    if parts[-1][1] == 0:  # the head is tied to what comes first
        lines.append([*sizes[1:], sizes[0]])
    budgets = list(usable(max_memory).values())
    fills = (smallest_largest_fill([size for size in line if size], budgets) for line in lines)
    return min((fill for fill in fills if fill is not None), default=None)


def told(parts, max_memory, device_map):
    """The evenness of a plan and how many cards are empty, or what is wrong with it."""
    if device_map is None:
        return "refused"
    if {"cpu", "disk"} & {str(device) for device in device_map.values()}:
        return "on the CPU"
    loads = {}
    for name, size in parts:
        keys = [key for key in device_map if key in ("", name) or name.startswith(f"{key}.")]
        device = device_map[max(keys, key=len)]
        loads[device] = loads.get(device, 0) + size
    budgets = usable(max_memory)
    fullest = largest_fill(loads, budgets)
    if fullest > 1:
        return "too full"
    empty = sum(1 for gpu in budgets if not loads.get(gpu))
    return [float(fullest / optimum(parts, max_memory)), empty]


def plan(mode, model, max_memory, quantizer):
    """The map that comes out on simulated GPUs; None where an error does."""
    import loadability

    import bnb_dispatch_fix

    bnb_dispatch_fix.deactivate()
    if MODES[mode]:
        bnb_dispatch_fix.activate(MODES[mode])
    try:
        return loadability.plan(model, "auto", max_memory, quantizer)
    finally:
        bnb_dispatch_fix.deactivate()


def load_peer():
    """The peer's planner as a module, None where it is not installed; its package stays out."""
    package, file = PEER
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / file
    spec = importlib.util.spec_from_file_location("peers_planner", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ask_peer(peer, model, max_memory, quantizer, **changes):
    """Its map; None where it refuses."""
    budgets = {gpu: size for gpu, size in max_memory.items() if gpu != "cpu"}
    try:
        found = peer.plan_device_map(model, max_memory=budgets, hf_quantizer=quantizer, **changes)
    except peer.DeviceMapInfeasible:
        return None
    return found.device_map


def times():
    """What the shim adds to a plan of the large model, as a part of the installed planner's time.

    `even` alone, and what it adds to the other features.
    """
    import loadability

    import bnb_dispatch_fix
    from bnb_dispatch_fix.planning.simulation import replaced
    from bnb_dispatch_fix.wrappers import planners

    model, quantizer = loadability.many_modules()
    asked = (model, "auto", {**dict.fromkeys(range(8), 64 * GIB), "cpu": HOST}, quantizer)
    around, planning = planners.around, planners._planning
    whole, inside = [], []

    def timed_around(*args):
        started = time.process_time()
        found = around(*args)
        whole.append(time.process_time() - started)
        return found

    @contextmanager
    def timed_planning():
        started = time.process_time()
        with planning():
            yield
        inside.append(time.process_time() - started)

    added = {name: [] for name in ("even", "defaults", "both")}
    modes = dict(zip(added, (["even"], MODES["rescue"], MODES["even"])))
    with replaced(planners, "around", timed_around), replaced(
        planners, "_planning", timed_planning
    ):
        for _ in range(ROUNDS):
            for name, features in modes.items():
                bnb_dispatch_fix.deactivate()
                bnb_dispatch_fix.activate(features)
                assert loadability.placed(loadability.plan(*asked))
                added[name].append(whole[-1] - inside[-1])
    bnb_dispatch_fix.deactivate()
    installed = min(inside)
    spent = {name: min(seconds) / installed for name, seconds in added.items()}
    return {
        "modules": sum(1 for _ in model.modules()),
        "alone": round(spent["even"], 3),
        "to the others": round(spent["both"] - spent["defaults"], 3),
    }


# --- as text --------------------------------------------------------------------------------


def is_like(entry):
    """Whether all cards are alike."""
    return "like" in entry["cards"]


def summary(entries, mode):
    """Median, largest, how many with an empty card, how many that do not load."""
    found = [entry["evenness"][mode] for entry in entries]
    loaded = [each for each in found if not isinstance(each, str)]
    if not loaded:
        return ["-", "-", "-", str(len(found))]
    numbers = [number for number, _ in loaded]
    empty = sum(1 for _, cards in loaded if cards)
    return [
        f"{statistics.median(numbers):.2f}",
        f"{max(numbers):.2f}",
        str(empty),
        str(len(found) - len(loaded)),
    ]


def table(results):
    """All plans side by side, the summaries, and the times, as Markdown."""
    lines = []
    for like in (True, False):
        count = sum(1 for entry in results[0]["plans"] if is_like(entry) is like)
        lines += [
            f"Evenness of {count} plans with {'like' if like else 'unlike'} cards: median, largest,"
            " with an empty card, not loaded",
            "",
            "| | median | largest | with an empty card | not loaded |",
            "|---|---|---|---|---|",
        ]
        for result in results:
            entries = [entry for entry in result["plans"] if is_like(entry) is like]
            for mode in entries[0]["evenness"]:
                cells = " | ".join(summary(entries, mode))
                lines.append(f"| {result['transformers']}, {mode} | {cells} |")
        lines.append("")
    columns = [
        (index, mode)
        for index, result in enumerate(results)
        for mode in result["plans"][0]["evenness"]
    ]
    heads = [f"{results[index]['transformers']}, {mode}" for index, mode in columns]
    lines += [f"| model | cards | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for entries in zip(*(result["plans"] for result in results)):
        cells = [cell(entries[index]["evenness"][mode]) for index, mode in columns]
        lines.append(f"| {entries[0]['model']} | {entries[0]['cards']} | {' | '.join(cells)} |")
    lines.append("")
    for result in results:
        spent = result["time"]
        lines.append(
            f"{result['transformers']}, {spent['modules']} modules: even adds {spent['alone']:.3f} "
            "of the installed planner's time alone, "
            f"{spent['to the others']:.3f} to the other features"
        )
    return "\n".join(lines)


def cell(found):
    if isinstance(found, str):
        return found
    number, empty = found
    return f"{number:.2f}" + (f" ({empty} empty)" if empty else "")


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table([json.loads(Path(path).read_text("utf-8")) for path in sys.argv[2:]]))
    else:
        main(Path(sys.argv[1]))
