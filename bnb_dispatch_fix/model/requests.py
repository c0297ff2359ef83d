"""What a caller asked a planner for, read from the arguments of the installed function."""

from __future__ import annotations

import inspect
import sys
from functools import cached_property
from typing import Any, Callable, Collection, Dict, FrozenSet, Mapping, NamedTuple, Optional, Tuple

from packaging.version import Version

from bnb_dispatch_fix.backport.balanced import (
    LONE_DEVICE_SHARE,
    lone_device_share,
    no_split_names,
)
from bnb_dispatch_fix.backport.shapes import GetMaxMemory, Installed, Module
from bnb_dispatch_fix.model.budgets import (
    Budgets,
    adds_unused,
    reserved_but_unused,
    usable_budgets,
)
from bnb_dispatch_fix.model.noted import Balanced, behind
from bnb_dispatch_fix.model.sizers import Sizer, call_sizer, planners_count_is_true, sizer_for
from bnb_dispatch_fix.model.units import Units, measure
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import STRATEGIES


class Request(NamedTuple):
    """One call of a planner.

    `strategy` is one of `wording.STRATEGIES`, "" where the planner is not told.
    `max_memory` is as the caller gave it, before anything is balanced or held back;
    `quantizer` is transformers' `HfQuantizer`, accelerate's `BnbQuantizationConfig`, or None.
    `adjust` takes off each budget (bytes) what the quantizer keeps; `sizer` tells the bytes per
    element once loaded; `lone_share` is used of a lone accelerator's free memory; `adds_unused`
    says that the planner adds what torch has reserved and does not use; `no_placement` are the
    names of parameters that it leaves without a place where the model does not fit with them;
    `counts_true_sizes` says that its own count of each tensor is that of `sizer`; `call` is the
    installed planner and what it was given, by name, for who wants to ask it again; `refuses` asks
    a quantizer whose refusals are not known here (see `refuses_offload`) about a map; `balanced`
    is what was asked for the budgets, where they are capped and `strategy` is "".
    """

    model: Any
    strategy: str
    max_memory: Optional[Mapping[Device, Any]]
    no_split: FrozenSet[str]
    quantizer: Any
    get_max_memory: GetMaxMemory
    adjust: Optional[Callable[[Dict[Device, Any]], Dict[Device, Any]]]
    sizer: Sizer
    lone_share: float = LONE_DEVICE_SHARE
    adds_unused: bool = False
    no_placement: FrozenSet[str] = frozenset()
    counts_true_sizes: bool = False
    call: Optional[Tuple[Callable[..., Any], Mapping[str, Any]]] = None
    refuses: Optional[Callable[[Mapping[str, Device]], bool]] = None
    balanced: Optional[Balanced] = None

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether bitsandbytes will quantize the model."""
        return is_bitsandbytes(self.quantizer)

    @property
    def is_diffusers(self) -> bool:
        """Whether the model is one of diffusers'; its arguments and quantizers are its own."""
        classes = type(self.model).__mro__
        return any(base.__module__.startswith("diffusers.") for base in classes)

    @property
    def refuses_offload(self) -> bool:
        """Whether a module on the CPU or the disk is an error, or silently slow, here."""
        return _offload_switch(self.quantizer) is False

    @property
    def decided_later(self) -> bool:
        """Whether the release looks at the map only after its planner: transformers 4.30-4.49."""
        return self.call is not None and "device_map" not in self.call[1]

    def budgets(self) -> Budgets:
        """What each device may hold, in bytes.

        Raises what the installed `get_max_memory` raises for a `max_memory` it cannot read.
        """
        return usable_budgets(
            self.max_memory,
            get_max_memory=self.get_max_memory,
            adjust=self.adjust,
            single_device_share=self.lone_share,
            unused=reserved_but_unused if self.adds_unused else None,
        )

    def units(self, no_placement_params: Collection[str] = ()) -> Units:
        """What goes to one device whole, in true bytes."""
        return measure(
            self.model,
            no_split_module_classes=self.no_split,
            sizer=self.sizer,
            no_placement_params=no_placement_params,
        )


class Measured:
    """What the model of a request takes and what devices have for it, each read when first asked.

    For who looks at one answer of a planner more than once: a walk over the model is a large part
    of what a plan takes.
    """

    def __init__(self, request: Request) -> None:
        self.request = request

    @cached_property
    def budgets(self) -> Budgets:
        """See `Request.budgets`; what that raises is raised."""
        return self.request.budgets()

    @cached_property
    def units(self) -> Units:
        """See `Request.units`."""
        return self.request.units()

    def as_balanced(self) -> Measured:
        """The same before the budgets were capped; itself where nobody capped them."""
        asked = self.request.balanced
        if asked is None:
            return self
        found = Measured(
            self.request._replace(
                strategy=asked.strategy,
                max_memory=asked.max_memory,
                lone_share=asked.lone_share,
                balanced=None,
            )
        )
        found.units = self.units
        return found


def is_bitsandbytes(quantizer: Any) -> bool:
    """Whether a quantizer, or a configuration of accelerate's, is that of bitsandbytes."""
    return _offload_switch(quantizer) is not None


def _offload_switch(quantizer: Any) -> Optional[bool]:
    """The caller's `llm_int8_enable_fp32_cpu_offload`; None where it is not bitsandbytes."""
    if hasattr(quantizer, "load_in_4bit") and hasattr(quantizer, "skip_modules"):
        # accelerate's own config has no such switch: 8-bit modules may always be offloaded.
        return not quantizer.load_in_4bit
    config = getattr(quantizer, "quantization_config", None)
    switch = getattr(config, "llm_int8_enable_fp32_cpu_offload", None)
    return None if switch is None else bool(switch)


def from_transformers(
    installed: Installed, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Request]:
    """The request in a call of `_get_device_map` (transformers 4.50 and newer).

    None where no plan was asked for: `device_map` is a dict, or no strategy.
    """
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    strategy = given.get("device_map")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return None
    model, quantizer = given["model"], given.get("hf_quantizer")
    dtype = given.get("dtype", given.get("torch_dtype"))
    ask = getattr(model, "_get_no_split_modules", None)  # a plain attribute since 5.1
    classes = model._no_split_modules if ask is None else ask(strategy)
    return Request(
        model=model,
        strategy=strategy,
        max_memory=copied(given.get("max_memory")),
        no_split=frozenset(no_split_names(classes)),
        quantizer=quantizer,
        get_max_memory=installed.__globals__["get_max_memory"],
        adjust=getattr(quantizer, "adjust_max_memory", None),
        sizer=sizer_for(model, quantizer, dtype),
        lone_share=lone_share(strategy, installed),
        adds_unused=adds_unused(release_of("transformers")),
        no_placement=_no_placement(installed, model),
        counts_true_sizes=planners_count_is_true(model, quantizer, dtype),
        call=(installed, given),
    )


def _no_placement(installed: Installed, model: Module) -> FrozenSet[str]:
    """The model's `_no_placement_params`, where the release knows of these (5.16 and newer)."""
    planner = installed.__globals__.get("infer_auto_device_map")
    if planner is None or "no_placement_params" not in inspect.signature(planner).parameters:
        return frozenset()
    return frozenset(getattr(model, "_no_placement_params", None) or ())


def from_accelerate_bnb(
    installed: Installed, args: Tuple[Any, ...], kwargs: Dict[str, Any]
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
        max_memory=copied(given.get("max_memory")),
        no_split=frozenset(no_split_names(given.get("no_split_module_classes"))),
        quantizer=config,
        get_max_memory=sys.modules["accelerate.utils.modeling"].get_max_memory,
        adjust=None,
        sizer=sizer_for(given["model"], config),
        lone_share=lone_share(strategy, installed),
        call=(installed, given),
    )


def from_accelerate(installed: Installed, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Request:
    """The request in a call of accelerate's `infer_auto_device_map` by its own loader.

    Its budgets are balanced already, by a strategy that is not known here (""), unless it was
    noted (see noted.py).
    """
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    model = given["model"]
    return Request(
        model=model,
        strategy="",
        max_memory=copied(given.get("max_memory")),
        no_split=frozenset(no_split_names(given.get("no_split_module_classes"))),
        quantizer=None,
        get_max_memory=installed.__globals__["get_max_memory"],
        adjust=None,
        sizer=call_sizer(model, given.get("dtype"), given.get("special_dtypes")),
        lone_share=1.0,
        balanced=behind(model, given.get("max_memory")),
    )


def copied(max_memory: Optional[Mapping[Device, Any]]) -> Optional[Dict[Device, Any]]:
    """A copy: the installed `get_max_memory` turns texts into numbers in the caller's dict."""
    # What is no mapping is the installed release's to refuse.
    return dict(max_memory) if isinstance(max_memory, Mapping) else max_memory


def lone_share(strategy: str, planner: Callable[..., Any]) -> float:
    """What is used of a lone accelerator without `max_memory`; only balancing keeps some back.

    How much, the release's `get_balanced_memory` beside the `planner` says.
    """
    if strategy == "sequential":
        return 1.0
    return lone_device_share(planner.__globals__.get("get_balanced_memory"))


def release_of(package: str) -> Tuple[int, ...]:
    """The numbers of the version that is loaded."""
    return Version(sys.modules[package].__version__).release
