"""The placement search: against every assignment tried, on planted instances, on known models."""

from __future__ import annotations

import inspect
import random
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import best_rank, planted, random_instance, rank_of

from bnb_dispatch_fix.explain.proofs import told
from bnb_dispatch_fix.placement import packing
from bnb_dispatch_fix.placement.certificates import (
    RoomUnusable,
    SearchComplete,
    TooManyLarge,
    TotalTooLarge,
    UnitTooLarge,
    verify,
)
from bnb_dispatch_fix.placement.contiguous import Steps
from bnb_dispatch_fix.placement.division import Effort
from bnb_dispatch_fix.placement.packing import (
    GaveUp,
    Impossible,
    Kind,
    Placement,
    SearchFault,
    Unit,
    check,
    pack,
)
from bnb_dispatch_fix.placement.scattered import Line


def agrees_with_every_assignment(units, budgets, fill_last, missed):
    result = pack(units, budgets, fill_last=fill_last)
    best = best_rank(units, budgets, fill_last)
    if best is None:
        assert isinstance(result, Impossible)
        assert verify(result.certificate, units, budgets)
        return result
    assert isinstance(result, Placement)
    assert check(result, units, budgets) == []
    reached = rank_of(result, units, budgets, fill_last)
    _, _, kind, changes, off_first, fill = reached
    assert (result.kind, result.changes, result.fill) == (kind, changes, fill)
    assert result.embedding_first is not off_first
    assert reached == best if result.optimal else reached >= best
    ties = [unit.tie for unit in units if unit.tie is not None]
    assert result.optimal or len(set(ties)) > 1
    missed.append(reached != best)
    return result


@pytest.mark.parametrize(
    ("seed", "instances", "units", "devices", "ties"),
    [
        (1, 5000, 8, 3, 0),
        (2, 4000, 7, 3, 1),
        (3, 2000, 7, 2, 2),
        (4, 500, 7, 4, 2),
        (5, 80, 8, 5, 0),
    ],
)
def test_best_of_all_assignments(seed, instances, units, devices, ties):
    rng = random.Random(seed)
    outcomes = set()
    missed = []  # the best is not promised with several tie groups, but found in all of these
    for _ in range(instances):
        units_, budgets = random_instance(rng, units, devices, ties)
        fill_last = rng.choice([None, None, next(iter(budgets))])
        result = agrees_with_every_assignment(units_, budgets, fill_last, missed)
        outcomes.add(result.kind if isinstance(result, Placement) else type(result.certificate))
    assert outcomes >= {*Kind, TooManyLarge}
    assert not any(missed)


@st.composite
def small_instances(draw):
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    ties = draw(st.lists(st.sampled_from([None, None, "a", "b"]), min_size=6, max_size=6))
    embedding = draw(st.integers(-1, len(sizes) - 1))
    units = [
        Unit(f"unit.{n}", size, tie, n == embedding)
        for n, (size, tie) in enumerate(zip(sizes, ties))
    ]
    devices = st.sampled_from([0, 1, 4, "xpu", "mps"])
    return units, draw(st.dictionaries(devices, st.integers(-1, 20), min_size=1, max_size=3))


@settings(max_examples=500, deadline=None)
@given(small_instances(), st.sampled_from([None, 0, "xpu"]))
def test_best_of_all_assignments_shrinkable(instance, fill_last):
    units, budgets = instance
    agrees_with_every_assignment(units, budgets, fill_last if fill_last in budgets else None, [])


@pytest.mark.parametrize("runs_per_device", [1, 2, 99])
@pytest.mark.parametrize("shape", ["blocks", "two kinds of blocks", "irregular"])
@pytest.mark.parametrize(("count", "devices"), [(12, 3), (40, 6), (80, 8), (300, 8)])
def test_planted_placements_are_found(shape, count, devices, runs_per_device):
    rng = random.Random(f"{shape} {count} {devices} {runs_per_device}")
    for _ in range(3):
        units, budgets = planted(rng, shape, count, devices, runs_per_device)
        result = pack(units, budgets)
        assert isinstance(result, Placement)
        assert check(result, units, budgets) == []
        if runs_per_device == 1:
            assert result.kind <= Kind.OTHER_ORDER
            assert result.optimal


def fits_in_some_order(units, budgets):
    for order in permutations(budgets.values()):
        room = list(order)
        for unit in units:
            while room and unit.size > room[0]:
                room.pop(0)
            if not room:
                break
            room[0] -= unit.size
        else:
            return True
    return False


def test_contiguous_if_some_order_of_six_devices_fits():
    rng = random.Random(6)
    outcomes = set()
    for _ in range(600):
        sizes = [rng.randint(1, 100) for _ in range(rng.randint(8, 14))]
        weights = [rng.uniform(0.3, 1) for _ in range(6)]
        scale = sum(sizes) * rng.uniform(1.02, 1.3) / sum(weights)
        units = [Unit(str(n), size) for n, size in enumerate(sizes)]
        budgets = {device: int(weight * scale) for device, weight in enumerate(weights)}
        result = pack(units, budgets, effort=100)
        contiguous = isinstance(result, Placement) and result.kind <= Kind.OTHER_ORDER
        assert contiguous is fits_in_some_order(units, budgets)
        outcomes.add(contiguous and result.kind)
    assert outcomes == {False, Kind.DEVICE_ORDER, Kind.OTHER_ORDER}


@pytest.mark.parametrize("devices", [12, 14, 16])
def test_order_of_many_different_devices_is_found(devices):
    units, budgets = planted(random.Random(devices), "irregular", 200, devices, 1, slack=0.002)
    result = pack(units, budgets)
    assert isinstance(result, Placement)
    assert (result.kind, result.optimal) == (Kind.OTHER_ORDER, True)
    assert check(result, units, budgets) == []


def test_more_devices_than_all_orders_can_be_tried_for():
    units, budgets = planted(random.Random(1), "irregular", 200, 20, 1, slack=0.01)
    result = pack(units, budgets)
    assert isinstance(result, Placement)
    assert not result.optimal
    assert check(result, units, budgets) == []


def test_same_arguments_same_placement():
    for seed in range(40):
        shape = ["blocks", "irregular"][seed % 2]
        units, budgets = planted(random.Random(seed), shape, 30, 4, 1 + seed % 3)
        shuffled = list(budgets.items())
        random.Random(seed).shuffle(shuffled)
        assert pack(units, budgets) == pack(list(units), dict(shuffled))


def model(embedding, blocks, block, head, *, tied=False):
    tie = "embedding" if tied else None
    return [
        Unit("embed", embedding, tie, is_input_embedding=True),
        *(Unit(f"layers.{n}", block) for n in range(blocks)),
        Unit("norm", 0),
        Unit("head", 0 if tied else head, tie),
    ]


def test_57_blocks_do_not_fit_7_times_8():
    units = [Unit(f"layers.{n}", 133) for n in range(57)]
    budgets = dict.fromkeys(range(8), 1000)
    result = pack(units, budgets)
    assert isinstance(result, Impossible)
    assert result.certificate == TooManyLarge(133, 57, tuple((d, 7) for d in range(8)))
    assert verify(result.certificate, units, budgets)
    found = pack(units[:56], budgets)
    assert isinstance(found, Placement)
    assert (found.changes, found.fill) == (7, Fraction(931, 1000))


def test_small_second_device_stays_empty():
    found = pack(model(100, 40, 95, 100), {0: 8000, 1: 800})
    assert isinstance(found, Placement)
    assert found.loads == {0: 4000}


def test_tied_head_goes_with_the_embedding_to_the_first_device():
    units = model(50, 30, 10, 50, tied=True)
    budgets = {0: 150, 1: 150, 2: 150}
    found = pack(units, budgets)
    assert isinstance(found, Placement)
    assert found.devices["head"] == found.devices["embed"] == 0
    assert found.kind is Kind.DEVICE_ORDER
    # Three runs, and back to the first device for the head.
    assert [device for device, _ in groupby(found.devices.values())] == [0, 1, 2, 0]
    assert (found.changes, found.fill) == (3, Fraction(120, 150))


def test_fills_that_differ_by_less_than_the_bisection_sees():
    # Cut after 41: fills 41/101 and 99/100. Cut after 100: 100/101 and 40/100.
    found = pack([Unit("a", 41), Unit("b", 59), Unit("c", 40)], {0: 101, 1: 100})
    assert isinstance(found, Placement)
    assert (found.changes, found.fill) == (1, Fraction(99, 100))


def test_device_filled_last_holds_what_the_others_cannot():
    found = pack(model(1, 8, 2, 1), {0: 20, 1: 8, 2: 8}, fill_last=0)
    assert isinstance(found, Placement)
    # 18 bytes, 16 of them elsewhere would leave a block or embedding and head on device 0.
    assert found.loads == {0: 3, 1: 8, 2: 7}
    assert found.kind is Kind.DEVICE_ORDER


def test_layers_tied_pairwise_across_two_towers():
    encoder = [Unit(f"encoder.{n}", 10, n) for n in range(12)]
    decoder = [Unit(f"decoder.{n}", 2, n) for n in range(12)]
    units = [*encoder, *decoder, Unit("head", 6)]
    budgets = {0: 60, 1: 60, 2: 60}
    found = pack(units, budgets)
    assert isinstance(found, Placement)
    assert check(found, units, budgets) == []
    assert not found.optimal  # too many ways to handle the ties


def test_numbers_before_names_and_names_in_the_given_order():
    found = pack([Unit(str(n), 1) for n in range(4)], {"xpu:1": 1, "xpu:0": 1, 3: 1, 0: 1})
    assert isinstance(found, Placement)
    assert list(found.devices.values()) == [0, 3, "xpu:1", "xpu:0"]


def test_gives_up_when_the_effort_is_too_small():
    # Pairs of 31 + 69, 32 + 68, ... fill the devices exactly; no first choice is right.
    sizes = [s for n in range(1, 15) for s in (30 + n, 70 - n)]
    units = [Unit(str(n), size) for n, size in enumerate(sizes)]
    budgets = {**dict.fromkeys(range(12), 100), 12: 101, 13: 99}
    assert pack(units, budgets, effort=10) == GaveUp(10)
    assert "gave up after 10 steps" in told(GaveUp(10))


def test_complete_search_proves_what_no_bound_sees():
    # The 9 has to go to device 0, the 6 fills one of the others, and 3 + 4 exceed the last.
    units = [Unit(str(size), size) for size in (3, 9, 4, 6)]
    budgets = {0: 10, 1: 6, 2: 6}
    result = pack(units, budgets)
    assert result == Impossible(SearchComplete(4, 3))
    assert verify(result.certificate, units, budgets)


@pytest.mark.parametrize(
    ("sizes", "budgets", "proof"),
    [
        ((6, 5), {0: 5, 1: 5}, TotalTooLarge(11, 10)),
        ((6, 5), {0: 5, 1: 0, 2: -9, 3: 5}, TotalTooLarge(11, 10)),
        ((0,), {0: 0}, TotalTooLarge(0, 0)),
        ((1, 6, 2), {0: 5, 1: 5}, UnitTooLarge(("1",), 6, 5)),
        ((3, 0, 3, 0, 3), {0: 5, 1: 5}, TooManyLarge(3, 3, ((0, 1), (1, 1)))),
        # Three of at least 4 need three devices, not four of at least 3.
        ((3, 4, 5, 4), {0: 7, 1: 7, 2: 3}, TooManyLarge(4, 3, ((0, 1), (1, 1), (2, 0)))),
        ((6, 5, 6), {0: 10, 1: 10}, RoomUnusable(5, 17, ((0, 6), (1, 6)))),
        # 7 + 4 and 4 + 4 at most.
        ((7, 4, 7, 4), {0: 13, 1: 10}, RoomUnusable(4, 22, ((0, 11), (1, 8)))),
        ((9, 3, 4, 6), {0: 10, 1: 6, 2: 6}, SearchComplete(4, 3)),
    ],
)
def test_proof_is_the_first_of_its_order_that_holds(sizes, budgets, proof):
    result = pack([Unit(str(n), size) for n, size in enumerate(sizes)], budgets)
    assert result.certificate == proof
    assert result.verified


def test_tied_units_are_too_large_together():
    units = [Unit("a", 3, "t"), Unit("b", 1), Unit("c", 3, "t")]
    result = pack(units, {0: 5, 1: 5})
    assert result == Impossible(UnitTooLarge(("a", "c"), 6, 5))
    assert result.verified


def test_nothing_to_place():
    nothing = Placement({}, {}, Kind.DEVICE_ORDER, 0, True, Fraction(0), True)
    assert pack([], {}) == nothing
    assert pack([], {}) == pack([], {0: 1})
    assert pack([Unit("empty", 0)], {0: 1}).devices == {"empty": 0}
    assert isinstance(pack([Unit("empty", 0)], {0: 0, 1: -1}), Impossible)


@pytest.mark.parametrize("units", [[Unit("a", -1)], [Unit("a", 1), Unit("a", 2)]])
def test_invalid_units_are_refused(units):
    with pytest.raises(ValueError, match=r"unit"):
        pack(units, {0: 10})


def test_check_refuses_a_device_that_is_not_there():
    units = [Unit("a", 1)]
    assert check(pack(units, {"xpu": 1}), units, {0: 1}) == ["device xpu has no budget"]


def test_check_names_every_violation():
    units = [Unit("a", 6, "t"), Unit("b", 5), Unit("c", 1, "t"), Unit("d", 1)]
    budgets = {0: 10, 1: 10, 2: 0}
    good = pack(units, budgets)
    assert isinstance(good, Placement)
    assert check(good, units, budgets) == []
    bad = replace(good, devices={"a": 0, "b": 0, "c": 1, "x": 0, "d": 2})
    assert check(bad, units, budgets) == [
        "c is on 1, what it is tied to on 0",
        "x is not a unit",
        "device 0 has a budget of 10 bytes and holds 11",
        "device 2 has no budget",
        f"the loads are {{0: 11, 1: 1, 2: 1}}, not {good.loads}",
    ]
    assert check(replace(good, devices={}), units, budgets)[0] == "a has no device"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"devices": [0, 1, 1, 0]}, "d is on 0, what it is tied to on 1"),
        ({"devices": [0, 0, 0, 0]}, "device 0 has a budget of 6 bytes and holds 9"),
        ({"loads": {0: 4, 1: 5}}, "the loads are {0: 3, 1: 6}"),
        ({"changes": 0}, "'changes': 1"),
        ({"embedding_first": False}, "'embedding_first': True"),
        ({"fill": Fraction(1, 2)}, "'fill': Fraction(1, 1)"),
    ],
)
def test_wrong_placement_never_leaves_the_search(monkeypatch, change, fault):
    class Faulty(packing.Search):
        def contiguous(self):
            return super().contiguous()._replace(**change)

    monkeypatch.setattr(packing, "Search", Faulty)
    units = [Unit("a", 3, None, True), Unit("b", 2, "t"), Unit("c", 3), Unit("d", 1, "t")]
    with pytest.raises(SearchFault) as caught:
        pack(units, {0: 6, 1: 6})
    assert fault in str(caught.value)


def test_refuted_proof_never_leaves_the_search(monkeypatch):
    wrong = UnitTooLarge(("a",), 6, 5)
    monkeypatch.setattr(packing.impossibility, "too_large", lambda *_: wrong)
    with pytest.raises(SearchFault, match="no proof: UnitTooLarge"):
        pack([Unit("a", 5)], {0: 5})


def test_proof_that_takes_too_long_to_verify_says_so():
    # Both halves would be odd, all sizes are even; no bound sees that.
    rng = random.Random(26)
    units = [Unit(str(n), 2 * rng.randint(5 * 10**6, 5 * 10**7)) for n in range(6)]
    units = [Unit(f"{unit.name}.{n}", unit.size) for unit in units for n in range(9)]
    half = sum(unit.size for unit in units) // 2
    half -= half % 2 == 0
    result = pack(units, {0: half, 1: half + 2})
    assert result == Impossible(SearchComplete(54, 2))
    assert not result.verified
    assert pack(units[:3], {0: 1, 1: 2}).verified


def within_few_calls(call):
    """Return what the call does with room for few calls within calls."""
    limit = sys.getrecursionlimit()
    depth = len(inspect.stack(0))
    sys.setrecursionlimit(depth + 60)
    try:
        return call()
    finally:
        sys.setrecursionlimit(limit)


def test_many_devices_do_not_reach_the_recursion_limit():
    # No greedy way divides the large ones; before them come 400 devices of one byte each.
    units = [Unit(str(n), size) for n, size in enumerate([60, 40, 40, 40, 30, 30, *[1] * 400])]
    budgets = {**dict.fromkeys(range(400), 1), 400: 120, 401: 120}
    result = within_few_calls(lambda: pack(units, budgets))
    assert isinstance(result, Placement)
    assert check(result, units, budgets) == []


def test_many_changes_do_not_reach_the_recursion_limit():
    # Two tie groups, the bytes counted at their first steps, take turns.
    steps = Steps([3, 2, *[0] * 598], [0, 1] * 300, list(range(600)), -1)
    runs = within_few_calls(lambda: Line(steps).search([3, 2], 599, False, Effort(1000)))
    assert runs == [(step % 2, step, step + 1) for step in range(600)]
