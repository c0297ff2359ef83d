"""`bnb_dispatch_fix.plan(...)`: where a model would go, without its weights and without a GPU.

The model is built on the meta device and handed to the planner of the installed release, three
times: as it is, with the backport, with rescue; where it is asked for, with even. That happens in a
process of its own (see rehearsal.py), because it pretends that there are GPUs and switches features
on and off.
"""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from bnb_dispatch_fix import child
from bnb_dispatch_fix.doctor import surroundings
from bnb_dispatch_fix.features import SWITCH
from bnb_dispatch_fix.model.layout import Part
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning import checkpoint
from bnb_dispatch_fix.planning.budgets import parse_budgets
from bnb_dispatch_fix.planning.records import (
    Change,
    DeviceLoad,
    Fewer,
    Plan,
    PlanError,
    Precision,
    Room,
    Run,
)
from bnb_dispatch_fix.planning.run_arguments import asked_room
from bnb_dispatch_fix.wording import STRATEGIES

_REHEARSAL = "bnb_dispatch_fix.planning.rehearsal:main"
_SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "CUDA_VISIBLE_DEVICES": "",  # the simulated GPUs are the only ones, and none is woken up
    SWITCH: None,
}


def plan(
    model: Any,
    *,
    max_memory: Union[Mapping[Device, Any], str, None] = None,
    quantization_config: Any = None,
    device_map: str = "auto",
    dtype: Any = None,
    trust_remote_code: bool = False,
    context: Optional[int] = None,
    batch: int = 1,
    kv_dtype: Any = None,
    reserve: Union[int, str] = 0,
    even: bool = False,
) -> Plan:
    """What `bnb_dispatch_fix.plan` does; see there."""
    job = {
        **_source(model),
        "max_memory": _pairs(max_memory),
        "quantization": _quantization(quantization_config),
        "strategy": _strategy(device_map),
        "dtype": None if dtype is None else str(dtype).replace("torch.", ""),
        **asked_room(context, batch, kv_dtype, reserve),
    }
    if trust_remote_code:
        job["trust_remote_code"] = True
    if even:
        job["even"] = True
    if max_memory is None:
        job["free"] = free_memory()
    return rehearse(job)


def rehearse(job: Mapping[str, Any], on_wait: Optional[Callable[[], None]] = None) -> Plan:
    """Have a process of its own carry out a job, and read its answer.

    Args:
        job: see `rehearsal.carry_out`; plain data.
        on_wait: called ten times a second meanwhile.

    Raises:
        PlanError: the job cannot be carried out.
    """
    try:
        ending = child.ask(_REHEARSAL, job, environment=_SURROUNDINGS, on_wait=on_wait)
    except child.CannotAsk as error:
        raise PlanError(str(error)) from error
    answer = _answered(ending)
    if "error" in answer:
        raise PlanError(answer["error"])
    runs = tuple(_run(entry) for entry in answer.pop("runs"))
    largest = tuple(Part(*entry) for entry in answer.pop("largest"))
    device_map = _as_dict(answer.pop("device_map"))
    room = answer.pop("room", None)
    if room is not None:
        room = Room(**{**room, "devices": _loads(room["devices"])})
    fewer = answer.pop("fewer")
    if fewer is not None:
        fewer = Fewer(tuple(fewer["devices"]), fewer["arguments"])
    return Plan(
        runs=runs,
        largest=largest,
        device_map=device_map,
        notes=tuple(answer.pop("notes")),
        precisions=tuple(_precision(entry) for entry in answer.pop("precisions")),
        recipes=tuple(Change(*recipe) for recipe in answer.pop("recipes")),
        fewer=fewer,
        room=room,
        **answer,
    )


def _answered(ending: child.Ending) -> Dict[str, Any]:
    if ending.answers:
        answer: Dict[str, Any] = ending.answers[0]
        return answer
    last = ending.last_line or f"exit code {ending.code}"
    return {"error": f"planning ended without an answer: {last}; see `bnb-dispatch-fix doctor`"}


def _run(entry: Mapping[str, Any]) -> Run:
    return Run(
        entry["name"],
        entry["outcome"],
        entry["error"],
        _as_dict(entry["device_map"]),
        _loads(entry["devices"]),
        entry.get("evenness"),
    )


def _loads(entries: Sequence[Sequence[Any]]) -> Tuple[DeviceLoad, ...]:
    return tuple(
        DeviceLoad(device, given, usable, placed, tuple(Part(*part) for part in parts), *more)
        for device, given, usable, placed, parts, *more in entries
    )


def _precision(entry: Mapping[str, Any]) -> Precision:
    return Precision(**{**entry, "devices": tuple(entry["devices"])})


def _as_dict(pairs: Optional[Sequence[Tuple[str, Device]]]) -> Optional[Dict[str, Device]]:
    return None if pairs is None else dict(pairs)


def _source(model: Any) -> Dict[str, Any]:
    """What to build: {"path"}, or {"config", "class"} of a configuration or a model."""
    if isinstance(model, (str, os.PathLike)):
        checkpoint.settings(os.fspath(model))  # or the other process may wait for ever
        return {"path": os.fspath(model)}
    config: Any = getattr(model, "config", None) if hasattr(model, "named_modules") else model
    if not hasattr(config, "to_dict") or not hasattr(config, "model_type"):
        raise PlanError(
            f"model: expected a checkpoint folder, a config.json, a transformers configuration "
            f"or model, found {type(model).__module__}.{type(model).__qualname__}"
        )
    source: Dict[str, Any] = {"config": json.loads(config.to_json_string(use_diff=False))}
    if config is not model:
        source["class"] = [type(model).__module__, type(model).__qualname__]
    return source


def _pairs(max_memory: Union[Mapping[Device, Any], str, None]) -> Optional[List[List[Any]]]:
    """A device map's budgets as JSON can hold them: order and types of the keys are kept."""
    if max_memory is None:
        return None
    if isinstance(max_memory, str) and any(sign in max_memory for sign in "xX*×="):
        return [list(pair) for pair in parse_budgets(max_memory, "max_memory")]
    if not isinstance(max_memory, Mapping):
        raise PlanError(
            f"max_memory: expected a dict such as {{0: '22GiB', 'cpu': '60GiB'}} or a text such "
            f"as '2x22GiB,cpu=60GiB', found {max_memory!r}"
        )
    return [[key, _plain(value)] for key, value in max_memory.items()]


def _plain(value: Any) -> Union[int, float, str]:
    """A number of numpy or torch as Python's own; texts as they are."""
    if isinstance(value, (str, int, float)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise PlanError(f"max_memory: {value!r} is neither bytes nor a text as '22GiB'") from None


def _strategy(device_map: Any) -> str:
    if device_map not in STRATEGIES:
        raise PlanError(
            f"device_map: expected one of {', '.join(STRATEGIES)}, found {device_map!r}"
        )
    return str(device_map)


def _quantization(config: Any) -> Optional[Dict[str, Any]]:
    """A quantization configuration as a dict; dtypes become texts, as in a config.json."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise PlanError(
                f"quantization_config: expected transformers' BitsAndBytesConfig or a dict, "
                f"found {type(config).__name__}"
            )
        config = config.to_dict()
    text = json.dumps(dict(config), default=lambda value: str(value).replace("torch.", ""))
    settings: Dict[str, Any] = json.loads(text)
    return settings


def free_memory() -> List[List[Any]]:
    """Free bytes of this machine's accelerators and the CPU, asked in a process of its own.

    Raises:
        PlanError: torch sees no accelerator.
    """
    try:
        devices = surroundings.look(["torch"])["torch"].facts.get("devices", [])
    except child.CannotAsk as error:
        raise PlanError(str(error)) from error
    free = [[device["id"], device["free"]] for device in devices if device.get("free")]
    if not free:
        raise PlanError(
            "max_memory: no accelerator is seen here to take it from; say what there is, as "
            "{0: '22GiB', 1: '22GiB'} (--max-memory 2x22GiB)"
        )
    return [*free, ["cpu", _free_ram()]]


def _free_ram() -> int:
    """Available bytes of main memory; accelerate asks psutil, too."""
    try:
        import psutil  # found, not required

        return int(psutil.virtual_memory().available)
    except ImportError:
        return 0
