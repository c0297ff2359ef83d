"""In place of a quantizer whose library or kernels may not be there: what a planner asks of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, Mapping, Tuple

from bnb_dispatch_fix.model.requests import Request, release_of
from bnb_dispatch_fix.model.sizers import Sizer, Storage, own_storage
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning.packed import PackedExperts, PackedLinear
from bnb_dispatch_fix.planning.stored import Stored
from bnb_dispatch_fix.wording import HOST


class StandIn:
    """Knows the tensors of the checkpoint as they are: nothing becomes larger or smaller."""

    pre_quantized = True

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.quantization_config = SimpleNamespace(quant_method=stored.method)

    def adjust_max_memory(self, max_memory: Mapping[Device, Any]) -> Dict[Device, Any]:
        """What the quantizer leaves of each budget."""
        return {device: size * self.stored.share for device, size in max_memory.items()}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a map that the quantizer refuses."""
        device_map = kwargs.get("device_map")
        places = set(map(str, device_map.values())) if isinstance(device_map, Mapping) else set()
        if places.intersection(_refused(self.stored.method)):
            raise ValueError(f"{self.stored.method} takes no module on the CPU or the disk")

    def param_element_size(self, model: Any, name: str, tensor: Any) -> float:
        """Bytes of an element; asked by transformers 5."""
        return float(tensor.element_size())

    def get_special_dtypes_update(self, model: Any, dtype: Any) -> Dict[str, Any]:
        """Tensors that are not counted in the model's dtype; accelerate knows those of integers."""
        return {}

    def adjust_target_dtype(self, dtype: Any) -> Any:
        """What everything else is counted in."""
        return dtype


def _refused(method: str) -> Tuple[str, ...]:
    """Where a quantizer takes no modules of a checkpoint: read off 4.57.6 and 5.12.1."""
    if method == "hqq" or (method == "awq" and release_of("transformers") < (5,)):
        return HOST
    return ("disk",) if method == "torchao" else ()


def in_true_sizes(request: Request, stored: Stored) -> Request:
    """The request, with what is packed counted as it is."""
    return request._replace(sizer=_sizer(request.sizer, stored))


def _sizer(others: Sizer, stored: Stored) -> Sizer:
    def size(name: str, tensor: Any, owner: Any) -> Storage:
        packed = owner.packed if isinstance(owner, (PackedLinear, PackedExperts)) else ()
        if name.rpartition(".")[2] in packed:
            return own_storage(tensor.dtype)._replace(label=stored.bits, quantized=True)
        return others(name, tensor, owner)

    return size
