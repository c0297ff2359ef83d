"""Explains the refusal of a device map that the caller wrote: what is where, and what fits."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any, Dict, List, Mapping, Optional, Tuple

from bnb_dispatch_fix.explain import trial
from bnb_dispatch_fix.explain.arguments import wrong_keys
from bnb_dispatch_fix.explain.offloading import Recipe, stored_quantized, with_offload, written
from bnb_dispatch_fix.model.layout import Part, collapsed, parts_by_device
from bnb_dispatch_fix.model.load import Load, measured
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import search
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST, amount, cell, device_name, pasted
from bnb_dispatch_fix.wording import collapsed as collapsed_names

#: A model of more layers × experts than this is not built a second time to be measured.
_LARGEST = 2_000
_MOST_PARTS = 6
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def lines(error: BaseException, load: Load) -> List[str]:
    """What lies on the CPU or the disk by this map, line by line, and what to write instead."""
    device_map = dict(load.device_map)
    request = measured(load) if _is_small(error, load) else None
    if request is None:
        return [*_names(device_map), *wrong_keys(load), _SWITCH]
    coarse, fine = request.units(), request._replace(no_split=frozenset()).units()
    found: List[str] = []
    for device, parts in parts_by_device(coarse, fine, device_map).items():
        if str(device) in HOST:
            found.append(_parts(device, parts))
    where, placement = _on_accelerators(request, device_map)
    recipes = [*placement, *_as_it_is(request, device_map)]
    found += [*where, *wrong_keys(load)]
    if recipes:
        found.append("any one of these loads it (each was planned):")
    for number, recipe in enumerate(recipes, 1):
        found += [f"  {number}. {recipe.what}:", f"     {recipe.arguments}"]
    return found or [_SWITCH]


_SWITCH = (
    "put them on accelerators, or leave them there unquantized with "
    "llm_int8_enable_fp32_cpu_offload=True in BitsAndBytesConfig"
)


def _names(device_map: Mapping[str, Device]) -> List[str]:
    found = []
    for device in HOST:
        names = collapsed_names(name for name, place in device_map.items() if str(place) == device)
        shown = ", ".join(str(run) or "the whole model" for run in names[:_MOST_PARTS])
        if names:
            more = f" and {len(names) - _MOST_PARTS} more" if len(names) > _MOST_PARTS else ""
            found.append(f"device_map puts {shown}{more} on {_place(device)}")
    return found


def _parts(device: Device, parts: List[Part]) -> str:
    total = amount(sum(part.size for part in parts))
    every = collapsed(parts)
    shown = ", ".join(f"{part.name} {cell(part.size)}" for part in every[:_MOST_PARTS])
    more = f" and {len(every) - _MOST_PARTS} more" if len(every) > _MOST_PARTS else ""
    return f"device_map puts {total} on {_place(device)}: {shown}{more}"


def _place(device: Device) -> str:
    return "the CPU" if str(device) == "cpu" else "the disk"


def _on_accelerators(
    request: Request, device_map: Mapping[str, Device]
) -> Tuple[List[str], List[Recipe]]:
    """Whether all of it has a place on the accelerators that the map names, and the map for it."""
    try:
        free = request.get_max_memory(None)
    except Exception:  # noqa: BLE001  # nobody can tell what is free
        return [], []
    named = [d for d in free if d in device_map.values() and d not in HOST]
    cards = named or [d for d in free if d not in HOST]
    outcome = search(request._replace(max_memory={device: free[device] for device in cards}))
    usable = outcome.budgets.accelerators
    room = ", ".join(f"{amount(size)} on {device_name(d)}" for d, size in usable.items())
    total = amount(outcome.units.total)
    if outcome.device_map is None:
        return [f"all of it needs {total}; usable: {room or 'nothing on any accelerator'}"], []
    if not trial.accepts(request, outcome.device_map):
        return [], []
    first = Recipe(
        f"all of it fits on accelerators ({total} of {room} usable)",
        f"device_map={pasted(outcome.device_map)}",
    )
    return [], [first]


def _as_it_is(request: Request, device_map: Dict[str, Device]) -> List[Recipe]:
    """The same map with the switch on, where weights are not stored quantized."""
    config = getattr(request.quantizer, "quantization_config", None)
    if config is None or stored_quantized(request):
        return []
    if not trial.accepts(request, device_map, with_offload(config)):
        return []
    return [
        Recipe(
            "these modules stay there, unquantized: slow",
            f"quantization_config={written(config)}",
        )
    ]


def _is_small(error: BaseException, load: Load) -> bool:
    """Whether the model can be built on the meta device in no time."""
    config = load.arguments.get("config") or _config_in_frames(error)
    if config is None:
        return False
    text = getattr(config, "text_config", None) or config
    layers = getattr(text, "num_hidden_layers", None) or 0
    experts = max(_number(getattr(text, name, 0)) for name in _EXPERTS)
    return _number(layers) * max(experts, 1) <= _LARGEST


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _config_in_frames(error: BaseException) -> Optional[Any]:
    for frame, _ in walk_tb(error.__traceback__):
        config = frame.f_locals.get("config")
        if hasattr(config, "num_hidden_layers"):
            return config
    return None
