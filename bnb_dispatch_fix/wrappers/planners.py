"""Around a planner: an exact search where its map would be refused, or where it raised.

With `even` on, also where its map is accepted (see spreading.py).
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

from bnb_dispatch_fix import features, states
from bnb_dispatch_fix.backport.shapes import Installed
from bnb_dispatch_fix.model import requests
from bnb_dispatch_fix.model.budgets import overfull
from bnb_dispatch_fix.model.device_map import all_on_host
from bnb_dispatch_fix.model.load import (
    is_asking,
    leave_if_measuring,
    read_request,
    remember,
    uncorrected,
)
from bnb_dispatch_fix.model.requests import Measured, Request
from bnb_dispatch_fix.model.search import Outcome, offloads, search
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import amount, cell, log, one_line
from bnb_dispatch_fix.wrappers import spreading
from bnb_dispatch_fix.wrappers.contained import contained

#: What planners raise on valid input, and quantizers for a map they refuse. Known so far:
#: KeyError for device ids with gaps under balanced_low_0, ValueError for a no-split class
#: without an instance (transformers 5.14.0-5.24.0), IndexError for towers tied pairwise.
PLANNER_ERRORS = (ValueError, KeyError, IndexError)

RequestReader = Callable[[Installed, Tuple[Any, ...], Dict[str, Any]], Optional[Request]]


class _Thread(threading.local):
    planning = False


_thread = _Thread()


@contextmanager
def _planning() -> Iterator[None]:
    """The planners that an installed planner calls in this thread are parts of it."""
    before, _thread.planning = _thread.planning, True
    try:
        yield
    finally:
        _thread.planning = before


def transformers_planner(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    """Stands for `_get_device_map` of transformers 4.50 and newer."""
    return around(requests.from_transformers, installed, args, kwargs)


def accelerate_planner(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    """Stands for accelerate's `infer_auto_device_map`, under all of its names.

    transformers 4.30-4.49 call it in `from_pretrained`; whoever else calls it asks for itself. A
    planner that is looked after already calls it for a part of its answer.
    """
    if _thread.planning:
        return installed(*args, **kwargs)
    model = args[0] if args else kwargs.get("model")
    read = read_request if is_asking(model) else requests.from_accelerate
    return around(read, installed, args, kwargs)


def accelerate_bnb_planner(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    """Stands for accelerate's `get_quantized_model_device_map`."""
    return around(requests.from_accelerate_bnb, installed, args, kwargs)


def around(
    read: RequestReader,
    installed: Installed,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Any:
    """Call a planner; step in only where its answer would be refused, or is to be spread."""
    request = _read(read, installed, args, kwargs)
    leave_if_measuring(request)
    if request is None:
        with _planning():
            return installed(*args, **kwargs)
    measured = Measured(request)
    device_map = _answer(measured, installed, args, kwargs)
    with contained("plan unread"):
        _look_at(measured, device_map, decided=read is not read_request)
    return device_map


def _look_at(measured: Measured, device_map: Any, decided: bool) -> None:
    """Warn of an odd plan that is accepted; `decided`: the release will not refuse it later."""
    request = measured.request
    if "explain" not in features.on():
        return
    if all_on_host(device_map):
        from bnb_dispatch_fix.explain import whole_model  # needed for an odd plan only

        whole_model.warn(request, device_map, decided=decided)
    elif request.refuses_offload and isinstance(device_map, Mapping):
        from bnb_dispatch_fix.explain import overfilled  # for what bitsandbytes quantizes only

        overfilled.warn(measured, device_map, decided=decided)


def _answer(
    measured: Measured,
    installed: Installed,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Any:
    """The installed planner's answer, or a better one; raises what it raises, explained."""
    request = measured.request
    try:
        with _planning():
            device_map = installed(*args, **kwargs)
    except PLANNER_ERRORS as error:
        found, outcome = _instead(measured, error, None)
        if found is None and "backport" in features.on():
            with suppress(Exception):  # refused in any case: the first error is what is seen
                found = _without_backport(request, outcome, installed, args, kwargs)
        if found is None:
            raise
        return found
    remember(request, None, device_map)
    why = None
    with contained("plan unread"):
        why = _wrong_with(measured, device_map)
    if why is None:
        return spreading.spread(measured, device_map)
    found, outcome = _instead(measured, None, why, device_map)
    if found is None:
        better = spreading.spread(measured, device_map)
        found = None if better is device_map else better
    if found is None and "backport" in features.on():
        if all_on_host(device_map) and request.decided_later:
            return device_map  # refused for sure, and by an error that says what it is about
        try:
            return _without_backport(request, outcome, installed, args, kwargs)
        except Exception as error:
            _explain(error, request, outcome)
            raise
    return device_map if found is None else found


def _wrong_with(measured: Measured, device_map: Any) -> Optional[str]:
    """Why a map will be refused, or should be; None where nothing is wrong with it."""
    request = measured.request
    if not isinstance(device_map, Mapping):
        return None
    if request.refuses is not None and request.refuses(device_map):
        return "a map that its quantizer refuses"
    if not request.refuses_offload:
        return None
    if offloads(device_map):
        return "modules on the CPU"
    if not request.counts_true_sizes and _overfills(measured, device_map):
        return "more on a device than its budget, as not every module counted in its own dtype"
    return None


def _without_backport(
    request: Request,
    outcome: Optional[Outcome],
    installed: Installed,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Any:
    """The answer to budgets that nobody corrected; raises what the planner raises.

    Where no placement exists, what comes out is what came out without the shim. Corrected budgets
    can turn a map that was accepted into one that is not: with less on the accelerators than one
    module (a map that is all "cpu" is accepted), or with the sizes of transformers 4.x that count
    too little. And with these it can accept more on a device than its budget, and refused before.
    """
    with features.without("backport"), _planning():
        device_map = uncorrected(request, installed, args, kwargs)
    remember(request, outcome, device_map)
    return device_map


def _read(
    read: RequestReader,
    installed: Installed,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Optional[Request]:
    """The request, or None where it cannot be read: then the installed planner is on its own."""
    try:
        return read(installed, args, kwargs)
    except Exception as error:  # noqa: BLE001  # the installed planner is on its own
        log(states.contained("request unread", error), "request unread", error)
        return None


def _overfills(measured: Measured, device_map: Mapping[str, Device]) -> bool:
    """Whether true sizes put more on an accelerator than the caller's budget.

    transformers 4.x counts every module of a bitsandbytes model as quantized, embeddings too;
    5.x counts in the model's dtype what it keeps in fp32.
    """
    try:
        return bool(overfull(measured.units.loads(device_map), measured.budgets))
    except Exception as fault:  # noqa: BLE001  # the map stays as it is
        log(states.contained("loads unchecked", fault), "loads unchecked", fault)
        return False


def _instead(
    measured: Measured,
    error: Optional[Exception],
    why: Optional[str],
    refused: Any = None,
) -> Tuple[Optional[Dict[str, Device]], Optional[Outcome]]:
    """An exact placement, None where there is none, and what the search found.

    An error without a placement is explained. No exception leaves it.
    """
    request = measured.request
    try:
        spread = spreading.to_spread(measured)
        if spread is None:
            outcome = search(request, measured)
        else:
            outcome = search(spread.request, spread, "even")
        if outcome.device_map is not None and "rescue" in features.on():
            if error is not None:
                _validate(request, outcome.device_map)
            _announce(request, why or _short(error), outcome)
            if spread is not None:
                spreading.announce(spread.request, outcome, refused)
            return outcome.device_map, outcome
    except Exception as fault:  # noqa: BLE001  # the installed answer stays
        level = (
            logging.DEBUG if error is not None else states.contained("no exact placement", fault)
        )
        log(level, "no exact placement", fault)
        return None, None
    remember(request, outcome, refused)
    if error is not None:
        _explain(error, request, outcome)
    return None, outcome


def _explain(error: Exception, request: Request, outcome: Optional[Outcome]) -> None:
    with contained("unexplained"):
        if "explain" in features.on():
            from bnb_dispatch_fix.explain import refusal  # needed for an error only

            refusal.explain(error, request, outcome)


def _validate(request: Request, device_map: Dict[str, Device]) -> None:
    """Ask the quantizer itself; what it raises was not about the placement."""
    validate = getattr(request.quantizer, "validate_environment", None)
    if validate is not None:
        validate(device_map=device_map)


def _announce(request: Request, why: str, outcome: Outcome) -> None:
    """One line: why, where the model went, how to switch it off."""
    asked = f"device_map={request.strategy!r}" if request.strategy else "accelerate's planner"
    log(
        logging.WARNING,
        "rescued",
        asked,
        why,
        ", ".join(_loads(outcome)),
    )


def _loads(outcome: Outcome) -> Iterator[str]:
    """Device by device what lies there; with scales, of the budget whose tenth is for these."""
    device_map = outcome.device_map or {}
    stored = outcome.units.stored().loads(device_map)
    for device, load in outcome.units.loads(device_map).items():
        whole = stored[device]
        if amount(whole) == amount(load):
            yield f"{device}: {cell(load)} of {amount(outcome.budgets.usable[device])}"
        else:
            given = amount(outcome.budgets.given[device])
            yield f"{device}: {cell(load)} + {cell(whole - load)} scales of {given}"


def _short(error: Optional[Exception]) -> str:
    return "no map" if error is None else one_line(error, 80, "...")
