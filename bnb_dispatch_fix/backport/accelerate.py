"""`get_balanced_memory` for accelerate, and for transformers 4.x, which plans with it."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional, Union

from bnb_dispatch_fix.backport.balanced import (
    Bytes,
    balanced_caps,
    largest_leaf_module,
    lone_device_share,
    no_split_names,
)
from bnb_dispatch_fix.backport.shapes import Installed
from bnb_dispatch_fix.backport.transformers_v5 import largest_instance
from bnb_dispatch_fix.placement.records import Device

#: What must stand beside the installed function, and the parameters it must take.
HELPERS = ("get_max_memory", "compute_module_sizes")
PARAMETERS = (
    "model",
    "max_memory",
    "no_split_module_classes",
    "dtype",
    "special_dtypes",
    "low_zero",
)

_NAMED_DEVICES = ("cpu", "disk", "mps")


def get_balanced_memory(
    installed: Installed,
    model: Any,
    max_memory: Optional[Mapping[Device, Union[int, str]]] = None,
    no_split_module_classes: Optional[Union[str, Iterable[str]]] = None,
    dtype: Any = None,
    special_dtypes: Optional[Mapping[str, Any]] = None,
    low_zero: bool = False,
) -> Dict[Device, Bytes]:
    """Balanced caps in bytes: accelerate's formula with the buffer of #47203 and #47211, and #4298.

    No accelerate release has the buffer (1.16.0 is the newest looked at). Budgets and
    sizes come from the helpers beside the `installed` function.
    """
    namespace = installed.__globals__
    budgets = namespace["get_max_memory"](max_memory)
    if not all(isinstance(device, int) or device in _NAMED_DEVICES for device in budgets):
        # Until 0.21 only the installed function finds fault with such a name, or plans for it.
        return installed(  # type: ignore[no-any-return]
            model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero
        )
    sizes = namespace["compute_module_sizes"](model, dtype=dtype, special_dtypes=special_dtypes)
    return balanced_caps(
        budgets,
        total=sizes[""],
        largest_no_split=largest_instance(model, no_split_names(no_split_module_classes), sizes),
        largest_leaf=largest_leaf_module(_tensors_only(sizes)),
        low_zero=low_zero,
        caller_set_budgets=max_memory is not None,
        lone_share=lone_device_share(installed),
    )


def _tensors_only(sizes: Mapping[str, Bytes]) -> Dict[str, Bytes]:
    """Drop the modules: accelerate lists tensors and modules in one dict, parents by prefix."""
    parents = {name.rpartition(".")[0] for name in sizes if name}
    return {name: size for name, size in sizes.items() if name and name not in parents}
