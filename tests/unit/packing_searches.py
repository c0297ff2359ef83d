"""The searches for runs along the model and for a division, each against brute force."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import ne
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from bnb_dispatch_fix.placement.contiguous import AnyOrder, Chain, Segment, Steps, in_device_order
from bnb_dispatch_fix.placement.division import Effort, _Division, divide
from bnb_dispatch_fix.placement.scattered import Line


def fewest_runs(
    chain: Chain, caps: Sequence[int], embedding_first: bool, in_order: bool
) -> Optional[int]:
    """Return how many runs a contiguous placement of the chain has at least, None if none fits."""
    counts: List[int] = []

    def extend(start: int, runs: List[Segment]) -> None:
        if start == len(chain.prefix) - 1:
            if _is_laid(chain, caps, runs, embedding_first):
                counts.append(len(runs))
            return
        used = [device for device, _, _ in runs]
        for device in range(used[-1] + 1 if in_order and used else 0, len(caps)):
            for end in range(start + 1, len(chain.prefix)):
                # A run without bytes needs no budget; AnyOrder does without such runs.
                if device not in used and (in_order or caps[device] > 0):
                    extend(end, [*runs, (device, start, end)])

    extend(0, [])
    return min(counts, default=None)


def is_contiguous(
    chain: Chain,
    caps: Sequence[int],
    runs: Sequence[Segment],
    embedding_first: bool,
    in_order: bool,
) -> bool:
    """Tell whether the runs cover the chain, each device once, as asked for."""
    devices = [device for device, _, _ in runs]
    starts = [start for _, start, _ in runs]
    ends = [end for _, _, end in runs]
    return (
        len(devices) == len(set(devices))
        and (not in_order or devices == sorted(devices))
        and [*starts, len(chain.prefix) - 1] == [0, *ends]
        and all(start < end for start, end in zip(starts, ends))
        and _is_laid(chain, caps, runs, embedding_first)
    )


def _is_laid(
    chain: Chain, caps: Sequence[int], runs: Sequence[Segment], embedding_first: bool
) -> bool:
    first = min(device for device, _, _ in runs)
    return all(
        chain.prefix[end] - chain.prefix[start] <= caps[device]
        and not any(start < cut < end for cut in chain.cuts)
        and (not embedding_first or not start <= chain.embedding < end or device == first)
        for device, start, end in runs
    )


def fewest_changes(steps: Steps, caps: Sequence[int], embedding_first: bool) -> Optional[int]:
    """Return the changes of device that a placement of the steps has at least, or None."""
    counts: List[int] = []

    def extend(devices: List[int], room: List[int], holders: Dict[int, int]) -> None:
        step = len(devices)
        if step == len(steps.sizes):
            if is_division(steps, caps, devices, embedding_first):
                counts.append(sum(map(ne, devices, devices[1:])))
            return
        size, group = steps.sizes[step], steps.groups[step]
        for device in range(len(caps)):
            if size <= room[device] and holders.get(group, device) == device:
                left = [*room[:device], room[device] - size, *room[device + 1 :]]
                held = holders if group < 0 else {**holders, group: device}
                extend([*devices, device], left, held)

    extend([], list(caps), {})
    return min(counts, default=None)


def is_division(
    steps: Steps, caps: Sequence[int], devices: Sequence[int], embedding_first: bool
) -> bool:
    """Tell whether the devices of the steps respect budgets and ties."""
    loads: Dict[int, int] = {}
    holders: Dict[int, int] = {}
    for size, group, device in zip(steps.sizes, steps.groups, devices):
        loads[device] = loads.get(device, 0) + size
        if group >= 0 and holders.setdefault(group, device) != device:
            return False
    if any(caps[device] <= 0 or load > caps[device] for device, load in loads.items()):
        return False
    embedding = steps.embedding if embedding_first else -1
    return embedding < 0 or devices[embedding] == min(loads)


def _caps(rng: random.Random, total: int, devices: int) -> List[int]:
    """Return budgets that together come near the total, some of them equal, 0, or too small."""
    parts = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(devices)]
    scale = total * rng.choice([0.9, 1, 1, 1.1, 1.3, 2]) / (sum(parts) or 1)
    return [round(part * scale) for part in parts]


def _sizes(rng: random.Random, most: int) -> List[int]:
    largest = rng.choice([1, 3, 9, 40])
    return [rng.choice([0, largest, rng.randint(0, largest)]) for _ in range(rng.randint(1, most))]


def _contiguous(rng: random.Random, in_order: bool) -> Tuple[str, object]:
    sizes = _sizes(rng, 6)
    cuts = tuple(cut for cut in range(1, len(sizes)) if rng.random() < 0.15)
    embedding = rng.choice([-1, 0, rng.randrange(len(sizes))])
    chain = Chain([0, *accumulate(sizes)], range(len(sizes)), cuts, embedding)
    caps = _caps(rng, sum(sizes), rng.randint(1, 4))
    runs = rng.randint(1, len(caps))
    first = rng.random() < 0.5
    found = (in_device_order if in_order else AnyOrder())(chain, caps, runs, first)
    fewest = fewest_runs(chain, caps, first, in_order)
    if fewest is not None and fewest > runs:
        fewest = None
    instance = (chain, caps, runs, first, found, fewest)
    if found is None or fewest is None:
        return ("WRONG" if found is not fewest else "none"), instance
    # With the embedding on the first device in use AnyOrder keeps to `runs`, no more.
    most = fewest if in_order or not first else runs
    right = len(found) <= most and is_contiguous(chain, caps, found, first, in_order)
    return ("within the runs" if right else "WRONG"), instance


def _division(rng: random.Random, greedy: bool) -> Tuple[str, object]:
    if greedy:
        sizes = _sizes(rng, 8)
        caps = _caps(rng, sum(sizes), rng.randint(1, 4))
    else:
        sizes, caps = _tight_division(rng)
    order = rng.sample([d for d, cap in enumerate(caps) if cap > 0], sum(cap > 0 for cap in caps))
    found = (
        divide(sizes, caps, 100_000)
        if greedy
        else _Division([s for s in sizes if s], caps, order, Effort(100_000)).search()
    )
    instance = (sizes, caps, order, found)
    if found is None:
        return ("WRONG" if _can_be_divided(sizes, caps) else "none"), instance
    right = all(sum(part) <= cap for part, cap in zip(found, caps))
    placed = sorted(size for part in found for size in part)
    right = right and placed == sorted(size for size in sizes if size)
    return ("divided" if right else "WRONG"), instance


def _tight_division(rng: random.Random) -> Tuple[List[int], List[int]]:
    """Return sizes and budgets that leave little or no room, possible or just not."""
    caps = [0] * rng.randint(2, 4)
    largest = rng.choice([5, 9, 20])
    sizes = [rng.randint(1, largest) for _ in range(rng.randint(3, 10))]
    for size in sizes:
        caps[rng.randrange(len(caps))] += size
    moved = rng.choice([0, 1, 1, 2, 3])  # from one budget to another
    first, second = rng.sample(range(len(caps)), 2)
    if caps[first] >= moved:
        caps[first] -= moved
        caps[second] += moved
    if rng.random() < 0.3:
        caps = [-(-sum(caps) // len(caps))] * len(caps)
    if rng.random() < 0.3:
        caps[rng.randrange(len(caps))] += rng.randint(1, 2)
    return sizes, caps


def _can_be_divided(sizes: Sequence[int], caps: Sequence[int]) -> bool:
    rooms = {tuple(caps)}
    for size in sizes:
        rooms = {
            (*room[:d], room[d] - size, *room[d + 1 :])
            for room in rooms
            for d in range(len(room))
            if room[d] >= size
        }
    return bool(rooms)


def _line(rng: random.Random) -> Tuple[str, object]:
    tight = rng.random() < 0.7
    sizes, caps = _tight_division(rng) if tight else (_sizes(rng, 6), [])
    sizes = sizes[:7]
    caps = caps or _caps(rng, sum(sizes), rng.randint(1, 4))
    groups = [-1] * len(sizes)
    for group in range(rng.choice([0, 0, 1, 2])):
        for member in rng.sample(range(len(sizes)), min(len(sizes), rng.choice([2, 3]))):
            groups[member] = group
    for group in set(groups) - {-1}:  # all bytes count at the first member
        members = [step for step, of in enumerate(groups) if of == group]
        sizes[members[0]] = sum(sizes[step] for step in members)
        for step in members[1:]:
            sizes[step] = 0
    embedding = rng.choice([-1, 0, rng.randrange(len(sizes))])
    steps = Steps(sizes, groups, list(range(len(sizes))), embedding)
    first = rng.random() < 0.5
    fewest = fewest_changes(steps, caps, first)
    changes = rng.randint(0, 5) if fewest is None else max(0, fewest - rng.choice([0, 0, 0, 1, -1]))
    found = Line(steps).search(caps, changes, first, Effort(100_000))
    instance = (steps, caps, changes, first, found, fewest)
    if found is None:
        return ("none" if fewest is None or fewest > changes else "WRONG"), instance
    devices = [device for device, start, end in found for _ in range(start, end)]
    right = sum(map(ne, devices, devices[1:])) <= changes and len(devices) == len(sizes)
    right = right and is_division(steps, caps, devices, first)
    return ("within the changes" if right else "WRONG"), instance


SEARCHES: Dict[str, Callable[[random.Random], Tuple[str, object]]] = {
    "in_device_order": lambda rng: _contiguous(rng, True),
    "AnyOrder": lambda rng: _contiguous(rng, False),
    "divide": lambda rng: _division(rng, True),
    "divide, nothing greedy": lambda rng: _division(rng, False),
    "Line.search": _line,
}
