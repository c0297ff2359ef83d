"""Exact search for placements in which every device holds one run of the model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, combinations, islice, product
from math import prod
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

# Device index, first step, step after the last one.
Segment = Tuple[int, int, int]
# What to do with one tie group: the members in [first, last] share a run with all that lies
# between them; of the others, which follow from a distance, those in `cuts` lie on a change.
_TieChoice = Tuple[int, int, Tuple[int, ...]]

# Combinations of tie choices (two tie groups of two have at most 25) times steps that are tried.
TIE_WORK = 1 << 20
TIE_CHOICES = 1 << 10
# States kept per number of runs: all with up to 16 devices (12,870 if all budgets differ), and with
# more devices so many that a search takes this many steps.
STATES = 1 << 14
BEAM_WORK = 1 << 18


class _Trail(NamedTuple):
    """The last run of a partial placement, and the runs before it."""

    segment: Segment
    before: Optional[_Trail]


# Budget, its devices, value of one of them in a state.
_Kind = Tuple[int, List[int], int]
# By state: position reached, budgets used up, state before the last run, kind and start of that.
_Layer = Dict[int, Tuple[int, int, int, int, int]]


class Steps(NamedTuple):
    """The model as a line of steps, each a stretch of units that stays together anyway.

    The bytes of a tie group count at its first step; its later steps have size 0.
    """

    sizes: List[int]
    groups: List[int]  # tie group of each step, -1 where it has none
    starts: List[int]  # first unit of each step
    embedding: int  # step of the input embedding, -1 where there is none


class Chain(NamedTuple):
    """The steps as a line of items that one run covers whole, for one choice of tie handling."""

    prefix: List[int]  # bytes before each item, and the total
    owner: Sequence[int]  # item of each step
    cuts: Tuple[int, ...]  # items at which a run must start, ascending
    embedding: int  # item of the input embedding, or -1


def tie_groups(groups: Sequence[int]) -> Dict[int, List[int]]:
    """Return the steps of each tie group that has more than one."""
    members: Dict[int, List[int]] = {}
    for step, group in enumerate(groups):
        if group >= 0:
            members.setdefault(group, []).append(step)
    return {group: steps for group, steps in members.items() if len(steps) > 1}


def chains(steps: Steps) -> Tuple[List[Chain], bool]:
    """Return a chain per way to handle the ties, and whether they are sure to have the best one.

    With several groups they are not: members that follow from a distance can be neighbours.
    """
    members = list(tie_groups(steps.groups).values())
    if not members:
        prefix = [0, *accumulate(steps.sizes)]
        return [Chain(prefix, range(len(steps.sizes)), (), steps.embedding)], True
    last = len(steps.sizes) - 1
    limit = min(TIE_CHOICES, max(27, TIE_WORK // (last + 1)))
    choices = [list(islice(_tie_choices(positions, last), limit + 1)) for positions in members]
    complete = prod(map(len, choices)) <= limit
    together = product(*choices) if complete else _in_step(members, limit)
    built = [_chain(steps, members, chosen) for chosen in together]
    return built, complete and len(members) == 1


def _in_step(members: Sequence[Sequence[int]], limit: int) -> Iterator[List[_TieChoice]]:
    """Yield the choices in which all groups stay whole, or all are led by the same member."""
    yield [(positions[0], positions[-1], ()) for positions in members]
    for number in range(min(limit, max(map(len, members)))):
        leaders = [positions[min(number, len(positions) - 1)] for positions in members]
        yield [(leader, leader, ()) for leader in leaders]


def _tie_choices(positions: Sequence[int], last_step: int) -> Iterator[_TieChoice]:
    count = len(positions)
    for detached in range(count):
        for first in range(detached + 1):
            final = first + count - 1 - detached
            far = [p for p in (*positions[:first], *positions[final + 1 :]) if 0 < p < last_step]
            for cut_count in range(len(far) + 1):
                for cuts in combinations(far, cut_count):
                    yield positions[first], positions[final], cuts


def _chain(steps: Steps, members: Sequence[Sequence[int]], chosen: Sequence[_TieChoice]) -> Chain:
    """Build the chain of one choice per tie group."""
    merged_until: Dict[int, int] = {}
    anchor_of: Dict[int, int] = {}
    for positions, (first, last, _) in zip(members, chosen):
        merged_until[first] = last
        anchor_of.update((p, first) for p in positions if not first <= p <= last)
    wanted_cuts = {cut for _, _, cuts in chosen for cut in cuts}

    owner = []
    cuts = []
    items = 0
    together = -1  # the steps up to here belong to the item that was started last
    for step in range(len(steps.sizes)):
        if step in anchor_of:
            if step in wanted_cuts:
                cuts.append(items)
            owner.append(-1)
        else:
            items += step > together
            owner.append(items - 1)
        together = max(together, merged_until.get(step, -1))
    for step, anchor in anchor_of.items():
        owner[step] = owner[anchor]
    sizes = [0] * items
    for item, size in zip(owner, steps.sizes):
        sizes[item] += size
    inner_cuts = tuple(sorted({cut for cut in cuts if 0 < cut < items}))
    embedding = owner[steps.embedding] if steps.embedding >= 0 else -1
    return Chain([0, *accumulate(sizes)], owner, inner_cuts, embedding)


def _no_further(cuts: Sequence[int], start: int, end: int) -> int:
    """Return the first cut within a run, or its end."""
    return next((cut for cut in cuts if start < cut < end), end)


def in_device_order(
    chain: Chain, caps: Sequence[int], runs: int, embedding_first: bool
) -> Optional[List[Segment]]:
    """Return the placement with the fewest runs, at most `runs`, in device order.

    The furthest item that r runs on the first devices can reach is all that counts: a run that
    starts later ends later.
    """
    total = len(chain.prefix) - 1
    furthest = [0] + [-1] * runs
    trail: List[Optional[_Trail]] = [None] * (runs + 1)
    for device, cap in enumerate(caps):
        for run in range(min(runs, device + 1), 0, -1):
            start = furthest[run - 1]
            if start < 0:
                continue
            end = bisect_right(chain.prefix, chain.prefix[start] + cap) - 1
            end = _no_further(chain.cuts, start, end)
            if run == 1 and embedding_first and end <= chain.embedding:
                continue
            if end > start and end > furthest[run]:
                furthest[run] = end
                trail[run] = _Trail((device, start, end), trail[run - 1])
    for run in range(1, runs + 1):
        if furthest[run] == total:
            return _unwind(trail[run])
    return None


def _unwind(trail: Optional[_Trail]) -> List[Segment]:
    segments = []
    while trail is not None:
        segments.append(trail.segment)
        trail = trail.before
    return segments[::-1]


class AnyOrder:
    """Search over the orders of the devices; `exact` turns False once states were left out."""

    def __init__(self) -> None:
        self.exact = True

    def __call__(
        self, chain: Chain, caps: Sequence[int], runs: int, embedding_first: bool
    ) -> Optional[List[Segment]]:
        """Return a placement with at most `runs` runs, in any order of devices.

        It has the fewest runs there are, unless the embedding has to be on the first device.
        """
        if not embedding_first or chain.embedding < 0:
            return self._search(chain, caps, runs, -1)
        tried = set()
        for first, cap in enumerate(caps):
            # With an equal budget, the earlier device leaves more devices behind it.
            if cap > 0 and cap not in tried:
                tried.add(cap)
                later = [0] * first + list(caps[first:])
                found = self._search(chain, later, runs, first)
                if found is not None:
                    return found
        return None

    def _search(
        self, chain: Chain, caps: Sequence[int], runs: int, first: int
    ) -> Optional[List[Segment]]:
        """Search by number of runs; a state is how many devices of each budget are used.

        `first` is the device that has to hold the input embedding, or -1.
        """
        kinds = _kinds(caps, first)
        usable = sorted((cap for cap in caps if cap > 0), reverse=True)
        largest = [0, *accumulate(usable)]
        runs = min(runs, len(usable))
        width = STATES if len(usable) <= 16 else max(1, BEAM_WORK // (len(kinds) * runs))
        layers: List[_Layer] = [{0: (0, 0, 0, 0, 0)}]
        for run in range(1, runs + 1):
            room = (largest[runs - run], largest[-1])
            layer = _one_more_run(chain, kinds, layers[-1], first, room)
            layers.append(layer)
            for state, reached in layer.items():
                if reached[0] == len(chain.prefix) - 1 and (first < 0 or state % 2):
                    return _trace(layers, kinds, state)
            layers[-1] = self._keep(layer, width, chain.prefix)
        return None

    def _keep(self, layer: _Layer, width: int, prefix: Sequence[int]) -> _Layer:
        """Return the states that wasted the least room, `width` at most."""
        if len(layer) <= width:
            return layer
        self.exact = False
        by_waste = sorted(
            layer, key=lambda state: (layer[state][1] - prefix[layer[state][0]], state)
        )
        return {state: layer[state] for state in by_waste[:width]}


def _one_more_run(
    chain: Chain, kinds: Sequence[_Kind], layer: _Layer, first: int, room: Tuple[int, int]
) -> _Layer:
    """Return the states with one run more from which the rest may still fit.

    `room` is what the runs to come can take at most, and what all devices can take.
    """
    after: _Layer = {}
    prefix, cuts = chain.prefix, chain.cuts
    total = prefix[-1]
    least = bisect_left(prefix, total - room[0])
    numbered = [(kind, *values) for kind, values in enumerate(kinds)]
    for state, (position, used, *_) in layer.items():
        for kind, cap, devices, place in numbered:
            if state // place % (len(devices) + 1) == len(devices):
                continue
            start = position
            if devices[0] == first:
                start = min(position, chain.embedding)
            end = bisect_right(prefix, prefix[start] + cap) - 1
            if cuts:  # rare, and here is where the time goes
                end = _no_further(cuts, start, end)
            if end <= start or end < least or total - prefix[end] > room[1] - used - cap:
                continue
            if devices[0] == first and end <= chain.embedding:
                continue
            known = after.get(state + place)
            if known is None or known[0] < end:
                after[state + place] = (end, used + cap, state, kind, start)
    return after


def _trace(layers: Sequence[_Layer], kinds: Sequence[_Kind], state: int) -> List[Segment]:
    """Return the runs that led to a state of the last layer."""
    segments = []
    limit = layers[-1][state][0]
    for layer in layers[:0:-1]:
        end, _, state, kind, start = layer[state]
        _, devices, place = kinds[kind]
        device = devices[state // place % (len(devices) + 1)]
        end = min(end, limit)
        # A run that started at the embedding may have left nothing of the one before it.
        if start < end:
            segments.append((device, start, end))
            limit = start
    return segments[::-1]


def _kinds(caps: Sequence[int], first: int) -> List[_Kind]:
    """Return the different budgets, largest first, but before them device `first` by itself."""
    alike: Dict[Tuple[bool, int], List[int]] = {}
    for device, cap in enumerate(caps):
        if cap > 0:
            alike.setdefault((device != first, -cap), []).append(device)
    kinds = []
    place = 1
    for (_, negative_cap), devices in sorted(alike.items()):
        kinds.append((-negative_cap, devices, place))
        place *= len(devices) + 1
    return kinds
