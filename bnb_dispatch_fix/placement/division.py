"""Bounded exact search for a way to divide sizes among devices, in no order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from itertools import accumulate
from typing import Callable, Iterator, List, Optional, Sequence, Set, Tuple


class OutOfEffort(Exception):
    """The search spent its nodes before it could decide."""


class Effort:
    """A number of search nodes that may still be spent."""

    def __init__(self, nodes: int) -> None:
        self.left = nodes

    def spend(self, nodes: int = 1) -> None:
        """Count nodes; raise OutOfEffort when there are none left."""
        self.left -= nodes
        if self.left < 0:
            raise OutOfEffort


Bins = List[List[int]]
# A part of a depth-first search: yields the parts below it one after the other, None at the goal.
Branch = Iterator[Optional["Branch"]]


def reaches_goal(root: Branch) -> bool:
    """Search depth first, however deep, without calls within calls.

    What the branches on the way to the goal have noted stays as it was when they got there.
    """
    path = [root]
    while path:
        for below in path[-1]:
            if below is None:
                return True
            path.append(below)
            break
        else:
            path.pop()
    return False


def divide(sizes: Sequence[int], caps: Sequence[int], nodes: int) -> Optional[Bins]:
    """Return the sizes that each device gets, or None if there is no way; order is ignored.

    Raises OutOfEffort when `nodes` do not suffice to decide. Sizes of 0 are left out.
    """
    sizes = sorted((size for size in sizes if size > 0), reverse=True)
    for smallest_room in (True, False):
        packed = _greedy(sizes, caps, smallest_room)
        if packed is not None:
            return packed
    largest_last = sorted((d for d, cap in enumerate(caps) if cap > 0), key=lambda d: (caps[d], d))
    for order, share in ((largest_last, 8), (largest_last[::-1], 8), (largest_last, 1)):
        effort = Effort(nodes // share)
        try:
            return _Division(sizes, caps, order, effort).search()
        except OutOfEffort:
            if share == 1:
                raise
    raise AssertionError("unreachable")


def _greedy(sizes: Sequence[int], caps: Sequence[int], smallest_room: bool) -> Optional[Bins]:
    """Place the largest first, where it leaves the least (or the most) room."""
    rooms = sorted((cap, device) for device, cap in enumerate(caps))
    packed: Bins = [[] for _ in caps]
    for size in sizes:
        at = bisect_left(rooms, (size,)) if smallest_room else len(rooms) - 1
        if not rooms or at == len(rooms) or rooms[at][0] < size:
            return None
        room, device = rooms.pop(at)
        insort(rooms, (room - size, device))
        packed[device].append(size)
    return packed


class _Division:
    """Fill one device after the other with a set of sizes that no other set replaces.

    Of all divisions that fit, take the one whose fillings, device by device and largest size
    first, are lexicographically greatest. In it no size left over fits into a device's free room,
    no size in a device can be swapped for a larger one left over, and devices of equal budget
    that come last take the largest size left over first. Only such fillings are tried.
    """

    def __init__(
        self, sizes: Sequence[int], caps: Sequence[int], order: Sequence[int], effort: Effort
    ) -> None:
        counted = Counter(sizes)
        self.sizes = sorted(counted, reverse=True)
        self.counts = [counted[size] for size in self.sizes]
        self.ascending = [-size for size in self.sizes]
        self.caps = [caps[device] for device in order]
        self.largest_cap = _suffixes(max, self.caps)
        self.smallest_cap = _suffixes(min, self.caps)
        self.devices = order
        self.width = len(caps)
        self.effort = effort
        self.failed: Set[Tuple[int, Tuple[int, ...]]] = set()
        self.filled: List[List[Tuple[int, int]]] = []

    def search(self) -> Optional[Bins]:
        """Return the sizes that each device gets, or None; raises OutOfEffort."""
        slack = sum(self.caps) - sum(s * c for s, c in zip(self.sizes, self.counts))
        if not reaches_goal(self._fill_from(0, self.counts, slack)):
            return None
        packed: Bins = [[] for _ in range(self.width)]
        for device, picks in zip(self.devices, self.filled):
            packed[device] = [self.sizes[kind] for kind, count in picks for _ in range(count)]
        return packed

    def _fill_from(self, index: int, counts: List[int], slack: int) -> Branch:
        """Fill the devices from `index` on with `counts`; `slack` is the room beyond them."""
        largest = next((kind for kind, count in enumerate(counts) if count), None)
        if largest is None:
            yield None
            return
        if slack < 0 or index == len(self.caps):
            return
        if self.sizes[largest] > self.largest_cap[index]:
            return
        key = (index, tuple(counts))
        if key in self.failed:
            return
        self.effort.spend(len(counts) // 8)
        alike = self.largest_cap[index] == self.smallest_cap[index]
        for picks, room in self._fillings(counts, self.caps[index], slack):
            if alike and (not picks or picks[0][0] != largest):
                break
            rest = counts[:]
            for kind, count in picks:
                rest[kind] -= count
            self.filled.append(picks)
            yield self._fill_from(index + 1, rest, slack - room)
            self.filled.pop()
        self.failed.add(key)

    def _fillings(
        self, counts: List[int], cap: int, slack: int
    ) -> Iterator[Tuple[List[Tuple[int, int]], int]]:
        """Yield (picks, free room), lexicographically descending, with at most `slack` free."""
        sizes = self.sizes
        from_here = [0] * (len(sizes) + 1)  # bytes of each kind and all smaller ones
        for kind in range(len(sizes) - 1, -1, -1):
            from_here[kind] = from_here[kind + 1] + sizes[kind] * counts[kind]
        picks: List[Tuple[int, int]] = []
        room = cap
        kind = 0
        while True:
            while True:
                kind = bisect_left(self.ascending, -room, kind)
                while kind < len(sizes) and not counts[kind]:
                    kind += 1
                if kind == len(sizes) or room - from_here[kind] > slack:
                    break
                self.effort.spend()
                count = min(counts[kind], room // sizes[kind])
                if count:
                    picks.append((kind, count))
                    room -= count * sizes[kind]
                kind += 1
            if room <= slack and not self._replaceable(picks, counts, room):
                yield picks[:], room
            if not picks:
                return
            kind, count = picks.pop()
            room += sizes[kind]
            if count > 1:
                picks.append((kind, count - 1))
            self.effort.spend()
            kind += 1

    def _replaceable(self, picks: List[Tuple[int, int]], counts: List[int], room: int) -> bool:
        """Tell whether a size left over fits in addition, or in place of a smaller one."""
        self.effort.spend(len(counts) // 8)
        taken = dict(picks)
        above = None  # the smallest size left over so far; sizes descend
        for kind, count in enumerate(counts):
            used = taken.get(kind, 0)
            if used and above is not None and above - self.sizes[kind] <= room:
                return True
            if count > used:
                above = self.sizes[kind]
        return above is not None and above <= room


def _suffixes(of: Callable[[int, int], int], numbers: Sequence[int]) -> List[int]:
    """Return the largest, or smallest, of the numbers from each one on."""
    return list(accumulate(reversed(numbers), of))[::-1]
