"""`bnb_dispatch_fix.plan(...)`: where a model would go, without its weights and without a GPU.

The model is built on the meta device and handed to the planner of the installed release, three
times: as it is, with the backport, with rescue. That happens in a process of its own (see
rehearsal.py), because it pretends that there are GPUs and switches features on and off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

Device = Union[int, str]

#: The planners that are asked, in this order: what each is called, and the features it has on.
RUNS: Mapping[str, Tuple[str, ...]] = {
    "release": (),
    "backport": ("backport",),
    "rescue": ("backport", "rescue"),
}
HOST = ("cpu", "disk")
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bnb_dispatch_fix.rehearsal import main; main()"
)
#: What the child writes its answer after; libraries print to stdout, too.
MARK = "bnb-dispatch-fix plan: "
#: Seconds between two calls of `on_wait`.
_TICK = 0.1


class PlanError(ValueError):
    """No plan can be made of these arguments; one line that says which, and what to do."""


@dataclass(frozen=True)
class Part:
    """A module, or neighbours of one name and one device ("model.layers.0–5"), in bytes."""

    name: str
    size: int
    quantized: int
    modules: int = 1

    @property
    def unquantized(self) -> int:
        """Bytes that stay in a dtype of their own."""
        return self.size - self.quantized


@dataclass(frozen=True)
class DeviceLoad:
    """What lies on one device, in bytes.

    `given` is the caller's budget, or what is free there; `usable` is what the quantizer leaves
    of it; `placed` counts true bytes, whatever the planner counted. The disk has no budget.
    """

    device: Device
    given: Optional[int]
    usable: Optional[int]
    placed: int
    parts: Tuple[Part, ...]

    @property
    def free(self) -> Optional[int]:
        """Usable bytes that stay free; negative where more is placed than the budget holds."""
        return None if self.usable is None else self.usable - self.placed


@dataclass(frozen=True)
class Run:
    """What one planner does.

    `outcome` is "loads" (everything on accelerators), "offloads" (accepted, with modules on the
    CPU or the disk), "overfull" (accepted, with more bytes on a device than the caller gave it),
    "refused" (a map was made, and an error raised) or "fails" (an error, no map).
    """

    name: str
    outcome: str
    error: Optional[str]
    device_map: Optional[Dict[str, Device]]
    devices: Tuple[DeviceLoad, ...]

    @property
    def offloaded(self) -> int:
        """Bytes on the CPU and the disk."""
        return sum(load.placed for load in self.devices if load.device in HOST)


@dataclass(frozen=True)
class Plan:
    """The model, the budgets, and what each planner makes of them; all sizes in bytes.

    `fits` says that everything has a place on the accelerators, `verdict` why or why not;
    `device_map` is the map to paste (None where it does not fit). `largest` are the largest kinds
    of modules, their numbers replaced by "*"; `notes` say what could not be patched.
    """

    model: str
    versions: Dict[str, str]
    strategy: str
    precision: str
    total: int
    quantized: int
    largest: Tuple[Part, ...]
    runs: Tuple[Run, ...]
    fits: bool
    verdict: str
    device_map: Optional[Dict[str, Device]]
    notes: Tuple[str, ...] = ()

    @property
    def unquantized(self) -> int:
        """Bytes that no quantizer will touch."""
        return self.total - self.quantized

    def as_dict(self) -> Dict[str, Any]:
        """Plain data, as `bnb-dispatch-fix plan --json` prints it."""
        found = asdict(self)
        for run, told in zip(self.runs, found["runs"]):
            for load, entry in zip(run.devices, told["devices"]):
                entry["free"] = load.free
        return {**found, "unquantized": self.unquantized}


def plan(
    model: Any,
    *,
    max_memory: Optional[Mapping[Device, Any]] = None,
    quantization_config: Any = None,
    device_map: str = "auto",
    dtype: Any = None,
) -> Plan:
    """What `bnb_dispatch_fix.plan` does; see there."""
    job = {
        **_source(model),
        "max_memory": _pairs(max_memory),
        "quantization": _quantization(quantization_config),
        "strategy": _strategy(device_map),
        "dtype": None if dtype is None else str(dtype).replace("torch.", ""),
    }
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
    answer = _ask(job, on_wait)
    if "error" in answer:
        raise PlanError(answer["error"])
    runs = tuple(_run(entry) for entry in answer.pop("runs"))
    largest = tuple(Part(*entry) for entry in answer.pop("largest"))
    device_map = _as_dict(answer.pop("device_map"))
    notes = tuple(answer.pop("notes"))
    return Plan(runs=runs, largest=largest, device_map=device_map, notes=notes, **answer)


def _ask(job: Mapping[str, Any], on_wait: Optional[Callable[[], None]]) -> Dict[str, Any]:
    """Start the child, wait for it, and return what it wrote after the mark."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "critical",
        "CUDA_VISIBLE_DEVICES": "",  # the simulated GPUs are the only ones, and none is woken up
    }
    environment.pop("BNB_DISPATCH_FIX", None)
    # Files, not pipes: nothing can fill up while this process waits.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        try:
            _wait(process, on_wait)
        finally:
            process.kill()
        return _answer(_text(output), _text(errors), process.returncode)


def _wait(process: subprocess.Popen[bytes], on_wait: Optional[Callable[[], None]]) -> None:
    while True:
        try:
            process.wait(_TICK)
            return
        except subprocess.TimeoutExpired:
            if on_wait is not None:
                on_wait()


def _text(stream: Any) -> str:
    stream.seek(0)
    text: str = stream.read().decode("utf-8", errors="replace")
    return text


def _answer(output: str, errors: str, code: int) -> Dict[str, Any]:
    for line in output.splitlines():
        if line.startswith(MARK):
            answer: Dict[str, Any] = json.loads(line[len(MARK) :])
            return answer
    last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
    return {"error": f"planning ended without an answer: {last}; see `bnb-dispatch-fix doctor`"}


def _run(entry: Mapping[str, Any]) -> Run:
    devices = [
        DeviceLoad(device, given, usable, placed, tuple(Part(*part) for part in parts))
        for device, given, usable, placed, parts in entry["devices"]
    ]
    return Run(
        entry["name"],
        entry["outcome"],
        entry["error"],
        _as_dict(entry["device_map"]),
        tuple(devices),
    )


def _as_dict(pairs: Optional[Sequence[Tuple[str, Device]]]) -> Optional[Dict[str, Device]]:
    return None if pairs is None else dict(pairs)


def _source(model: Any) -> Dict[str, Any]:
    """What to build: {"path"}, or {"config", "class"} of a configuration or a model."""
    if isinstance(model, (str, os.PathLike)):
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


def _pairs(max_memory: Optional[Mapping[Device, Any]]) -> Optional[List[List[Any]]]:
    """A device map's budgets as JSON can hold them: order and types of the keys are kept."""
    if max_memory is None:
        return None
    if not isinstance(max_memory, Mapping):
        raise PlanError(
            f"max_memory: expected a dict such as {{0: '22GiB', 'cpu': '60GiB'}}, "
            f"found {max_memory!r}"
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
    known = ("auto", "balanced", "balanced_low_0", "sequential")
    if device_map not in known:
        raise PlanError(f"device_map: expected one of {', '.join(known)}, found {device_map!r}")
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
    from bnb_dispatch_fix import surroundings

    devices = surroundings.look(["torch"])["torch"].facts.get("devices", [])
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
        import psutil

        return int(psutil.virtual_memory().available)
    except ImportError:
        return 0
