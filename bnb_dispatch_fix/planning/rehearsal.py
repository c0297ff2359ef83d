"""Asks the installed release's own planner where a model goes, as it is and with each feature.

Runs in a process of its own: GPUs are pretended and features switched on and off. The real
`from_pretrained` is called on a checkpoint without weights, so that everything before the weights
is what the installed release does: its dtype rules, its quantizer, its tied weights.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

import bnb_dispatch_fix
from bnb_dispatch_fix import child
from bnb_dispatch_fix.explain import experts
from bnb_dispatch_fix.model import layout
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import search
from bnb_dispatch_fix.planning import (
    advice,
    asking,
    comparison,
    components,
    context,
    evenness,
    loader,
    needs,
    simulation,
)
from bnb_dispatch_fix.planning import runs as planned_runs
from bnb_dispatch_fix.planning.construction import Construction, built_once
from bnb_dispatch_fix.planning.records import RUNS, PlanError, told
from bnb_dispatch_fix.planning.stored import Stored, stored_as
from bnb_dispatch_fix.wording import amount, bytes_in


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
            or None, with "free" bytes as pairs; "compare" where precisions are to be compared, in
            place of "quantization"; "label" and "since" for examples; "context", "batch",
            "kv_dtype" and "reserve" (bytes) where it is to run, too; "even" where
            that planner is asked, too.

    Raises:
        PlanError: the model cannot be built, or the budgets cannot be read.
    """
    component = components.settings_of(job)
    free = None if job.get("free") is None else dict(job["free"])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if component is not None:
            if job.get("context") is not None:
                raise PlanError("context: a component of diffusers takes none")
            calls = components.loader(job, component, folder)
            stack.enter_context(simulation.simulated_gpus(free))
            return _asked(job, lambda quantization: asking.of_diffusers(calls(quantization)))
        config = loader.configuration(job)
        stored = None if job["quantization"] else _stored(config)
        loads = loader.Loader(job, config, folder)
        building = Construction()
        if loads.model_class is not None:
            building = stack.enter_context(built_once(loads.model_class))
        elif stored is not None:
            raise PlanError(f"{stored.method}: it is not known which class the checkpoint has")
        stack.enter_context(simulation.simulated_gpus(free))
        stack.enter_context(simulation.sizes_looked_up_once())
        if stored is not None:
            return _stored_answer(job, stored, loads, building)
        try:
            return _asked(job, lambda quantization: asking.of_transformers(loads(quantization)))
        except PlanError as error:
            if job["quantization"] and hasattr(config, "quantization_config"):
                hint = "without quantization_config (--bits) it is planned as it is stored"
                raise PlanError(f"{str(error).rstrip('.')}; {hint}") from error
            raise


def _asked(job: Mapping[str, Any], ask: comparison.Ask) -> Dict[str, Any]:
    """The answer about a checkpoint that is quantized as the job says, or in each way."""

    def compared() -> comparison.Compared:
        if job.get("compare"):
            return comparison.compare(ask)
        question = ask(job["quantization"])
        request = question.request
        return comparison.Compared([], question, search(request), request)

    return _answer(job, compared, ask)


def _stored_answer(
    job: Mapping[str, Any], stored: Stored, loads: loader.Loader, building: Construction
) -> Dict[str, Any]:
    """The answer about a checkpoint whose layers are taken from its configuration."""
    from bnb_dispatch_fix.planning import packed, stand_in  # they need torch, which is there now

    counted: Set[str] = set()

    def compared() -> comparison.Compared:
        dequantizes = needs.can_dequantize(stored.method)
        plain = asking.of_transformers(loads(None)) if dequantizes else None
        building.change = lambda model: counted.update(packed.put_in(model, stored))
        found = asking.of_transformers(loads(None), stand_in.StandIn(stored))
        found = found._replace(request=stand_in.in_true_sizes(found.request, stored))
        return comparison.as_stored(stored.method, found, plain)

    answer = _answer(job, compared)
    dtype = answer["precision"].rpartition(", ")[2]
    answer["precision"] = f"{stored.method} as stored ({stored.bits}), {dtype}"
    answer["notes"] = [
        needs.line(stored.method),
        *needs.experts(stored, packed.EXPERTS in counted),
        *answer["notes"],
    ]
    return answer


def _stored(config: Any) -> Optional[Stored]:
    """How the checkpoint is stored, taken out of its configuration; None where it is not."""
    stored = stored_as(getattr(config, "quantization_config", None))
    if stored is not None:
        del config.quantization_config
    return stored


def _unread_budgets(job: Mapping[str, Any]) -> str:
    """The budgets that are no size, to be told with an error that may not name them (4.30)."""
    unread = [
        f"max_memory[{device!r}]={budget!r} is no size"
        for device, budget in job["max_memory"] or ()
        if isinstance(budget, str) and bytes_in(budget) is None
    ]
    return "".join(f"; {text}" for text in unread)


def _answer(
    job: Mapping[str, Any],
    compare: Callable[[], comparison.Compared],
    ask: Optional[comparison.Ask] = None,
) -> Dict[str, Any]:
    """What was asked and answered, as plain data; `ask` takes another quantization, if any."""
    rows, question, exact, quantized = _compared(job, compare)
    request, attempts = question.request, question.attempts(bool(job.get("even")))
    bnb_dispatch_fix.activate(RUNS["rescue"])
    fine = request._replace(no_split=frozenset()).units()
    runs = [
        planned_runs.describe_run(name, attempt, exact.units, fine, exact.budgets)
        for name, attempt in attempts.items()
    ]
    if job.get("even"):
        evenness.add(request, runs)
    answer = {
        "model": job.get("label") or type(request.model).__name__,
        "versions": components.versions(request),
        "strategy": job["strategy"],
        "precision": _precision(request),
        "precisions": rows,
        "runs": runs,
        "notes": [
            *_unpatched(),
            *_misshapen(getattr(request.model, "config", None)),
            *_unquantized_experts(quantized),
        ],
        **_model_as_data(fine),
        **planned_runs.verdict(exact.result, exact.device_map, runs),
    }
    answer.update(advice.added(job, question, exact, answer, ask))
    if request.is_diffusers:
        return answer
    return {**answer, **context.added(job, request, exact, fine, answer)}


def _compared(
    job: Mapping[str, Any], compare: Callable[[], comparison.Compared]
) -> comparison.Compared:
    """What there is to compare, and the question that is looked at in detail."""
    try:
        return compare()
    except PlanError as error:
        raise PlanError(f"{error}{_unread_budgets(job)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"max_memory: {told(error)}") from error


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


def _misshapen(config: Any) -> List[str]:
    """A release that builds a model without its groups of heads, or with heads of another size.

    So it is with Llama before 4.31, and with Mistral before 4.43.
    """
    import transformers  # found, not required

    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    built = {"num_key_value_heads": heads, "head_dim": hidden // heads if heads and hidden else 0}
    try:
        known = type(config)()
    except Exception:  # noqa: BLE001  # it cannot be made without arguments
        return []
    return [
        f"transformers {transformers.__version__} does not know {name}={getattr(config, name)} of "
        f"this model and builds {other}: the weights of such a checkpoint do not fit into it"
        for name, other in built.items()
        if getattr(config, name, None) not in (None, other) and not hasattr(known, name)
    ]


def _unquantized_experts(request: Optional[Request]) -> List[str]:
    """What bitsandbytes leaves of a mixture of experts, and which release takes them, too."""
    if request is None or not request.is_bitsandbytes:
        return []
    units = request._replace(no_split=frozenset()).units()
    found = experts.lines(request, units)
    bits = 4 if request.quantizer.quantization_config.load_in_4bit else 8
    return [f"in {bits} bits it takes {amount(units.total)}; {'; '.join(found)}"] if found else []


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
