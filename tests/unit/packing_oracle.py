"""Small packing instances, and their best placement by trying every assignment."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import groupby, product
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from bnb_dispatch_fix.placement.packing import Device, Kind, Placement, Unit, device_order

Rank = Tuple[object, ...]


def best_rank(
    units: Sequence[Unit], budgets: Dict[Device, int], fill_last: Optional[Device] = None
) -> Optional[Rank]:
    """Return the rank of the best placement, None if there is none."""
    order = [device for device in device_order(budgets) if budgets[device] > 0]
    ranks = (
        rank(units, [order[number] for number in numbers], order, budgets, fill_last)
        for numbers in _assignments(units, [budgets[device] for device in order])
    )
    return min(ranks, default=None)


def rank_of(
    placement: Placement,
    units: Sequence[Unit],
    budgets: Dict[Device, int],
    fill_last: Optional[Device] = None,
) -> Rank:
    """Return the rank of a placement, from nothing but its device map."""
    order = [device for device in device_order(budgets) if budgets[device] > 0]
    devices = [placement.devices[unit.name] for unit in units]
    return rank(units, devices, order, budgets, fill_last)


def rank(
    units: Sequence[Unit],
    devices: Sequence[Device],
    order: Sequence[Device],
    budgets: Dict[Device, int],
    fill_last: Optional[Device],
) -> Rank:
    """Return a tuple that is smaller for the better placement."""
    kind = _kind(units, devices, order)
    loads: Dict[Device, int] = {}
    for unit, device in zip(units, devices):
        loads[device] = loads.get(device, 0) + unit.size
    changes = sum(1 for _ in groupby(devices)) - 1
    embedding = [device for unit, device in zip(units, devices) if unit.is_input_embedding]
    off_first = bool(embedding) and embedding[0] != min(loads, key=order.index)
    fill = max(Fraction(load, budgets[device]) for device, load in loads.items())
    spared = 0 if fill_last is None else loads.get(fill_last, 0)
    return kind is Kind.SCATTERED, spared, kind, changes, off_first, fill


def _kind(units: Sequence[Unit], devices: Sequence[Device], order: Sequence[Device]) -> Kind:
    kinds = {Kind.SCATTERED}
    tied = Counter(unit.tie for unit in units if unit.tie is not None)
    weightless = {
        position
        for position, unit in enumerate(units)
        if unit.size == 0 and tied[unit.tie] < 2 and not unit.is_input_embedding
    }
    members: Dict[object, List[int]] = {}
    for position, unit in enumerate(units):
        if unit.tie is not None:
            members.setdefault(unit.tie, []).append(position)
    for flags in product(*(product((True, False), repeat=len(m)) for m in members.values())):
        if all(any(kept) for kept in flags):
            left_out = {
                position
                for positions, kept in zip(members.values(), flags)
                for position, keep in zip(positions, kept)
                if not keep
            }
            line = [device for p, device in enumerate(devices) if p not in left_out | weightless]
            runs = [order.index(device) for device, _ in groupby(line)]
            if runs == sorted(set(runs)):
                kinds.add(Kind.DEVICE_ORDER)
            elif len(runs) == len(set(runs)):
                kinds.add(Kind.OTHER_ORDER)
    return min(kinds)


def _assignments(units: Sequence[Unit], budgets: Sequence[int]) -> Iterator[List[int]]:
    """Yield the device numbers of the units for every assignment within budgets and ties."""

    def extend(chosen: List[int], room: List[int], tied: Dict[object, int]) -> Iterator[List[int]]:
        if len(chosen) == len(units):
            yield chosen
            return
        unit = units[len(chosen)]
        for device in range(len(budgets)):
            if unit.size <= room[device] and tied.get(unit.tie, device) == device:
                left = [*room[:device], room[device] - unit.size, *room[device + 1 :]]
                held = tied if unit.tie is None else {**tied, unit.tie: device}
                yield from extend([*chosen, device], left, held)

    return extend([], list(budgets), {})


def random_instance(
    rng: random.Random, most_units: int, most_devices: int, most_ties: int
) -> Tuple[List[Unit], Dict[Device, int]]:
    """Return units and budgets near the border between possible and impossible."""
    count = rng.randint(most_units // 3, most_units)
    largest = rng.choice([2, 5, 30])
    sizes = [rng.randint(0 if rng.random() < 0.2 else 1, largest) for _ in range(count)]
    if rng.random() < 0.5:
        block = rng.randint(1, largest)
        sizes = [block if rng.random() < 0.7 else size for size in sizes]
    if rng.random() < 0.2:  # fills that differ by a few bytes
        sizes = [size * 10_000 + rng.randint(0, 2) for size in sizes]
    ties: List[Optional[int]] = [None] * count
    for tie in range(rng.randint(0, most_ties)):
        for position in rng.sample(range(count), min(count, rng.choice([2, 2, 3]))):
            ties[position] = tie
    embedding = rng.choice([0, 0, rng.randrange(count), -1])
    units = [
        Unit(f"unit.{n}", size, tie, n == embedding)
        for n, (size, tie) in enumerate(zip(sizes, ties))
    ]
    devices: List[Device] = [0, 1, 2, 3, 7, "xpu", "mps"]
    devices = rng.sample(devices, rng.randint(min(2, most_devices), most_devices))
    weights = [rng.choice([1, 1, rng.uniform(0.3, 1), rng.uniform(0.3, 1), 0]) for _ in devices]
    total = sum(sizes) * rng.choice([0.95, 1, 1.02, 1.05, 1.1, 1.2, 1.4, 3]) / (sum(weights) or 1)
    return units, {device: round(weight * total) for device, weight in zip(devices, weights)}


def planted(
    rng: random.Random,
    shape: str,
    count: int,
    devices: int,
    runs_per_device: int,
    slack: Optional[float] = None,
) -> Tuple[List[Unit], Dict[Device, int]]:
    """Return units, and budgets 0.2–5 % (or `slack`) above the loads of a random placement."""
    gib = 2**30
    if shape == "blocks":
        sizes = [gib, *[gib // 10] * (count - 3), 8192, gib]
    elif shape == "two kinds of blocks":
        sizes = [gib // 2, *[gib // 10, gib // 7] * ((count - 2) // 2), gib // 2]
    else:
        sizes = [rng.randint(gib // 100, gib) for _ in range(count)]
    runs = min(runs_per_device * devices, len(sizes))
    cuts = sorted(rng.sample(range(1, len(sizes)), runs - 1))
    holders = [device for _ in range(runs_per_device) for device in range(devices)]
    rng.shuffle(holders)
    loads = [0] * devices
    for start, end, holder in zip([0, *cuts], [*cuts, len(sizes)], holders):
        loads[holder] += sum(sizes[start:end])
    factor = 1 + (rng.uniform(0.002, 0.05) if slack is None else slack)
    units = [Unit(f"unit.{n}", size, None, n == 0) for n, size in enumerate(sizes)]
    return units, {device: int(load * factor) for device, load in enumerate(loads)}
