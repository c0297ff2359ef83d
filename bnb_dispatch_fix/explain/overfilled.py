"""Warns of an accepted plan that puts more on an accelerator than its budget, by true sizes."""

from __future__ import annotations

import logging
from typing import Mapping

from bnb_dispatch_fix.model.load import say_later
from bnb_dispatch_fix.model.requests import Measured
from bnb_dispatch_fix.model.search import offloads, overfilled
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import amount, device_name, log


def warn(measured: Measured, device_map: Mapping[str, Device], decided: bool = True) -> None:
    """Log one line where it is so, device by device; no exception leaves it.

    The release counts less than is stored: transformers 4.x what is not quantized, every release
    bitsandbytes' scales. A map with parts on the CPU is not yet accepted where that is not
    `decided`: then it is said when `from_pretrained` has loaded.
    """
    try:
        found = overfilled(measured, device_map)
        if not found:
            return
        devices = ", ".join(
            f"{device_name(device)}: {amount(load)} of {amount(budget)}"
            for device, (load, budget) in found.items()
        )
        strategy = measured.request.strategy
        asked = f"device_map={strategy!r}" if strategy else "accelerate's planner"
        if not decided and offloads(device_map):
            say_later("overfilled", asked, devices)
        else:
            log(logging.WARNING, "overfilled", asked, devices)
    except Exception as fault:  # noqa: BLE001  # no load is lost to a note
        log(logging.DEBUG, "loads unchecked", fault)
