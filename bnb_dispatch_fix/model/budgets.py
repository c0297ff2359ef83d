"""Reads what the caller allows each device, and what the installed release leaves of it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from bnb_dispatch_fix.backport.balanced import LONE_DEVICE_SHARE
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST

Budget = Dict[Device, Any]

#: What bitsandbytes is left of every budget; transformers 4.33-4.37 apply it in `from_pretrained`,
#: later releases in the quantizer, earlier ones and accelerate's own callers not at all.
BITSANDBYTES_SHARE = 0.9
#: More than any device has; stands for an infinite budget.
UNLIMITED = 2**63 - 1


@dataclass(frozen=True)
class Budgets:
    """Bytes per device, in the order of the installed release; no device is added.

    `given` is what the caller wrote, or what is free; `usable` is what the release would use of it.
    """

    given: Dict[Device, int]
    usable: Dict[Device, int]

    @property
    def accelerators(self) -> Dict[Device, int]:
        """Usable bytes of the accelerators (numbers, "mps", ...) that have any."""
        return {device: size for device, size in self.usable.items() if device not in HOST and size}

    @property
    def host(self) -> Dict[Device, int]:
        """Usable bytes of "cpu" and "disk", where listed."""
        return {device: size for device, size in self.usable.items() if device in HOST}


def usable_budgets(
    max_memory: Optional[Mapping[Device, Any]],
    *,
    get_max_memory: Callable[[Optional[Budget]], Budget],
    adjust: Optional[Callable[[Budget], Budget]] = None,
    single_device_share: float = LONE_DEVICE_SHARE,
    unused: Optional[Callable[[Device], int]] = None,
) -> Budgets:
    """Return what each device may hold, as the installed release counts it before it balances.

    `max_memory` is the caller's (bytes as int, float or numpy scalar, or text such as "22GiB"; it
    is not changed) or None for what is free. `get_max_memory` and `adjust` (the
    quantizer's `adjust_max_memory`) are the installed ones. `single_device_share` is for one
    accelerator without `max_memory` (see `requests.lone_share`). `unused` tells how many bytes of a
    device torch has reserved and does not use, where the planner adds these (see `adds_unused`).

    No budget is above the caller's. Everything is rounded down; negative is 0. Raises what
    `get_max_memory` raises for devices and texts it cannot read, and ValueError for NaN.
    """
    read = get_max_memory(None if max_memory is None else dict(max_memory))
    given = {device: _whole(device, size) for device, size in read.items()}
    usable = dict(read)
    if max_memory is None:
        used = [device for device, size in given.items() if device not in HOST and size > 0]
        if len(used) == 1 and isinstance(used[0], int):
            usable[used[0]] = usable[used[0]] * single_device_share
    if adjust is not None:
        usable = dict(adjust(usable))
    if unused is not None:
        for device in usable:
            if isinstance(device, int):
                usable[device] = usable[device] + unused(device)
    whole = {device: _whole(device, usable[device]) for device in given if device in usable}
    if max_memory is not None:
        whole = {device: min(size, given[device]) for device, size in whole.items()}
    return Budgets(given, whole)


def overfull(loads: Mapping[Device, int], budgets: Budgets) -> Dict[Device, int]:
    """Return by how many bytes each accelerator holds more than its usable budget.

    Only those that do; a device without a budget and the host are never too full.
    """
    return {
        device: load - budgets.usable[device]
        for device, load in loads.items()
        if device not in HOST and load > budgets.usable.get(device, load)
    }


def adds_unused(transformers: Tuple[int, ...]) -> bool:
    """Return whether the planner of this release adds what torch has reserved and does not use.

    Releases 4.52-5.3 add it after the quantizer's share; 5.4 and newer in their own
    `get_max_memory`, so that it is in already; earlier ones do not.
    """
    return (4, 52) <= transformers < (5, 4)


def reserved_but_unused(device: Device) -> int:
    """Return how many bytes torch's allocator holds on this device without using them."""
    torch: Any = sys.modules.get("torch")
    try:
        backend = torch.xpu if torch.xpu.is_available() else torch.cuda
        return int(backend.memory_reserved(device) - backend.memory_allocated(device))
    except Exception:  # noqa: BLE001  # no such device, no such backend: nothing is reserved
        return 0


def _whole(device: Device, size: Any) -> int:
    if size != size:
        raise ValueError(f"max_memory[{device!r}] must be a number of bytes, not {size!r}")
    if size <= 0:
        return 0
    return UNLIMITED if size >= UNLIMITED else math.floor(size)
