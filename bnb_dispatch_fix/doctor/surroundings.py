"""Imports torch and the packages around it in a process of its own, which may crash or hang.

A broken CUDA library can end a process without an exception, and an import can wait for ever;
whoever asks here gets an answer all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from bnb_dispatch_fix import child
from bnb_dispatch_fix.features import SWITCH
from bnb_dispatch_fix.wording import one_line

#: In the order they are imported; each needs those before it.
PACKAGES = ("torch", "bitsandbytes", "accelerate", "transformers")
#: Seconds until an import counts as one that hangs (torch on a cold network disk takes 60).
TIMEOUT = 180.0
#: The modules the planners live in: a package may import and still break there.
_DEEPER = {"transformers": "transformers.modeling_utils", "accelerate": "accelerate.utils"}


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
        ending = child.ask(
            f"{__name__}:answer", waiting, environment={SWITCH: "off"}, timeout=timeout
        )
        for found in ending.answers[: len(waiting)]:
            answers[waiting.pop(0)] = Answer(*found)
        if waiting:
            package = waiting.pop(0)
            how = _how_it_ended(ending, timeout)
            answers[package] = Answer("broken", how, {"version": _version(package)})
    return answers


def _how_it_ended(ending: child.Ending, timeout: float) -> str:
    if ending.code is None:
        return f"the import did not end within {timeout:g} s"
    return f"the import ended its process (exit code {ending.code}) {ending.last_line}".strip()


def answer(packages: Sequence[str]) -> None:
    """In the child: import each package and give its answer at once."""
    for package in packages:
        child.answer(_import(package))


def _import(package: str) -> Answer:
    try:
        module = importlib.import_module(package)
        if package in _DEEPER:
            importlib.import_module(_DEEPER[package])
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a library may fail in any way
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        facts = {"version": _version(package)}
        if package == "bitsandbytes" and not missing:
            facts["built_for"] = _libraries_of(package)
        return Answer("missing" if missing else "broken", one_line(error), facts)
    facts = {"version": getattr(module, "__version__", None) or _version(package)}
    facts["unmet"] = _unmet(package)
    try:
        facts.update(_FACTS.get(package, dict)())
    except Exception as error:  # noqa: BLE001  # a library may fail in any way
        return Answer("ok", one_line(error), facts)
    return Answer("ok", "", facts)


def _version(package: str) -> Any:
    from importlib import metadata  # 70 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _unmet(package: str) -> List[Tuple[str, str, str]]:
    """Requirements of a package that what is installed does not meet: name, range, version."""
    from importlib import metadata  # 70 ms

    from packaging.requirements import Requirement  # 30 ms

    unmet = []
    try:
        for text in metadata.requires(package) or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            found = _version(wanted.name)
            if found is None or not wanted.specifier.contains(found, prereleases=True):
                unmet.append((wanted.name, str(wanted.specifier), found or "none"))
    except Exception:  # noqa: BLE001  # metadata that nobody can read is not what is wrong here
        return []
    return unmet


def _numpy_facts(torch: Any) -> Dict[str, Any]:
    """Whether torch and the installed numpy know each other; "numpy_error" where not."""
    version = _version("numpy")
    if version is None:
        return {}
    try:
        torch.zeros(1).numpy()
    except Exception as error:  # noqa: BLE001  # torch says it in more than one way
        return {"numpy": version, "numpy_error": one_line(error)}
    return {"numpy": version}


def _torch_facts() -> Dict[str, Any]:
    """The build ("cuda 12.8", "hip ...", "xpu", "cpu") and the devices, memory in bytes."""
    import torch  # found, not required

    versions = vars(torch.version)
    kind = next((name for name in ("cuda", "hip", "xpu") if versions.get(name)), "cpu")
    facts: Dict[str, Any] = {"build": f"{kind} {versions.get(kind) or ''}".strip(), "devices": []}
    facts["set_submodule"] = hasattr(torch.nn.Module, "set_submodule")
    facts.update(_numpy_facts(torch))
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
    except Exception as error:  # noqa: BLE001  # a driver may fail in any way
        device["error"] = one_line(error)
    return device


def _bitsandbytes_facts() -> Dict[str, Any]:
    """Whether its GPU library was loaded; where it says so moved in 0.43.0."""
    extension = importlib.import_module("bitsandbytes.cextension")
    library = getattr(extension, "lib", None)
    with_cuda = getattr(library, "compiled_with_cuda", None)
    if with_cuda is None:
        with_cuda = getattr(extension, "COMPILED_WITH_CUDA", False)
    name = type(library).__name__
    gpu = bool(with_cuda) or name.lower().startswith("xpu")
    return {"library": name, "gpu": gpu, "built_for": _built_for(extension.__file__)}


def _built_for(extension: Optional[str]) -> List[str]:
    """The CUDA versions ("118") that the installed bitsandbytes has a library for, in order."""
    libraries = Path(extension or "").parent.glob("libbitsandbytes_cuda*")
    found = (re.match(r"libbitsandbytes_cuda(\d+)", library.name) for library in libraries)
    return sorted({match.group(1) for match in found if match}, key=int)


def _libraries_of(package: str) -> Optional[List[str]]:
    """The same of a bitsandbytes that cannot be imported; None where it is not found."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # what is half imported may have none
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return _built_for(spec.origin)


_FACTS: Mapping[str, Callable[[], Dict[str, Any]]] = {
    "torch": _torch_facts,
    "bitsandbytes": _bitsandbytes_facts,
}
