"""The fewest accelerators that hold a model, and the `max_memory` that keeps it there."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional

from bnb_dispatch_fix.explain import trial
from bnb_dispatch_fix.explain.recipes import typeable
from bnb_dispatch_fix.model.budgets import Budgets
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome, with_scales
from bnb_dispatch_fix.placement.packing import pack
from bnb_dispatch_fix.placement.records import Device, Placement, device_order


def fewest(outcome: Outcome) -> List[Device]:
    """The devices of the smallest number that holds the model, its scales counted; [] for none."""
    budgets, units = outcome.budgets, outcome.units
    for chosen in _candidates(outcome):
        part = Budgets(
            {device: budgets.given[device] for device in chosen},
            {device: budgets.usable[device] for device in chosen},
        )
        placed = pack(units.units, part.accelerators)
        if isinstance(placed, Placement):
            device_map = units.device_map(with_scales(placed, units, part, None).devices)
            loads = units.stored().loads(device_map)
            if all(load <= part.given[device] for device, load in loads.items()):
                return chosen
    return []


def max_memory_of(
    request: Request, outcome: Outcome, devices: List[Device]
) -> Optional[Dict[Device, Any]]:
    """Budgets with which the installed planner stays on these devices; None without any."""
    max_memory = _budgets(request, outcome, devices)
    if request.max_memory is None:
        max_memory = {device: typeable(size, up=False) for device, size in max_memory.items()}
    return None if trial.loads(request, max_memory) is None else max_memory


def _candidates(outcome: Outcome) -> Iterator[List[Device]]:
    """The largest devices first, in their order; one, two, and so on, from what may be enough."""
    usable = outcome.budgets.accelerators
    largest = sorted(device_order(usable), key=lambda device: -usable[device])
    room = 0
    for count, device in enumerate(largest, 1):
        room += usable[device]
        if room >= outcome.units.total:
            chosen = set(largest[:count])
            yield [each for each in device_order(usable) if each in chosen]


def _budgets(request: Request, outcome: Outcome, devices: List[Device]) -> Dict[Device, Any]:
    """What the caller wrote for these devices; what is free where nothing was written."""
    written: Mapping[Device, Any] = request.max_memory or outcome.budgets.given
    return {device: written[device] for device in devices}
