"""The recipe that leaves modules to the CPU or the disk, unquantized, with a ready device map."""

from __future__ import annotations

import sys
from typing import Any, Collection, Dict, Mapping, NamedTuple, Optional

from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome
from bnb_dispatch_fix.model.sizers import Storage, own_storage
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.packing import pack
from bnb_dispatch_fix.placement.records import Device, Placement, device_order
from bnb_dispatch_fix.wording import gib, pasted

#: A search for a recipe gives up early: there are several, and the caller waits for an error.
EFFORT = 20_000
#: A device map longer than this many characters is not shown.
_LONGEST_MAP = 4_000


class Recipe(NamedTuple):
    """What to change in one line; `arguments` is Python to paste into the call, or empty."""

    what: str
    arguments: str = ""


def offloaded(request: Request, outcome: Outcome) -> Optional[Recipe]:
    """The last blocks on the CPU, as few as will do, and on the disk what does not fit there.

    bitsandbytes does not quantize what is there: its size is that of the dtype it is loaded in,
    and the first accelerator keeps room for the largest of these modules, which it runs on.
    """
    config = getattr(request.quantizer, "quantization_config", None)
    if not request.is_bitsandbytes or config is None:
        return None
    whole = {
        unit.name: unit.size for unit in request._replace(sizer=_loaded(request)).units().units
    }
    leaving = _fewest(request, outcome, whole)
    if leaving is None:
        return None
    names, placement = leaving
    room = _room_on_the_host(request, outcome)
    device_map = outcome.units.device_map({**placement.devices, **_on_the_host(names, whole, room)})
    text = pasted(device_map)
    if len(text) > _LONGEST_MAP:
        return None
    disk = "disk" in device_map.values()
    arguments = f"quantization_config={_with_offload(config)}, device_map={text}"
    size = sum(whole[name] for name in names)
    return Recipe(
        f"{len(names)} modules, {gib(size)} GiB unquantized, on the CPU"
        f"{' and the disk' if disk else ''}: slow, but it loads",
        arguments + (', offload_folder="offload"' if disk else ""),
    )


def _with_offload(config: Any) -> str:
    """The caller's configuration with the switch on, as an expression."""
    changed = config.to_diff_dict()
    own = {
        key: value
        for key, value in changed.items()
        if key.startswith(("load_in_", "bnb_4bit_", "llm_int8_"))
        and isinstance(value, (bool, int, float, str, list))
    }
    own["llm_int8_enable_fp32_cpu_offload"] = True
    return f"BitsAndBytesConfig({', '.join(f'{key}={value!r}' for key, value in own.items())})"


def _loaded(request: Request) -> Any:
    """The sizer of what is not quantized: its bytes in the dtype it is loaded in."""

    def size(name: str, tensor: Any, owner: Any) -> Storage:
        storage = request.sizer(name, tensor, owner)
        if not storage.quantized:
            return storage
        return own_storage(tensor.dtype) if tensor.is_floating_point() else Storage(2, "", False)

    return size


def _fewest(request: Request, outcome: Outcome, whole: Mapping[str, int]) -> Any:
    """The names of the last blocks that have to leave and the placement of the rest, or None."""
    units: Units = outcome.units
    usable = outcome.budgets.accelerators
    blocks = [
        unit.name
        for unit in reversed(units.units)
        if unit.tie is None and units.facts[unit.name].module_class in request.no_split
    ]
    if not usable or not blocks:
        return None
    first = device_order(usable)[0]

    def packed(count: int) -> Any:
        away = set(blocks[:count])
        kept = max(whole[name] for name in away)
        budgets = {**usable, first: max(0, usable[first] - kept)}
        rest = [unit for unit in units.units if unit.name not in away]
        return pack(rest, budgets, effort=EFFORT)

    low, high = 0, len(blocks)
    best = packed(high)
    if not isinstance(best, Placement):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = packed(middle)
        if isinstance(found, Placement):
            high, best = middle, found
        else:
            low = middle
    return blocks[:high], best


def _room_on_the_host(request: Request, outcome: Outcome) -> int:
    """Bytes of RAM the caller allows, or that are free."""
    if "cpu" in outcome.budgets.given:
        return outcome.budgets.given["cpu"]
    try:
        psutil: Any = sys.modules.get("psutil") or __import__("psutil")
        return int(psutil.virtual_memory().available)
    except Exception:  # nobody can tell: the disk
        return 0


def _on_the_host(names: Collection[str], whole: Mapping[str, int], room: int) -> Dict[str, Device]:
    """ "cpu" for what fits there, the last blocks first, "disk" for the rest."""
    devices: Dict[str, Device] = {}
    for name in names:
        devices[name] = "cpu" if whole[name] <= room else "disk"
        room -= whole[name] if devices[name] == "cpu" else 0
    return devices
