"""Feeds changed arguments back to the installed release: does the model load with them?

The raw installed planner is called with exactly these arguments, on the model that is there; the
names it calls are patched as they are now, and where it refuses, rescue has its turn if it is on.
Quantizers are asked through copies, so that nothing of the running load changes.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional

from bnb_dispatch_fix import features
from bnb_dispatch_fix.model.budgets import overfull
from bnb_dispatch_fix.model.device_map import all_on_host
from bnb_dispatch_fix.model.requests import Request, copied
from bnb_dispatch_fix.model.search import search
from bnb_dispatch_fix.model.sizers import Sizer
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST

#: Who speaks up while a map is planned; of trials nothing is to be heard.
_CHATTY = (
    "accelerate.utils.modeling",
    "transformers.modeling_utils",
    "transformers.integrations.accelerate",
    "transformers.quantizers.quantizer_bnb_4bit",
    "transformers.quantizers.quantizer_bnb_8bit",
    "diffusers.models.model_loading_utils",
    "diffusers.quantizers.bitsandbytes.bnb_quantizer",
)

Map = Dict[str, Device]


class Stored(NamedTuple):
    """Another way to store the tensors: how the release would be told, and what it would count.

    `config` is the quantization configuration (None: as it is), `dtype` what is loaded
    unquantized; `element` gives the bytes of an element by those of now and its tensor.
    """

    sizer: Sizer
    element: Callable[[float, Any], float]
    config: Any = None
    dtype: Any = None


def loads(
    request: Request,
    max_memory: Optional[Mapping[Device, Any]],
    stored: Optional[Stored] = None,
    on_host: bool = False,
) -> Optional[Map]:
    """The map with which the model loads on accelerators, within the budgets; None without one.

    With `on_host` a model that goes to the CPU as a whole counts, too. No exception leaves it.
    """
    changed = request._replace(max_memory=copied(max_memory))
    if stored is not None:
        changed = changed._replace(sizer=stored.sizer)
    try:
        if not on_host and changed.units().total > sum(changed.budgets().accelerators.values()):
            return None  # there is no need to ask
        with _hushed():
            device_map = _planned(changed, stored)
    except Exception:  # noqa: BLE001  # refused, or not understood: not with these arguments
        device_map = None
    try:
        if device_map is not None and _is_right(changed, device_map, on_host):
            return dict(device_map)
        if "rescue" not in features.on() or on_host:
            return None
        return search(changed).device_map
    except Exception:  # noqa: BLE001  # a trial that fails is no recipe
        return None


def accepts(request: Request, device_map: Mapping[str, Device], config: Any = None) -> bool:
    """Whether the release takes this map, written by hand, with this configuration.

    It is asked as at the start of `from_pretrained`: the quantizer is new and knows no model yet.
    """
    config = config if config is not None else _config(request)
    try:
        with _hushed():
            quantizer = _fresh(request, config)
            if quantizer is None:  # transformers before 4.38, accelerate: they look at the map
                return _switch(config) or not _on_host(device_map)
            quantizer.validate_environment(device_map=dict(device_map))
            return True
    except Exception:  # noqa: BLE001  # a trial that fails is no recipe
        return False


def _is_right(request: Request, device_map: Any, on_host: bool) -> bool:
    if not isinstance(device_map, Mapping):
        return False
    if _on_host(device_map):
        return on_host and all_on_host(device_map) and "disk" not in device_map.values()
    return not overfull(request.units().loads(device_map), request.budgets())


def _on_host(device_map: Mapping[str, Device]) -> bool:
    return not set(HOST).isdisjoint(map(str, device_map.values()))


def _planned(request: Request, stored: Optional[Stored]) -> Any:
    """What the installed planner answers; raises what it raises."""
    if request.call is None:
        raise LookupError("no planner to ask")
    installed, given = request.call
    given = dict(given)
    if "hf_quantizer" in inspect.signature(installed).parameters:
        given.update(max_memory=copied(request.max_memory))
        given.update(hf_quantizer=_quantizer(request, stored))
        for name in ("dtype", "torch_dtype"):
            if name in given and stored is not None and stored.dtype is not None:
                given[name] = stored.dtype
        return installed(**given)
    if "bnb_quantization_config" in given:
        given.update(max_memory=copied(request.max_memory))
        if stored is not None and stored.config is not None:
            given.update(bnb_quantization_config=_accelerates(request.quantizer, stored.config))
        return installed(**given)
    return _inside(request, installed, given, stored)


def _inside(
    request: Request, installed: Any, given: Dict[str, Any], stored: Optional[Stored]
) -> Any:
    """As transformers 4.30-4.49 do inside `from_pretrained`: balance, keep back, plan, look."""
    planner: Any = sys.modules["transformers.modeling_utils"]
    if stored is not None and stored.config is not None:
        given["dtype"] = sys.modules["accelerate.utils"].CustomDtype.INT4
    if stored is not None and stored.dtype is not None:
        special = given.get("special_dtypes") or {}
        given["special_dtypes"] = dict.fromkeys(special, stored.dtype)
    sizes = {
        name: given[name] for name in ("no_split_module_classes", "special_dtypes") if name in given
    }
    budgets = copied(request.max_memory)
    if request.strategy == "sequential":
        budgets = request.get_max_memory(budgets)
    else:
        low_zero = request.strategy == "balanced_low_0"
        budgets = planner.get_balanced_memory(
            request.model,
            dtype=given.get("dtype"),
            low_zero=low_zero,
            max_memory=budgets,
            **sizes,
        )
    if request.adjust is not None:
        budgets = request.adjust(dict(budgets))
    return installed(**{**given, "max_memory": budgets})


def _quantizer(request: Request, stored: Optional[Stored]) -> Any:
    """A quantizer for the planner, of its own; for another way to store, one that counts so."""
    quantizer = copy.copy(request.quantizer)
    if stored is None or quantizer is None:
        return quantizer
    if stored.config is not None:
        quantizer = _fresh(request, stored.config)
        quantizer.modules_to_not_convert = request.quantizer.modules_to_not_convert
    before = getattr(request.quantizer, "param_element_size", None)  # transformers 5
    if before is not None:
        quantizer.param_element_size = lambda model, name, tensor: stored.element(
            before(model, name, tensor), tensor
        )
    return quantizer


def _fresh(request: Request, config: Any) -> Any:
    """A new quantizer of the installed release; None where it has none (before 4.38)."""
    stored = bool(getattr(request.quantizer, "pre_quantized", False))
    if request.is_diffusers:
        auto: Any = sys.modules["diffusers.quantizers.auto"]
        return auto.DiffusersAutoQuantizer.from_config(config, pre_quantized=stored)
    auto = sys.modules.get("transformers.quantizers.auto")
    if auto is None or not hasattr(config, "quant_method"):
        return None
    return auto.AutoHfQuantizer.from_config(config, pre_quantized=stored)


def _accelerates(before: Any, config: Any) -> Any:
    """accelerate's configuration, knowing of the model what the one before knows."""
    changed = copy.copy(config)
    for name in ("skip_modules", "keep_in_fp32_modules", "torch_dtype"):
        setattr(changed, name, getattr(before, name))
    return changed


def _config(request: Request) -> Any:
    return getattr(request.quantizer, "quantization_config", None)


def _switch(config: Any) -> bool:
    return bool(getattr(config, "llm_int8_enable_fp32_cpu_offload", False))


@contextmanager
def _hushed() -> Iterator[None]:
    """Nothing that this thread's trials log is to be seen; other threads log as before."""
    here = threading.get_ident()

    def others_only(record: logging.LogRecord) -> bool:
        return record.thread != here

    loggers = [logging.getLogger(name) for name in _CHATTY]
    for logger in loggers:
        logger.addFilter(others_only)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(others_only)
