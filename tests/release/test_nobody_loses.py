"""A model that loads without the shim loads with it, within the same budgets: random models."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="what refuses a device map is its quantizer")

import shapes
from shapes import HAS_PLANNER, SHARE, STRATEGIES, Shape

import bnb_dispatch_fix

#: Models; each is planned with every strategy. `from_pretrained` takes ten times as long.
COUNT = 150 if HAS_PLANNER else 40


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


def within(shape, outcome, max_memory):
    """Whether everything is on accelerators, in true bytes within what is usable of them."""
    budgets = shapes.usable(max_memory)
    loads = shape.loads(outcome.device_map)
    return all(load <= budgets.get(device, -1) for device, load in loads.items())


@pytest.fixture(scope="module")
def outcomes():
    """(model, strategy, budgets, outcome without the shim, outcome with it)."""
    draw = random.Random(4)
    models = [random_shape(draw) for _ in range(COUNT)]
    asked = [
        (shape, strategy, max_memory)
        for shape in models
        for max_memory in [random_budgets(draw, sum(shape.sizes.values()))]
        for strategy in STRATEGIES
    ]
    bnb_dispatch_fix.deactivate()
    without = [shapes.plan(*one) for one in asked]
    bnb_dispatch_fix.activate()
    found = [shapes.plan(*one) for one in asked]
    bnb_dispatch_fix.deactivate()
    return [(*one, *pair) for one, *pair in zip(asked, without, found)]


def test_what_loads_without_the_shim_loads_with_it(outcomes):
    lost = [case for case in outcomes if case[3].error is None and case[4].error is not None]
    assert not lost, f"{len(lost)} of {len(outcomes)}, the first: {lost[0]}"


def test_what_is_within_the_budgets_without_the_shim_is_so_with_it(outcomes):
    lost = [
        case
        for case in outcomes
        for shape, _, max_memory, without, found in [case]
        if without.error is None
        and within(shape, without, max_memory)
        and not within(shape, found, max_memory)
    ]
    assert not lost, f"{len(lost)} of {len(outcomes)}, the first: {lost[0]}"


def test_more_models_load_with_the_shim_and_no_accelerator_is_overfilled(outcomes, record_property):
    """Were nothing refused without it, the two tests above would show little."""
    loaded = {
        name: sum(
            1
            for shape, _, max_memory, *both in outcomes
            if both[index].error is None and within(shape, both[index], max_memory)
        )
        for index, name in enumerate(["without", "with"])
    }
    record_property("random models", {**loaded, "of": len(outcomes)})
    assert 0 < loaded["without"] < loaded["with"] < len(outcomes)
