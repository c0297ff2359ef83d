"""Where the units of a model go: the best placement within the budgets, or the proof of none."""

from __future__ import annotations

from fractions import Fraction
from operator import index
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import impossibility
from .records import (
    Device,
    GaveUp,
    Impossible,
    Kind,
    Placement,
    SearchComplete,
    Unit,
    device_order,
)
from .scattered import OutOfEffort
from .search import Found, Search

__all__ = [
    "EFFORT",
    "Device",
    "GaveUp",
    "Impossible",
    "Kind",
    "Placement",
    "Unit",
    "check",
    "device_order",
    "pack",
]

# Search nodes, some microseconds each, that may be spent to decide whether a placement exists.
EFFORT = 200_000


def pack(
    units: Sequence[Unit],
    budgets: Mapping[Device, int],
    *,
    fill_last: Optional[Device] = None,
    effort: int = EFFORT,
) -> Union[Placement, Impossible, GaveUp]:
    """Return the best placement of the units within the budgets (usable bytes per device).

    Of all placements the best has, in this order: the better kind (in device order, contiguous
    in another order, scattered), the fewest changes of device along the model, the input
    embedding on the first device in use, the smallest maximum of load ÷ budget. A device in
    `fill_last` (GPU 0 with balanced_low_0) gets as few bytes as a contiguous placement allows,
    or a scattered one if there is none; this counts before device order and changes.

    Contiguous placements are searched completely with up to 16 devices and one tie group; with
    more tie groups a placement with fewer changes can be missed (`optimal` is False then). A
    scattered one is searched within `effort`. Budgets of 0 or less are not used. The result
    depends on nothing but the arguments. Raises ValueError for repeated names or negative sizes.
    """
    order = [device for device in device_order(budgets) if budgets[device] > 0]
    usable = {device: index(budgets[device]) for device in order}
    together = _checked(units)
    if not units:
        return Placement({}, {}, Kind.DEVICE_ORDER, 0, True, Fraction(0), True)
    certificate = impossibility.too_large(together, usable)
    if certificate is not None:
        return Impossible(certificate)
    last = order.index(fill_last) if fill_last in usable else -1
    search = Search(units, list(usable.values()), last)
    if not search.fits_in_device_order():
        certificate = impossibility.indivisible([size for size, _ in together], usable)
        if certificate is not None:
            return Impossible(certificate)
    try:
        found = search.contiguous() or search.scattered(effort)
    except OutOfEffort:
        return GaveUp(effort)
    if found is None:
        return Impossible(SearchComplete(len(together), len(order)))
    return _placement(found, units, order, search.optimal)


def _checked(units: Sequence[Unit]) -> List[Tuple[int, Tuple[str, ...]]]:
    """Return (bytes, names) of what has to share a device; raise ValueError for invalid units."""
    names = set()
    alone = []
    tied: Dict[Union[int, str], List[Unit]] = {}
    for unit in units:
        if unit.size < 0:
            raise ValueError(f"size of unit {unit.name!r} must be 0 bytes or more, not {unit.size}")
        names.add(unit.name)
        if unit.tie is None:
            alone.append((unit.size, (unit.name,)))
        else:
            tied.setdefault(unit.tie, []).append(unit)
    if len(names) < len(units):
        raise ValueError("names of units must be different, one is there twice")
    groups = [(sum(u.size for u in group), tuple(u.name for u in group)) for group in tied.values()]
    return alone + groups


def _placement(
    found: Found, units: Sequence[Unit], order: Sequence[Device], optimal: bool
) -> Placement:
    ends = [*found.first_units[1:], len(units)]
    lengths = [end - start for start, end in zip(found.first_units, ends)]
    devices = [order[d] for d, length in zip(found.devices, lengths) for _ in range(length)]
    if found.in_order:
        kind = Kind.DEVICE_ORDER
    else:
        kind = Kind.OTHER_ORDER if found.contiguous else Kind.SCATTERED
    return Placement(
        devices=dict(zip((unit.name for unit in units), devices)),
        loads={order[d]: found.loads[d] for d in sorted(found.loads)},
        kind=kind,
        changes=found.changes,
        embedding_first=found.embedding_first,
        fill=found.fill,
        optimal=optimal,
    )


def check(placement: Placement, units: Sequence[Unit], budgets: Mapping[Device, int]) -> List[str]:
    """Return what is wrong with the placement, one line each; nothing if it may be used."""
    wrong = []
    loads: Dict[Device, int] = {}
    tied: Dict[Union[int, str], Device] = {}
    for unit in units:
        device = placement.devices.get(unit.name)
        if device is None:
            wrong.append(f"{unit.name} has no device")
            continue
        loads[device] = loads.get(device, 0) + unit.size
        if unit.tie is not None and tied.setdefault(unit.tie, device) != device:
            wrong.append(f"{unit.name} is on {device}, what it is tied to on {tied[unit.tie]}")
    unknown = placement.devices.keys() - {unit.name for unit in units}
    wrong.extend(f"{name} is not a unit" for name in sorted(unknown))
    for device, load in loads.items():
        budget = budgets.get(device, 0)
        if budget <= 0:
            wrong.append(f"device {device} has no budget")
        elif load > budget:
            wrong.append(f"device {device} has a budget of {budget} bytes and holds {load}")
    if loads != placement.loads:
        wrong.append(f"the loads are {loads}, not {placement.loads}")
    return wrong
