"""The demo: one checkpoint, one `from_pretrained`, without and with the shim, side by side.

Each run is a process of its own, because the shim activates on import. Budgets are given through
`max_memory`, GPUs and network are not needed (see simulation.py for what stands in).
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Mapping, Optional, Tuple

from bnb_dispatch_fix import simulation

Device = simulation.Device

#: What a child prints its answer after; libraries print to stdout, too.
_MARK = "bnb-dispatch-fix demo: "
_QUIET = {"TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
_ERROR_WIDTH = 88


def run_demo() -> int:
    """Run both children and print what each did.

    Returns:
        0 when with the shim every module is on a GPU, 1 when not, 2 when it cannot run here.
    """
    without = _run_child(BNB_DISPATCH_FIX="off")
    with_shim = _run_child(BNB_DISPATCH_FIX="")
    for answer in (without, with_shim):
        if answer.get("broken"):
            print(f"the demo cannot run here: {answer['broken']}", file=sys.stderr)
            return 2
    gpus = len(simulation.EIGHT_SMALL_GPUS) - 1
    budget = simulation.EIGHT_SMALL_GPUS[0] / simulation.MIB
    print(", ".join(with_shim["versions"]))
    print(
        f"A Llama checkpoint of 2.77 MiB in 4-bit (nf4), device_map='auto', "
        f"{gpus} simulated GPUs of {budget:.2f} MiB each.\n"
    )
    print("\n".join(["Without the shim", *_report(without)]))
    print("\n".join(["\nWith `import bnb_dispatch_fix`", *_report(with_shim)]))
    print("\n" + _conclusion(without, with_shim))
    return 0 if with_shim["loads_on_gpus"] else 1


def _run_child(**environment: str) -> Dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", __name__.replace("__main__", "bnb_dispatch_fix.demo"), "--child"],
        env={**os.environ, **_QUIET, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in result.stdout.splitlines():
        if line.startswith(_MARK):
            answer: Dict[str, Any] = json.loads(line[len(_MARK) :])
            return answer
    last = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
    return {"broken": last}


def _child() -> None:
    """One load in this process; the environment decides whether the shim is active."""
    import accelerate
    import bitsandbytes
    import transformers

    import bnb_dispatch_fix

    with tempfile.TemporaryDirectory() as folder:
        simulation.build_checkpoint(folder)
        outcome = simulation.plan_checkpoint(folder, simulation.EIGHT_SMALL_GPUS)
    modules = (transformers, accelerate, bitsandbytes)
    answer = {
        "versions": [
            *(f"{module.__name__} {module.__version__}" for module in modules),
            f"Python {platform.python_version()}",
        ],
        "device_map": outcome.device_map,
        "error": outcome.error and f"{type(outcome.error).__name__}: {outcome.error}",
        "loads_on_gpus": outcome.loads_on_gpus,
        "applied": [
            (f"{patch.module.partition('.')[0]}'s {patch.attribute}", list(patch.fixes))
            for patch in bnb_dispatch_fix.status().patches
            if patch.state == "applied" and patch.fixes
        ],
    }
    print(_MARK + json.dumps(answer))


def _report(answer: Mapping[str, Any]) -> List[str]:
    lines = [
        f"  repaired {name} ({', '.join(f'#{fix}' for fix in fixes)})"
        for name, fixes in answer["applied"]
    ]
    lines = list(dict.fromkeys(lines))  # one function may be called under several names
    placed = modules_by_device(answer["device_map"] or {})
    lines += [f"  {device:8} {modules}" for device, modules in _device_rows(placed)]
    if answer["error"]:
        return [*lines, f"  -> {_one_line(answer['error'])}"]
    offloaded = [name for device in ("cpu", "disk") for name in placed.get(device, [])]
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
            rows.append((f"GPU {_span(empty)}", "-"))
            empty = []
        if modules is not None:
            label = f"GPU {device}" if isinstance(device, int) else str(device).upper()
            rows.append((label, ", ".join(modules)))
    if empty:
        rows.append((f"GPU {_span(empty)}", "-"))
    return rows


def modules_by_device(device_map: Mapping[str, Device]) -> Dict[str, List[str]]:
    """Module names per device (as text), numbered neighbours as ranges: "model.layers.0–2"."""
    placed: Dict[str, List[str]] = {}
    runs: Dict[str, Tuple[str, List[int]]] = {}
    for name, device in device_map.items():
        modules = placed.setdefault(str(device), [])
        stem, _, last = name.rpartition(".")
        previous: Optional[Tuple[str, List[int]]] = runs.pop(str(device), None)
        if last.isdigit():
            numbers = [int(last)]
            if previous and previous[0] == stem and previous[1][-1] + 1 == int(last):
                numbers = [*previous[1], int(last)]
                modules.pop()
            runs[str(device)] = (stem, numbers)
            modules.append(f"{stem}.{_span(numbers)}")
        else:
            modules.append(name or "the whole model")
    return placed


def _span(numbers: List[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _one_line(text: str) -> str:
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= _ERROR_WIDTH else line[: _ERROR_WIDTH - 1].rstrip() + "…"


def _conclusion(without: Mapping[str, Any], with_shim: Mapping[str, Any]) -> str:
    if not with_shim["loads_on_gpus"]:
        return "The shim did not fix it here: see `bnb-dispatch-fix status`."
    if without["loads_on_gpus"]:
        return "This release loads it without help; the shim left it alone."
    return "The same model, the same budgets: with the shim it fits."


if __name__ == "__main__":
    if "--child" in sys.argv:
        _child()
    else:
        sys.exit(run_demo())
