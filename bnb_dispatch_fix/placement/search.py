"""The order of the searches, and the one place that says which of two placements is better."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate, islice
from operator import ne
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .contiguous import AnyOrder, Chain, Segment, Steps, chains, in_device_order
from .division import Effort, OutOfEffort, divide
from .records import Unit
from .scattered import Line, few_changes

# The part of the effort spent on one number of changes, or on the smallest fill, of a scattered
# placement that is known to exist.
POLISH = 16
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
    spread: Fraction  # the largest fill of the devices other than the one filled last


def fewest_changes(found: Found) -> Tuple[int, bool, Fraction]:
    """Return what is smaller for the better of two placements of a kind, by changes of device."""
    return found.changes, not found.embedding_first, found.fill


def most_even(found: Found) -> Tuple[Fraction, int, bool]:
    """Return what is smaller for the better of two placements of a kind, by largest fill."""
    return found.spread, found.changes, not found.embedding_first


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
        return any(in_device_order(c, self.budgets, len(self.budgets), False) for c in self.chains)

    def contiguous(self) -> Optional[Found]:
        """Return the contiguous placement with the fewest changes, or None if there is none."""
        any_order = AnyOrder()

        def candidates(caps: Caps) -> Tuple[_Solver, List[_Laid]]:
            found = self._laid(in_device_order, caps)
            return (in_device_order, found) if found else (any_order, self._laid(any_order, caps))

        caps = self._spare_last(lambda caps: self._least_on_last(candidates(caps)[1]))
        solver, laid = candidates(caps)

        def refine(chain: Chain, segments: List[Segment]) -> List[Segment]:
            return self._refine(solver, caps, chain, segments)

        best = self._best(laid, refine, solver is in_device_order, fewest_changes)
        self.optimal = self.optimal and any_order.exact
        return best

    def most_even(self) -> Optional[Found]:
        """Return the most even placement in device order, or None if there is none.

        The device filled last gets as little as a placement in device order allows.
        """

        def candidates(caps: Caps) -> List[_Laid]:
            return self._laid(in_device_order, caps)

        def spread(caps: Caps) -> Optional[Fraction]:
            return min((self._spread(_loads(*laid)) for laid in candidates(caps)), default=None)

        caps = self._spare_last(lambda caps: self._least_on_last(candidates(caps)))
        reached = spread(caps)
        if reached is None:
            return None
        load = caps[self.last] if self.last >= 0 else 0
        others = sum(budget for d, budget in enumerate(self.budgets) if d != self.last)
        low = (self.total - load) * SCALE // max(others, 1)
        least = self._least(caps, reached, low, spread, self.last)
        caps = self._tight(caps, least.numerator, least.denominator, self.last)

        def refine(chain: Chain, segments: List[Segment]) -> List[Segment]:
            return in_device_order(chain, caps, len(segments), True) or segments

        return self._best(candidates(caps), refine, True, most_even)

    def _laid(self, solver: _Solver, caps: Caps) -> List[_Laid]:
        """Return each chain that fits, and the fewest runs it fits with."""
        tried = ((chain, solver(chain, caps, len(caps), False)) for chain in self.chains)
        return [(chain, segments) for chain, segments in tried if segments is not None]

    def _least_on_last(self, laid: Sequence[_Laid]) -> Optional[int]:
        return min((_loads(*one).get(self.last, 0) for one in laid), default=None)

    def _best(
        self,
        laid: Sequence[_Laid],
        refine: Callable[[Chain, List[Segment]], List[Segment]],
        in_order: bool,
        merit: Callable[[Found], Any],
    ) -> Optional[Found]:
        """Return the best of the placements and of what the ones with fewest changes lead to."""
        first = [self._found(*one, in_order) for one in laid]
        fewest = min((found.changes for found in first), default=0)
        refined = [
            self._found(chain, refine(chain, segments), in_order)
            for (chain, segments), found in zip(laid, first)
            if found.changes == fewest
        ]
        return min(first + refined, key=merit, default=None)

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

        def fill(tighter: Caps) -> Optional[Fraction]:
            nonlocal best
            found = solver(chain, tighter, runs, first is not None)
            if found is None:
                return None
            best = found
            return self._fill(_loads(chain, best))

        self._least(caps, self._fill(_loads(chain, best)), self._least_fill(runs), fill)
        return best

    def _least(
        self,
        caps: Caps,
        fill: Fraction,
        low: int,
        attempt: Callable[[Caps], Optional[Fraction]],
        spared: int = -1,
    ) -> Fraction:
        """Return the least fill that `attempt` reaches within smaller and smaller budgets.

        `fill` has been reached, less than `low` parts of SCALE cannot be. The budget of device
        `spared` stays as it is.
        """
        high = _scaled(fill)
        low -= 1
        while high - low > 1 and fill:
            middle = (low + high) // 2
            less = attempt(self._tight(caps, middle, SCALE, spared))
            if less is None:
                low = middle
            else:
                fill = less
                high = _scaled(fill)
        while fill:
            less = attempt(self._tight(caps, fill.numerator, fill.denominator, spared, 1))
            if less is None:
                break
            fill = less
        return fill

    def _tight(self, caps: Caps, parts: int, of: int, spared: int, less: int = 0) -> Caps:
        """Return the budgets cut down to `parts` of `of`, and below that where `less` is 1."""
        tight = [min(c, (parts * b - less) // of) for c, b in zip(caps, self.budgets)]
        if spared >= 0:
            tight[spared] = caps[spared]
        return tight

    def _least_fill(self, runs: int) -> int:
        room = sum(sorted(self.budgets, reverse=True)[:runs])
        return self.total * SCALE // room

    def _fill(self, loads: Dict[int, int]) -> Fraction:
        fills = (Fraction(load, self.budgets[device]) for device, load in loads.items())
        return max(fills, default=Fraction(0))

    def _spread(self, loads: Dict[int, int]) -> Fraction:
        return self._fill({d: load for d, load in loads.items() if d != self.last})

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
            self._spread(loads),
        )


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
    members = Counter(unit.tie for unit in units if unit.tie is not None)
    tied_bytes: Dict[object, int] = {}
    for unit in units:
        if unit.tie is not None:
            tied_bytes[unit.tie] = tied_bytes.get(unit.tie, 0) + unit.size
    numbers: Dict[object, int] = {}
    steps = Steps([], [], [], -1)
    embedding = -1
    for position, (_, size, tie, marked) in enumerate(units):
        is_embedding = marked and embedding < 0
        if tie is None or members[tie] == 1:
            group = -1
            joins = not size and not is_embedding
        else:
            size = 0 if tie in numbers else tied_bytes[tie]
            group = numbers.setdefault(tie, len(numbers))
            joins = bool(steps.groups) and steps.groups[-1] == group
        if not joins:
            steps.sizes.append(size)
            steps.groups.append(group)
            steps.starts.append(position if steps.starts else 0)
        if is_embedding:
            embedding = len(steps.sizes) - 1
    return steps._replace(embedding=embedding) if steps.sizes else Steps([0], [-1], [0], -1)
