"""How quantized checkpoints store a weight: the shapes that follow from their configuration.

One function per method takes the settings of a layer and its weight, and names the tensors that
stand in its place. The shapes are those of the libraries that write such checkpoints; the release
tests compare them with what these libraries make.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Mapping, NamedTuple, Tuple


class Unknown(ValueError):
    """A setting whose sizes are not known here; a few words that say which."""


class Weight(NamedTuple):
    """A weight before it was quantized: `outside` rows of `inside` elements, or that many experts.

    `dtype` is that of what is not quantized.
    """

    outside: int
    inside: int
    experts: int
    dtype: str


#: By name, shape and dtype (torch's name).
Tensors = Dict[str, Tuple[Tuple[int, ...], str]]
Format = Callable[[Mapping[str, Any], Weight], Tensors]


def _up(count: int, size: int) -> int:
    """How many of a size are needed for a count."""
    return -(-count // size)


def _groups(weight: Weight, size: Any) -> int:
    """Groups of a row; one where there is no group size."""
    return _up(weight.inside, int(size)) if isinstance(size, int) and size > 0 else 1


def gptq(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """32 / bits elements in an int32, with zeros, scales and an index for each group."""
    bits, groups = int(settings.get("bits", 4)), _groups(weight, settings.get("group_size", 128))
    return {
        "qweight": ((_up(weight.inside * bits, 32), weight.outside), "int32"),
        "qzeros": ((groups, _up(weight.outside * bits, 32)), "int32"),
        "scales": ((groups, weight.outside), "float16"),
        "g_idx": ((weight.inside,), "int32"),
    }


def awq(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """The same, packed along the other side and without an index."""
    bits = int(settings.get("bits", settings.get("w_bit", 4)))
    groups = _groups(weight, settings.get("group_size", settings.get("q_group_size", 128)))
    return {
        "qweight": ((weight.inside, _up(weight.outside * bits, 32)), "int32"),
        "qzeros": ((groups, _up(weight.outside * bits, 32)), "int32"),
        "scales": ((groups, weight.outside), "float16"),
    }


def fp8(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """A byte per element, and a scale per block, or one."""
    block = settings.get("weight_block_size", (128, 128))
    scale = "uint8" if settings.get("scale_fmt") == "ue8m0" else "float32"
    shape = () if not block else (_up(weight.outside, block[0]), _up(weight.inside, block[1]))
    tensors: Tensors = {
        "weight": ((weight.outside, weight.inside), "float8_e4m3fn"),
        "weight_scale_inv": (shape, scale if block else "float32"),
    }
    if settings.get("activation_scheme") == "static":
        tensors["activation_scale"] = ((), "float32")
    return tensors


def mxfp4(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """Two elements in a byte, and a byte for 32 of them."""
    blocks = _up(weight.inside, 32)
    return {
        "blocks": ((weight.outside, blocks, 16), "uint8"),
        "scales": ((weight.outside, blocks), "uint8"),
    }


#: Bits of an element → how many stand in one of a tensor, and its dtype.
_HQQ = {8: (1, "uint8"), 4: (2, "uint8"), 3: (10, "int32"), 2: (4, "uint8"), 1: (8, "uint8")}


def hqq(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """Groups as rows, several elements of a column in one; a scale and a zero for each group."""
    how = settings.get("weight_quant_params", settings)
    bits, size = int(how.get("nbits", 4)), how.get("group_size", 64)
    if bits not in _HQQ:
        raise Unknown(f"hqq of {bits} bits")
    elements = weight.outside * weight.inside
    along = weight.outside if how.get("axis") == 0 else weight.inside
    length = size if isinstance(size, int) and size > 0 else along
    groups = _up(elements, length)
    packed, dtype = _HQQ[bits]
    # axis 0 has a column, axis 1 a row for each group; packed are rows.
    rows, columns = (length, groups) if how.get("axis") == 0 else (groups, length)
    return {
        "W_q": ((_up(rows, packed), columns), dtype),
        "scale": ((groups,), weight.dtype),
        "zero": ((groups,), weight.dtype),
    }


def compressed(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """compressed-tensors: `settings` is one of its groups, with the format among them."""
    kind = str(settings.get("format") or "")
    how = settings.get("weights") or {}
    if kind not in _COMPRESSED or not how:
        raise Unknown(f"format {kind or 'unnamed'}")
    tensors = _COMPRESSED[kind](how, weight)
    inputs = settings.get("input_activations") or {}
    if inputs and not inputs.get("dynamic", False) and kind not in _GLOBAL_SCALES:
        tensors["input_scale"] = ((1,), weight.dtype)
    return tensors


def _scale_shape(how: Mapping[str, Any], weight: Weight) -> Tuple[int, ...]:
    strategy = how.get("strategy") or ("group" if how.get("group_size") else "tensor")
    if strategy == "block":
        block = how.get("block_structure") or (128, 128)
        return (_up(weight.outside, block[0]), _up(weight.inside, block[1]))
    if strategy in ("group", "tensor_group"):
        return (weight.outside, _groups(weight, how.get("group_size")))
    if strategy == "channel":
        return (weight.outside, 1)
    if strategy == "tensor":
        return (1,)
    raise Unknown(f"strategy {strategy}")


def _pack_quantized(how: Mapping[str, Any], weight: Weight) -> Tensors:
    bits, scales = int(how.get("num_bits", 8)), _scale_shape(how, weight)
    tensors: Tensors = {
        "weight_packed": ((weight.outside, _up(weight.inside * bits, 32)), "int32"),
        "weight_scale": (scales, weight.dtype),
        "weight_shape": ((2,), "int64"),
    }
    if not how.get("symmetric", True):
        shape = (_up(scales[0] * bits, 32), *scales[1:])
        tensors["weight_zero_point"] = (shape, "int32")
    if how.get("actorder") in ("group", True):
        tensors["weight_g_idx"] = ((weight.inside,), "int32")
    return tensors


def _plain_quantized(how: Mapping[str, Any], weight: Weight) -> Tensors:
    element = "float8_e4m3fn" if how.get("type") == "float" else "int8"
    tensors: Tensors = {
        "weight": ((weight.outside, weight.inside), element),
        "weight_scale": (_scale_shape(how, weight), weight.dtype),
    }
    if not how.get("symmetric", True):
        tensors["weight_zero_point"] = (_scale_shape(how, weight), "int8")
    return tensors


def _nvfp4(how: Mapping[str, Any], weight: Weight) -> Tensors:
    groups = _groups(weight, how.get("group_size") or 16)
    return {
        "weight_packed": ((weight.outside, _up(weight.inside, 2)), "uint8"),
        "weight_scale": ((weight.outside, groups), "float8_e4m3fn"),
        "weight_global_scale": ((1,), "float32"),
        "input_global_scale": ((1,), "float32"),
    }


def _mxfp4_packed(how: Mapping[str, Any], weight: Weight) -> Tensors:
    groups = _groups(weight, how.get("group_size") or 32)
    return {
        "weight_packed": ((weight.outside, _up(weight.inside, 2)), "uint8"),
        "weight_scale": ((weight.outside, groups), "uint8"),
    }


_COMPRESSED: Mapping[str, Format] = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _plain_quantized,
    "float-quantized": _plain_quantized,
    "naive-quantized": _plain_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4_packed,
}
_GLOBAL_SCALES = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


def torchao(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """`settings` is one of torchao's configurations: its name under "_type", its fields beside."""
    kind = str(settings.get("_type") or "")
    for name, make in _TORCHAO.items():
        if re.fullmatch(name, kind):
            return make(settings, weight)
    raise Unknown(kind or "an unnamed configuration")


def _value(field: Any) -> Any:
    """A field of torchao's configurations without its type."""
    return field.get("_data") if isinstance(field, Mapping) and "_data" in field else field


def _ao_int4(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    """Two elements in a byte, 16 bits of scale and zero for a group; tiles are filled up."""
    rows, inside = weight.outside, weight.inside
    layout = settings.get("layout") or {}
    tiled = _value(settings.get("int4_packing_format")) == "tile_packed_to_4d"
    if tiled or layout.get("_type") == "TensorCoreTiledLayout":
        rows, inside = 8 * _up(rows, 8), 1024 * _up(inside, 1024)
    groups = _up(inside, int(settings.get("group_size") or 128))
    return {
        "qdata": ((rows, _up(inside, 2)), "uint8"),
        "scale": ((groups, rows), "bfloat16"),
        "zero_point": ((groups, rows), "bfloat16"),
    }


def _ao_int8(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    groups = _groups(weight, settings.get("group_size"))
    return {
        "qdata": ((weight.outside, weight.inside), "int8"),
        "scale": ((weight.outside, groups), "float32"),
        "zero_point": ((weight.outside, groups), "int8"),
    }


def _ao_float8(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    granularity = settings.get("granularity")
    whole = isinstance(granularity, Mapping) and granularity.get("_type") == "PerTensor"
    return {
        "qdata": ((weight.outside, weight.inside), "float8_e4m3fn"),
        "scale": ((1, 1) if whole else (weight.outside, 1), "float32"),
    }


def _ao_intx(settings: Mapping[str, Any], weight: Weight) -> Tensors:
    packing = _value(settings.get("intx_packing_format")) or "UNPACKED_TO_INT8"
    if str(packing).upper() != "UNPACKED_TO_INT8":
        raise Unknown(f"intx_packing_format {packing}")
    granularity = settings.get("weight_granularity") or settings.get("granularity") or {}
    groups = _groups(weight, (_value(granularity) or {}).get("group_size"))
    return {
        "qdata": ((weight.outside, weight.inside), "int8"),
        "scale": ((weight.outside, groups), weight.dtype),
        "zero_point": ((weight.outside, groups), "int8"),
    }


#: By the names of its configurations, also as texts of old.
_TORCHAO: Mapping[str, Format] = {
    "Int4WeightOnlyConfig|int4_weight_only": _ao_int4,
    "Int8WeightOnlyConfig|int8_weight_only": _ao_int8,
    "Int8DynamicActivationInt8WeightConfig|int8_dynamic_activation_int8_weight": _ao_int8,
    "Float8WeightOnlyConfig|float8_weight_only": _ao_float8,
    "Float8DynamicActivationFloat8WeightConfig|float8_dynamic_activation_float8_weight": _ao_float8,
    "IntxWeightOnlyConfig|Int8DynamicActivationIntxWeightConfig": _ao_intx,
}
