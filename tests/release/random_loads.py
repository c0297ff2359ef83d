"""Random loads, planned without the shim and with it, and what it means that one is lost.

Models are shapes.py's. Budgets are from a little too small to roomy, alike or unlike, with gaps in
the ids, zeros, texts and odd numbers, or none at all: then GPUs report what is free. Used by
test_nobody_loses.py and by the script of `nox -s fuzz`.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from typing import NamedTuple, Optional

import shapes
from packaging.version import Version
from shapes import SHARE, STRATEGIES, TRANSFORMERS, Shape

import bnb_dispatch_fix
from bnb_dispatch_fix.features import DEFAULTS

#: Of a lone GPU without `max_memory` accelerate before 0.22 plans all, later releases 0.9.
LONE_SHARE = (
    0.9
    if Version("5") <= TRANSFORMERS
    or Version(importlib.metadata.version("accelerate")) >= Version("0.22")
    else 1
)


class Load(NamedTuple):
    """What is asked; `max_memory` is None where `free` counts.

    `even` says whether that feature is on where the shim is.
    """

    shape: Shape
    strategy: str
    max_memory: Optional[dict]
    free: Optional[dict]
    double: bool
    even: bool = False


def random_shape(draw):
    blocks = draw.randint(1, 24)
    kinds = [draw.choice([400, 1000, 3000, 8000]) + draw.randint(0, 99) for _ in range(2)]
    odd = draw.random() < 0.3
    sizes = [draw.choice(kinds) if odd else kinds[0] for _ in range(blocks)]
    embed = 2 * draw.choice([100, 1000, 5000, 15_000])
    return Shape(embed, tuple(sizes), 2 * draw.choice([1, 1000, 5000]), draw.random() < 0.3)


def random_budgets(draw, total):
    """From a little too small to roomy; like devices, unlike ones, gaps in ids, zeros."""
    count = draw.choice([1, 2, 2, 3, 4, 6, 8])
    first = draw.choice([0, 0, 0, 1])
    ids = [first + index * draw.choice([1, 1, 1, 2]) for index in range(count)]
    shares = [1 if draw.random() < 0.6 else draw.uniform(0.2, 2) for _ in ids]
    slack = draw.choice([0.97, 1.005, 1.02, 1.1, 1.3, 2, 4, 8])
    scale = total * slack / sum(shares) / SHARE
    budgets = {device: int(scale * share) + 1 for device, share in zip(ids, shares)}
    if count > 2 and draw.random() < 0.1:
        budgets[draw.choice(sorted(budgets))] = 0
    return budgets if draw.random() < 0.2 else {**budgets, "cpu": 10 * total}


def odd_budgets(draw, total):
    """What people write by mistake, and what programs hand over."""
    much = 10 * total
    return draw.choice(
        [
            {},
            {"cpu": much},
            {"cpu": 0},
            {0: 0, "cpu": much},
            {0: 512, "cpu": much},
            {0: 0, 1: 0},
            {0: 1, 1: much, "cpu": much},
            {0: f"{much // 1000 + 1}KB", "cpu": f"{much}KiB"},
            {"cpu": much, 1: total, 0: total},
            {0: 1.5 * total, 1: 0.5 * total, "cpu": 1e9},
            {0: 2**70, "cpu": much},
            {0: total, "cpu": 1},
            {7: 2 * total},
            {0: total // 2, 1: total // 2, 2: total // 2},
        ]
    )


def free_memory(draw, total):
    """What GPUs report: one of them in half of the cases, full ones and nearly full ones too."""
    count = draw.choice([1, 1, 1, 2, 3, 8])
    slack = draw.choice([0.97, 1.005, 1.1, 1.12, 1.2, 1.24, 1.3, 2, 4])
    free = {device: int(total * slack / count / SHARE) + device for device in range(count)}
    if draw.random() < 0.1:
        free[draw.choice(sorted(free))] = draw.choice([0, 512])
    return {**free, "cpu": draw.choice([10 * total, 10 * total, total // 4])}


def random_loads(draw, count):
    """That many loads; a model and its budgets are asked for with every strategy."""
    while count > 0:
        shape = random_shape(draw)
        total = sum(shape.sizes.values())
        kind = draw.random()
        free = given = None
        if kind < 0.25:
            free = free_memory(draw, total)
        elif kind < 0.35:
            given = odd_budgets(draw, total)
        else:
            given = random_budgets(draw, total)
        double = draw.random() < 0.5
        even = draw.random() < 0.5
        for strategy in STRATEGIES[:count]:
            yield Load(shape, strategy, given, free, double, even)
        count -= len(STRATEGIES)


def planned(loads, active):
    """The outcomes of the loads, with the shim or without it."""
    found = {}
    for even in (False, True):
        if active:
            bnb_dispatch_fix.activate([*DEFAULTS, "even"] if even else DEFAULTS)
        else:
            bnb_dispatch_fix.deactivate()
        try:
            found.update((n, plan(load)) for n, load in enumerate(loads) if load.even == even)
        finally:
            bnb_dispatch_fix.deactivate()
    return [found[n] for n in range(len(loads))]


def plan(load):
    """What the installed release does with it."""
    return shapes.plan(
        load.shape,
        load.strategy,
        load.max_memory,
        load.free,
        bnb_4bit_use_double_quant=load.double,
    )


def within(load, outcome):
    """Whether everything is on accelerators, in true bytes within what is usable of them."""
    given = load.free if load.max_memory is None else load.max_memory
    accelerators = {d: _bytes(size) for d, size in given.items() if d not in ("cpu", "disk")}
    used = [size for size in accelerators.values() if size]
    lone = load.max_memory is None and len(used) == 1 and load.strategy != "sequential"
    share = SHARE * (LONE_SHARE if lone else 1)
    loads = load.shape.loads(outcome.device_map)
    return all(size <= accelerators.get(d, -1) * share for d, size in loads.items())


def _bytes(size):
    if not isinstance(size, str):
        return size
    units = {"KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20}
    unit = next(unit for unit in units if size.endswith(unit))
    return int(size[: -len(unit)]) * units[unit]


def loss(load, without, found):
    """What got worse with the shim, in a word or two; None where nothing did."""
    if found.error is not None:
        return "refused" if without.error is None else None
    if within(load, found):
        return None
    if without.error is not None:
        return "accepted beyond the budgets, or on the CPU"
    if within(load, without):
        return "no longer within the budgets"
    if dict(found.device_map) != dict(without.device_map):
        return "another plan beyond the budgets"
    return None


def kinds(loads, outcomes, others):
    """How many are accepted within the budgets, accepted otherwise, and refused, either way."""
    found = Counter()
    for load, *pair in zip(loads, outcomes, others):
        for name, outcome in zip(("without", "with"), pair):
            accepted = outcome.error is None
            kind = "refused" if not accepted else "fits" if within(load, outcome) else "beyond"
            found[f"{name}: {kind}"] += 1
    return dict(sorted(found.items()))
