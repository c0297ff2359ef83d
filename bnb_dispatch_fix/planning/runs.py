"""What each planner made of the model, and the verdict, as plain data to answer with."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from bnb_dispatch_fix.explain import proofs
from bnb_dispatch_fix.model.budgets import Budgets, overfull
from bnb_dispatch_fix.model.layout import collapsed, parts_by_device
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.records import Device, GaveUp, Impossible, Placement
from bnb_dispatch_fix.planning.records import told
from bnb_dispatch_fix.wording import HOST


class Attempt(NamedTuple):
    """What one planner answered: a device map, an error, or the refusal of a map."""

    device_map: Optional[Dict[str, Device]]
    error: Optional[Exception]


def describe_run(
    name: str, attempt: Attempt, coarse: Units, fine: Units, budgets: Budgets
) -> Dict[str, Any]:
    """One planner's answer: its outcome, its map as pairs, what lies on each device."""
    device_map = attempt.device_map
    placed = {} if device_map is None else parts_by_device(coarse, fine, device_map)
    loads = {device: sum(part.size for part in parts) for device, parts in placed.items()}
    devices: List[Tuple[Any, ...]] = [
        (
            device,
            budgets.given.get(device),
            budgets.usable.get(device),
            loads.get(device, 0),
            [astuple(part) for part in collapsed(placed.get(device, ()))],
        )
        for device in dict.fromkeys([*budgets.given, *placed])
    ]
    over = bool(overfull(loads, budgets))
    offloads = any(device in HOST for device in placed)
    error = attempt.error
    return {
        "name": name,
        "outcome": outcome(attempt, offloads=offloads, over=over),
        "error": None if error is None else told(error),
        "device_map": None if device_map is None else list(device_map.items()),
        "devices": devices,
    }


def outcome(attempt: Attempt, *, offloads: bool, over: bool) -> str:
    """One of the outcomes of `records.Run`."""
    if attempt.error is not None:
        return "fails" if attempt.device_map is None else "refused"
    if over:
        return "overfull"
    return "offloads" if offloads else "loads"


def verdict(
    result: Union[Placement, Impossible, GaveUp],
    exact: Optional[Dict[str, Device]],
    runs: List[Dict[str, Any]],
) -> Dict[str, Any]:
    """Whether the model fits, why, and the device map to use: where it loads, the even one."""
    loading = {run["name"]: run for run in runs if run["outcome"] == "loads"}
    if loading:
        first = next(iter(loading))
        even = ""
        if "even" in loading and first != "even":
            even = "; spread evenly with the device_map below"
        return {
            "fits": True,
            "verdict": f"{_HELP[first]}{even}",
            "device_map": loading.get("even", loading[first])["device_map"],
        }
    if isinstance(result, Placement):
        pairs = None if exact is None else list(exact.items())
        return {"fits": True, "verdict": "fits with the device_map below", "device_map": pairs}
    return {"fits": False, "verdict": proofs.told(result), "device_map": None}


_HELP = {
    "release": "fits, and the installed release places it by itself",
    "backport": "fits with the backport",
    "rescue": "fits with rescue",
    "even": "fits with even",
}
