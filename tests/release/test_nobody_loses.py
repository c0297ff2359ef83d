"""A model that loads without the shim loads with it, within the same budgets: random loads.

A part of what `nox -s fuzz` plans.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="what refuses a device map is its quantizer")

import random_loads
from random_loads import STRATEGIES, loss, within
from shapes import HAS_PLANNER

#: Models; each is planned with every strategy. `from_pretrained` takes ten times as long.
COUNT = 150 if HAS_PLANNER else 40


@pytest.fixture(scope="module")
def outcomes():
    """(load, outcome without the shim, outcome with it)."""
    loads = list(random_loads.random_loads(random.Random(4), COUNT * len(STRATEGIES)))
    without = random_loads.planned(loads, active=False)
    return list(zip(loads, without, random_loads.planned(loads, active=True)))


def lost(outcomes, kind):
    found = [case for case in outcomes if loss(*case) == kind]
    return f"{len(found)} of {len(outcomes)}, the first: {found[0]}" if found else None


def test_what_loads_without_the_shim_loads_with_it(outcomes):
    assert not lost(outcomes, "refused")


def test_what_is_within_the_budgets_without_the_shim_is_so_with_it(outcomes):
    assert not lost(outcomes, "no longer within the budgets")


def test_what_is_refused_without_the_shim_is_not_accepted_beyond_a_budget(outcomes):
    assert not lost(outcomes, "accepted beyond the budgets, or on the CPU")


def test_what_is_accepted_beyond_a_budget_is_planned_as_without_the_shim(outcomes):
    assert not lost(outcomes, "another plan beyond the budgets")


def test_more_models_load_with_the_shim_and_no_accelerator_is_overfilled(outcomes, record_property):
    """Were nothing refused without it, the tests above would show little."""
    loaded = {
        name: sum(
            1 for load, *both in outcomes if both[index].error is None and within(load, both[index])
        )
        for index, name in enumerate(["without", "with"])
    }
    record_property("random models", {**loaded, "of": len(outcomes)})
    assert 0 < loaded["without"] < loaded["with"] < len(outcomes)


def test_every_kind_of_loss_is_one():
    """The judgement itself: what is lost is called so."""
    shape = random_loads.Shape(200, (400, 400), 200)
    load = random_loads.Load(shape, "auto", {0: 2000, 1: 2000, "cpu": 10**4}, None, False)
    refused = random_loads.shapes.Outcome(None, ValueError("refused"))
    fits = random_loads.shapes.Outcome({"": 0}, None)
    small = load._replace(max_memory={0: 500, 1: 500, "cpu": 10**4})
    beyond = random_loads.shapes.Outcome({"embed": 0, "layers": 0, "head": "cpu"}, None)
    other = random_loads.shapes.Outcome({"": 1}, None)
    assert loss(load, fits, refused) == "refused"
    assert loss(load, refused, beyond) == "accepted beyond the budgets, or on the CPU"
    assert loss(small, refused, fits) == "accepted beyond the budgets, or on the CPU"
    assert loss(load, fits, beyond) == "no longer within the budgets"
    assert loss(small, beyond, other) == "another plan beyond the budgets"
    assert [loss(load, *pair) for pair in ((fits, fits), (refused, refused), (refused, fits))] == [
        None
    ] * 3
    assert loss(small, beyond, beyond) is None
