"""Device maps: the shortest one for where things go, and the one that an error is about."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any, Collection, Dict, Iterable, Iterator, Mapping, Optional, Tuple

from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST


def ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain `name`, the outermost ("") first."""
    if name:
        yield ""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def compact(
    keys: Iterable[Tuple[str, Device]], unplaced: Collection[str] = ()
) -> Dict[str, Device]:
    """Return a device map in which a module stands for its parts if they share a device.

    `keys` are names of modules and tensors with their devices, in model order; `unplaced` are
    names of tensors that no key of the map may cover. A model on one device gives {"": device}.
    """
    pairs = list(keys)
    devices: Dict[str, Device] = {}
    mixed = {module for name in unplaced for module in ancestors(name)}
    for name, device in pairs:
        for module in ancestors(name):
            if devices.setdefault(module, device) != device:
                mixed.add(module)
    device_map: Dict[str, Device] = {}
    for name, device in pairs:
        whole = (module for module in ancestors(name) if module not in mixed)
        device_map.setdefault(next(whole, name), device)
    return device_map


def all_on_host(device_map: Any) -> bool:
    """Whether a device map puts every module on the CPU or the disk."""
    return (
        isinstance(device_map, Mapping)
        and bool(device_map)
        and {str(device) for device in device_map.values()} <= set(HOST)
    )


def refused_map(error: BaseException) -> Optional[Dict[str, Device]]:
    """Return the map in the innermost frame an error came through; no release attaches it."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        device_map = frame.f_locals.get("device_map")
        if isinstance(device_map, dict) and device_map and all(map(_is_name, device_map)):
            found = dict(device_map)
    return found


def _is_name(key: Any) -> bool:
    return isinstance(key, str)
