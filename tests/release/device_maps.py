"""Reads device maps as loaders do: the longest key that covers a name says where it is."""

from __future__ import annotations


def covers(key, name):
    return key in ("", name) or name.startswith(f"{key}.")


def place(name, device_map):
    """The device of a tensor or of a module that is not split; None where no key covers it."""
    keys = [key for key in device_map if covers(key, name)]
    return device_map[max(keys, key=len)] if keys else None


def on_devices(sizes, device_map):
    """Bytes by device of what is in `sizes` (name → bytes)."""
    loads = {}
    for name, size in sizes.items():
        device = place(name, device_map)
        assert device is not None, f"{name} has no place in {device_map}"
        loads[device] = loads.get(device, 0) + size
    return loads
