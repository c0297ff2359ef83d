"""`dispatch_model` for a map that is entirely "disk": hooks are attached (accelerate #4083)."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from bnb_dispatch_fix.backport.rebound import rebound
from bnb_dispatch_fix.backport.shapes import Installed, Module

#: What the installed function must take, and what must stand beside it.
PARAMETERS = ("model", "device_map", "main_device", "offload_dir", "offload_index")
HELPERS = ("find_tied_parameters",)


def dispatch_model(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    """Dispatch a model that is entirely on the disk, as accelerate 1.15.0 does.

    It runs on `main_device`, by default the CPU, and each module's weights are read from
    `offload_index` or `offload_dir` when its turn comes. Any other map goes to the `installed`
    function as it is. Raises what that function raises.
    """
    call = inspect.signature(installed).bind(*args, **kwargs)
    given = call.arguments
    if not all_on_disk(given["device_map"]):
        return installed(*args, **kwargs)
    model, device_map = given["model"], given["device_map"]
    if given.get("offload_index") is None:
        given["device_map"] = by_children(model, device_map)
    if given.get("main_device") is None:
        given["main_device"] = "cpu"
    tied = installed.__globals__["find_tied_parameters"](model)
    given["offload_index"] = with_tied_names(given.get("offload_index"), tied)
    function = rebound(installed, {"find_tied_parameters": _tied_in_memory(tied, model)})
    if "force_hooks" in inspect.signature(installed).parameters:  # since accelerate 0.23
        given["force_hooks"] = True
        dispatched = function(*call.args, **call.kwargs)
    else:
        with _taken_for_quantized(model):
            dispatched = function(*call.args, **call.kwargs)
    dispatched.hf_device_map = dict(device_map)
    return dispatched


def all_on_disk(device_map: Any) -> bool:
    """Whether a device map puts every module on the disk."""
    return isinstance(device_map, Mapping) and set(map(str, device_map.values())) == {"disk"}


def by_children(model: Module, device_map: Mapping[str, Any]) -> Dict[str, Any]:
    """The map with a key for each child of the model in place of "".

    For the key "" accelerate, 1.15.0 too, writes no weights to `offload_dir`, and then misses them.
    """
    if "" not in device_map:
        return dict(device_map)
    children = dict.fromkeys(name.partition(".")[0] for name in model.state_dict())
    return {**dict.fromkeys(children, device_map[""]), **{k: v for k, v in device_map.items() if k}}


def with_tied_names(
    index: Optional[Mapping[str, Dict[str, Any]]], tied: Any
) -> Optional[Mapping[str, Dict[str, Any]]]:
    """An offload index in which each name of a tied weight leads to the tensor that was saved.

    A safetensors checkpoint has tied weights once; transformers 4.x lists only that name.
    """
    if index is None:
        return None
    complete = dict(index)
    for group in tied:
        saved = [name for name in group if "safetensors_file" in index.get(name, ())]
        for name in group:
            if saved and name not in complete:
                complete[name] = {"weight_name": saved[0], **index[saved[0]]}
    return complete


def _tied_in_memory(tied: Any, model: Module) -> Callable[[Any], List[Any]]:
    """Stands for `find_tied_parameters`: leaves out what is on the meta device.

    Tied weights are told apart by their address, which is 0 for all tensors on the meta device:
    accelerate 0.27-1.14 would take every offloaded weight for a tied one.
    """
    # torch before 2.0 has no named_parameters(remove_duplicate=).
    tensors = {
        f"{module_name}.{leaf}" if module_name else leaf: tensor
        for module_name, module in model.named_modules(remove_duplicate=False)
        for leaf, tensor in module._parameters.items()
    }

    def on_meta(group: Any) -> bool:
        return any(getattr(tensors.get(name), "is_meta", False) for name in group)

    groups = [group for group in tied if not on_meta(group)]
    return lambda model, **options: groups


@contextmanager
def _taken_for_quantized(model: Any) -> Iterator[None]:
    """accelerate 0.21 and 0.22 attach hooks for one device only to a quantized model."""
    if "is_quantized" in vars(model):
        yield
        return
    model.is_quantized = True
    try:
        yield
    finally:
        del model.is_quantized
