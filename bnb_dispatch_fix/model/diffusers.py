"""What a caller asked diffusers for, read from the arguments of its planner.

diffusers 0.31 and newer plan in `_determine_device_map`, with accelerate's functions. That counts
norms and biases of a quantized model as quantized, too; here everything counts as it is loaded.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from typing import Any, Callable, Collection, Dict, Mapping, Optional, Tuple

from bnb_dispatch_fix.backport.balanced import no_split_names
from bnb_dispatch_fix.backport.shapes import Installed, Module, Tensor
from bnb_dispatch_fix.model.load import Load, running
from bnb_dispatch_fix.model.requests import Request, copied, is_bitsandbytes, lone_share
from bnb_dispatch_fix.model.sizers import Sizer, Storage, dtype_storage, own_storage, sizer_for
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST, STRATEGIES

_FP32 = Storage(4, "float32", False)


def alone(installed: Installed) -> Callable[..., Any]:
    """The planner, with accelerate's functions inside left to themselves: they are seams, too."""

    @functools.wraps(installed)
    def planner(*args: Any, **kwargs: Any) -> Any:
        with running(Load(None, None)):
            return installed(*args, **kwargs)

    return planner


def from_diffusers(
    planner: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Request]:
    """The request in a call of `_determine_device_map`, as `alone` wraps it.

    None where no plan was asked for: `device_map` is a dict, or no strategy.
    """
    installed = inspect.unwrap(planner)
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    strategy = given.get("device_map")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return None
    model, quantizer, dtype = given["model"], given.get("hf_quantizer"), given.get("torch_dtype")
    foreseen = quantizer is None or is_bitsandbytes(quantizer)
    return Request(
        model=model,
        strategy=strategy,
        max_memory=copied(given.get("max_memory")),
        no_split=frozenset(no_split_names(model._get_no_split_modules(strategy))),
        quantizer=quantizer,
        get_max_memory=installed.__globals__["get_max_memory"],
        adjust=None if quantizer is None else functools.partial(_adjusted, quantizer),
        sizer=_sizer(model, quantizer, dtype, given.get("keep_in_fp32_modules") or ()),
        lone_share=lone_share(strategy, installed),
        call=(planner, given),
        refuses=None if foreseen else functools.partial(_refuses, quantizer),
    )


def _adjusted(quantizer: Any, budgets: Dict[Device, Any]) -> Dict[Device, Any]:
    """What the quantizer leaves of each budget; of one accelerator only, where it takes no more."""
    left: Dict[Device, Any] = quantizer.adjust_max_memory(budgets)
    accelerators = {device: size for device, size in left.items() if device not in HOST}
    if len(accelerators) < 2 or is_bitsandbytes(quantizer) or not _takes_one_device(quantizer):
        return left
    roomiest = max(accelerators, key=lambda device: accelerators[device])
    return {d: 0 if d in accelerators and d != roomiest else size for d, size in left.items()}


def _takes_one_device(quantizer: Any) -> bool:
    """Whether a quantizer refuses every model on several devices, as quanto's does."""
    return _refuses(quantizer, {"one": 0, "other": 1}) and not _refuses(quantizer, {"": 0})


def _refuses(quantizer: Any, device_map: Mapping[str, Device]) -> bool:
    """Whether a quantizer refuses this map; a copy is asked, as torchao's notes its answer."""
    try:
        copy.copy(quantizer).validate_environment(device_map=dict(device_map))
    except ValueError:
        return True
    except Exception:  # noqa: BLE001  # it cannot be told  # noqa: BLE001  # it was about something else
        return False
    return False


def _sizer(model: Module, quantizer: Any, dtype: Any, kept: Collection[str]) -> Sizer:
    """The sizer for a model that diffusers has built and will load in `dtype`.

    What the quantizer will convert counts in its dtype; of a quantizer that tells it of no weight
    before it is read (gguf), the planner's own count is taken.
    """
    if quantizer is not None and is_bitsandbytes(quantizer):
        return sizer_for(model, quantizer, dtype)
    if quantizer is None:
        return _loaded_in(dtype, kept)
    if not any(_converts(quantizer, model, *named) for named in model.named_parameters()):
        return sizer_for(model, quantizer, dtype)
    target, plain = dtype_storage(quantizer.adjust_target_dtype(dtype)), _loaded_in(dtype, kept)

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        if _converts(quantizer, model, name, tensor):
            return target
        return plain(name, tensor, owner)

    return size


def _converts(quantizer: Any, model: Module, name: str, tensor: Tensor) -> bool:
    nothing: Mapping[str, Any] = {}
    return bool(quantizer.check_if_quantized_param(model, tensor, name, nothing, param_device=0))


def _loaded_in(dtype: Any, kept: Collection[str]) -> Sizer:
    """Parameters in the dtype they are loaded in, or in fp32 where a part of their name says so."""
    names = "|".join(map(re.escape, sorted(kept)))
    in_fp32 = re.compile(rf"(?:^|\.)(?:{names})(?:\.|$)") if names else None

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        if not tensor.is_floating_point() or name.rpartition(".")[2] not in owner._parameters:
            return own_storage(tensor.dtype)
        if in_fp32 is not None and in_fp32.search(name):
            return _FP32
        return own_storage(tensor.dtype) if dtype is None else dtype_storage(dtype)

    return size
