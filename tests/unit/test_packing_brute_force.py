"""The placement search and its parts against brute force: a share of tests/fuzz/packing.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from packing_oracle import FAMILIES, best_rank, rank_of, verdict
from packing_searches import SEARCHES

from bnb_dispatch_fix.placement.packing import Kind, Unit, check, pack

# What is not claimed to be the best may well be it; whether it is claimed is what counts.
RIGHT = {"best", "impossible"}
UNCLAIMED = {"best, not claimed", "not the best, not claimed"}


@pytest.mark.parametrize("merit", ["fewest_changes", "even"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_better_placement_than_the_one_called_optimal(family, merit):
    rng = random.Random(f"{family} {merit}")
    outcomes: Counter[str] = Counter()
    for _ in range(400):
        instance = FAMILIES[family](rng)
        outcome = verdict(*instance, merit)
        outcomes[outcome] += 1
        assert outcome in RIGHT | UNCLAIMED, instance
    assert outcomes["best"] > 200
    assert family == "several tie groups" or set(outcomes) <= RIGHT


@pytest.mark.parametrize("search", SEARCHES)
def test_search_agrees_with_brute_force(search):
    rng = random.Random(search)
    outcomes: Counter[str] = Counter()
    for _ in range(1500):
        outcome, instance = SEARCHES[search](rng)
        outcomes[outcome] += 1
        assert outcome != "WRONG", instance
    assert min(outcomes.values()) > 300
    assert len(outcomes) == 2


def units(*sizes, embedding=0, tie=None):
    return [
        Unit(str(n), size, "tie" if tie and n in tie else None, n == embedding)
        for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "embedding", "budgets", "rank"),
    [
        # What is free on device 0, which stays empty, is no reason to stop.
        ((2, 2, 2, 5, 7, 4, 6), 0, {0: 2, 1: 13, 2: 7, 3: 8}, (4, False)),
        ((5, 2, 5, 7, 4, 4, 5), -1, {0: 1, 1: 13, 2: 9, 3: 10}, (4, False)),
        ((7, 5, 3, 6, 4), 1, {0: 2, 1: 11, 2: 3, 3: 11}, (4, False)),
    ],
)
def test_empty_device_that_is_filled_last(sizes, embedding, budgets, rank):
    placed = pack(units(*sizes, embedding=embedding), budgets, fill_last=0)
    assert (placed.kind, placed.loads.get(0, 0)) == (Kind.SCATTERED, 0)
    assert (placed.changes, not placed.embedding_first) == rank
    assert placed.optimal


def test_even_fills_the_fullest_device_least():
    model = units(4, 1, 1, 1, 1, 1, 1, 4)
    budgets = {0: 20, 1: 20}
    packed = pack(model, budgets)
    assert packed.loads == {0: 14}
    even = pack(model, budgets, merit="even")
    assert (even.loads, even.changes, even.optimal) == ({0: 7, 1: 7}, 1, True)


def test_even_goes_by_the_share_of_unequal_budgets():
    even = pack(units(*[1] * 36), {0: 48, 1: 24}, merit="even")
    assert even.loads == {0: 24, 1: 12}


def test_even_uses_no_more_devices_than_needed_for_it():
    # The 6 fills any device to 6; the others do as well on one device as on two.
    even = pack(units(6, 1, 1, 1, 1), {0: 10, 1: 10, 2: 10}, merit="even")
    assert even.loads == {0: 6, 1: 4}


def test_even_leaves_to_the_device_filled_last_what_no_other_can_hold():
    model = units(3, *[2] * 6, 3)
    roomy = pack(model, {0: 20, 1: 20, 2: 20, 3: 20}, fill_last=0, merit="even")
    assert (max(roomy.loads.values()), roomy.changes) == (7, 2)
    assert 0 not in roomy.loads
    tight = pack(model, {0: 20, 1: 7, 2: 8}, fill_last=0, merit="even")
    assert tight.loads == {0: 5, 1: 6, 2: 7}


def test_even_without_a_placement_in_device_order_is_the_usual_one():
    model = units(5, 3)
    assert pack(model, {0: 3, 1: 5}, merit="even") == pack(model, {0: 3, 1: 5})
    assert pack(model, {0: 3, 1: 5}, merit="even").kind is Kind.OTHER_ORDER


def test_unknown_merit_is_refused():
    with pytest.raises(ValueError, match="fastest"):
        pack(units(1), {0: 1}, merit="fastest")


def test_even_spread_of_a_large_model_is_the_bound_of_its_largest_run():
    # 4,000 units: a thousand blocks of three sizes; the fills differ by less than a block.
    model = units(900, *[7, 11, 3, 5] * 999, 900)
    budgets = dict.fromkeys(range(16), 4_000)
    even = pack(model, budgets, merit="even")
    total = sum(unit.size for unit in model)
    assert check(even, model, budgets) == []
    assert total / 16 <= max(even.loads.values()) <= total / 16 + 11
    assert even.fill.numerator * 4_000 == max(even.loads.values()) * even.fill.denominator


def test_oracle_ranks_even_before_fewest_changes():
    model = units(4, 1, 1, 1, 1, 1, 1, 4)
    budgets = {0: 20, 1: 20}
    packed = pack(model, budgets)
    assert rank_of(packed, model, budgets) == best_rank(model, budgets)
    assert rank_of(packed, model, budgets, None, "even") > best_rank(model, budgets, None, "even")
