"""How evenly a device map fills the accelerators: what `even` makes as small as it can be."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from operator import ne
from typing import Dict, Mapping, NamedTuple, Optional

from bnb_dispatch_fix.model.device_map import ancestors
from bnb_dispatch_fix.model.layout import device_of
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.records import Device, device_order


class Spread(NamedTuple):
    """What counts for the merit "even", in its order (see `packing.pack`); smaller is better."""

    spared: int  # bytes on the device filled last
    fill: Fraction  # the largest load ÷ usable budget on the other devices
    changes: int
    embedding_later: bool


def spread_of(
    units: Units,
    device_map: Mapping[str, Device],
    usable: Mapping[Device, int],
    fill_last: Optional[Device] = None,
) -> Optional[Spread]:
    """Return the spread of a map within the usable budgets (bytes) of the accelerators.

    None where it keeps to the rules of a placement in a part only: a unit is divided or on no
    accelerator, or a budget is exceeded.
    """
    devices = devices_of(units, device_map)
    if devices is None or not set(devices.values()) <= set(usable):
        return None
    loads = units.loads(device_map)
    if fullest(loads, usable) > 1:
        return None
    line = list(devices.values())
    first = next((device for device in device_order(usable) if device in loads), None)
    embedding = next((devices[unit.name] for unit in units.units if unit.is_input_embedding), first)
    return Spread(
        0 if fill_last is None else loads.get(fill_last, 0),
        fullest(loads, usable, fill_last),
        sum(map(ne, line, islice(line, 1, None))),
        embedding != first,
    )


def fullest(
    loads: Mapping[Device, int],
    usable: Mapping[Device, int],
    fill_last: Optional[Device] = None,
) -> Fraction:
    """Return the largest load ÷ usable budget of the accelerators but the one filled last."""
    counted = ((load, usable[d]) for d, load in loads.items() if d in usable and d != fill_last)
    return max((Fraction(load, budget) for load, budget in counted), default=Fraction(0))


def in_device_order(devices: Mapping[str, Device], usable: Mapping[Device, int]) -> bool:
    """Whether units go from device to device in order, with no regard to what is tied."""
    order = {device: number for number, device in enumerate(device_order(usable))}
    line = [order.get(device, -1) for device in devices.values()]
    return line == sorted(line)


def devices_of(units: Units, device_map: Mapping[str, Device]) -> Optional[Dict[str, Device]]:
    """Return the device of each unit; None where a map divides one of them, or leaves one out."""
    divided = {module for key in device_map for module in ancestors(key)}
    found: Dict[str, Device] = {}
    for unit in units.units:
        device = device_of(unit.name, device_map)
        if device is None or unit.name in divided:
            return None
        found[unit.name] = device
    return found
