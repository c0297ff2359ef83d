"""What a caller asked a planner for, read from the arguments of the installed function."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, Dict, FrozenSet, Mapping, NamedTuple, Optional, Tuple, Union

from bnb_dispatch_fix.backport.balanced import no_split_names

Device = Union[int, str]

#: The values of `device_map` that ask for a plan.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


class Request(NamedTuple):
    """One call of a planner.

    `max_memory` is as the caller gave it, before anything is balanced or held back;
    `quantizer` is transformers' `HfQuantizer`, accelerate's `BnbQuantizationConfig`, or None.
    """

    model: Any
    strategy: str
    max_memory: Optional[Mapping[Device, Any]]
    no_split: FrozenSet[str]
    quantizer: Any
    get_max_memory: Callable[..., Dict[Device, Any]]
    dtype: Any = None

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether bitsandbytes will quantize the model."""
        return _offload_switch(self.quantizer) is not None

    @property
    def refuses_offload(self) -> bool:
        """Whether a module on the CPU or the disk is an error, or silently slow, here."""
        return _offload_switch(self.quantizer) is False

    def adjusted(self, budgets: Dict[Device, Any]) -> Dict[Device, Any]:
        """The budgets the quantizer leaves (bytes); bitsandbytes takes a tenth since 4.33."""
        adjust = getattr(self.quantizer, "adjust_max_memory", None)
        return budgets if adjust is None else dict(adjust(budgets))


def _offload_switch(quantizer: Any) -> Optional[bool]:
    """The caller's `llm_int8_enable_fp32_cpu_offload`; None where it is not bitsandbytes."""
    if hasattr(quantizer, "load_in_4bit") and hasattr(quantizer, "skip_modules"):
        # accelerate's own config has no such switch: 8-bit modules may always be offloaded.
        return not quantizer.load_in_4bit
    config = getattr(quantizer, "quantization_config", None)
    switch = getattr(config, "llm_int8_enable_fp32_cpu_offload", None)
    return None if switch is None else bool(switch)


def from_transformers(
    installed: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Request]:
    """The request in a call of `_get_device_map` (transformers 4.50 and newer).

    None where no plan was asked for: `device_map` is a dict, or no strategy.
    """
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    strategy = given.get("device_map")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return None
    model = given["model"]
    ask = getattr(model, "_get_no_split_modules", None)  # a plain attribute since 5.1
    classes = model._no_split_modules if ask is None else ask(strategy)
    return Request(
        model=model,
        strategy=strategy,
        max_memory=_copied(given.get("max_memory")),
        no_split=frozenset(no_split_names(classes)),
        quantizer=given.get("hf_quantizer"),
        get_max_memory=_beside(installed, "get_max_memory"),
        dtype=given.get("dtype", given.get("torch_dtype")),
    )


def from_accelerate_bnb(
    installed: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Request]:
    """The request in a call of `accelerate.utils.bnb.get_quantized_model_device_map`."""
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    strategy = given.get("device_map")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return None
    config = given["bnb_quantization_config"]
    return Request(
        model=given["model"],
        strategy=strategy,
        max_memory=_copied(given.get("max_memory")),
        no_split=frozenset(no_split_names(given.get("no_split_module_classes"))),
        quantizer=config,
        get_max_memory=sys.modules["accelerate.utils.modeling"].get_max_memory,
        dtype=config.torch_dtype,
    )


def _copied(max_memory: Optional[Mapping[Device, Any]]) -> Optional[Dict[Device, Any]]:
    """A copy: the installed `get_max_memory` turns texts into numbers in the caller's dict."""
    return None if max_memory is None else dict(max_memory)


def _beside(installed: Callable[..., Any], helper: str) -> Callable[..., Dict[Device, Any]]:
    """A helper of the module the planner lives in, as it is now."""
    found: Callable[..., Dict[Device, Any]] = installed.__globals__[helper]
    return found
