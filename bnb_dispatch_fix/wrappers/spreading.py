"""The feature `even`: the most even placement in device order in place of a map.

The installed planner has answered before. Where there is no such placement, or where it is no
better, its answer stays.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, Iterator, Mapping, Optional

from bnb_dispatch_fix import features
from bnb_dispatch_fix.model.load import remember
from bnb_dispatch_fix.model.requests import Measured, Request
from bnb_dispatch_fix.model.search import Outcome, filled_last, most_even, overfilled
from bnb_dispatch_fix.model.spread import devices_of, fullest, in_device_order, spread_of
from bnb_dispatch_fix.placement.records import Device, Kind, Placement
from bnb_dispatch_fix.wording import HOST, amount, device_name, gib, log
from bnb_dispatch_fix.wrappers.contained import contained

_BALANCED = ("auto", "balanced", "balanced_low_0")


def to_spread(measured: Measured) -> Optional[Measured]:
    """The request with the caller's own budgets; None where nothing is to be spread."""
    if "even" not in features.on():
        return None
    asked = measured.request.balanced
    strategy = measured.request.strategy if asked is None else asked.strategy
    return measured.as_balanced() if strategy in _BALANCED else None


def spread(measured: Measured, device_map: Any) -> Any:
    """A better map than the one that was planned, or that one."""
    with contained("left unspread"):
        asked = to_spread(measured)
        if asked is not None and isinstance(device_map, Mapping):
            found = _better(asked, device_map)
            if found is not None:
                remember(measured.request, None, found)
                return found
    return device_map


def announce(request: Request, outcome: Outcome, before: Optional[Mapping[str, Device]]) -> None:
    """One line: how full the fullest device is and was, and what lies where."""
    if isinstance(outcome.result, Placement) and outcome.result.kind is Kind.DEVICE_ORDER:
        usable = outcome.budgets.accelerators
        device_map = outcome.device_map or {}
        loads = ", ".join(
            f"{device_name(device)}: {gib(load)} of {gib(usable[device])} GiB"
            for device, load in outcome.units.loads(device_map).items()
        )
        told = [_told(request, outcome, each) for each in (device_map, before)]
        log(logging.INFO, "spread", f"device_map={request.strategy!r}", *told, loads)


def _better(measured: Measured, planned: Mapping[str, Device]) -> Optional[Dict[str, Device]]:
    request, outcome = measured.request, most_even(measured)
    if outcome is None:
        _stays(request, "no placement in device order within the budgets")
        return None
    device_map = outcome.device_map or {}
    if _is_as_even(request, outcome, planned):
        fullest = _told(request, outcome, planned)
        _stays(request, f"none is more even, the fullest device is {fullest} full")
        return None
    if overfilled(measured, device_map) and _keeps_within(measured, outcome, planned):
        _stays(request, "a more even one has no room for the scales of the weights")
        return None
    if not _accepted(request, device_map, planned):
        _stays(request, "the quantizer refuses a more even one")
        return None
    announce(request, outcome, planned)
    return device_map


def _is_as_even(request: Request, outcome: Outcome, planned: Mapping[str, Device]) -> bool:
    """Whether the search has found the map that was planned, or none that is better."""
    usable = outcome.budgets.accelerators
    devices = devices_of(outcome.units, planned)
    found = outcome.result.devices if isinstance(outcome.result, Placement) else {}
    if devices is None or devices == found:
        return devices is not None
    last = filled_last(request, usable)
    before = spread_of(outcome.units, planned, usable, last)
    after = spread_of(outcome.units, found, usable, last)
    if before is None or after is None:
        return False
    if in_device_order(devices, usable):
        return before <= after
    return before < after and not getattr(outcome.result, "optimal", True)


def _keeps_within(measured: Measured, outcome: Outcome, planned: Mapping[str, Device]) -> bool:
    """Whether a map is on accelerators that have room for it, scales and all."""
    within = spread_of(outcome.units, planned, outcome.budgets.accelerators) is not None
    return within and not overfilled(measured, planned)


def _accepted(
    request: Request, device_map: Dict[str, Device], planned: Mapping[str, Device]
) -> bool:
    """Ask the quantizer; it notes what it was asked last, so that is the map that is used."""
    if request.refuses is not None:
        return not request.refuses(device_map)
    validate = getattr(request.quantizer, "validate_environment", None)
    if validate is None:
        return True
    try:
        validate(device_map=dict(device_map))
    except Exception:  # noqa: BLE001  # whatever it has against it
        validate(device_map=dict(planned))
        return False
    return True


def _stays(request: Request, why: str) -> None:
    log(logging.INFO, "not spread", f"device_map={request.strategy!r}", why)


def _told(request: Request, outcome: Outcome, device_map: Optional[Mapping[str, Device]]) -> str:
    """How full the fullest device is, without the one that is filled last; what is on the host."""
    return ", ".join(_parts(request, outcome, device_map or {})) or "not placed"


def _parts(request: Request, outcome: Outcome, device_map: Mapping[str, Device]) -> Iterator[str]:
    usable = outcome.budgets.accelerators
    last = filled_last(request, usable)
    loads = outcome.units.loads(device_map)
    if any(device in usable and device != last for device in loads):
        yield f"{float(fullest(loads, usable, last)):.0%}"
    for device in HOST:
        if device in loads:
            yield f"{amount(loads[device])} on the {device_name(device)}"
