"""The search for placements with several runs on a device: its parts, worked out by hand."""

from __future__ import annotations

import pytest

from bnb_dispatch_fix.placement.contiguous import Steps
from bnb_dispatch_fix.placement.division import Effort, OutOfEffort
from bnb_dispatch_fix.placement.scattered import (
    Line,
    _arrange,
    _covers,
    _next_device,
    _runs_then_rest,
    _Walk,
    few_changes,
)

NODES = 1000


def steps_of(*sizes, groups=None, embedding=-1):
    return Steps(list(sizes), groups or [-1] * len(sizes), list(range(len(sizes))), embedding)


# --- a division, laid along the model ------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "given", "bins", "devices"),
    [
        # Each step goes where the longest stretch from it on can go, and the next ones stay there.
        ((3, 2, 3, 2), [], [[3, 3], [2, 2]], [0, 1, 0, 1]),
        ((3, 2, 3), [], [[3, 2], [3]], [0, 0, 1]),
        ((3, 0, 2), [], [[3], [2]], [0, 0, 1]),
        ((1, 1, 1, 1, 2), [], [[1, 1], [1, 1, 2]], [0, 0, 1, 1, 1]),
        ((3, 3, 4, 4), [0], [[4], [4, 3]], [0, 1, 1, 0]),
    ],
)
def test_steps_go_where_the_longest_stretch_can_go(sizes, given, bins, devices):
    assert _arrange(steps_of(*sizes), given, bins) == devices


def test_a_stretch_ends_where_the_sizes_do_or_at_what_another_device_holds():
    steps = steps_of(2, 0, 2, groups=[-1, 5, -1])
    assert _covers(steps, 0, 0, {2: 2}, {}) == 3
    assert _covers(steps, 0, 0, {2: 1}, {}) == 2
    assert _covers(steps, 0, 0, {2: 2}, {5: 1}) == 1
    assert _covers(steps, 0, 1, {2: 2}, {5: 1}) == 3
    assert _next_device(steps, 0, [{2: 2}, {2: 2}], {5: 1}) == 1


@pytest.mark.parametrize(
    ("sizes", "caps", "order", "runs"),
    [
        # Full runs on both.
        ((4, 4, 2, 2, 2), [8, 6], [0, 1], [(0, 0, 2), (1, 2, 5)]),
        ((4, 4, 2, 2, 2), [6, 8], [1, 0], [(1, 0, 2), (0, 2, 5)]),
        # After two of 3 on device 0 the fours do not fit; after one, 3 and 4 go to device 1.
        ((3, 3, 4, 4), [7, 7], [0, 1], [(0, 0, 1), (1, 1, 3), (0, 3, 4)]),
        ((3, 4), [4, 3], [0, 1], None),  # not even with the first step on the first device
    ],
)
def test_full_runs_as_far_as_the_rest_can_be_divided(sizes, caps, order, runs):
    assert _runs_then_rest(steps_of(*sizes), caps, order, NODES) == runs


def test_runs_are_fewer_than_those_of_the_division():
    # The division alone takes turns: 1 on device 1, 2 on device 0, and again.
    steps = steps_of(1, 2, 1, 2)
    assert few_changes(steps, [4, 4], [[2, 2], [1, 1]], NODES) == [(0, 0, 3), (1, 3, 4)]


# --- where a run may end -------------------------------------------------------------------------


def ends(steps, free, start, device, changes, first=-1, holder=None):
    walk = _Walk(Line(steps), free, first, Effort(NODES))
    walk.holder.update(holder or {})
    return list(walk._ends(start, device, changes))


TEN = steps_of(*[1] * 10)


@pytest.mark.parametrize(
    ("free", "changes", "expected"),
    [
        ([6, -1, 5], 2, [6, 5, 4, 3, 2, 1]),  # 6 and 5 hold all of it: any start may do
        ([6, -1, 5], 1, [6, 5]),  # the one run to come holds 5
        ([6, -1, 5], 0, []),  # none is to come, and 4 would be left
        ([6, -1, 3, 2], 2, [6, 5]),  # two runs to come hold 5
        ([6, -1, 2, 1], 2, []),
        ([12, -1, 5], 0, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),  # all of it fits here
        ([6, 7, 5], 1, [6, 5, 4, 3]),  # the largest of the others counts
    ],
)
def test_a_run_ends_where_the_rest_can_still_fit(free, changes, expected):
    assert ends(TEN, free, 0, 0, changes) == expected


def test_a_run_that_starts_later():
    assert ends(TEN, [3, 4, 5], 4, 1, 1) == [8, 7, 6, 5]  # 6 are left: 5 beside it, at least 1
    assert ends(TEN, [3, 1, 5], 4, 1, 1) == [5]
    assert ends(TEN, [3, 1, 4], 4, 1, 1) == []


def test_a_run_ends_before_what_another_device_holds():
    steps = steps_of(1, 1, 0, 1, groups=[0, -1, 0, -1])
    assert ends(steps, [9, 9], 1, 1, 3, holder={0: 0}) == [2]
    assert ends(steps, [9, 9], 1, 1, 3, holder={0: 1}) == [4, 3, 2]
    assert ends(steps, [9, 9], 1, 1, 3) == [4, 3, 2]


def test_a_run_ends_before_the_embedding_where_another_device_is_to_hold_it():
    steps = steps_of(1, 1, 1, 1, embedding=2)
    assert ends(steps, [9, 9], 0, 1, 3, first=0) == [2, 1]
    assert ends(steps, [9, 9], 0, 0, 3, first=0) == [4, 3, 2, 1]
    assert ends(steps, [9, 9], 3, 1, 3, first=0) == [4]


# --- states that are the same --------------------------------------------------------------------


def key(steps, free, previous, first=-1, start=1, changes=2):
    return _Walk(Line(steps), free, first, Effort(NODES))._key(start, previous, changes)


def test_states_are_the_same_where_only_the_names_of_devices_differ():
    assert key(TEN, [4, 5, 6], 0) == key(TEN, [6, 4, 5], 1)
    assert key(TEN, [4, 5, 6], 0) != key(TEN, [4, 5, 6], 1)
    assert key(TEN, [4, 5, 6], 0) != key(TEN, [4, 5, 7], 0)
    assert key(TEN, [4, 5, 6], 0) != key(TEN, [4, 5, 6], 0, changes=3)
    assert key(TEN, [4, 5, 6], 0) != key(TEN, [4, 5, 6], 0, start=2)


def test_devices_have_names_where_one_of_them_holds_something():
    tied = steps_of(1, 1, 0, groups=[0, -1, 0])
    assert key(tied, [4, 5], 0) != key(tied, [5, 4], 1)
    waiting = steps_of(1, 1, 1, embedding=1)
    assert key(waiting, [4, 5], 0, first=0) != key(waiting, [5, 4], 1, first=0)
    assert key(waiting, [4, 5], 0, first=0, start=2) == key(waiting, [5, 4], 1, first=0, start=2)
    assert key(waiting, [4, 5], 0) == key(waiting, [5, 4], 1)  # nobody has to hold it


# --- nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (4, 1), (8, 2), (16, 5)])
def test_a_node_counts_more_where_there_are_many_devices(devices, nodes):
    # Each looks at all others: one more from 64 pairs on.
    effort = Effort(nodes)
    assert Line(steps_of(1)).search([1] * devices, 0, False, effort) == [(0, 0, 1)]
    assert effort.left == 0
    with pytest.raises(OutOfEffort):
        Line(steps_of(1)).search([1] * devices, 0, False, Effort(nodes - 1))


def test_devices_alike_are_tried_once():
    # Else it takes 4,890 nodes. What has to hold the embedding is a device of its own.
    steps = steps_of(2, 2, 3, 3, 1, 1, 4, 4, 1, 1, 2, 2, 5, 5, embedding=12)
    runs = Line(steps).search([10] * 4, 6, True, Effort(NODES))
    assert len(runs) == 7
    assert next(device for device, start, end in runs if start <= 12 < end) == 0


def test_a_state_that_failed_is_not_tried_again():
    # Else it takes 788. The 8 fits nowhere.
    steps = steps_of(4, 4, 1, 1, 5, 1, 8, 3, embedding=4)
    assert Line(steps).search([5, 6, 4, 4, 5, 3], 9, True, Effort(500)) is None


# --- devices that may not be used ----------------------------------------------------------------


def test_a_device_without_a_budget_holds_nothing_not_even_what_has_no_bytes():
    steps = steps_of(0, 3, embedding=0)
    assert Line(steps).search([0, 3], 1, False, Effort(NODES)) == [(1, 0, 2)]
    assert Line(steps).search([0, 3], 1, True, Effort(NODES)) == [(1, 0, 2)]


def test_a_device_of_one_byte_may_be_used():
    steps = steps_of(3, 2, 1, embedding=2)
    expected = [(3, 0, 1), (1, 1, 2), (0, 2, 3)]
    assert Line(steps).search([1, 2, 0, 3], 2, True, Effort(NODES)) == expected
    steps = steps_of(2, 1)
    assert Line(steps).search([2, 1], 1, False, Effort(NODES)) == [(0, 0, 1), (1, 1, 2)]


def test_devices_before_the_one_that_holds_the_embedding_stay_empty():
    # The 17 has to be on device 1, and all of it is too much for that.
    steps = steps_of(3, 7, 6, 17, embedding=0)
    assert Line(steps).search([6, 27], 5, True, Effort(NODES)) is None
    assert Line(steps).search([6, 27], 5, False, Effort(NODES)) is not None


def test_fewer_changes_left_is_another_state():
    steps = steps_of(5, 5, 2, 3, 4, 4, 5, 1, 3, embedding=4)
    runs = Line(steps).search([14, 7, 11, 0], 4, True, Effort(NODES))
    assert len(runs) == 5


def test_a_tie_group_is_free_again_once_its_run_is_taken_back():
    steps = steps_of(6, 4, 2, 0, 2, 1, 2, 5, 4, groups=[1, -1, 0, 1, -1, -1, -1, -1, -1])
    runs = Line(steps).search([2, 7, 13, 4, 0], 5, False, Effort(NODES))
    assert len(runs) <= 6
    assert max(end for _, _, end in runs) == 9
