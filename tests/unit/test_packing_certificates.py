"""The checker of proofs: right ones pass, and nothing proves impossible what is possible."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from packing_oracle import best_rank, random_instance

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
        "needs 0.00 GiB, no device has a budget",
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
        "3 units of at least 3.00 GiB: 2 fit on 0, 0 fit on 2, 0 fit on xpu, 2 < 3",
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
    assert certificate.describe() == text


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
