"""The demo: one checkpoint, one `from_pretrained`, without the shim, with it, and with even.

Without and with the shim is a process of its own, because it activates on import. Budgets are given
through `max_memory`, GPUs and network are not needed (see simulation.py for what stands in).
"""

from __future__ import annotations

import json
import math
import platform
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import bnb_dispatch_fix
from bnb_dispatch_fix import child
from bnb_dispatch_fix.features import DEFAULTS, SWITCH, is_off
from bnb_dispatch_fix.model.layout import device_of
from bnb_dispatch_fix.patching.matrix import installed_versions
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning import simulation
from bnb_dispatch_fix.wording import HOST, MIB, collapsed, one_line, say, span, visible

_QUIET = {"TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
#: Longer texts of errors are cut.
_ERROR_WIDTH = 75


def run_demo() -> int:
    """Run both children and print what each did.

    Returns:
        0 when with the shim every module is on a GPU, 1 when not, 2 when it cannot run here.
    """
    without = _run_child("off")
    with_shim = _run_child("")
    for answer in (without, with_shim):
        if answer.get("broken"):
            say(f"the demo cannot run here: {visible(answer['broken'])}", sys.stderr)
            return 2
    gpus = len(simulation.EIGHT_SMALL_GPUS) - 1
    budget = simulation.EIGHT_SMALL_GPUS[0] / MIB
    say(", ".join(with_shim["versions"]))
    say(
        f"A Llama checkpoint of 2.77 MiB in 4-bit (nf4), device_map='auto', "
        f"{gpus} simulated GPUs of {budget:.2f} MiB each.\n"
    )
    say("\n".join(["Without the shim", *_report(without)]))
    say("\n".join(["\nWith `import bnb_dispatch_fix`", *_report(with_shim)]))
    if with_shim.get("loads"):
        say("\n".join(["\nWith `even` on as well: MiB on each GPU", *_spreads(with_shim)]))
    say("\n" + _conclusion(without, with_shim))
    return 0 if with_shim["loads_on_gpus"] else 1


def _run_child(switch: str) -> Dict[str, Any]:
    try:
        ending = child.ask(f"{__name__}:load", environment={**_QUIET, SWITCH: switch})
    except child.CannotAsk as error:
        return {"broken": str(error)}
    if ending.answers:
        answer: Dict[str, Any] = ending.answers[0]
        return answer
    return {"broken": ending.last_line or f"exit code {ending.code}"}


def load(_: Any) -> None:
    """In the child: the load, and again with even; the environment may switch the shim off."""
    with tempfile.TemporaryDirectory() as folder:
        simulation.build_checkpoint(folder)
        outcome = simulation.plan_checkpoint(folder, simulation.EIGHT_SMALL_GPUS)
        applied = _applied()
        loads = [] if is_off() else [_loads(folder, each) for each in (outcome, _evenly(folder))]
    versions = installed_versions()  # bitsandbytes itself tells its own only since 0.42
    answer = {
        "versions": [
            *(f"{name} {version}" for name, version in versions.items() if name != "torch"),
            f"Python {platform.python_version()}",
        ],
        "device_map": outcome.device_map,
        "error": outcome.error and one_line(outcome.error, _ERROR_WIDTH),
        "loads_on_gpus": outcome.loads_on_gpus,
        "applied": applied,
        "loads": loads if all(loads) else [],
    }
    child.answer(answer)


def _applied() -> List[Tuple[str, str, List[int]]]:
    """Function, package and PRs of what was repaired."""
    return [
        (patch.attribute, patch.module.partition(".")[0], list(patch.fixes))
        for patch in bnb_dispatch_fix.status().patches
        if patch.state == "applied" and patch.fixes
    ]


def _evenly(folder: str) -> simulation.Outcome:
    bnb_dispatch_fix.activate([*DEFAULTS, "even"])
    return simulation.plan_checkpoint(folder, simulation.EIGHT_SMALL_GPUS)


def _loads(folder: str, outcome: simulation.Outcome) -> List[float]:
    """MiB on each GPU, counted from the checkpoint: what is linear in a layer takes 4 bits."""
    if not outcome.loads_on_gpus:
        return []
    loads = dict.fromkeys(range(len(simulation.EIGHT_SMALL_GPUS) - 1), 0.0)
    with (Path(folder) / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    for name, tensor in tensors.items():
        device = device_of(name, outcome.device_map or {})
        if "shape" in tensor and isinstance(device, int):
            linear = ".layers." in name and len(tensor["shape"]) > 1
            loads[device] += math.prod(tensor["shape"]) * (0.5 if linear else 2) / MIB
    return list(loads.values())


def _spreads(answer: Mapping[str, Any]) -> List[str]:
    """A line each for the spread before and with even."""
    return [
        f"  {name:7} {' '.join(f'{load:.2f}' for load in loads)}"
        for name, loads in zip(("before", "even"), answer["loads"])
    ]


def _report(answer: Mapping[str, Any]) -> List[str]:
    repaired: Dict[Tuple[str, str], List[str]] = {}
    for function, package, fixes in answer["applied"]:
        packages = repaired.setdefault((function, ", ".join(f"#{fix}" for fix in fixes)), [])
        if package not in packages:  # one function may be called under several names
            packages.append(package)
    lines = [
        f"  repaired {function} of {' and '.join(packages)} ({fixes})"
        for (function, fixes), packages in repaired.items()
    ]
    placed = modules_by_device(answer["device_map"] or {})
    lines += [f"  {device:8} {modules}" for device, modules in _device_rows(placed)]
    if answer["error"]:
        return [*lines, f"  -> {answer['error']}"]
    offloaded = [name for device in HOST for name in placed.get(device, [])]
    if offloaded:
        return [*lines, f"  -> loads, but {', '.join(offloaded)} silently left the GPUs"]
    return [*lines, "  -> loads, every module on a GPU"]


def _device_rows(placed: Mapping[str, List[str]]) -> List[Tuple[str, str]]:
    """A row per device that holds something; empty GPUs next to each other share one."""
    rows: List[Tuple[str, str]] = []
    empty: List[int] = []
    for device in simulation.EIGHT_SMALL_GPUS:
        modules = placed.get(str(device))
        if modules is None and isinstance(device, int):
            empty.append(device)
            continue
        if empty:
            rows.append((f"GPU {span(empty[0], empty[-1])}", "-"))
            empty = []
        if modules is not None:
            label = f"GPU {device}" if isinstance(device, int) else str(device).upper()
            rows.append((label, ", ".join(modules)))
    if empty:
        rows.append((f"GPU {span(empty[0], empty[-1])}", "-"))
    return rows


def modules_by_device(device_map: Mapping[str, Device]) -> Dict[str, List[str]]:
    """Module names per device (as text), numbered neighbours as ranges: "model.layers.0–2"."""
    placed: Dict[str, List[str]] = {}
    for name, device in device_map.items():
        placed.setdefault(str(device), []).append(name)
    return {
        device: [str(run) or "the whole model" for run in collapsed(names)]
        for device, names in placed.items()
    }


def _conclusion(without: Mapping[str, Any], with_shim: Mapping[str, Any]) -> str:
    if not with_shim["loads_on_gpus"]:
        return "The shim did not fix it here: see `bnb-dispatch-fix status`."
    if without["loads_on_gpus"]:
        return "This release loads it without help; the shim left it alone."
    return "The same model, the same budgets: with the shim it fits."
