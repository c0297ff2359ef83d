"""The checker of proofs: right ones pass, and nothing proves impossible what is possible."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from packing_oracle import best_rank, random_instance

from bnb_dispatch_fix.explain.proofs import described
from bnb_dispatch_fix.placement.certificates import (
    CannotVerify,
    RoomUnusable,
    SearchComplete,
    TooManyLarge,
    TotalTooLarge,
    UnitTooLarge,
    verify,
)
from bnb_dispatch_fix.placement.packing import Unit

GIB = 2**30


def units_of(*sizes, tie=None):
    return [Unit(f"unit.{n}", size, tie) for n, size in enumerate(sizes)]


# Units, budgets, what proves that they do not fit, and how that reads.
PROOFS = [
    (
        units_of(int(13.7 * GIB)),
        {0: int(12.6 * GIB)},
        TotalTooLarge(int(13.7 * GIB), int(12.6 * GIB)),
        "needs 13.70 GiB, usable 12.60 GiB: short by 1.10 GiB",
    ),
    (
        units_of(0),
        {0: 0},
        TotalTooLarge(0, 0),
        "needs 0 bytes, no device has a budget",
    ),
    (
        [Unit("lm_head", 3 * GIB), Unit("norm", 1)],
        {0: 5 * GIB // 2, 1: 2 * GIB},
        UnitTooLarge(("lm_head",), 3 * GIB, 5 * GIB // 2),
        "`lm_head` alone needs 3.00 GiB, the largest budget is 2.50 GiB",
    ),
    (
        units_of(2 * GIB, GIB, tie="head"),
        {0: 2 * GIB, 1: 2 * GIB},
        UnitTooLarge(("unit.0", "unit.1"), 3 * GIB, 2 * GIB),
        "`unit.0` + `unit.1` (tied) together need 3.00 GiB, the largest budget is 2.00 GiB",
    ),
    (
        units_of(*[int(13.3 * GIB)] * 57),
        dict.fromkeys(range(8), 100 * GIB),
        TooManyLarge(int(13.3 * GIB), 57, tuple((d, 7) for d in range(8))),
        "57 units of at least 13.30 GiB: 7 fit on each of 8 devices, 56 < 57",
    ),
    (
        units_of(3 * GIB, 3 * GIB, GIB, 3 * GIB),
        {0: 7 * GIB, "xpu": 2 * GIB, 2: GIB},
        TooManyLarge(3 * GIB, 3, ((0, 2), (2, 0), ("xpu", 0))),
        "3 units of at least 3.00 GiB: 2 fit on GPU 0, 0 fit on GPU 2, 0 fit on xpu, 2 < 3",
    ),
    (
        # No two fit together, and of each device at most 6 of 10 are used.
        units_of(6 * GIB, 6 * GIB, 5 * GIB),
        {0: 10 * GIB, 1: 10 * GIB},
        RoomUnusable(5 * GIB, 17 * GIB, ((0, 6 * GIB), (1, 6 * GIB))),
        "the units of at least 5.00 GiB need 17.00 GiB, but they cannot be divided and fill at "
        "most 6.00 GiB of each of 2 devices: 12.00 GiB",
    ),
    (
        units_of(9, 3, 4, 6),
        {0: 10, 1: 6, 2: 6},
        SearchComplete(4, 3),
        "searched completely: no way to divide 4 units among 3 devices",
    ),
]


@pytest.mark.parametrize(("units", "budgets", "certificate", "text"), PROOFS)
def test_proof_holds_and_reads_well(units, budgets, certificate, text):
    assert verify(certificate, units, budgets)
    assert described(certificate) == text


@pytest.mark.parametrize(("units", "budgets", "certificate", "text"), PROOFS)
def test_no_proof_holds_with_budgets_that_suffice(units, budgets, certificate, text):
    enough = {device: 60 * GIB * len(units) for device in budgets}
    assert not verify(certificate, units, enough)


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (0, {"needed": 14 * GIB}),
        (0, {"usable": 12 * GIB}),
        (2, {"needed": 4 * GIB}),
        (2, {"names": ("norm",)}),
        (2, {"largest_budget": 2 * GIB}),
        (4, {"count": 58}),
        (4, {"count": 56}),
        (4, {"size": int(12.5 * GIB)}),
        (4, {"fits": tuple((d, 6) for d in range(8))}),
        (4, {"fits": tuple((d, 7) for d in range(7))}),
        (6, {"needed": 18 * GIB}),
        (6, {"usable": ((0, 5 * GIB), (1, 6 * GIB))}),
        (6, {"usable": ((0, 6 * GIB),)}),
        (6, {"usable": ((0, 8 * GIB), (1, 9 * GIB))}),
    ],
)
def test_altered_proof_is_refused(number, changes):
    units, budgets, certificate, _ = PROOFS[number]
    assert not verify(replace(certificate, **changes), units, budgets)


# Units, budgets, and a claim that fails by the least there is.
NEAR_MISSES = {
    "the total is as large as the budgets": ((5, 5), {0: 6, 1: 4}, TotalTooLarge(10, 10)),
    "the total is not too large, though it cannot be divided so": (
        (6, 6, 5),
        {0: 10, 1: 10},
        TotalTooLarge(17, 20),
    ),
    "more bytes than there are": ((5, 6), {0: 5, 1: 5}, TotalTooLarge(12, 10)),
    "fewer bytes than there are": ((5, 7), {0: 5, 1: 5}, TotalTooLarge(11, 10)),
    "a smaller budget": ((5, 6), {0: 5, 1: 5}, TotalTooLarge(11, 9)),
    "a budget below 0 counted": ((5, 6), {0: 5, 1: -1, 2: 5}, TotalTooLarge(11, 9)),
    "no units": ((), {}, TotalTooLarge(0, 0)),
    "no units, but budgets": ((), {0: 1}, TotalTooLarge(0, 1)),
    "no bytes": ((0,), {0: 1}, TotalTooLarge(0, 1)),
    "as large as the largest budget": ((5,), {0: 5, 1: 4}, UnitTooLarge(("unit.0",), 5, 5)),
    "not the largest budget": ((5,), {0: 5, 1: 4}, UnitTooLarge(("unit.0",), 5, 4)),
    "a larger budget than the largest": ((6,), {0: 4, 1: 4}, UnitTooLarge(("unit.0",), 6, 5)),
    "another unit's bytes": ((6, 5), {0: 5, 1: 9}, UnitTooLarge(("unit.1",), 6, 5)),
    "tied, but they are not": ((3, 3), {0: 5, 1: 5}, UnitTooLarge(("unit.0", "unit.1"), 6, 5)),
    "as many as fit": ((3, 3), {0: 5, 1: 5}, TooManyLarge(3, 2, ((0, 1), (1, 1)))),
    "more than there are": ((3, 3), {0: 5, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1)))),
    "one fits more": ((3, 3, 3), {0: 6, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1)))),
    "not so large": ((3, 3, 2), {0: 5, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1)))),
    "a device left out": ((3, 3, 3), {0: 6, 1: 5}, TooManyLarge(3, 3, ((0, 2),))),
    "one device more": ((3, 3, 3), {0: 5, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1), (2, 0)))),
    "units of 0 bytes": ((0, 0), {0: 5}, TooManyLarge(0, 2, ((0, 1),))),
    "room for all": ((6, 5), {0: 10, 1: 10}, RoomUnusable(5, 11, ((0, 6), (1, 6)))),
    "exactly room for all": ((6, 6), {0: 10, 1: 10}, RoomUnusable(6, 12, ((0, 6), (1, 6)))),
    "one more byte is usable": ((7, 6, 6), {0: 9, 1: 9}, RoomUnusable(6, 19, ((0, 6), (1, 7)))),
    "two together fill it": ((6, 6, 5), {0: 10, 1: 11}, RoomUnusable(5, 17, ((0, 6), (1, 6)))),
    "two alike fill it": ((5, 5, 5), {0: 10, 1: 9}, RoomUnusable(5, 15, ((0, 5), (1, 5)))),
    "three alike fill it": (
        (3, 3, 3, 3, 5),
        {0: 9, 1: 7},
        RoomUnusable(3, 17, ((0, 8), (1, 6))),
    ),
    "the smallest left out": ((6, 6, 4), {0: 10, 1: 10}, RoomUnusable(5, 16, ((0, 6), (1, 6)))),
    "fewer bytes than counted": ((6, 6, 5), {0: 10, 1: 10}, RoomUnusable(5, 16, ((0, 6), (1, 6)))),
    "room of a device left out": ((6, 6, 5), {0: 10, 1: 10}, RoomUnusable(5, 17, ((0, 6),))),
    "room of one device more": (
        (6, 6, 5),
        {0: 10, 1: 10},
        RoomUnusable(5, 17, ((0, 6), (1, 6), (2, 0))),
    ),
    "one way to divide": ((9, 3, 4, 6), {0: 10, 1: 6, 2: 7}, SearchComplete(4, 3)),
    "one way, all full": ((5, 4, 3, 2, 2), {0: 8, 1: 8}, SearchComplete(5, 2)),
    "one way with equal units": ((4, 4, 3, 3, 2), {0: 8, 1: 8}, SearchComplete(5, 2)),
    "the small device holds one": ((7, 1), {0: 7, 1: 1}, SearchComplete(2, 2)),
    "nothing but units of 0 bytes": ((0, 0), {0: 5}, SearchComplete(2, 1)),
    "a unit less": ((9, 3, 4, 6), {0: 10, 1: 6, 2: 6}, SearchComplete(3, 3)),
    "a device more": ((9, 3, 4, 6), {0: 10, 1: 6, 2: 6}, SearchComplete(4, 4)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_claim_that_fails_by_the_least_is_refused(name):
    sizes, budgets, claim = NEAR_MISSES[name]
    assert verify(claim, units_of(*sizes), budgets) is False


# The same units and budgets, or nearly, and what does prove it.
HITS = [
    ((6, 5), {0: 5, 1: 5}, TotalTooLarge(11, 10)),
    ((5, 6), {0: 5, 1: -1, 2: 5}, TotalTooLarge(11, 10)),
    ((0,), {}, TotalTooLarge(0, 0)),
    ((6, 1), {0: 5, 1: 4}, UnitTooLarge(("unit.0",), 6, 5)),
    ((6, 1), {0: 5, 1: -1}, UnitTooLarge(("unit.0",), 6, 5)),
    ((3, 3, 4), {0: 5, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1)))),
    ((3, 3, 4, 4), {0: 5, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1)))),
    ((3, 3), {0: 5, 1: 0}, TooManyLarge(3, 2, ((0, 1),))),
    ((1, 1), {0: 1}, TooManyLarge(1, 2, ((0, 1),))),
    ((6, 6, 5), {0: 10, 1: 10}, RoomUnusable(5, 17, ((0, 6), (1, 6)))),
    ((6, 6, 5, 1), {0: 10, 1: 10}, RoomUnusable(5, 17, ((0, 8), (1, 6)))),
    ((5, 5, 5), {0: 9, 1: 9, 2: 0}, RoomUnusable(5, 15, ((0, 5), (1, 5)))),
    ((6,), {}, UnitTooLarge(("unit.0",), 6, 0)),
    ((6,), {}, RoomUnusable(6, 6, ())),
    ((9, 3, 4, 6), {0: 10, 1: 6, 2: 6}, SearchComplete(4, 3)),
    ((9, 3, 0, 4, 6), {0: 10, 1: 6, 2: 6, 3: 0}, SearchComplete(5, 3)),
    ((4, 4, 4, 4), {0: 7, 1: 7, 2: 7}, SearchComplete(4, 3)),
]


@pytest.mark.parametrize(("sizes", "budgets", "claim"), HITS)
def test_claim_that_just_holds_is_confirmed(sizes, budgets, claim):
    assert best_rank(units_of(*sizes), budgets) is None
    assert verify(claim, units_of(*sizes), budgets) is True


def test_units_that_are_tied_count_together():
    units = [Unit("a", 3, "t"), Unit("b", 3), Unit("c", 3, "t"), Unit("d", 3, 7), Unit("e", 3, 7)]
    assert verify(UnitTooLarge(("a", "c"), 6, 5), units, {0: 5, 1: 5})
    assert not verify(UnitTooLarge(("a", "b"), 6, 5), units, {0: 5, 1: 5})
    budgets = dict.fromkeys(range(4), 6)
    assert verify(TooManyLarge(6, 2, ((0, 1),)), units, {0: 6})
    assert not verify(TooManyLarge(6, 3, tuple((d, 1) for d in budgets)), units, budgets)
    assert verify(SearchComplete(3, 3), units, {0: 5, 1: 6, 2: 4})
    assert not verify(SearchComplete(3, 3), units, {0: 6, 1: 6, 2: 3})
    assert not verify(SearchComplete(5, 3), units, {0: 5, 1: 6, 2: 4})


def test_no_more_steps_than_allowed():
    # 0; 0 and 5; 0, 5 and 6: three sizes, six steps.
    units = units_of(6, 6, 5)
    claim = RoomUnusable(5, 17, ((0, 6), (1, 6)))
    assert verify(claim, units, {0: 10, 1: 10}, steps=6)
    with pytest.raises(CannotVerify, match=r"5 steps .* one device"):
        verify(claim, units, {0: 10, 1: 10}, steps=5)


@pytest.mark.parametrize(
    ("sizes", "budgets", "steps"),
    [
        # A load that leaves room for another unit is a step, and is not followed: 5 on GPU 0, of
        # which one goes on, 4 on GPU 1, of which none does.
        ((3, 6, 6, 6), {0: 5, 1: 11, 2: 11}, 9),
        ((3, 6, 6, 6), {0: 3, 1: 11, 2: 11}, 9),
        ((9, 3, 4, 6), {0: 10, 1: 6, 2: 6}, 26),
        # Even sizes, odd budgets; with nine kinds each step counts twice.
        ((4, 6, 8, 10, 12, 14, 16, 18, 20), {0: 53, 1: 55}, 1328),
    ],
)
def test_search_takes_no_more_steps_than_allowed(sizes, budgets, steps):
    claim = SearchComplete(len(sizes), len(budgets))
    assert verify(claim, units_of(*sizes), budgets, steps=steps)
    with pytest.raises(CannotVerify, match=rf"{steps - 1} steps .* the devices"):
        verify(claim, units_of(*sizes), budgets, steps=steps - 1)


def test_many_equal_units_take_few_steps_to_verify():
    units = units_of(*[2 * GIB] * 50_000)
    budgets = dict.fromkeys(range(8), 5 * GIB)
    claim = RoomUnusable(2 * GIB, 100_000 * GIB, tuple((d, 4 * GIB) for d in budgets))
    assert verify(claim, units, budgets, steps=20)


def test_nothing_proves_impossible_what_is_possible():
    rng = random.Random(7)
    possible = 0
    for _ in range(1500):
        units, budgets = random_instance(rng, 6, 3, 1)
        if best_rank(units, budgets) is None:
            continue
        possible += 1
        usable = [(device, budget) for device, budget in budgets.items() if budget > 0]
        size = rng.choice([unit.size for unit in units])
        total = sum(unit.size for unit in units)
        largest = max(budget for _, budget in usable)
        for claim in (
            TotalTooLarge(total, sum(budget for _, budget in usable)),
            UnitTooLarge((units[0].name,), units[0].size, largest),
            TooManyLarge(size, len(units), tuple((d, b // max(size, 1)) for d, b in usable)),
            RoomUnusable(size, total, tuple((d, rng.randint(0, b)) for d, b in usable)),
            SearchComplete(len(units), len(usable)),
        ):
            assert not verify(claim, units, budgets)
    assert possible > 500


def test_what_is_too_long_to_check_is_neither_true_nor_false():
    rng = random.Random(0)
    units = units_of(*(rng.randint(GIB // 2, GIB) for _ in range(60)))
    budgets = dict.fromkeys(range(8), sum(unit.size for unit in units) // 8 + 1)
    with pytest.raises(CannotVerify, match="loads"):
        verify(SearchComplete(60, 8), units, budgets)
    with pytest.raises(CannotVerify, match="loads"):
        usable = tuple((device, 0) for device in budgets)
        verify(RoomUnusable(0, sum(unit.size for unit in units), usable), units, budgets)
