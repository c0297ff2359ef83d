"""Checkpoints that are stored quantized: what their configuration says, weight by weight.

Neither kernels nor the library that wrote them are needed: the shapes follow from the settings
(formats.py). Layers of the same shapes take the places of the model's own (packed.py).
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.planning import formats
from bnb_dispatch_fix.planning.formats import Tensors, Weight
from bnb_dispatch_fix.planning.records import PlanError

#: What skips a layer, by the names that configurations have for it.
_SKIPS = ("modules_to_not_convert", "ignored_layers", "skip_modules", "ignore")
#: What a quantizer leaves of a budget for its own buffers.
_SHARES = {"torchao": 0.9}


class Layer(NamedTuple):
    """A layer to decide about: its full name, its class, and whether it is in one of the blocks."""

    name: str
    kind: str
    in_block: bool
    weight: Weight


class Stored(NamedTuple):
    """How a checkpoint is stored.

    `tensors` tells what stands in place of a layer's weight; None leaves it as it is. `experts`
    says whether experts that are one tensor count as the linear layers they are stored as,
    `skips_head` whether the output layer is left out where nothing else is named.
    """

    method: str
    bits: str
    share: float
    experts: bool
    skips_head: bool
    tensors: Callable[[Layer], Optional[Tensors]]


def stored_as(settings: Any) -> Optional[Stored]:
    """What a `quantization_config` says; None for a method that is planned by the release itself.

    Raises:
        PlanError: the method is known and its settings are not.
    """
    found = settings if isinstance(settings, Mapping) else getattr(settings, "to_dict", dict)()
    method = str(getattr(found.get("quant_method"), "value", found.get("quant_method")) or "")
    reader = _READERS.get(method)
    if reader is None:
        return None
    try:
        return reader(found)
    except (formats.Unknown, TypeError, ValueError, KeyError, AttributeError) as error:
        raise PlanError(f"quantization_config: {method} cannot be planned: {error}") from error


def _skipped(settings: Mapping[str, Any]) -> List[str]:
    listed = (settings.get(name) for name in _SKIPS)
    return [str(name) for names in listed if isinstance(names, (list, tuple)) for name in names]


class Names:
    """Names of layers in a configuration: whole parts of a full name, or regular expressions."""

    def __init__(self, listed: Iterable[str]) -> None:
        self._plain = set()
        self._expressions = []
        for text in listed:
            if re.fullmatch(r"[\w.-]+", text):
                self._plain.add(tuple(text.split(".")))
            else:
                expression = text[3:] if text.startswith("re:") else rf"(?:{text})(?:\.|$)"
                self._expressions.append(re.compile(expression))
        self._lengths = sorted(set(map(len, self._plain)))

    def __contains__(self, name: object) -> bool:
        parts = tuple(str(name).split("."))
        for length in self._lengths:
            for start in range(len(parts) - length + 1):
                if parts[start : start + length] in self._plain:
                    return True
        return any(expression.match(str(name)) for expression in self._expressions)


def _linear(
    method: str,
    make: formats.Format,
    settings: Mapping[str, Any],
    bits: str,
    *,
    default_skip: bool = False,
    in_blocks: bool = False,
    only: Tuple[str, ...] = (),
) -> Stored:
    """Every linear layer in the same way, but for those that are named."""
    skipped, wanted = Names(_skipped(settings)), Names(only)

    def tensors(layer: Layer) -> Optional[Tensors]:
        if layer.kind != "Linear" or layer.name in skipped or (in_blocks and not layer.in_block):
            return None
        if only and layer.name not in wanted:
            return None
        return make(settings, layer.weight)

    given = any(settings.get(name) is not None for name in _SKIPS)
    skips_head = default_skip or not given
    return Stored(method, bits, _SHARES.get(method, 1.0), True, skips_head, tensors)


def _gptq(settings: Mapping[str, Any]) -> Stored:
    """Linear layers in the blocks; "dynamic" has settings of its own for some of them."""
    inside = settings.get("modules_in_block_to_quantize") or ()
    only = tuple(
        str(name) for names in inside for name in (names if isinstance(names, list) else [names])
    )
    base = _linear("gptq", formats.gptq, settings, f"{int(settings.get('bits', 4))}-bit",
                   in_blocks=not settings.get("lm_head"), only=only)  # fmt: skip
    dynamic = settings.get("dynamic") or {}

    def tensors(layer: Layer) -> Optional[Tensors]:
        for pattern, changes in dynamic.items():
            sign, _, expression = pattern.partition(":")
            expression = expression if sign in ("+", "-") else pattern
            if layer.kind == "Linear" and re.match(expression, layer.name):
                if sign == "-":
                    return None
                own = {**settings, **(changes or {})}
                return formats.gptq(own, layer.weight)
        return base.tensors(layer)

    return base._replace(tensors=tensors, skips_head=not settings.get("lm_head"))


def _awq(settings: Mapping[str, Any]) -> Stored:
    bits = int(settings.get("bits", settings.get("w_bit", 4)))
    return _linear("awq", formats.awq, settings, f"{bits}-bit", default_skip=True)


def _fp8(settings: Mapping[str, Any]) -> Stored:
    return _linear("fp8", formats.fp8, settings, "8-bit")


def _mxfp4(settings: Mapping[str, Any]) -> Stored:
    """Experts only: transformers and the checkpoints that there are convert nothing else."""
    base = _linear("mxfp4", formats.mxfp4, settings, "4-bit")

    def tensors(layer: Layer) -> Optional[Tensors]:
        return base.tensors(layer) if layer.weight.experts else None

    return base._replace(tensors=tensors)


def _hqq(settings: Mapping[str, Any]) -> Stored:
    """One setting for all layers, or some by the last two parts of a layer's name."""
    config = settings.get("quant_config") or settings
    skipped = Names(_skipped(settings) or ["lm_head"])
    by_tag = "weight_quant_params" not in config and "nbits" not in config
    how = config.get("weight_quant_params", config)
    bits = "mixed" if by_tag else f"{int(how.get('nbits', 4))}-bit"

    def tensors(layer: Layer) -> Optional[Tensors]:
        own = config.get(".".join(layer.name.split(".")[-2:])) if by_tag else config
        if own is None or layer.kind != "Linear" or layer.name in skipped:
            return None
        return formats.hqq(own, layer.weight)

    return Stored("hqq", bits, 1.0, False, False, tensors)


def _compressed(settings: Mapping[str, Any]) -> Stored:
    """Groups of layers, each with its targets; the first that names a layer counts."""
    groups = list((settings.get("config_groups") or {}).values())
    ignored = Names([*_skipped(settings), *map(_inner, _skipped(settings))])
    targets = [Names(map(str, group.get("targets") or ())) for group in groups]
    widths = {int((group.get("weights") or {}).get("num_bits", 16)) for group in groups}

    def tensors(layer: Layer) -> Optional[Tensors]:
        if layer.name in ignored or _inner(layer.name) in ignored:
            return None
        for group, meant in zip(groups, targets):
            if layer.kind in meant or layer.name in meant:
                kind = group.get("format") or settings.get("format")
                return formats.compressed({**group, "format": kind}, layer.weight)
        return None

    bits = f"{widths.pop()}-bit" if len(widths) == 1 else "mixed"
    return Stored("compressed-tensors", bits, 1.0, True, False, tensors)


def _inner(name: str) -> str:
    """A name without the parts that releases have put in or taken out since it was written."""
    if name.startswith("re:"):
        return name
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def _torchao(settings: Mapping[str, Any]) -> Stored:
    """One configuration of torchao's for all linear layers, or some by name."""
    kind = settings.get("quant_type")
    if isinstance(kind, Mapping):
        kind = kind.get("default", kind)
    own: Dict[str, Any]
    if isinstance(kind, Mapping):
        own = {"_type": kind.get("_type"), **(kind.get("_data") or {})}
    else:
        own = {"_type": kind, **(settings.get("quant_type_kwargs") or {})}
    by_name = own.get("fqn_to_config") or own.get("module_fqn_to_config")
    skipped = Names(_skipped(settings))
    embeds = bool(settings.get("include_input_output_embeddings"))

    def tensors(layer: Layer) -> Optional[Tensors]:
        if layer.name in skipped or (layer.kind == "Embedding" and not embeds):
            return None
        if by_name is None:
            return formats.torchao(own, layer.weight)
        inner = by_name.get(layer.name, by_name.get("_default"))
        if not isinstance(inner, Mapping):
            return None
        data = {"_type": inner.get("_type"), **(inner.get("_data") or {})}
        return formats.torchao(data, layer.weight)

    digits = re.search(r"(\d)", str(own.get("_type")))
    bits = f"{digits.group(1)}-bit" if digits and by_name is None else "mixed"
    skips_head = not embeds and settings.get("modules_to_not_convert") is None
    return Stored("torchao", bits, _SHARES["torchao"], False, skips_head, tensors)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Stored]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "hqq": _hqq,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
