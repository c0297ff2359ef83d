"""The recipe that leaves modules to the CPU or the disk, unquantized, with a ready device map."""

from __future__ import annotations

import sys
from typing import Any, Collection, Dict, Iterator, List, Mapping, NamedTuple, Optional

from bnb_dispatch_fix.backport.shapes import Module, Tensor
from bnb_dispatch_fix.explain import trial
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome
from bnb_dispatch_fix.model.sizers import Storage, own_storage
from bnb_dispatch_fix.model.units import Units
from bnb_dispatch_fix.placement.packing import pack
from bnb_dispatch_fix.placement.records import Device, Placement, Unit, device_order
from bnb_dispatch_fix.wording import amount, pasted

#: A search for a recipe gives up early: there are several, and the caller waits for an error.
EFFORT = 20_000
#: A device map longer than this many characters is not shown.
_LONGEST_MAP = 4_000
#: Smaller parts of the model are not worth a place of their own.
_WORTHWHILE = 0.02


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
    if not request.is_bitsandbytes or config is None or stored_quantized(request):
        return None  # weights that are stored quantized cannot be unquantized by loading them
    whole = {
        unit.name: unit.size for unit in request._replace(sizer=_loaded(request)).units().units
    }
    leaving = _fewest(request, outcome, whole)
    if leaving is None:
        return None
    names, placement = leaving
    room = _room_on_the_host(request, outcome)
    device_map = outcome.units.device_map({**placement.devices, **_on_the_host(names, whole, room)})
    disk = "disk" in device_map.values()
    size = sum(whole[name] for name in names)
    what = (
        f"{len(names)} modules, {amount(size)} unquantized, on the CPU"
        f"{' and the disk' if disk else ''}: slow, but it loads"
    )
    return _accepted(request, config, device_map, what)


def offloaded_head(request: Request, outcome: Outcome) -> Optional[Recipe]:
    """Head and embedding on the CPU, which nothing quantizes anyway; the last first.

    They run on the first accelerator, which keeps room for the largest of them. transformers 4.x
    takes such a map as it is for what it does not convert; 5.x wants the switch, and quantized
    layers that are stored so lose nothing by it.
    """
    config = getattr(request.quantizer, "quantization_config", None)
    usable = outcome.budgets.accelerators
    if not request.is_bitsandbytes or config is None or not usable:
        return None
    first = device_order(usable)[0]
    for away in _heads(request, outcome):
        kept = max(unit.size for unit in away)
        names = {unit.name for unit in away}
        rest = [unit for unit in outcome.units.units if unit.name not in names]
        budgets = {**usable, first: max(0, usable[first] - kept)}
        result = pack(rest, budgets, effort=EFFORT)
        if isinstance(result, Placement):
            on_cpu: Dict[str, Device] = dict.fromkeys(names, "cpu")
            device_map = outcome.units.device_map({**result.devices, **on_cpu})
            size = sum(unit.size for unit in away)
            what = f"{' and '.join(unit.name for unit in away)}, {amount(size)}, on the CPU"
            return _accepted(request, config, device_map, f"{what}: slower, but it loads")
    return None


def _heads(request: Request, outcome: Outcome) -> Iterator[List[Unit]]:
    """What may leave: units outside of the blocks that are not quantized and not small."""
    units: Units = outcome.units
    found = [
        unit
        for unit in reversed(units.units)
        if unit.size >= _WORTHWHILE * units.total
        and units.facts[unit.name].quantized == 0
        and units.facts[unit.name].module_class not in request.no_split
    ]
    groups = {unit.tie for unit in found if unit.tie is not None}
    if groups:  # what is tied leaves together
        found += [u for u in units.units if u.tie in groups and u not in found]
    elif found:
        yield found[:1]
    if found:
        yield found


def _accepted(
    request: Request, config: Any, device_map: Dict[str, Device], what: str
) -> Optional[Recipe]:
    """The recipe with as few arguments as the release accepts; None where it accepts none."""
    text = pasted(device_map)
    if len(text) > _LONGEST_MAP:
        return None
    folder = ', offload_folder="offload"' if "disk" in device_map.values() else ""
    if trial.accepts(request, device_map):
        return Recipe(what, f"device_map={text}{folder}")
    if stored_quantized(request):  # the configuration in the checkpoint wins
        return None
    if not trial.accepts(request, device_map, with_offload(config)):
        return None
    arguments = f"quantization_config={written(config)}, device_map={text}"
    return Recipe(what, arguments + folder)


def stored_quantized(request: Request) -> bool:
    """Whether the weights of the checkpoint are quantized already."""
    stored = getattr(request.quantizer, "pre_quantized", None)
    return bool(stored) if stored is not None else False


def _own(config: Any) -> Dict[str, Any]:
    """The caller's configuration with the switch on, by the names of its arguments."""
    own = {
        key: value
        for key, value in _changed(config).items()
        if key.startswith(("load_in_", "bnb_4bit_", "llm_int8_"))
        and isinstance(value, (bool, int, float, str, list))
    }
    own["llm_int8_enable_fp32_cpu_offload"] = True
    return own


def _changed(config: Any) -> Dict[str, Any]:
    """What differs from the defaults; transformers before 4.31 cannot tell, and all is taken."""
    found = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config.to_dict()
    return {key: value for key, value in found.items() if value is not False}


def with_offload(config: Any) -> Any:
    """The caller's configuration with the switch on."""
    return type(config)(**_own(config))


def written(config: Any) -> str:
    """The same as an expression."""
    return f"BitsAndBytesConfig({', '.join(f'{k}={v!r}' for k, v in _own(config).items())})"


def _loaded(request: Request) -> Any:
    """The sizer of what is not quantized: its bytes in the dtype it is loaded in."""
    # diffusers builds a model in float32, whatever it loads it in.
    dtype = request.call[1].get("torch_dtype") if request.call and request.is_diffusers else None

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        storage = request.sizer(name, tensor, owner)
        if not storage.quantized:
            return storage
        floating = tensor.is_floating_point()
        return own_storage(dtype or tensor.dtype) if floating else Storage(2, "", False)

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
    except Exception:  # noqa: BLE001  # nobody can tell: the disk
        return 0


def _on_the_host(names: Collection[str], whole: Mapping[str, int], room: int) -> Dict[str, Device]:
    """ "cpu" for what fits there, the last blocks first, "disk" for the rest."""
    devices: Dict[str, Device] = {}
    for name in names:
        devices[name] = "cpu" if whole[name] <= room else "disk"
        room -= whole[name] if devices[name] == "cpu" else 0
    return devices
