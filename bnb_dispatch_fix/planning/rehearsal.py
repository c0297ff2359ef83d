"""Asks the installed release's own planner where a model goes, as it is and with each feature.

Runs in a process of its own: GPUs are pretended and features switched on and off. The real
`from_pretrained` is called on a checkpoint without weights, so that everything before the weights
is what the installed release does: its dtype rules, its quantizer, its tied weights.
"""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import astuple
from functools import partial, wraps
from typing import Any, Callable, Dict, List, Mapping, Tuple

import bnb_dispatch_fix
from bnb_dispatch_fix import child
from bnb_dispatch_fix.model import layout, requests
from bnb_dispatch_fix.model.device_map import refused_map
from bnb_dispatch_fix.model.load import read_request
from bnb_dispatch_fix.model.search import search
from bnb_dispatch_fix.patching.patches import original_of
from bnb_dispatch_fix.planning import components, context, loader, simulation
from bnb_dispatch_fix.planning import runs as planned_runs
from bnb_dispatch_fix.planning.records import RUNS, PlanError, told
from bnb_dispatch_fix.planning.runs import Attempt
from bnb_dispatch_fix.wording import bytes_in


class _Called(BaseException):
    """Carries the arguments of the planner out of `from_pretrained`."""

    def __init__(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        super().__init__()
        self.args_of_call, self.kwargs_of_call = args, kwargs


def main(job: Mapping[str, Any]) -> None:
    """In the child: carry out a job and answer."""
    try:
        answer = carry_out(job)
    except PlanError as error:
        answer = {"error": str(error)}
    child.answer(answer)


def carry_out(job: Mapping[str, Any]) -> Dict[str, Any]:
    """Build the model, ask each planner, and describe what they answered as plain data.

    Args:
        job: "path", or "config" with "class" (module and name, optional); "strategy"; "dtype" (a
            name) and "quantization" (a dict), or None; "trust_remote_code" where code of the
            checkpoint may run; "max_memory" as pairs of device and budget,
            or None, with "free" bytes as pairs; "label" and "since" for examples; "context",
            "batch", "kv_dtype" and "reserve" (bytes) where it is to run, too.

    Raises:
        PlanError: the model cannot be built, or the budgets cannot be read.
    """
    component = components.settings_of(job)
    free = None if job.get("free") is None else dict(job["free"])
    with tempfile.TemporaryDirectory() as folder:
        if component is None:
            load, ask = loader.loader(job, loader.configuration(job), folder), _ask_all
        else:
            if job.get("context") is not None:
                raise PlanError("context: a component of diffusers takes none")
            load, ask = components.loader(job, component, folder), _ask_diffusers
        with simulation.simulated_gpus(free):
            try:
                attempts, request = ask(load)
            except PlanError as error:
                raise PlanError(f"{error}{_unread_budgets(job)}") from error
            return _answer(job, attempts, request)


def _unread_budgets(job: Mapping[str, Any]) -> str:
    """The budgets that are no size, to be told with an error that may not name them (4.30)."""
    unread = [
        f"max_memory[{device!r}]={budget!r} is no size"
        for device, budget in job["max_memory"] or ()
        if isinstance(budget, str) and bytes_in(budget) is None
    ]
    return "".join(f"; {text}" for text in unread)


def _answer(
    job: Mapping[str, Any], attempts: Mapping[str, Attempt], request: Any
) -> Dict[str, Any]:
    try:
        exact = search(request)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"max_memory: {told(error)}") from error
    fine = request._replace(no_split=frozenset()).units()
    runs = [
        planned_runs.describe_run(name, attempt, exact.units, fine, exact.budgets)
        for name, attempt in attempts.items()
    ]
    answer = {
        "model": job.get("label") or type(request.model).__name__,
        "versions": components.versions(request),
        "strategy": job["strategy"],
        "precision": _precision(request),
        "runs": runs,
        "notes": [*_unpatched(), *_ungrouped(getattr(request.model, "config", None))],
        **_model_as_data(fine),
        **planned_runs.verdict(exact.result, exact.device_map, runs),
    }
    if request.is_diffusers:
        return answer
    return {**answer, **context.added(job, request, exact, fine, answer)}


def _model_as_data(fine: Any) -> Dict[str, Any]:
    described = layout.describe_model(fine)
    largest = [astuple(part) for part in described["largest"]]
    return {**described, "largest": largest, "scales": fine.scales}


def _unpatched() -> List[str]:
    """What should have been patched and was not: the runs then show what the release does."""
    return [
        f"{patch.module}.{patch.attribute} is {patch.state}: {patch.reason}"
        for patch in bnb_dispatch_fix.status().patches
        if patch.module.startswith("transformers.") and (patch.missing or patch.state == "failed")
    ]


def _ungrouped(config: Any) -> List[str]:
    """A release that builds a model without its groups of heads (Llama before 4.31)."""
    import transformers  # found, not required

    groups = getattr(config, "num_key_value_heads", None)
    heads = getattr(config, "num_attention_heads", None)
    try:
        if groups in (None, heads) or hasattr(type(config)(), "num_key_value_heads"):
            return []
    except Exception:  # noqa: BLE001  # it cannot be made without arguments
        return []
    return [
        f"transformers {transformers.__version__} does not know num_key_value_heads={groups} of "
        f"this model and builds {heads}: the weights of such a checkpoint do not fit into it"
    ]


def _ask_all(load: Callable[[], Any]) -> Tuple[Dict[str, Attempt], Any]:
    """Each planner's answer, and the request that all of them got."""
    bnb_dispatch_fix.import_targets()
    modeling = importlib.import_module("transformers.modeling_utils")
    if hasattr(modeling, "_get_device_map"):
        return _ask_planner(load, modeling, "_get_device_map", requests.from_transformers)
    return _ask_from_pretrained(load, modeling)


def _ask_diffusers(load: Callable[[], Any]) -> Tuple[Dict[str, Attempt], Any]:
    """The same of diffusers, whose quantizer is asked after the planner."""
    bnb_dispatch_fix.import_targets()
    modeling = importlib.import_module("diffusers.models.modeling_utils")
    with components.gpus():
        return _ask_planner(load, modeling, "_determine_device_map", components.request_of)


def _ask_planner(
    load: Callable[[], Any], modeling: Any, planner: str, read: Callable[..., Any]
) -> Tuple[Dict[str, Attempt], Any]:
    """Since 4.50 the planner is a function: the model is built once, the planner asked again."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    bnb_dispatch_fix.deactivate()
    with simulation.replaced(modeling, planner, stop):
        try:
            load()
        except _Called as called:
            args, kwargs = called.args_of_call, called.kwargs_of_call
        except Exception as error:
            raise PlanError(f"from_pretrained stops before it plans: {told(error)}") from error
        else:
            raise PlanError("from_pretrained did not ask for a device map; is it a model?")
    installed = original_of(getattr(modeling, planner))
    request = read(installed, *_copied(args, kwargs))
    attempts = {}
    for name, features in RUNS.items():
        bnb_dispatch_fix.activate(features)
        fresh_args, fresh_kwargs = _copied(args, kwargs)
        ask = partial(getattr(modeling, planner), *fresh_args, **fresh_kwargs)
        if request.is_diffusers:
            ask = partial(components.accepted, ask, request)
        attempts[name] = _attempt(ask)
    return attempts, request


def _ask_from_pretrained(load: Callable[[], Any], modeling: Any) -> Tuple[Dict[str, Attempt], Any]:
    """Until 4.49 the planner is a part of `from_pretrained`, which is called for each."""
    seen: List[Any] = []
    attempts = {}
    for name, features in RUNS.items():
        bnb_dispatch_fix.activate(features)
        with simulation.replaced(
            modeling, "infer_auto_device_map", _spy(modeling.infer_auto_device_map, seen)
        ):
            attempts[name] = _attempt(load)
    if not seen:
        errors = [attempt.error for attempt in attempts.values() if attempt.error]
        reason = told(errors[0]) if errors else "it was planned without a device map"
        raise PlanError(f"from_pretrained stops before it plans: {reason}")
    return attempts, seen[-1]


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


def _precision(request: Any) -> str:
    config = getattr(request.quantizer, "quantization_config", None)
    dtype = str(getattr(request.model, "dtype", "")).replace("torch.", "")
    if config is None:
        return dtype
    method = getattr(config, "quant_method", "bitsandbytes")  # 4.30 and 4.31 know no other
    method = getattr(method, "value", method)
    if not request.is_bitsandbytes:
        return f"{method}, {dtype}"
    bits = "4-bit" if config.load_in_4bit else "8-bit"
    kind = f" {config.bnb_4bit_quant_type}" if config.load_in_4bit else ""
    return f"{bits}{kind} ({method}), {dtype}"
