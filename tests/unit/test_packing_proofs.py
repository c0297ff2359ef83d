"""Proofs that are found without a search: the one that is given, and when none is."""

from __future__ import annotations

import random

from bnb_dispatch_fix.placement.impossibility import indivisible, too_large
from bnb_dispatch_fix.placement.records import (
    Impossible,
    RoomUnusable,
    TooManyLarge,
    TotalTooLarge,
    Unit,
    UnitTooLarge,
)


def test_the_first_of_the_largest_units_is_the_one_that_is_too_large():
    together = [(3, ("a",)), (6, ("b",)), (6, ("c",)), (2, ("z",))]
    assert too_large(together, {0: 5, 1: 5, 2: 5, 3: 5}) == UnitTooLarge(("b",), 6, 5)


def test_units_of_one_byte_count():
    assert indivisible([1, 1], {0: 1}) == TooManyLarge(1, 2, ((0, 1),))
    assert indivisible([0, 1], {0: 1}) is None


def test_a_size_that_adds_no_load_does_not_end_the_search_for_a_proof():
    # Loads up to 8 are 0, 3 and 6, whether there are two of 3 or one: GPU 1 is left with 3.
    assert indivisible([6, 3, 3], {0: 8, 1: 5}) == RoomUnusable(3, 12, ((0, 6), (1, 3)))


def test_loads_that_no_device_can_hold_are_not_followed():
    # No two fit together, so that there are 42 loads; with pairs and threes it would be 10,000.
    rng = random.Random(5)
    sizes = [510_000_000 + n for n in rng.sample(range(1_000_000), 40)]
    budgets = dict.fromkeys(range(40), 1_000_000_000)
    found = indivisible([*sizes, 495_000_000], budgets)
    full = tuple((device, max(sizes)) for device in budgets)
    assert found == RoomUnusable(495_000_000, sum(sizes) + 495_000_000, full)


def test_a_proof_is_not_verified_until_somebody_has():
    proof = TotalTooLarge(2, 1)
    assert Impossible(proof).verified is False
    assert Impossible(proof) == Impossible(proof, verified=True)


def test_a_unit_is_no_embedding_unless_it_is_said():
    assert Unit("a", 1).is_input_embedding is False
