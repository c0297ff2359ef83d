"""Layers on the meta device with the shapes of a quantized checkpoint, in the model's own places.

In a process of its own: torch is needed, nothing is ever computed with numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import torch  # found, not required: whoever imports this module is ready for its absence

from bnb_dispatch_fix.planning.formats import Tensors, Unknown, Weight
from bnb_dispatch_fix.planning.records import PlanError
from bnb_dispatch_fix.planning.stored import Layer, Names, Stored

#: What `put_in` calls experts that are one tensor.
EXPERTS = "experts"


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch's types are not looked at
    """In place of a linear layer or an embedding; as wide as that."""

    def __init__(self, layer: Any, tensors: Tensors) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        _register(self, tensors, ())
        self.register_parameter("bias", getattr(layer, "bias", None))


class PackedExperts(torch.nn.Module):  # type: ignore[misc]  # as above
    """In place of experts that are one tensor for each projection."""

    def __init__(self, experts: Any, packed: Dict[str, Tuple[Weight, Tensors]]) -> None:
        super().__init__()
        for name, tensor in experts._parameters.items():
            if name not in packed and tensor is not None:
                self.register_parameter(name, tensor)
        for name, tensor in experts._buffers.items():
            self.register_buffer(name, tensor)
        for name, (weight, tensors) in packed.items():
            named_so = {f"{name}_{part}": shape for part, shape in tensors.items()}
            _register(self, named_so, (weight.experts,))
        self._sides = [(weight.outside, weight.inside) for weight, _ in packed.values()]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """What the widest projection takes for all tokens, and as much as came in."""
        outside, inside = max(self._sides)
        weight = torch.empty((outside, inside), dtype=hidden_states.dtype)
        rows = hidden_states.numel() // hidden_states.shape[-1]
        projected = torch.empty((rows, outside), dtype=hidden_states.dtype)
        result = torch.empty_like(hidden_states)
        del weight, projected
        return result


def _register(module: Any, tensors: Tensors, before: Tuple[int, ...]) -> None:
    """Buffers of these shapes; their names are the module's `packed`."""
    module.packed = (*getattr(module, "packed", ()), *tensors)
    for name, (shape, dtype) in tensors.items():
        empty = torch.empty((*before, *shape), dtype=_dtype(dtype), device="meta")
        module.register_buffer(name, empty)


def _dtype(name: str) -> Any:
    """An integer as wide: accelerate counts these as they are, floating point in the model's."""
    wide = re.match(r"b?float(\d+)", name)
    return getattr(torch, f"int{wide.group(1)}" if wide else name)


def put_in(model: Any, stored: Stored) -> Set[str]:
    """Give a model the layers that its checkpoint has; returns the kinds that were replaced.

    Raises:
        PlanError: the sizes of one are not known here.
    """
    try:
        return _put_in(model, stored)
    except Unknown as error:
        what = f"{stored.method} ({error})"
        raise PlanError(f"quantization_config: sizes of {what} are not known here") from None


def _put_in(model: Any, stored: Stored) -> Set[str]:
    replaced = set()
    hidden = _hidden_size(model)
    head = _head_names(model) if stored.skips_head else []
    kept = Names([*head, *(getattr(model, "_keep_in_fp32_modules", None) or ())])
    blocks = _blocks(model)
    for name, parent, leaf, module in list(_places(model)):
        if name in kept:
            continue
        in_block = blocks is not None and name.startswith(blocks)
        if type(module) in (torch.nn.Linear, torch.nn.Embedding):
            outside, inside = module.weight.shape
            weight = Weight(outside, inside, 0, _name(module.weight))
            tensors = stored.tensors(Layer(name, type(module).__name__, in_block, weight))
            if tensors is not None:
                parent._modules[leaf] = PackedLinear(module, tensors)
                replaced.add(type(module).__name__)
        elif stored.experts and "expert" in f"{leaf} {type(module).__name__}".lower():
            packed = dict(_packed_experts(name, module, in_block, hidden, stored))
            if packed:
                parent._modules[leaf] = PackedExperts(module, packed)
                replaced.add(EXPERTS)
    return replaced


def _places(model: Any) -> Iterator[Tuple[str, Any, str, Any]]:
    """Every module below the model: its name, its parent, its name there, itself."""
    for name, parent in model.named_modules():
        for leaf, module in parent._modules.items():
            if module is not None:
                yield f"{name}.{leaf}" if name else leaf, parent, leaf, module


def _packed_experts(
    name: str, module: Any, in_block: bool, hidden: int, stored: Stored
) -> Iterator[Tuple[str, Tuple[Weight, Tensors]]]:
    """The projections of experts that are one tensor, as the checkpoint has them."""
    for leaf, tensor in module._parameters.items():
        if tensor is None or tensor.dim() != 3:
            continue
        experts, outside, inside = tensor.shape
        if (
            (inside if "down" in leaf else outside)
            == hidden
            != (outside if "down" in leaf else inside)
        ):  # transposed: gate and up read what is hidden, down writes it
            outside, inside = inside, outside
        weight = Weight(outside, inside, experts, _name(tensor))
        tensors = stored.tensors(Layer(f"{name}.{leaf}", "Linear", in_block, weight))
        if tensors is not None:
            yield leaf, (weight, tensors)


def _name(tensor: Any) -> str:
    return str(tensor.dtype).replace("torch.", "")


def _hidden_size(model: Any) -> int:
    config = getattr(model.config, "text_config", None) or model.config
    return int(getattr(config, "hidden_size", 0) or 0)


def _head_names(model: Any) -> List[str]:
    """The output layer, under all its names; the model's last child where it has none."""
    try:
        head = model.get_output_embeddings()
    except Exception:  # noqa: BLE001  # some models do not implement it
        head = None
    if head is None:
        return list(model._modules)[-1:]
    return [name for name, module in model.named_modules() if module is head]


def _blocks(model: Any) -> Optional[str]:
    """What the names of the blocks begin with: of all lists the one with most in it."""
    sizes: Counter[str] = Counter()
    for name, module in model.named_modules():
        found = re.match(r"(.*?\.)\d+\.", f"{name}.")
        if found:
            sizes[found.group(1)] += sum(tensor.numel() for tensor in module._parameters.values()
                                         if tensor is not None)  # fmt: skip
    return sizes.most_common(1)[0][0] if sizes else None
