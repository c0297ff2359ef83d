"""A plan made by hand: two GPUs of 4 GiB (3.6 usable), a model of 4.5 GiB, three planners."""

from __future__ import annotations

from dataclasses import replace

from bnb_dispatch_fix.model.layout import Part
from bnb_dispatch_fix.planning.records import Change, DeviceLoad, Fewer, Plan, Precision, Room, Run

GIB = 2**30
FEATURES = ("backport", "rescue")
EMBED = Part("model.embed_tokens", GIB, 0)
NORM = Part("model.norm", 0, 0)
#: A name that would break out of HTML if it were not escaped.
HEAD = Part('lm_head<script>alert("&")</script>', GIB // 2, 0)


def blocks(first, last):
    count = last - first + 1
    size = count * GIB // 4
    return Part(f"model.layers.{first}–{last}", size, size, count)


def load(device, *parts, given=4 * GIB, usable=int(3.6 * GIB)):
    return DeviceLoad(device, given, usable, sum(part.size for part in parts), parts)


BEFORE = {
    "model.embed_tokens": 1,
    **{f"model.layers.{i}": 1 for i in range(10)},
    **{f"model.layers.{i}": "cpu" for i in range(10, 12)},
    "model.norm": "cpu",
    HEAD.name: "cpu",
}
AFTER = {
    "model.embed_tokens": 0,
    **{f"model.layers.{i}": 0 for i in range(4)},
    **{f"model.layers.{i}": 1 for i in range(4, 12)},
    "model.norm": 1,
    HEAD.name: 1,
}


def run_before(name="release"):
    devices = (
        load(0),
        load(1, EMBED, blocks(0, 9)),
        load("cpu", blocks(10, 11), NORM, HEAD, given=60 * GIB, usable=54 * GIB),
    )
    return Run(name, "refused", "ValueError: some <b>modules</b> …", BEFORE, devices)


def run_after(name):
    devices = (
        load(0, EMBED, blocks(0, 3)),
        load(1, blocks(4, 11), NORM, HEAD),
        load("cpu", given=60 * GIB, usable=54 * GIB),
    )
    return Run(name, "loads", None, AFTER, devices)


def plan(**changes):
    facts = {
        "model": "tiny & co",
        "versions": {"transformers": "5.12.1", "accelerate": "1.14.0"},
        "strategy": "auto",
        "precision": "4-bit nf4 (bitsandbytes), float16",
        "total": 9 * GIB // 2,
        "quantized": 3 * GIB,
        "largest": (Part("model.layers.*.mlp", 3 * GIB, 3 * GIB, 12), EMBED, HEAD),
        "runs": (run_before(), *map(run_after, FEATURES)),
        "fits": True,
        "verdict": "fits with the backport",
        "device_map": AFTER,
    }
    return Plan(**{**facts, **changes})


def plan_that_does_not_fit():
    runs = tuple(run_before(name) for name in ("release", *FEATURES))
    verdict = "needs 4.50 GiB, usable 3.60 GiB: short by 0.90 GiB"
    return plan(runs=runs, fits=False, verdict=verdict, device_map=None)


def room(**changes):
    """What 4096 tokens take of two GPUs of 4 GiB, of which the second is too small."""
    devices = (
        DeviceLoad(0, 4 * GIB, 3 * GIB, 2 * GIB, (), GIB // 4, GIB // 2, GIB, GIB // 8),
        DeviceLoad(1, 4 * GIB, 3 * GIB, 3 * GIB, (), 0, GIB, GIB // 2, GIB // 8),
    )
    facts = {
        "context": 4096,
        "batch": 2,
        "kv_dtype": "bfloat16",
        "reserve": GIB // 8,
        "source": "measured on a release's own forward pass",
        "limit": 8192,
        "most": 1000,
        "enough": False,
        "shown": "backport",
        "devices": devices,
    }
    return Room(**{**facts, **changes})


#: Of the model above: 16 bits do not fit, 4 bits fill their device but for the scales.
PRECISIONS = (
    Precision(
        *("16", "float16", 15 * GIB // 2, 0, False, 0, ()),
        "needs 7.50 GiB, usable 7.20 GiB: short by 0.30 GiB",
    ),
    Precision("8", "8-bit", 6 * GIB, 2**20, True, 0, (0, 1), None),
    Precision("4", "4-bit nf4", 9 * GIB // 2, 3 * GIB // 8, True, 2**20, (0, 1), None),
    Precision(
        "4dq", "4-bit nf4, double quantization", 9 * GIB // 2, GIB // 16, True, 0, (0,), None
    ),
)


def plan_that_compares(**changes):
    return plan(**{"precisions": PRECISIONS, **changes})


RECIPES = (
    Change("higher budgets", 'max_memory={0: "5GiB", 1: "5GiB"}'),
    Change("1 more <device> of 4.00 GiB", ""),
)


def plan_with_recipes():
    return replace(plan_that_does_not_fit(), recipes=RECIPES)


def plan_on_fewer():
    return plan(fewer=Fewer((0,), 'max_memory={0: "4GiB"}'))


#: The embedding alone, everything else on the other GPU: two thirds of what is usable there.
EVEN = {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, HEAD.name: 1}


def plan_with_even():
    """With a fourth run; the others that load hold 1.5 times the best on the fullest GPU."""
    devices = (load(0, EMBED), load(1, blocks(0, 11), NORM, HEAD))
    runs = [run_before(), *(replace(run_after(name), evenness=1.5) for name in FEATURES)]
    runs.append(Run("even", "loads", None, EVEN, devices, 1.0))
    return plan(runs=tuple(runs), device_map=EVEN)
