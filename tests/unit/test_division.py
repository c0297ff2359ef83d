"""The division of sizes among devices in no order: what is tried, what is left out, what it costs.

Expected fillings come from trying every one, or are worked out by hand.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from bnb_dispatch_fix.placement.division import (
    Effort,
    OutOfEffort,
    _Division,
    _greedy,
    divide,
    reaches_goal,
)


def test_effort_is_spent_to_the_last_node():
    effort = Effort(4)
    effort.spend()
    effort.spend(3)
    with pytest.raises(OutOfEffort):
        effort.spend()


def test_a_search_without_a_goal_says_so():
    assert reaches_goal(iter([iter([]), iter([iter([])])])) is False
    assert reaches_goal(iter([iter([]), iter([None])])) is True


# --- the largest first ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "caps", "smallest_room", "expected"),
    [
        # Where it leaves the least room, and where it leaves the most.
        ([5, 4], [9, 5], True, [[4], [5]]),
        ([5, 4], [9, 5], False, [[5], [4]]),
        ([5, 4], [9], True, [[5, 4]]),  # what is left of a device is used
        ([5], [5], True, [[5]]),
        ([4], [3, 9], False, [[], [4]]),
        ([5, 5], [9], True, None),
        ([5], [], True, None),
        ([5], [4, 4], False, None),
        ([], [4], True, [[]]),
    ],
)
def test_greedy(sizes, caps, smallest_room, expected):
    assert _greedy(sizes, caps, smallest_room) == expected


@pytest.mark.parametrize(
    ("sizes", "caps", "expected"),
    [
        ([4, 5, 0], [9, 5], [[4], [5]]),
        ([2, 3, 5], [5, 5], [[5], [3, 2]]),
        # The least room fails here: 4 | 3, 3 leaves 1 and 1 for the 2. The most: 4, 3 | 3, 2.
        ([2, 3, 3, 4], [7, 5], [[4, 3], [3, 2]]),
    ],
)
def test_what_greed_divides_takes_no_search(sizes, caps, expected):
    assert divide(sizes, caps, 0) == expected


# --- fillings of one device ----------------------------------------------------------------------


def every_filling(sizes, counts, cap, slack):
    """How often each size is taken, greatest first: nothing fits in addition or in exchange."""
    found = []
    for taken in product(*(range(count + 1) for count in counts)):
        room = cap - sum(size * times for size, times in zip(sizes, taken))
        left = [size for size, times, count in zip(sizes, taken, counts) if times < count]
        in_it = [size for size, times in zip(sizes, taken) if times]
        swaps = any(0 < large - small <= room for large in left for small in in_it)
        if 0 <= room <= slack and not swaps and not any(size <= room for size in left):
            found.append((taken, room))
    return sorted(found, reverse=True)


def division(sizes, caps, effort=10**6):
    return _Division(sizes, caps, range(len(caps)), Effort(effort))


def test_every_filling_that_no_other_replaces_is_tried_and_no_other():
    rng = random.Random(5)
    lengths = set()
    for _ in range(400):
        sizes = [rng.randint(1, 12) for _ in range(rng.randint(1, 9))]
        asked = division(sizes, [1])
        counts = [rng.randint(0, count) for count in asked.counts]
        cap, slack = rng.randint(0, 30), rng.choice([0, 1, 3, 30])
        found = [
            (tuple(dict(picks).get(kind, 0) for kind in range(len(counts))), room)
            for picks, room in asked._fillings(counts, cap, slack)
        ]
        assert found == every_filling(asked.sizes, counts, cap, slack), (sizes, counts, cap, slack)
        lengths.add(len(found))
    assert {0, 1, 2, 3, 4} <= lengths


# --- nodes, counted by hand ----------------------------------------------------------------------


def spent(sizes, caps):
    """The outcome of a search, and the nodes it took; one less is not enough."""
    search = division(sizes, caps)
    outcome = search.search()
    nodes = 10**6 - search.effort.left
    if nodes:
        with pytest.raises(OutOfEffort):
            division(sizes, caps, nodes - 1).search()
    return outcome, nodes


@pytest.mark.parametrize(
    ("kinds", "nodes"),
    [
        (7, 7),  # each size is taken once
        (8, 1 + 8 + 1),  # from eight kinds on the state, and the check for exchanges, count too
        (12, 1 + 12 + 1),
        (16, 2 + 16 + 2),
    ],
)
def test_many_kinds_take_more_nodes(kinds, nodes):
    sizes = [100 + kind for kind in range(kinds)]
    assert spent(sizes, [sum(sizes)]) == ([sizes[::-1]], nodes)


def test_a_filling_is_taken_back_node_by_node():
    # The 2 is taken on the first device and leaves 1, where nothing may be left; then it is not.
    assert spent([2, 2, 2], [3, 3]) == (None, 2)


def test_what_is_too_large_for_all_devices_to_come_takes_no_node():
    assert spent([5, 1, 1], [4, 4]) == (None, 0)


def test_too_little_room_takes_no_node():
    assert spent([4, 4, 4], [4, 4]) == (None, 0)


# --- what need not be tried ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "caps", "divided", "most"),
    [
        # Devices alike take the largest size left first: else it takes 280 nodes.
        ([12, 11, 9, 8, 7, 7, 7, 7, 6, 5, 5, 4], [15] * 6, False, 6),
        # More room may not be left than there is too much in all: else it takes 56.
        ([12, 12, 7, 6, 6, 4, 3, 3], [14] * 4, False, 8),
        ([12, 12, 12, 11, 11, 9, 9, 8, 7, 7, 6, 6, 4], [38] * 3, True, 14),
        # No size is left that could take the place of a smaller one: else it takes 231.
        ([12, 10, 9, 9, 9, 8, 8, 3], [16, 16, 15, 16, 17], False, 46),
        # What has failed is not tried again: else it takes 8,983. No odd room can be filled.
        (
            [16, 16, 16, 12, 12, 12, 10, 10, 8, 8, 8, 8, 6, 6, 6, 6, 4],
            [17, 22, 22, 22, 25, 25, 28],
            False,
            1951,
        ),
    ],
)
def test_so_many_nodes_are_enough(sizes, caps, divided, most):
    outcome = division(sizes, caps, most).search()
    if divided:
        assert sorted(size for part in outcome for size in part) == sorted(sizes)
        assert all(sum(part) <= cap for part, cap in zip(outcome, caps))
    else:
        assert outcome is None


def test_the_largest_is_taken_first_and_all_alike_at_once():
    # 7 and 3, 6 and 4, then both of 5 as one.
    assert spent([7, 6, 5, 5, 4, 3], [10, 10, 10]) == ([[7, 3], [6, 4], [5, 5]], 5)
