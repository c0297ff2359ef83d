"""Imports torch and the packages around it in a process of its own, which may crash or hang.

A broken CUDA library can end a process without an exception, and an import can wait for ever;
whoever asks here gets an answer all the same.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

#: In the order they are imported; each needs those before it.
PACKAGES = ("torch", "bitsandbytes", "accelerate", "transformers")
#: Seconds until an import counts as one that hangs (torch on a cold network disk takes 60).
TIMEOUT = 180.0
#: What an answer is printed after; libraries print to stdout, too.
_MARK = "bnb-dispatch-fix surroundings: "
#: The modules the planners live in: a package may import and still break there.
_DEEPER = {"transformers": "transformers.modeling_utils", "accelerate": "accelerate.utils"}
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bnb_dispatch_fix.surroundings import answer; answer(sys.argv[2:])"
)


class Answer(NamedTuple):
    """What became of one import: "ok", "missing" or "broken".

    `error` is one line; `facts` holds "version" and what else there is to know, as plain data.
    """

    state: str
    error: str
    facts: Mapping[str, Any]


def look(packages: Sequence[str] = PACKAGES, timeout: float = TIMEOUT) -> Dict[str, Answer]:
    """Import the packages elsewhere; one that ends or stops its process does not hide the others.

    Args:
        packages: names to import.
        timeout: seconds given to one process.
    """
    answers: Dict[str, Answer] = {}
    waiting = list(packages)
    while waiting:
        lines, ending = _run(waiting, timeout)
        for line in lines[: len(waiting)]:
            answers[waiting.pop(0)] = Answer(*json.loads(line))
        if waiting:
            package = waiting.pop(0)
            answers[package] = Answer("broken", ending, {"version": _version(package)})
    return answers


def _run(packages: Sequence[str], timeout: float) -> Tuple[List[str], str]:
    """The answers a process gave, and how it ended."""
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), *packages]
    process = subprocess.Popen(
        command,
        env={**os.environ, "BNB_DISPATCH_FIX": "off"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    try:
        output, errors = process.communicate(timeout=timeout)
        last = (errors.strip().splitlines() or [""])[-1]
        ending = f"the import ended its process (exit code {process.returncode}) {last}".strip()
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ending = f"the import did not end within {timeout:g} s"
    found = [line.partition(_MARK)[2] for line in output.splitlines() if _MARK in line]
    return found, ending


def answer(packages: Sequence[str]) -> None:
    """In the child: import each package and print its answer at once."""
    for package in packages:
        print(f"\n{_MARK}{json.dumps(_import(package))}", flush=True)


def _import(package: str) -> Answer:
    try:
        module = importlib.import_module(package)
        if package in _DEEPER:
            importlib.import_module(_DEEPER[package])
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return Answer("missing" if missing else "broken", line, {"version": _version(package)})
    facts = {"version": getattr(module, "__version__", None) or _version(package)}
    try:
        facts.update(_FACTS.get(package, dict)())
    except Exception as error:
        return Answer("ok", f"{type(error).__name__}: {error}", facts)
    return Answer("ok", "", facts)


def nvidia_driver(root: Path = Path("/")) -> Optional[str]:
    """What tells of an NVIDIA driver on this machine, None where nothing does; starts nothing."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text("utf-8", errors="replace")
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
        return f"version {version.group()}" if version else "/proc/driver/nvidia"
    except OSError:
        pass
    windows = Path(os.environ.get("SYSTEMROOT", "C:/Windows"))
    places = [root / "dev/nvidiactl", root / "usr/lib/wsl/lib/libcuda.so.1"]
    if sys.platform == "win32":
        places.append(windows / "System32/nvcuda.dll")
    return next((str(place) for place in places if place.exists()), None)


def _version(package: str) -> Any:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_facts() -> Dict[str, Any]:
    """The build ("cuda 12.8", "hip ...", "xpu", "cpu") and the devices, memory in bytes."""
    import torch

    versions = vars(torch.version)
    kind = next((name for name in ("cuda", "hip", "xpu") if versions.get(name)), "cpu")
    facts: Dict[str, Any] = {"build": f"{kind} {versions.get(kind) or ''}".strip(), "devices": []}
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        facts["devices"].append({"id": "mps", "name": "Apple GPU", "free": None, "total": None})
    backend = getattr(torch, "xpu" if kind == "xpu" else "cuda", None)
    if backend is None or not backend.is_available():
        return facts
    for number in range(backend.device_count()):
        facts["devices"].append(_device(backend, number))
    return facts


def _device(backend: Any, number: int) -> Dict[str, Any]:
    """One accelerator; `free` is None where its memory cannot be read, `error` says why."""
    device = {"id": number, "name": str(backend.get_device_name(number)), "free": None}
    try:
        device["free"], device["total"] = backend.mem_get_info(number)
    except Exception as error:
        device["error"] = " ".join(f"{type(error).__name__}: {error}".split())
    return device


def _bitsandbytes_facts() -> Dict[str, Any]:
    """Whether its GPU library was loaded; where it says so moved in 0.43.0."""
    extension = importlib.import_module("bitsandbytes.cextension")
    library = getattr(extension, "lib", None)
    with_cuda = getattr(library, "compiled_with_cuda", None)
    if with_cuda is None:
        with_cuda = getattr(extension, "COMPILED_WITH_CUDA", False)
    name = type(library).__name__
    return {"library": name, "gpu": bool(with_cuda) or name.lower().startswith("xpu")}


_FACTS: Mapping[str, Callable[[], Dict[str, Any]]] = {
    "torch": _torch_facts,
    "bitsandbytes": _bitsandbytes_facts,
}
