"""Carries what the caller asked to the planner, for transformers 4.30-4.49.

These releases plan inside `from_pretrained`: the planner sees budgets that were balanced and
reduced before, so the caller's own are kept beside it, per thread, while the call runs.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.backport.balanced import no_split_names
from bnb_dispatch_fix.placement.budgets import BITSANDBYTES_SHARE
from bnb_dispatch_fix.placement.packing import Device
from bnb_dispatch_fix.placement.sizers import call_sizer
from bnb_dispatch_fix.requests import STRATEGIES, Request, copied, lone_share


class _Load(NamedTuple):
    """The arguments of one running `from_pretrained` that a planner needs."""

    strategy: str
    max_memory: Optional[Dict[Device, Any]]


class _Loads(threading.local):
    def __init__(self) -> None:
        self.running: List[Optional[_Load]] = []


_loads = _Loads()


class _Quantizer(NamedTuple):
    """Stands for the `HfQuantizer` that the planner is not given; knows its configuration."""

    quantization_config: Any


def from_pretrained(installed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for `PreTrainedModel.from_pretrained`: notes the budgets while it runs."""
    strategy = kwargs.get("device_map")
    planned = isinstance(strategy, str) and strategy in STRATEGIES
    _loads.running.append(
        _Load(str(strategy), copied(kwargs.get("max_memory"))) if planned else None
    )
    try:
        return installed(*args, **kwargs)
    finally:
        _loads.running.pop()


def read_request(
    installed: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Request]:
    """The request in a call of `infer_auto_device_map` under a noted `from_pretrained`."""
    load = _loads.running[-1] if _loads.running else None
    if load is None:
        return None
    given = inspect.signature(installed).bind(*args, **kwargs).arguments
    model = given["model"]
    get_max_memory = installed.__globals__["get_max_memory"]
    share = _share_left(load.max_memory, given.get("max_memory"), get_max_memory)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return Request(
        model=model,
        strategy=load.strategy,
        max_memory=load.max_memory,
        no_split=frozenset(no_split_names(given.get("no_split_module_classes"))),
        quantizer=None if config is None else _Quantizer(config),
        get_max_memory=get_max_memory,
        adjust=lambda budgets: {device: size * share for device, size in budgets.items()},
        sizer=call_sizer(model, given.get("dtype"), given.get("special_dtypes")),
        lone_share=lone_share(load.strategy),
    )


def _share_left(
    asked: Optional[Mapping[Device, Any]],
    seen: Optional[Mapping[Device, Any]],
    get_max_memory: Callable[..., Dict[Device, Any]],
) -> float:
    """The part of every budget that the quantizer left, read off a budget nobody balanced.

    Balancing keeps the last accelerator's budget as it is. Free memory is not the same when
    read again, so without `max_memory` it is the tenth that bitsandbytes takes since 4.33.
    """
    if asked is None or seen is None:
        return BITSANDBYTES_SHARE
    budgets = get_max_memory(copied(asked))
    numbered = [d for d in budgets if isinstance(d, int) and budgets[d] > 0 and d in seen]
    if not numbered:
        return 1.0
    last = max(numbered)
    return round(min(1.0, float(seen[last] / budgets[last])), 6)
