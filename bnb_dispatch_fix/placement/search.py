"""The order of the searches: which kind of placement first, and which of its kind is best."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate, islice
from operator import ne
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .contiguous import AnyOrder, Chain, Segment, Steps, chains, in_device_order
from .records import Unit
from .scattered import Effort, Line, OutOfEffort, divide, few_changes

# The part of the effort spent on one number of changes, or on the smallest fill, of a scattered
# placement that is known to exist.
POLISH = 16
# The search along the model calls itself twice per run; with more runs it is not tried.
MOST_RUNS = 200
# What is to be smallest is bisected to this part, from there on made smaller byte by byte: few
# placements differ by less.
SCALE = 1 << 12

Caps = List[int]
_Laid = Tuple[Chain, List[Segment]]
# Chain, budgets, number of runs at most, whether the embedding must be on the first device used.
_Solver = Callable[[Chain, Caps, int, bool], Optional[List[Segment]]]


class Found(NamedTuple):
    """A placement in terms of step and device numbers."""

    first_units: List[int]  # first unit of each step
    devices: List[int]  # device of each step
    loads: Dict[int, int]
    in_order: bool
    contiguous: bool
    changes: int
    embedding_first: bool
    fill: Fraction


class Search:
    """One instance: the model as steps, budgets (all above 0) by number, the device filled last.

    `optimal` turns False when a part of the search was cut short.
    """

    def __init__(self, units: Sequence[Unit], budgets: Caps, last: int) -> None:
        self.steps = model_steps(units)
        self.budgets = budgets
        self.last = last
        self.chains, self.optimal = chains(self.steps)
        self.total = self.chains[0].prefix[-1]

    def fits_in_device_order(self) -> bool:
        """Tell whether there is a placement in device order at all."""
        runs = len(self.budgets)
        return any(in_device_order(c, self.budgets, runs, False) is not None for c in self.chains)

    def contiguous(self) -> Optional[Found]:
        """Return the best contiguous placement, or None."""
        any_order = AnyOrder()

        def candidates(caps: Caps) -> Tuple[_Solver, List[_Laid]]:
            for solver in (in_device_order, any_order):
                tried = [(c, solver(c, caps, len(caps), False)) for c in self.chains]
                found = [(c, segments) for c, segments in tried if segments is not None]
                if found:
                    break
            return solver, found

        def bytes_on_last(caps: Caps) -> Optional[int]:
            loads = [_loads(*laid).get(self.last, 0) for laid in candidates(caps)[1]]
            return min(loads, default=None)

        caps = self._spare_last(bytes_on_last)
        solver, feasible = candidates(caps)
        in_order = solver is in_device_order
        first = [self._found(*laid, in_order) for laid in feasible]
        least = min((found.changes for found in first), default=0)
        refined = [
            self._found(laid[0], self._refine(solver, caps, *laid), in_order)
            for laid, found in zip(feasible, first)
            if found.changes == least
        ]
        self.optimal = self.optimal and any_order.exact
        return min(first + refined, key=_rank, default=None)

    def scattered(self, effort: int) -> Optional[Found]:
        """Return the best scattered placement that `effort` nodes find, or None if there is none.

        Raises OutOfEffort if a placement was neither found nor excluded.
        """
        bins = divide(self.steps.sizes, self.budgets, effort)
        if bins is None:
            return None
        share = effort // POLISH

        def bytes_on_last(caps: Caps) -> Optional[int]:
            nonlocal bins
            try:
                packed = divide(self.steps.sizes, caps, share)
            except OutOfEffort:
                self.optimal = False
                return None
            if packed is None:
                return None
            bins = packed
            return sum(packed[self.last])

        caps = self._spare_last(bytes_on_last)
        line = Line(self.steps)
        chain = Chain(line.prefix, range(line.total), (), self.steps.embedding)
        segments = few_changes(self.steps, caps, bins, share // POLISH)
        segments = self._fewer_runs(line, caps, segments, share)
        rest = Effort(share)

        def walk(_: Chain, caps: Caps, runs: int, embedding: bool) -> Optional[List[Segment]]:
            return self._walk(line, caps, runs, embedding, rest)

        return self._found(chain, self._refine(walk, caps, chain, segments), False)

    def _walk(
        self, line: Line, caps: Caps, runs: int, embedding: bool, effort: Effort
    ) -> Optional[List[Segment]]:
        try:
            if runs > MOST_RUNS:
                raise OutOfEffort
            return line.search(caps, runs - 1, embedding, effort)
        except OutOfEffort:
            self.optimal = False
            return None

    def _fewer_runs(
        self, line: Line, caps: Caps, segments: List[Segment], share: int
    ) -> List[Segment]:
        """Try all smaller numbers of runs, in growing steps once the effort runs out."""
        runs = _fewest_devices(self.total, caps)
        step = 1
        while runs < len(segments):
            found = self._walk(line, caps, runs, False, Effort(share))
            if found is not None:
                return found
            runs += step
            step += step if not self.optimal else 0
        return segments

    def _spare_last(self, bytes_on_last: Callable[[Caps], Optional[int]]) -> Caps:
        """Return the budgets, that of the device filled last cut down to what it has to hold.

        `bytes_on_last` gives its load in a placement within other budgets, None without one.
        """
        caps = self.budgets[:]
        if self.last < 0:
            return caps
        impossible = max(0, self.total - sum(caps) + caps[self.last]) - 1
        load = bytes_on_last(caps)
        gap = (load or 0) - impossible
        while load is not None and load - impossible > 1:
            close = (load - impossible) * SCALE <= gap
            caps[self.last] = load - 1 if close else (load + impossible) // 2
            less = bytes_on_last(caps)
            if less is None:
                impossible = caps[self.last]
            else:
                load = less
        caps[self.last] = self.budgets[self.last] if load is None else load
        return caps

    def _refine(
        self, solver: _Solver, caps: Caps, chain: Chain, segments: List[Segment]
    ) -> List[Segment]:
        """With the number of runs given: the embedding first if possible, then the least fill."""
        runs = len(segments)
        first = solver(chain, caps, runs, True)
        best = segments if first is None else first
        fill = self._fill(_loads(chain, best))
        low, high = self._least_fill(runs) - 1, _scaled(fill)
        while high - low > 1 and fill:
            middle = (low + high) // 2
            tighter = [min(c, middle * b // SCALE) for c, b in zip(caps, self.budgets)]
            found = solver(chain, tighter, runs, first is not None)
            if found is None:
                low = middle
            else:
                best, fill = found, self._fill(_loads(chain, found))
                high = _scaled(fill)
        while fill:
            n, d = fill.numerator, fill.denominator
            tighter = [min(c, (n * b - 1) // d) for c, b in zip(caps, self.budgets)]
            found = solver(chain, tighter, runs, first is not None)
            if found is None:
                break
            best, fill = found, self._fill(_loads(chain, found))
        return best

    def _least_fill(self, runs: int) -> int:
        room = sum(sorted(self.budgets, reverse=True)[:runs])
        return self.total * SCALE // room

    def _fill(self, loads: Dict[int, int]) -> Fraction:
        return max(Fraction(load, self.budgets[device]) for device, load in loads.items())

    def _found(self, chain: Chain, segments: List[Segment], in_order: bool) -> Found:
        loads = _loads(chain, segments)
        devices = _devices(chain, segments)
        embedding = self.steps.embedding
        return Found(
            self.steps.starts,
            devices,
            loads,
            in_order,
            len(loads) == len(segments),
            _changes(devices),
            embedding < 0 or devices[embedding] == min(loads),
            self._fill(loads),
        )


def _rank(found: Found) -> Tuple[int, bool, Fraction]:
    return found.changes, not found.embedding_first, found.fill


def _loads(chain: Chain, segments: Sequence[Segment]) -> Dict[int, int]:
    loads: Dict[int, int] = {}
    for device, start, end in segments:
        loads[device] = loads.get(device, 0) + chain.prefix[end] - chain.prefix[start]
    return loads


def _devices(chain: Chain, segments: Sequence[Segment]) -> List[int]:
    """Return the device of each step."""
    of_item = [device for device, start, end in segments for _ in range(start, end)]
    return [of_item[item] for item in chain.owner]


def _changes(devices: Sequence[int]) -> int:
    return sum(map(ne, devices, islice(devices, 1, None)))


def _scaled(fill: Fraction) -> int:
    """Return the fill in parts of SCALE, rounded up."""
    return -(-fill.numerator * SCALE // fill.denominator)


def _fewest_devices(total: int, caps: Sequence[int]) -> int:
    """Return how many of the largest devices are needed for `total` bytes."""
    sums = accumulate(sorted(caps, reverse=True))
    return next(count for count, room in enumerate(sums, 1) if room >= total)


def model_steps(units: Sequence[Unit]) -> Steps:
    """Join to the unit before what may as well stay with it: tied neighbours, units of no bytes."""
    members = Counter(unit.tie for unit in units)
    tied_bytes: Dict[object, int] = {}
    for unit in units:
        tied_bytes[unit.tie] = tied_bytes.get(unit.tie, 0) + unit.size
    numbers: Dict[object, int] = {}
    steps = Steps([], [], [], -1)
    embedding = -1
    for position, unit in enumerate(units):
        is_embedding = unit.is_input_embedding and embedding < 0
        if unit.tie is None or members[unit.tie] == 1:
            size, group = unit.size, -1
            joins = not size and not is_embedding
        else:
            size = 0 if unit.tie in numbers else tied_bytes[unit.tie]
            group = numbers.setdefault(unit.tie, len(numbers))
            joins = bool(steps.groups) and steps.groups[-1] == group
        if not joins:
            steps.sizes.append(size)
            steps.groups.append(group)
            steps.starts.append(position if steps.starts else 0)
        if is_embedding:
            embedding = len(steps.sizes) - 1
    return steps._replace(embedding=embedding) if steps.sizes else Steps([0], [-1], [0], -1)
