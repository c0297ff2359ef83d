"""Small packing instances, and their best placement by trying every one there is."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import groupby, product
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from bnb_dispatch_fix.placement.packing import (
    Device,
    Impossible,
    Kind,
    Merit,
    Placement,
    Unit,
    check,
    device_order,
    pack,
)

Rank = Tuple[object, ...]


def best_rank(
    units: Sequence[Unit],
    budgets: Dict[Device, int],
    fill_last: Optional[Device] = None,
    merit: Merit = "fewest_changes",
) -> Optional[Rank]:
    """Return the rank of the best placement, None if there is none."""
    order = [device for device in device_order(budgets) if budgets[device] > 0]
    best: Optional[Rank] = None
    for numbers in _assignments(units, [budgets[device] for device in order]):
        devices = [order[number] for number in numbers]
        # Whether it is contiguous takes longest to find out, and often it does not matter.
        kind = Kind.DEVICE_ORDER
        if best is None or _rank(kind, units, devices, order, budgets, fill_last, merit) < best:
            kind = _kind(units, devices, order)
            found = _rank(kind, units, devices, order, budgets, fill_last, merit)
            best = found if best is None else min(best, found)
    return best


def rank_of(
    placement: Placement,
    units: Sequence[Unit],
    budgets: Dict[Device, int],
    fill_last: Optional[Device] = None,
    merit: Merit = "fewest_changes",
) -> Rank:
    """Return the rank of a placement, from nothing but its device map."""
    order = [device for device in device_order(budgets) if budgets[device] > 0]
    devices = [placement.devices[unit.name] for unit in units]
    return _rank(_kind(units, devices, order), units, devices, order, budgets, fill_last, merit)


def _rank(
    kind: Kind,
    units: Sequence[Unit],
    devices: Sequence[Device],
    order: Sequence[Device],
    budgets: Dict[Device, int],
    fill_last: Optional[Device],
    merit: Merit,
) -> Rank:
    """Return a tuple that is smaller for the better placement."""
    loads: Dict[Device, int] = {}
    for unit, device in zip(units, devices):
        loads[device] = loads.get(device, 0) + unit.size
    changes = sum(1 for _ in groupby(devices)) - 1
    embedding = [device for unit, device in zip(units, devices) if unit.is_input_embedding]
    off_first = bool(embedding) and embedding[0] != min(loads, key=order.index)
    fills = {device: Fraction(load, budgets[device]) for device, load in loads.items()}
    fill = max(fills.values())
    spared = 0 if fill_last is None else loads.get(fill_last, 0)
    if merit == "even":
        if kind is Kind.DEVICE_ORDER:
            spread = max((fills[device] for device in fills if device != fill_last), default=0)
            return False, spared, spread, changes, off_first, fill
        return True, kind is Kind.SCATTERED, spared, kind, changes, off_first, fill
    return kind is Kind.SCATTERED, spared, kind, changes, off_first, fill


def _kind(units: Sequence[Unit], devices: Sequence[Device], order: Sequence[Device]) -> Kind:
    kinds = {Kind.SCATTERED}
    tied = Counter(unit.tie for unit in units if unit.tie is not None)
    embedding = next((n for n, unit in enumerate(units) if unit.is_input_embedding), None)
    weightless = {
        position
        for position, unit in enumerate(units)
        if unit.size == 0 and tied[unit.tie] < 2 and position != embedding
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


def verdict(
    units: Sequence[Unit],
    budgets: Dict[Device, int],
    fill_last: Optional[Device] = None,
    merit: Merit = "fewest_changes",
) -> str:
    """Return what `pack` is worth here; "FALSE CLAIM" and "WRONG" are what must not be."""
    result = pack(units, budgets, fill_last=fill_last, merit=merit)
    best = best_rank(units, budgets, fill_last, merit)
    if isinstance(result, Impossible) and best is None:
        return "impossible" if result.verified else "impossible, not verified"
    if not isinstance(result, Placement) or best is None:
        return f"WRONG: {type(result).__name__}"
    reached = rank_of(result, units, budgets, fill_last, merit)
    kind = _kind(units, [result.devices[unit.name] for unit in units], device_order(budgets))
    if check(result, units, budgets) or result.kind is not kind:
        return "WRONG: what is said of the placement"
    if reached == best:
        return "best" if result.optimal else "best, not claimed"
    return "FALSE CLAIM" if result.optimal else "not the best, not claimed"


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


Instance = Tuple[List[Unit], Dict[Device, int], Optional[Device]]


def _units(
    rng: random.Random, sizes: Sequence[int], ties: Optional[Sequence[Optional[int]]] = None
) -> List[Unit]:
    """Return units of these sizes, the input embedding first, anywhere, twice, or nowhere."""
    marked = {rng.choice([0, 0, -1, rng.randrange(len(sizes))])}
    if rng.random() < 0.1:
        marked.add(rng.randrange(len(sizes)))
    ties = [None] * len(sizes) if ties is None else ties
    return [
        Unit(f"unit.{n}", size, tie, n in marked) for n, (size, tie) in enumerate(zip(sizes, ties))
    ]


def _exact(rng: random.Random, units: Sequence[Unit], devices: Sequence[Device]) -> List[int]:
    """Return what the devices hold after every unit, or tie group, went to any of them."""
    holder = {}
    loads = dict.fromkeys(devices, 0)
    for unit in units:
        key = unit.name if unit.tie is None else unit.tie
        loads[holder.setdefault(key, rng.choice(devices))] += unit.size
    return [loads[device] for device in devices]


def _small_device_filled_last(rng: random.Random) -> Instance:
    units = _units(rng, [rng.randint(1, 7) for _ in range(rng.randint(3, 7))])
    count = rng.choice([3, 3, 4])
    last = rng.choice([0, 0, rng.randrange(count)])
    others = [device for device in range(count) if device != last]
    budgets: Dict[Device, int] = dict(zip(others, _exact(rng, units, others)))
    budgets[last] = rng.randint(1, 3)
    return units, budgets, last


def _exact_budgets(rng: random.Random) -> Instance:
    units = _units(rng, [rng.randint(1, 7) for _ in range(rng.randint(3, 7))])
    devices: List[Device] = [0, 1, 2, "xpu"][: rng.choice([3, 3, 4])]
    loads = _exact(rng, units, devices)
    budgets = {d: load + rng.choice([0, 0, 0, 1]) for d, load in zip(devices, loads)}
    return units, budgets, rng.choice([None, 0, rng.choice(devices)])


def _near_the_border(rng: random.Random) -> Instance:
    units, budgets = random_instance(rng, 7, rng.choice([3, 3, 4]), 0)
    return units, budgets, rng.choice([None, rng.choice(list(budgets))])


def _tied(rng: random.Random, groups: int) -> Instance:
    count = rng.randint(3, 7)
    ties: List[Optional[int]] = [None] * count
    for tie in range(groups):
        for position in rng.sample(range(count), min(count, rng.choice([2, 2, 3, 4]))):
            ties[position] = tie
    units = _units(rng, [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(count)], ties)
    devices: List[Device] = [0, 1, 2]
    loads = _exact(rng, units, devices)
    budgets = {d: load + rng.choice([0, 0, 1, 2]) for d, load in zip(devices, loads)}
    return units, budgets, rng.choice([None, None, rng.choice(devices)])


def _one_tie_group(rng: random.Random) -> Instance:
    return _tied(rng, 1)


def _several_tie_groups(rng: random.Random) -> Instance:
    return _tied(rng, rng.choice([2, 2, 3]))


def _without_bytes(rng: random.Random) -> Instance:
    count = rng.randint(2, 7)
    ties = [rng.choice([None, None, None, 0]) for _ in range(count)]
    units = _units(rng, [rng.choice([0, 0, 1, 2, 4]) for _ in range(count)], ties)
    devices: List[Device] = [0, 1, 2]
    loads = _exact(rng, units, devices)
    budgets = {d: load + rng.choice([0, 0, 1, 3]) for d, load in zip(devices, loads)}
    return units, budgets, rng.choice([None, 0, 2])


def _larger_than_a_device(rng: random.Random) -> Instance:
    units = _units(rng, [rng.choice([1, 2, 2, 3, 8, 9]) for _ in range(rng.randint(3, 7))])
    total = sum(unit.size for unit in units)
    small = {device: rng.randint(1, 4) for device in range(rng.choice([1, 2]))}
    rest = max(1, total - rng.randint(0, sum(small.values())))
    large = rng.randint(rest // 2, rest)
    budgets = [*small.values(), large, rest - large]
    rng.shuffle(budgets)
    return units, dict(enumerate(budgets)), rng.choice([None, None, 0])


FAMILIES: Dict[str, Callable[[random.Random], Instance]] = {
    "small device filled last": _small_device_filled_last,
    "exact budgets": _exact_budgets,
    "near the border": _near_the_border,
    "one tie group": _one_tie_group,
    "several tie groups": _several_tie_groups,
    "units without bytes": _without_bytes,
    "units larger than a device": _larger_than_a_device,
}
