"""Bounded exact search for placements in which a device may hold several runs of the model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate, groupby, islice
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from .contiguous import Segment, Steps, tie_groups


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

# Orders of devices times steps of the model for which full runs and a divided rest are tried.
ORDERS_WORK = 20_000


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
    room = list(caps)
    packed: Bins = [[] for _ in caps]
    for size in sizes:
        fitting = [(r, d) for d, r in enumerate(room) if r >= size]
        if not fitting:
            return None
        device = (min(fitting) if smallest_room else max(fitting))[1]
        room[device] -= size
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
        self.devices = order
        self.width = len(caps)
        self.effort = effort
        self.failed: Set[Tuple[int, Tuple[int, ...]]] = set()
        self.filled: List[List[Tuple[int, int]]] = []

    def search(self) -> Optional[Bins]:
        slack = sum(self.caps) - sum(s * c for s, c in zip(self.sizes, self.counts))
        if not self._fill_from(0, self.counts, slack):
            return None
        packed: Bins = [[] for _ in range(self.width)]
        for device, picks in zip(self.devices, self.filled):
            packed[device] = [self.sizes[kind] for kind, count in picks for _ in range(count)]
        return packed

    def _fill_from(self, index: int, counts: List[int], slack: int) -> bool:
        """Fill the devices from `index` on with `counts`; `slack` is the room beyond them."""
        largest = next((kind for kind, count in enumerate(counts) if count), None)
        if largest is None:
            return True
        if slack < 0 or index == len(self.caps):
            return False
        if self.sizes[largest] > max(self.caps[index:]):
            return False
        key = (index, tuple(counts))
        if key in self.failed:
            return False
        self.effort.spend(len(counts) // 8)
        alike = len(set(self.caps[index:])) == 1
        for picks, room in self._fillings(counts, self.caps[index], slack):
            if alike and (not picks or picks[0][0] != largest):
                break
            rest = counts[:]
            for kind, count in picks:
                rest[kind] -= count
            self.filled.append(picks)
            if self._fill_from(index + 1, rest, slack - room):
                return True
            self.filled.pop()
        self.failed.add(key)
        return False

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


def few_changes(steps: Steps, caps: Sequence[int], bins: Bins, nodes: int) -> List[Segment]:
    """Return a placement with few changes, knowing that the sizes can be divided into `bins`.

    One run after the other is laid on the devices, in several orders, for as long as what
    remains of the model can still be divided. `nodes` may be spent on each such question.
    """
    best = _segments(_arrange(steps, [], bins))
    usable = [device for device, cap in enumerate(caps) if cap > 0]
    by_size = sorted(usable, key=lambda device: caps[device])
    orders = (
        o[turn:] + o[:turn] for o in (usable, by_size, by_size[::-1]) for turn in range(len(o))
    )
    for order in islice(orders, 1 + ORDERS_WORK // len(steps.sizes)):
        found = _runs_then_rest(steps, caps, order, nodes)
        if found is not None and len(found) < len(best):
            best = found
    return best


def _runs_then_rest(
    steps: Steps, caps: Sequence[int], order: Sequence[int], nodes: int
) -> Optional[List[Segment]]:
    """Lay full runs in this order as far as the rest can be divided, then the rest."""
    prefix = [0, *accumulate(steps.sizes)]
    devices: List[int] = []
    for device in order:
        end = bisect_right(prefix, prefix[len(devices)] + caps[device]) - 1
        devices.extend([device] * (end - len(devices)))
    best = None
    low, high = 0, len(devices)
    while low < high:
        middle = (low + high + 1) // 2
        room = list(caps)
        for device, size in zip(devices[:middle], steps.sizes):
            room[device] -= size
        try:
            bins = divide(steps.sizes[middle:], room, nodes)
        except OutOfEffort:
            bins = None
        if bins is None:
            high = middle - 1
        else:
            low = middle
            best = _arrange(steps, devices[:middle], bins)
    return None if best is None else _segments(best)


def _segments(devices: Sequence[int]) -> List[Segment]:
    segments: List[Segment] = []
    for device, steps in groupby(devices):
        start = segments[-1][2] if segments else 0
        segments.append((device, start, start + len(list(steps))))
    return segments


def _arrange(steps: Steps, given: Sequence[int], bins: Bins) -> List[int]:
    """Return the device of each step: the first ones as given, the rest from the bins."""
    quota = [Counter(sizes) for sizes in bins]
    holder: Dict[int, int] = {}
    devices: List[int] = []
    device = -1
    for step, (size, group) in enumerate(zip(steps.sizes, steps.groups)):
        if group in holder:
            device = holder[group]
        elif step < len(given):
            device = given[step]
        else:
            if device < 0 or (size and not quota[device][size]):
                device = _next_device(steps, step, quota, holder)
            quota[device][size] -= 1
        if group >= 0:
            holder[group] = device
        devices.append(device)
    return devices


def _next_device(
    steps: Steps, step: int, quota: Sequence[Mapping[int, int]], holder: Mapping[int, int]
) -> int:
    """Return the device that can take the longest stretch from `step` on."""
    used = [device for device, sizes in enumerate(quota) if sizes]
    return max(used, key=lambda device: _covers(steps, step, device, quota[device], holder))


def _covers(
    steps: Steps, step: int, device: int, quota: Mapping[int, int], holder: Mapping[int, int]
) -> int:
    """Return the step after the stretch from `step` on that the device's quota covers."""
    taken: Dict[int, int] = {}
    for at in range(step, len(steps.sizes)):
        size, group = steps.sizes[at], steps.groups[at]
        if holder.get(group, device) != device:
            return at
        if size:
            taken[size] = taken.get(size, 0) + 1
            if taken[size] > quota.get(size, 0):
                return at
    return len(steps.sizes)


class Line:
    """Depth-first search along the model for a placement with a given number of changes."""

    def __init__(self, steps: Steps) -> None:
        self.embedding = steps.embedding
        self.prefix = [0, *accumulate(steps.sizes)]
        self.total = len(steps.sizes)
        self.group_at: Dict[int, int] = {}  # group of each step that holds part of a tie group
        for group, members in tie_groups(steps.groups).items():
            self.group_at.update((step, group) for step in members)
        self.tied = sorted(self.group_at)

    def search(
        self, caps: Sequence[int], changes: int, embedding_first: bool, effort: Effort
    ) -> Optional[List[Segment]]:
        """Return a placement with at most `changes` changes; raises OutOfEffort."""
        firsts: Sequence[int] = [-1]
        if embedding_first and self.embedding >= 0:
            firsts = [device for device, cap in enumerate(caps) if cap > 0]
        for first in firsts:
            free = [cap if cap > 0 and d >= first else -1 for d, cap in enumerate(caps)]
            found = _Walk(self, free, first, effort).go(0, -1, changes)
            if found is not None:
                return found
        return None


class _Walk:
    """One depth-first search: the free bytes, and who holds each tie group so far.

    A device with -1 free bytes may not be used. `first` is the device that has to hold the input
    embedding, or -1.
    """

    def __init__(self, line: Line, free: List[int], first: int, effort: Effort) -> None:
        self.line = line
        self.free = free
        self.first = first
        self.effort = effort
        self.holder: Dict[int, int] = {}
        self.failed: Set[Tuple[object, ...]] = set()

    def go(self, start: int, previous: int, changes: int) -> Optional[List[Segment]]:
        """Place the steps from `start` on, the last one before having gone to `previous`."""
        line = self.line
        if start == line.total:
            return []
        self.effort.spend(1 + len(self.free) ** 2 // 64)  # every device looks at all others
        key = self._key(start, previous, changes)
        if key in self.failed:
            return None
        rest = line.prefix[-1] - line.prefix[start]
        seen = set()
        for device, room in enumerate(self.free):
            if device == previous or room < 0:
                continue
            if not line.tied and not self._pending(start, device):
                if room in seen:
                    continue
                seen.add(room)
            for end in self._ends(start, device, rest, changes):
                found = self._take(start, end, device, changes)
                if found is not None:
                    return found
        self.failed.add(key)
        return None

    def _pending(self, start: int, device: int) -> bool:
        return device == self.first and start <= self.line.embedding

    def _key(self, start: int, previous: int, changes: int) -> Tuple[object, ...]:
        if self.line.tied or (self.first >= 0 and start <= self.line.embedding):
            return start, previous, changes, tuple(self.free), tuple(self.holder.items())
        last = self.free[previous] if previous >= 0 else -1
        return start, last, changes, tuple(sorted(self.free))

    def _ends(self, start: int, device: int, rest: int, changes: int) -> Iterable[int]:
        """Return where a run of `device` from `start` may end, longest first."""
        line = self.line
        prefix = line.prefix
        room = self.free[device]
        end = bisect_right(prefix, prefix[start] + room) - 1
        if self.first >= 0 and device != self.first and start <= line.embedding:
            end = min(end, line.embedding)
        for step in line.tied[bisect_left(line.tied, start) :]:
            if step >= end:
                break
            if self.holder.get(line.group_at[step], device) != device:
                end = step
                break
        others = sorted((f for d, f in enumerate(self.free) if d != device), reverse=True)
        least = start + 1
        if room + sum(others[: max(changes - 1, 0)]) < rest:
            # Not even coming back to this device later helps: the run has to leave no more
            # than the next devices can take.
            needed = prefix[start] + rest - sum(others[:changes])
            least = max(least, bisect_left(prefix, needed))
        return range(end, least - 1, -1)

    def _take(self, start: int, end: int, device: int, changes: int) -> Optional[List[Segment]]:
        line = self.line
        if changes == 0 and end < line.total:
            return None
        size = line.prefix[end] - line.prefix[start]
        new = []
        for step in line.tied[bisect_left(line.tied, start) : bisect_left(line.tied, end)]:
            group = line.group_at[step]
            if group not in self.holder:
                self.holder[group] = device
                new.append(group)
        self.free[device] -= size
        found = self.go(end, device, changes - 1)
        self.free[device] += size
        for group in new:
            del self.holder[group]
        return None if found is None else [(device, start, end), *found]
