"""Around a planner: an exact search where its map would be refused, or where it raised."""

from __future__ import annotations

import logging
import sys
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple, Union

from bnb_dispatch_fix import features, legacy, requests
from bnb_dispatch_fix.placement.budgets import Budgets
from bnb_dispatch_fix.placement.packing import (
    Device,
    GaveUp,
    Impossible,
    Placement,
    device_order,
    pack,
)
from bnb_dispatch_fix.placement.units import Units
from bnb_dispatch_fix.requests import Request

logger = logging.getLogger("bnb_dispatch_fix")

#: What planners raise on valid input, and quantizers for a map they refuse. Known so far:
#: KeyError for device ids with gaps under balanced_low_0, ValueError for a no-split class
#: without an instance (transformers 5.14.0-5.24.0), IndexError for towers tied pairwise.
PLANNER_ERRORS = (ValueError, KeyError, IndexError)
GIB = 2**30

RequestReader = Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Optional[Request]]


class Outcome(NamedTuple):
    """What the exact search found for a request; `device_map` is None unless it is placed."""

    result: Union[Placement, Impossible, GaveUp]
    units: Units
    budgets: Budgets
    device_map: Optional[Dict[str, Device]]


def search(request: Request) -> Outcome:
    """Search a placement on the accelerators within the caller's own budgets.

    Raises what the installed `get_max_memory` raises for a `max_memory` it cannot read.
    """
    budgets = request.budgets()
    usable = budgets.accelerators
    low_zero = request.strategy == "balanced_low_0" and len(usable) > 1
    fill_last = device_order(usable)[0] if low_zero else None
    for left_out in [(), request.no_placement] if request.no_placement else [()]:
        units = request.units(left_out)
        result = pack(units.units, usable, fill_last=fill_last)
        if isinstance(result, Placement):
            return Outcome(result, units, budgets, units.device_map(result.devices))
    return Outcome(result, units, budgets, None)


def transformers_planner(installed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for `_get_device_map` of transformers 4.50 and newer."""
    return _around(requests.from_transformers, installed, args, kwargs)


def accelerate_planner(installed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for accelerate's `infer_auto_device_map`.

    transformers 4.30-4.49 call it in `from_pretrained`, accelerate's own loader calls it elsewhere.
    """
    read = legacy.read_request if legacy.is_loading() else requests.from_accelerate
    return _around(read, installed, args, kwargs)


def accelerate_bnb_planner(installed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for accelerate's `get_quantized_model_device_map`."""
    return _around(requests.from_accelerate_bnb, installed, args, kwargs)


def _around(
    read: RequestReader,
    installed: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Any:
    """Call the installed planner; step in only where its answer would be refused."""
    request = _read(read, installed, args, kwargs)
    if request is None:
        return installed(*args, **kwargs)
    try:
        device_map = installed(*args, **kwargs)
    except PLANNER_ERRORS as error:
        found = _instead(request, error, None)
        if found is None:
            found = _without_backport(installed, args, kwargs)
        if found is None:
            raise
        return found
    legacy.remember(request, None, device_map)
    if not (request.refuses_offload and isinstance(device_map, Mapping)):
        return device_map
    if offloads(device_map):
        why = "modules on the CPU"
    elif not request.counts_true_sizes and _overfills(request, device_map):
        why = "more on a device than its budget, as not every module counted in its own dtype"
    else:
        return device_map
    found = _instead(request, None, why, device_map)
    return device_map if found is None else found


def _without_backport(
    installed: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Any:
    """The answer to budgets that nobody corrected; None where it is refused too.

    Corrected budgets can turn a map that was accepted into one that is not: with less on the
    accelerators than one module (a map that is all "cpu" is accepted), or with the sizes of
    transformers 4.x that count too little.
    """
    if "backport" not in features.on():
        return None
    with features.without("backport"):
        try:
            return installed(*args, **kwargs)
        except Exception:  # refused in any case: what was raised first is what the caller sees
            return None


def _read(
    read: RequestReader,
    installed: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Optional[Request]:
    """The request, or None where it cannot be read: then the installed planner is on its own."""
    try:
        return read(installed, args, kwargs)
    except Exception as error:
        logger.debug("a planner's call is left alone: %r", error)
        return None


def offloads(device_map: Mapping[str, Device]) -> bool:
    """Whether a device map leaves modules to the CPU or the disk though accelerators are there.

    A map without any accelerator is right on a machine that has none; budgets may name one even
    there.
    """
    places = {str(device) for device in device_map.values()}
    if places <= {"cpu", "disk"}:
        return accelerators_seen() > 0
    return not places.isdisjoint({"cpu", "disk"})


def accelerators_seen() -> int:
    """How many accelerators torch sees."""
    torch: Any = sys.modules.get("torch")
    counts = [0]
    for name in ("cuda", "xpu", "npu", "mlu", "musa", "hpu"):
        try:
            counts.append(int(getattr(torch, name).device_count()))
        except Exception:  # torch has no such backend here, or it is broken
            continue
    return max(counts)


def _overfills(request: Request, device_map: Mapping[str, Device]) -> bool:
    """Whether true sizes put more on an accelerator than the caller's budget.

    transformers 4.x counts every module of a bitsandbytes model as quantized, embeddings too;
    5.x counts in the model's dtype what it keeps in fp32.
    """
    try:
        loads = request.units().loads(device_map)
        usable = request.budgets().accelerators
    except Exception as fault:
        logger.debug("the loads of a device map were not checked: %r", fault)
        return False
    return any(load > usable.get(device, load) for device, load in loads.items())


def _instead(
    request: Request,
    error: Optional[Exception],
    why: Optional[str],
    refused: Any = None,
) -> Optional[Dict[str, Device]]:
    """An exact placement; None where there is none, and then an error is explained.

    No exception leaves it.
    """
    try:
        outcome = search(request)
        if outcome.device_map is not None and "rescue" in features.on():
            if error is not None:
                _validate(request, outcome.device_map)
            _announce(request, why or _one_line(error), outcome)
            return outcome.device_map
    except Exception as fault:
        level = logging.DEBUG if error is not None else logging.WARNING
        logger.log(level, "no exact placement was looked for: %r", fault)
        return None
    legacy.remember(request, outcome, refused)
    if error is not None and "explain" in features.on():
        from bnb_dispatch_fix import diagnosis  # needed for an error only

        diagnosis.explain(error, request, outcome)
    return None


def _validate(request: Request, device_map: Dict[str, Device]) -> None:
    """Ask the quantizer itself; what it raises was not about the placement."""
    validate = getattr(request.quantizer, "validate_environment", None)
    if validate is not None:
        validate(device_map=device_map)


def _announce(request: Request, why: str, outcome: Outcome) -> None:
    """One line: why, where the model went, how to switch it off."""
    usable = outcome.budgets.accelerators
    loads = outcome.units.loads(outcome.device_map or {})
    asked = f"device_map={request.strategy!r}" if request.strategy else "accelerate's planner"
    logger.warning(
        "%s gave %s; every module has a place within the budgets: %s "
        "(BNB_DISPATCH_FIX=backport,explain switches this off)",
        asked,
        why,
        ", ".join(
            f"{device}: {load / GIB:.2f} of {usable[device] / GIB:.2f} GiB"
            for device, load in loads.items()
        ),
    )


def _one_line(error: Optional[Exception]) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:80]}{'...' if len(text) > 80 else ''}"
