"""Bounded exact search for placements in which a device may hold several runs of the model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate, groupby, islice
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from .contiguous import Segment, Steps, tie_groups
from .division import Bins, Branch, Effort, OutOfEffort, divide, reaches_goal

# Orders of devices times steps of the model for which full runs and a divided rest are tried.
ORDERS_WORK = 20_000


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
    rest = None
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
            rest = bins
    return None if rest is None else _segments(_arrange(steps, devices[:low], rest))


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
            walk = _Walk(self, free, first, effort)
            if reaches_goal(walk.go(0, -1, changes)):
                return walk.runs
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
        self.runs: List[Segment] = []
        self.failed: Set[Tuple[object, ...]] = set()

    def go(self, start: int, previous: int, changes: int) -> Branch:
        """Place the steps from `start` on, the last one before having gone to `previous`."""
        line = self.line
        if start == line.total:
            yield None
            return
        self.effort.spend(1 + len(self.free) ** 2 // 64)  # every device looks at all others
        key = self._key(start, previous, changes)
        if key in self.failed:
            return
        seen = set()
        for device, room in enumerate(self.free):
            if device == previous or room < 0:
                continue
            if not line.tied and not self._pending(start, device):
                if room in seen:
                    continue
                seen.add(room)
            for end in self._ends(start, device, changes):
                yield from self._take(start, end, device, changes)
        self.failed.add(key)

    def _pending(self, start: int, device: int) -> bool:
        return device == self.first and start <= self.line.embedding

    def _key(self, start: int, previous: int, changes: int) -> Tuple[object, ...]:
        if self.line.tied or (self.first >= 0 and start <= self.line.embedding):
            return start, previous, changes, tuple(self.free), tuple(self.holder.items())
        last = self.free[previous] if previous >= 0 else -1
        return start, last, changes, tuple(sorted(self.free))

    def _ends(self, start: int, device: int, changes: int) -> Iterable[int]:
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
        # What is left after this run goes to `changes` runs at most. If this device has one of
        # them, all that is left from `start` on is on it and `changes` - 1 others; if not, what is
        # left after this run is on `changes` others. Either way no device holds more than is free
        # on it now, nor do any so many others hold more than the ones with most free bytes.
        rest = prefix[-1] - prefix[start]
        others = sorted((f for d, f in enumerate(self.free) if f > 0 and d != device), reverse=True)
        least = start + 1
        if room + sum(others[: max(changes - 1, 0)]) < rest:
            least = max(least, bisect_left(prefix, prefix[-1] - sum(others[:changes])))
        return range(end, least - 1, -1)

    def _take(self, start: int, end: int, device: int, changes: int) -> Branch:
        """Lay a run of `device`, go on behind it, and take the run back."""
        line = self.line
        if changes == 0 and end < line.total:
            return
        size = line.prefix[end] - line.prefix[start]
        new = []
        for step in line.tied[bisect_left(line.tied, start) : bisect_left(line.tied, end)]:
            group = line.group_at[step]
            if group not in self.holder:
                self.holder[group] = device
                new.append(group)
        self.free[device] -= size
        self.runs.append((device, start, end))
        yield self.go(end, device, changes - 1)
        self.runs.pop()
        self.free[device] += size
        for group in new:
            del self.holder[group]
