"""The exact search for a request: is there a placement within the caller's budgets, and which."""

from __future__ import annotations

from typing import Collection, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple, Union

from bnb_dispatch_fix.model.budgets import Budgets, overfull
from bnb_dispatch_fix.model.machine import accelerators_seen
from bnb_dispatch_fix.model.requests import Measured, Request
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.packing import fits_in_device_order, pack
from bnb_dispatch_fix.placement.records import (
    Device,
    GaveUp,
    Impossible,
    Kind,
    Merit,
    Placement,
    device_order,
)
from bnb_dispatch_fix.wording import HOST


class Outcome(NamedTuple):
    """What the exact search found for a request; `device_map` is None unless it is placed."""

    result: Union[Placement, Impossible, GaveUp]
    units: Units
    budgets: Budgets
    device_map: Optional[Dict[str, Device]]


def search(
    request: Request, measured: Optional[Measured] = None, merit: Merit = "fewest_changes"
) -> Outcome:
    """Search a placement on the accelerators within the caller's own budgets.

    Sizes are those the release counts, for nothing that it would accept may be refused; a
    placement with room for what is stored beside them is preferred (see `with_scales`).
    `measured` is what was read of the request already, `merit` that of `pack`. Raises what the
    installed `get_max_memory` raises for a `max_memory` it cannot read.
    """
    measured = measured or Measured(request)
    budgets = measured.budgets
    usable = budgets.accelerators
    last = filled_last(request, usable)
    for left_out in _left_out(request):
        units = request.units(left_out) if left_out else measured.units
        result = pack(units.units, usable, fill_last=last, merit=merit)
        if isinstance(result, Placement):
            result = with_scales(result, units, budgets, last, merit)
            return Outcome(result, units, budgets, _device_map(units, result, usable))
    return Outcome(result, units, budgets, None)


def most_even(measured: Measured) -> Optional[Outcome]:
    """Search the most even placement in device order; None where there is none in this order.

    As `search` with the merit "even", but a placement in another order, or one that leaves out
    what another has room for, is none.
    """
    request, budgets = measured.request, measured.budgets
    usable = budgets.accelerators
    last = filled_last(request, usable)
    for left_out in _left_out(request):
        units = request.units(left_out) if left_out else measured.units
        if units.units and usable and fits_in_device_order(units.units, usable):
            result = pack(units.units, usable, fill_last=last, merit="even")
            if not isinstance(result, Placement):
                return None
            roomy = with_scales(result, units, budgets, last, "even")
            result = roomy if roomy.kind is Kind.DEVICE_ORDER else result
            return Outcome(result, units, budgets, _device_map(units, result, usable))
        if request.no_placement and not isinstance(pack(units.units, usable), Impossible):
            return None
    return None


def filled_last(request: Request, usable: Mapping[Device, int]) -> Optional[Device]:
    """The accelerator that "balanced_low_0" spares; None with other strategies, or a lone one."""
    low_zero = request.strategy == "balanced_low_0" and len(usable) > 1
    return device_order(usable)[0] if low_zero else None


def _left_out(request: Request) -> Iterator[Collection[str]]:
    """What to leave without a place, nothing first."""
    yield ()
    if request.no_placement:
        yield request.no_placement


def _device_map(
    units: Units, placed: Placement, usable: Mapping[Device, int]
) -> Optional[Dict[str, Device]]:
    """The map of a placement; a model without any tensor is on the first accelerator, if any."""
    if placed.devices:
        return units.device_map(placed.devices)
    return {"": device_order(usable)[0]} if usable else None


def with_scales(
    placed: Placement,
    units: Units,
    budgets: Budgets,
    fill_last: Optional[Device],
    merit: Merit = "fewest_changes",
) -> Placement:
    """A placement with room for bitsandbytes' scales too; the one given where none was found.

    Counted with them it is within the caller's budgets, counted as the release does within what
    the quantizer leaves of these: the rest is meant for the scales.
    """
    stored = units.stored()
    given = {device: budgets.given[device] for device in budgets.accelerators}

    def fits(found: Placement) -> bool:
        device_map = units.device_map(found.devices)
        full = {d: load for d, load in stored.loads(device_map).items() if load > given.get(d, -1)}
        return not full and not overfull(units.loads(device_map), budgets)

    if stored is units or fits(placed):
        return placed
    for room in (given, budgets.accelerators):
        found = pack(stored.units, room, fill_last=fill_last, merit=merit)
        if isinstance(found, Placement) and fits(found):
            return found
    return placed


def overfilled(
    measured: Measured, device_map: Mapping[str, Device]
) -> Dict[Device, Tuple[int, int]]:
    """Return (stored bytes, the caller's budget) of each accelerator that a map overfills.

    True sizes, with bitsandbytes' scales, against what the caller gave or what is free.
    """
    given = measured.budgets.given
    loads = measured.units.stored().loads(device_map)
    return {
        device: (load, given[device])
        for device, load in loads.items()
        if device not in HOST and load > given.get(device, load)
    }


def offloads(device_map: Mapping[str, Device]) -> bool:
    """Whether a device map leaves modules to the CPU or the disk though accelerators are there.

    A map without any accelerator is right on a machine that has none; budgets may name one even
    there.
    """
    places = {str(device) for device in device_map.values()}
    if places <= set(HOST):
        return accelerators_seen() > 0
    return not places.isdisjoint(HOST)
