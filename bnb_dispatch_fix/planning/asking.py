"""Takes a `from_pretrained` to its planner, reads what is asked there, and asks it again.

Each run of `records.RUNS` is the same question with other features on.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial, wraps
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import bnb_dispatch_fix
from bnb_dispatch_fix.model import requests
from bnb_dispatch_fix.model.device_map import refused_map
from bnb_dispatch_fix.model.load import read_request
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.patching.patches import original_of
from bnb_dispatch_fix.planning import components, simulation
from bnb_dispatch_fix.planning.records import RUNS, PlanError, runs_of, told
from bnb_dispatch_fix.planning.runs import Attempt

Load = Callable[[], Any]


class Question(NamedTuple):
    """What a planner is asked, and a call for each run's answer.

    `attempts` is told whether the run "even" is one of them.
    """

    request: Request
    attempts: Callable[[bool], Dict[str, Attempt]]


class _Called(BaseException):
    """Carries the arguments of the planner out of `from_pretrained`."""

    def __init__(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        super().__init__()
        self.args_of_call, self.kwargs_of_call = args, kwargs


def of_transformers(load: Load, quantizer: Any = None) -> Question:
    """The question of a `from_pretrained` of transformers.

    Planners that are told the quantizer (4.50 and newer) are told `quantizer`, where it is given.

    Raises:
        PlanError: it ends before it asks.
    """
    bnb_dispatch_fix.import_targets()
    modeling = importlib.import_module("transformers.modeling_utils")
    if hasattr(modeling, "_get_device_map"):
        reader = requests.from_transformers
        return _planner(load, modeling, "_get_device_map", reader, quantizer)
    return _from_pretrained(load, modeling)


def of_diffusers(load: Load) -> Question:
    """The same of diffusers, whose quantizer is asked after the planner."""
    bnb_dispatch_fix.import_targets()
    modeling = importlib.import_module("diffusers.models.modeling_utils")
    with components.gpus():
        asked = _planner(load, modeling, "_determine_device_map", components.request_of)

    def attempts(even: bool) -> Dict[str, Attempt]:
        with components.gpus():
            return asked.attempts(even)

    return asked._replace(attempts=attempts)


def _planner(
    load: Load, modeling: Any, planner: str, read: Callable[..., Any], quantizer: Any = None
) -> Question:
    """Since 4.50 the planner is a function: the model is built once, the planner asked again."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    bnb_dispatch_fix.deactivate()
    with simulation.replaced(modeling, planner, stop):
        try:
            load()
        except _Called as called:
            args, kwargs = called.args_of_call, called.kwargs_of_call
        except PlanError:
            raise
        except Exception as error:
            reason = told(error)
            raise PlanError(f"from_pretrained stops before it plans: {reason}") from error
        else:
            raise PlanError("from_pretrained did not ask for a device map; is it a model?")
    installed = original_of(getattr(modeling, planner))
    if quantizer is not None:
        bound = inspect.signature(installed).bind(*args, **kwargs)
        bound.arguments["hf_quantizer"] = quantizer
        args, kwargs = bound.args, bound.kwargs
    request = read(installed, *_copied(args, kwargs))

    def attempts(even: bool) -> Dict[str, Attempt]:
        found = {}
        for name, features in runs_of(even).items():
            bnb_dispatch_fix.activate(features)
            fresh_args, fresh_kwargs = _copied(args, kwargs)
            ask = partial(getattr(modeling, planner), *fresh_args, **fresh_kwargs)
            if request.is_diffusers:
                ask = partial(components.accepted, ask, request)
            found[name] = _attempt(ask)
        return found

    return Question(request, attempts)


def _from_pretrained(load: Load, modeling: Any) -> Question:
    """Until 4.49 the planner is a part of `from_pretrained`, which is called for each."""
    seen: List[Any] = []

    def attempt(features: Tuple[str, ...]) -> Attempt:
        bnb_dispatch_fix.activate(features)
        with simulation.replaced(
            modeling, "infer_auto_device_map", _spy(modeling.infer_auto_device_map, seen)
        ):
            return _attempt(load)

    known = {"rescue": attempt(RUNS["rescue"])}  # whose wrapper knows what was asked
    if not seen:
        error = known["rescue"].error
        if isinstance(error, PlanError):
            raise error
        reason = told(error) if error else "it was planned without a device map"
        raise PlanError(f"from_pretrained stops before it plans: {reason}")

    def attempts(even: bool) -> Dict[str, Attempt]:
        return {
            name: known.get(name) or attempt(features) for name, features in runs_of(even).items()
        }

    return Question(seen[-1], attempts)


def _spy(planner: Any, seen: List[Any]) -> Callable[..., Any]:
    """The planner, noting what is asked of it; while rescue is on, its wrapper knows that."""

    @wraps(planner)  # these releases look at its signature to know whether it takes special_dtypes
    def asked(*args: Any, **kwargs: Any) -> Any:
        request = read_request(original_of(planner), args, kwargs)
        if request is not None:
            seen.append(request)
        return planner(*args, **kwargs)

    return asked


def _attempt(ask: Callable[[], Any]) -> Attempt:
    try:
        return Attempt(ask(), None)
    except simulation.Planned as planned:
        return Attempt(planned.device_map, None)
    except Exception as error:  # noqa: BLE001  # any error is the outcome
        return Attempt(refused_map(error), error)


def _copied(
    args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """The same arguments with dicts of their own: planners change `max_memory` in place."""

    def fresh(value: Any) -> Any:
        return dict(value) if type(value) is dict else value

    return tuple(map(fresh, args)), {name: fresh(value) for name, value in kwargs.items()}
