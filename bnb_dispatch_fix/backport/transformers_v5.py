"""`get_balanced_memory` for transformers 5.x, which plans with functions of its own."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional, Union

from bnb_dispatch_fix.backport.balanced import (
    Bytes,
    balanced_caps,
    lone_device_share,
    no_split_names,
)
from bnb_dispatch_fix.backport.shapes import Installed, Module
from bnb_dispatch_fix.placement.records import Device

#: What must stand beside the installed function, and the parameters it must take.
HELPERS = ("get_max_memory", "compute_module_sizes")
PARAMETERS = ("model", "max_memory", "no_split_module_classes", "hf_quantizer", "low_zero")


def get_balanced_memory(
    installed: Installed,
    model: Any,
    max_memory: Optional[Mapping[Device, Union[int, str]]] = None,
    no_split_module_classes: Optional[Union[str, Iterable[str]]] = None,
    hf_quantizer: Any = None,
    low_zero: bool = False,
) -> Dict[Device, Bytes]:
    """Balanced caps in bytes, equal to those of transformers 5.24.0 (#47203, #47211).

    Budgets and sizes come from the helpers beside the `installed` function. Differs from
    5.24.0 in what that lacks: a no-split class without an instance counts as 0 (5.14.0-5.24.0:
    ValueError), and `low_zero` reads budgets by device id (accelerate #4298).
    """
    namespace = installed.__globals__
    budgets = namespace["get_max_memory"](max_memory)
    sizes, leaf_sizes = namespace["compute_module_sizes"](model, hf_quantizer)
    names = no_split_names(no_split_module_classes)
    return balanced_caps(
        budgets,
        total=sizes[""],
        largest_no_split=largest_instance(model, names, sizes),
        largest_leaf=max(leaf_sizes.values(), default=0),
        low_zero=low_zero,
        caller_set_budgets=max_memory is not None,
        lone_share=lone_device_share(installed),
    )


def largest_instance(
    model: Module, class_names: Iterable[str], sizes: Mapping[str, Bytes]
) -> Bytes:
    """Bytes of the largest module whose class is one of `class_names`; 0 without any (#47203)."""
    wanted = frozenset(class_names)
    if not wanted:
        return 0
    return max(
        (
            sizes.get(name, 0)
            for name, module in model.named_modules()
            if type(module).__name__ in wanted
        ),
        default=0,
    )
