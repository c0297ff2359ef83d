"""Where the units of a model go: the best placement within the budgets, or the proof of none."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from operator import index, ne
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import impossibility
from .certificates import CannotVerify, verify
from .division import OutOfEffort
from .records import (
    Certificate,
    Device,
    GaveUp,
    Impossible,
    Kind,
    Merit,
    Placement,
    SearchComplete,
    SearchFault,
    Unit,
    device_order,
)
from .search import Found, Search

__all__ = [
    "EFFORT",
    "Device",
    "GaveUp",
    "Impossible",
    "Kind",
    "Merit",
    "Placement",
    "SearchFault",
    "Unit",
    "check",
    "device_order",
    "fits_in_device_order",
    "pack",
]

# Search nodes, some microseconds each, that may be spent to decide whether a placement exists.
EFFORT = 200_000
# Steps, below a microsecond each, that may be spent to verify the proof that none does.
VERIFY_STEPS = 100_000


def pack(
    units: Sequence[Unit],
    budgets: Mapping[Device, int],
    *,
    fill_last: Optional[Device] = None,
    effort: int = EFFORT,
    merit: Merit = "fewest_changes",
) -> Union[Placement, Impossible, GaveUp]:
    """Return the best placement of the units within the budgets (usable bytes per device).

    Of all placements the best has, in this order: the better kind (in device order, contiguous
    in another order, scattered), the fewest changes of device along the model, the input
    embedding on the first device in use, the smallest maximum of load ÷ budget. A device in
    `fill_last` (GPU 0 with balanced_low_0) gets as few bytes as a contiguous placement allows,
    or a scattered one if there is none; this counts before device order and changes.

    With `merit` "even", of the placements in device order the best has, in this order: as few
    bytes on `fill_last` as a placement in device order allows, the smallest maximum of load ÷
    budget on the other devices, the fewest changes, the embedding on the first device in use.
    Where there is none in device order, it is as without.

    Contiguous placements are searched completely with up to 16 devices and one tie group; with
    more tie groups a better placement can be missed (`optimal` is False then). A scattered one is
    searched within `effort`. Budgets of 0 or less are not used. The result depends on nothing but
    the arguments. Every placement is checked, every proof as far as VERIFY_STEPS go.

    Raises ValueError for repeated names or negative sizes, SearchFault for a result that is wrong.
    """
    if merit not in ("fewest_changes", "even"):
        raise ValueError(f"no such order of merit: {merit!r}")
    order = [device for device in device_order(budgets) if budgets[device] > 0]
    usable = {device: index(budgets[device]) for device in order}
    together = _checked(units)
    if not units:
        return Placement({}, {}, Kind.DEVICE_ORDER, 0, True, Fraction(0), True)
    found = _search(units, together, usable, fill_last, effort, merit)
    if isinstance(found, GaveUp):
        return found
    if isinstance(found, Placement):
        faults = check(found, units, usable) or _misstated(found, units, usable)
        if faults:
            raise SearchFault("; ".join(faults))
        return found
    return _verified(found, units, usable)


def fits_in_device_order(units: Sequence[Unit], budgets: Mapping[Device, int]) -> bool:
    """Tell whether a placement in device order exists; raises ValueError as `pack` does."""
    usable = [index(budgets[device]) for device in device_order(budgets) if budgets[device] > 0]
    _checked(units)
    return Search(units, usable, -1).fits_in_device_order()


def _search(
    units: Sequence[Unit],
    together: Sequence[Tuple[int, Tuple[str, ...]]],
    usable: Mapping[Device, int],
    fill_last: Optional[Device],
    effort: int,
    merit: Merit,
) -> Union[Placement, Certificate, GaveUp]:
    certificate = impossibility.too_large(together, usable)
    if certificate is not None:
        return certificate
    order = list(usable)
    last = order.index(fill_last) if fill_last is not None and fill_last in usable else -1
    search = Search(units, list(usable.values()), last)
    if not search.fits_in_device_order():
        certificate = impossibility.indivisible([size for size, _ in together], usable)
        if certificate is not None:
            return certificate
    try:
        found = search.most_even() if merit == "even" else None
        found = found or search.contiguous() or search.scattered(effort)
    except OutOfEffort:
        return GaveUp(effort)
    if found is None:
        return SearchComplete(len(together), len(order))
    return _placement(found, units, order, search.optimal)


def _verified(
    certificate: Certificate, units: Sequence[Unit], budgets: Mapping[Device, int]
) -> Impossible:
    try:
        holds = verify(certificate, units, budgets, VERIFY_STEPS)
    except CannotVerify:
        return Impossible(certificate, verified=False)
    if not holds:
        raise SearchFault(f"no proof: {certificate}")
    return Impossible(certificate, verified=True)


def _checked(units: Sequence[Unit]) -> List[Tuple[int, Tuple[str, ...]]]:
    """Return (bytes, names) of what has to share a device; raise ValueError for invalid units."""
    alone = []
    tied: Dict[Union[int, str], List[Unit]] = {}
    for unit in units:
        name, size, tie, _ = unit
        if size < 0:
            raise ValueError(f"size of unit {name!r} must be 0 bytes or more, not {size}")
        if tie is None:
            alone.append((size, (name,)))
        else:
            tied.setdefault(tie, []).append(unit)
    if len({unit.name for unit in units}) < len(units):
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
    for name, size, tie, _ in units:
        device = placement.devices.get(name)
        if device is None:
            wrong.append(f"{name} has no device")
            continue
        loads[device] = loads.get(device, 0) + size
        if tie is not None and tied.setdefault(tie, device) != device:
            wrong.append(f"{name} is on {device}, what it is tied to on {tied[tie]}")
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


def _misstated(
    placement: Placement, units: Sequence[Unit], budgets: Mapping[Device, int]
) -> List[str]:
    """Return what a placement that may be used says wrongly about itself, one line each."""
    line = [placement.devices[unit.name] for unit in units]
    embedding = next((line[n] for n, unit in enumerate(units) if unit.is_input_embedding), None)
    first = next(device for device in budgets if device in placement.loads)
    found = {
        "changes": sum(map(ne, line, islice(line, 1, None))),
        "embedding_first": embedding in (None, first),
        "fill": max(Fraction(load, budgets[d]) for d, load in placement.loads.items()),
    }
    stated = {name: getattr(placement, name) for name in found}
    return [] if found == stated else [f"the placement has {found}, not {stated}"]
