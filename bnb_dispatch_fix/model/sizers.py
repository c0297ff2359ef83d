"""How many bytes an element of each tensor will take once the model is loaded and quantized.

A 4-bit weight counts half a byte per element and an 8-bit weight one byte, as in transformers 5
(`HfQuantizer.param_element_size`). What bitsandbytes keeps beside the weights is counted apart,
as scales: no release counts it, the tenth that transformers takes off every budget since 4.33 is
for it. Without double quantization it can be more than that tenth.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any, Callable, Collection, Dict, Mapping, NamedTuple, Optional, Pattern, Set

from bnb_dispatch_fix.backport.shapes import Module, Quantizer, Tensor


class Storage(NamedTuple):
    """How a tensor is stored: bytes per element, the name to show, whether it is quantized.

    `scales` are the bytes per element that are kept beside it.
    """

    bytes: float
    label: str
    quantized: bool
    scales: float = 0.0


# Of a full name, the tensor and the module that owns it.
Sizer = Callable[[str, Any, Any], Storage]

_EIGHT_BIT = Storage(1, "8-bit", True)
_FOUR_BIT = Storage(0.5, "4-bit", True)
_LAYERS = {"Linear4bit": _FOUR_BIT, "Linear8bitLt": _EIGHT_BIT}
# By class of bitsandbytes' weights: what is set where they will not be quantized (again).
_FINAL = {"Params4bit": "quant_state", "Int8Params": "has_fp16_weights"}
#: Elements of a 4-bit weight per scale (absmax), where the weight does not say; absmax per scale
#: of its own, with double quantization.
_BLOCK, _NESTED_BLOCK = 64, 256
_FP32 = Storage(4, "float32", False)
# The values of accelerate's CustomDtype, which names what torch has no dtype for.
_CUSTOM = {"fp8": _EIGHT_BIT, "int4": _FOUR_BIT, "int2": Storage(0.25, "2-bit", True)}


def sizer_for(model: Module, quantizer: Any = None, dtype: Any = None) -> Sizer:
    """Return the sizer for a model whose layers are replaced and whose weights are not loaded yet.

    `quantizer` is transformers' `HfQuantizer`, accelerate's `BnbQuantizationConfig`, or None;
    `dtype` is the torch dtype asked of `from_pretrained`, by default that of the model.
    """
    dtype = dtype or getattr(quantizer, "torch_dtype", None) or getattr(model, "dtype", None)
    kept = _kept_in_fp32(model, quantizer, dtype)
    if _asks_the_quantizer(quantizer):
        return _quantizer_sizer(model, quantizer, kept)
    if hasattr(quantizer, "target_dtype") or _is_bitsandbytes(model, quantizer):
        return _bitsandbytes_sizer({}, kept, dtype)
    if quantizer is not None:  # transformers 4.38-4.57
        special = quantizer.get_special_dtypes_update(model, dtype)
        return _dtype_sizer(quantizer.adjust_target_dtype(dtype), special, kept)
    return _dtype_sizer(None, {}, kept)


def planners_count_is_true(model: Module, quantizer: Any, dtype: Any = None) -> bool:
    """Whether the release's planner counts as `sizer_for` does.

    transformers 5 does, but for what is kept in fp32: up to 5.24.0 that counts in the dtype of the
    model. Older releases count all that is not quantized too little.
    """
    kept = _kept_in_fp32(model, quantizer, dtype or getattr(model, "dtype", None))
    return kept is None and _asks_the_quantizer(quantizer)


def _asks_the_quantizer(quantizer: Any) -> bool:
    return hasattr(quantizer, "param_element_size")  # transformers 5


def call_sizer(
    model: Any,
    dtype: Any = None,
    special_dtypes: Optional[Mapping[str, Any]] = None,
    quantizer: Any = None,
) -> Sizer:
    """Return the sizer for a call of accelerate's `infer_auto_device_map` with these arguments.

    Where bitsandbytes will quantize (`quantizer` says so, or the layers it has replaced), `dtype`
    (CustomDtype.INT4, torch.int8) is taken for these layers, not for everything else as accelerate
    does. Otherwise the sizes are those of accelerate 1.15.0.
    """
    special = special_dtypes or {}
    if _is_bitsandbytes(model, quantizer):
        return _bitsandbytes_sizer(special, None, None)
    return _dtype_sizer(dtype, special, None)


def _quantizer_sizer(model: Module, quantizer: Quantizer, kept: Optional[Pattern[str]]) -> Sizer:
    """The installed quantizer's own count, but true for what is kept in fp32 or loaded already."""
    element_size = quantizer.param_element_size
    # Asked once per class: the answer takes a search for the module, and is the same for all.
    held: Dict[type, Storage] = {}

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        tensor_class = type(tensor)
        mark = _FINAL.get(tensor_class.__name__)
        if mark is not None:
            if getattr(tensor, mark, None):
                return _final_storage(tensor)
            if tensor_class not in held:
                held[tensor_class] = _quantized(element_size(model, name, tensor))
            return _with_scales(held[tensor_class], tensor)
        storage = _as_it_is(tensor, owner)
        element = element_size(model, name, tensor)
        if element != storage.bytes:
            return _quantized(element)
        return _FP32 if kept and _matches(kept, name, tensor) else storage

    return size


def _bitsandbytes_sizer(
    special: Mapping[str, Any], kept: Optional[Pattern[str]], loading: Any
) -> Sizer:
    """What bitsandbytes' layers hold counts as quantized, all else in the dtype it is loaded in."""

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        quantized = _layer(owner)
        if quantized is not None and not name.endswith("bias"):
            return _final_storage(tensor) if _is_final(tensor) else _with_scales(quantized, tensor)
        if special.get(name) is not None:
            return dtype_storage(special[name])
        if kept and _matches(kept, name, tensor):
            return _FP32
        if loading is not None and tensor.is_floating_point() and _is_parameter(name, owner):
            return dtype_storage(loading)
        return own_storage(tensor.dtype)

    return size


def _dtype_sizer(target: Any, special: Mapping[str, Any], kept: Optional[Pattern[str]]) -> Sizer:
    """accelerate's count: nothing wider than `target`, but what is named in `special`."""
    limit = None if target is None else dtype_storage(target)

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        if special.get(name) is not None:
            return dtype_storage(special[name])
        if kept and _matches(kept, name, tensor):
            return _FP32
        storage = _as_it_is(tensor, owner)
        if limit is not None and limit.bytes < storage.bytes and tensor.is_floating_point():
            return limit
        return storage

    return size


def _as_it_is(tensor: Tensor, owner: Module) -> Storage:
    """How a tensor is stored that nothing will convert; layers of GPTQ and AWQ are packed."""
    storage = own_storage(tensor.dtype)
    if "qweight" in owner._buffers or "qweight" in owner._parameters:
        return storage._replace(label="packed", quantized=True)
    return storage


@lru_cache(maxsize=None)
def own_storage(dtype: Any) -> Storage:
    """Return how a tensor of this torch dtype is stored."""
    width = getattr(dtype, "itemsize", None)  # since torch 2.1
    if width is None:
        width = sys.modules["torch"].empty(0, dtype=dtype).element_size()
    return Storage(width, str(dtype).replace("torch.", ""), False)


@lru_cache(maxsize=None)
def dtype_storage(dtype: Any) -> Storage:
    """Return how a tensor is stored once it has this dtype: torch's, accelerate's, or its name."""
    custom = _CUSTOM.get(getattr(dtype, "value", dtype))
    if custom is not None:
        return custom
    if isinstance(dtype, str):
        dtype = getattr(sys.modules["torch"], dtype.replace("torch.", ""))
    storage = own_storage(dtype)
    return _quantized(storage.bytes) if storage.bytes < 2 else storage


@lru_cache(maxsize=None)
def _quantized(element: float) -> Storage:
    return Storage(element, f"{element * 8:g}-bit", True)


def _layer(module: Any) -> Optional[Storage]:
    """How a layer of bitsandbytes stores its weight; None for any other module."""
    module_class: Any = type(module)
    return _layer_class(module_class)


@lru_cache(maxsize=None)
def _layer_class(module_class: Any) -> Optional[Storage]:
    for base in module_class.__mro__:
        if base.__module__.startswith("bitsandbytes.") and base.__name__ in _LAYERS:
            return _LAYERS[base.__name__]
    return None


def _is_final(tensor: Tensor) -> bool:
    """Whether a weight of bitsandbytes stays as it is: packed to 4 bits, or trained in 16."""
    mark = _FINAL.get(type(tensor).__name__)
    return mark is not None and bool(getattr(tensor, mark, None))


def _final_storage(tensor: Tensor) -> Storage:
    storage = own_storage(tensor.dtype)
    if type(tensor).__name__ == "Params4bit":  # two elements are one already
        scales = 2 * _scales(tensor)
        return storage._replace(label=_FOUR_BIT.label, quantized=True, scales=scales)
    return storage


def _with_scales(storage: Storage, tensor: Tensor) -> Storage:
    return _scaled(storage, _scales(tensor))


@lru_cache(maxsize=None)
def _scaled(storage: Storage, scales: float) -> Storage:
    return storage._replace(scales=scales)


def _scales(tensor: Tensor) -> float:
    """Bytes per element that bitsandbytes keeps beside a weight.

    Of a 4-bit weight a float32 per block, with double quantization a byte per block and a float32
    per 256 of these; of an 8-bit weight a float32 per row (SCB). The weight itself knows which.
    """
    kind = type(tensor).__name__
    if kind == "Params4bit":
        block = getattr(tensor, "blocksize", None) or _BLOCK
        nested = getattr(tensor, "compress_statistics", True)
        return (1 + 4 / _NESTED_BLOCK if nested else 4) / block
    if kind == "Int8Params" and tensor.dim() and tensor.shape[-1]:
        return float(4 / tensor.shape[-1])
    return 0.0


def _matches(kept: Pattern[str], name: str, tensor: Tensor) -> bool:
    return kept.search(name) is not None and bool(tensor.is_floating_point())


def _is_parameter(name: str, owner: Module) -> bool:
    return name.rpartition(".")[2] in owner._parameters


def _is_bitsandbytes(model: Module, quantizer: Any) -> bool:
    if quantizer is not None:
        config = getattr(quantizer, "quantization_config", None)
        method = getattr(config, "quant_method", None)  # since 4.32
        if method is not None:
            return bool(method == "bitsandbytes")
    if getattr(model, "quantization_method", None) == "bitsandbytes":  # transformers 4.31-4.37
        return True
    if "bitsandbytes" not in sys.modules:
        return False
    stack = [model]
    while stack:
        module = stack.pop()
        if _layer(module) is not None:
            return True
        stack += [child for child in module._modules.values() if child is not None]
    return False


def _kept_in_fp32(model: Module, quantizer: Any, dtype: Any) -> Optional[Pattern[str]]:
    """What the release loads in fp32 whatever the dtype, as a pattern for full names."""
    half = str(dtype) == "torch.float16"
    if hasattr(quantizer, "target_dtype"):  # accelerate
        return _pattern(r"{}\.", quantizer.keep_in_fp32_modules if half else None)
    plan = getattr(model, "dtype_plan", None)  # transformers 5.0
    if plan is None and hasattr(model, "_get_dtype_plan"):
        plan = model._get_dtype_plan(dtype)
    if plan is not None:
        return _pattern("{}", [name.replace("*", ".*") for name in plan])
    names: Set[str] = set()
    if half or getattr(quantizer, "use_keep_in_fp32_modules", False):
        names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if half or str(dtype) == "torch.bfloat16":
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return _pattern(r"(?:^|\.){}(?:\.|$)", names)


def _pattern(shape: str, names: Optional[Collection[str]]) -> Optional[Pattern[str]]:
    branches = [shape.format(name) for name in sorted(names or ())]
    return re.compile("|".join(branches)) if branches else None
