"""Explains a model that was planned on the disk as a whole: which budgets were read, and why."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from packaging.version import Version

from bnb_dispatch_fix.model.load import Load
from bnb_dispatch_fix.model.machine import accelerators_seen, nvidia_driver
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.wording import HOST, MIB, device_name, gib, log

#: How the errors are worded: accelerate 0.21-1.14; transformers 4.x and accelerate where there
#: is no folder for what is not safetensors.
_TEXTS = (
    "offload the whole model to the disk",
    "Please provide an `offload_folder`",
    "We need an `offload_dir`",
)
#: A budget below this is rather a slip than a budget (bytes).
_SLIP = MIB


def lines(error: BaseException, load: Load) -> List[str]:
    """The explanation, line by line; empty where the error is about something else."""
    text = str(error)
    if not any(part in text for part in _TEXTS) and not _root_as_device(text, load):
        return []
    found = list(_budgets(load))
    found += [f"- {cause}" for cause in _causes(load)]
    found.append(_remedy(text, load))
    return found


def warn(load: Load) -> None:
    """Say why a planner left the whole model to the disk, where no error is raised about it."""
    version = Version(sys.modules["transformers"].__version__)
    fate = (
        "and transformers 5.0-5.12 attach no hooks to it, so that it cannot run; use 5.13 or newer"
        if Version("5.0.0.dev0") <= version < Version("5.13.0")
        else "and will run slowly from there"
    )
    why = "; ".join([*_budgets(load), *_causes(load)])
    log(logging.WARNING, "whole model on the disk", fate, why)


def _root_as_device(text: str, load: Load) -> bool:
    """Whether transformers 4.50-4.57 took the "disk" under the key "" for a device of torch."""
    wanted = load.planned if load.strategy else load.device_map
    taken = "device disk is invalid" in text or "Expected one of cpu" in text
    return taken and isinstance(wanted, Mapping) and wanted.get("") == "disk"


def _budgets(load: Load) -> Iterator[str]:
    request = load.request
    if request is None:
        yield f"device_map={load.device_map!r} puts the whole model, or a part of it, on the disk"
        return
    budgets = request.budgets()
    source = "max_memory" if request.max_memory is not None else "free memory"
    read = ", ".join(f"{device_name(d)} {_exact(size)}" for d, size in budgets.given.items())
    yield f"{source} was read as: {read or 'nothing'}; the model needs {gib(_total(request))} GiB"


def _exact(size: int) -> str:
    return f"{size} bytes" if 0 < size < _SLIP else f"{gib(size)} GiB"


def _total(request: Request) -> int:
    return request.units().total


def _causes(load: Load) -> Iterator[str]:
    """What is implausible about the budgets, and about this machine."""
    request = load.request
    if request is not None:
        yield from _implausible(request, load.max_memory)
    yield from _no_accelerator()


def _implausible(request: Request, asked: Optional[Mapping[Any, Any]]) -> Iterator[str]:
    budgets = request.budgets()
    given = budgets.given
    numbers = [device for device in given if device not in HOST]
    if asked is not None and not numbers and accelerators_seen():
        yield (
            f"max_memory names no GPU though torch sees {accelerators_seen()}: "
            f"add 0: ..., the GPU's number without quotes"
        )
    if asked is not None and set(given) <= {"disk"}:
        yield "only the disk has a budget: name a GPU or the CPU"
    for device, size in given.items():
        if device != "disk" and 0 <= size < _SLIP:
            meant = "a text with a unit such as '20GiB'; a bare number counts bytes"
            yield f"{device_name(device)} has {size} bytes: write {meant}"
    for size in (asked or {}).values():
        if isinstance(size, str) and size.endswith("b"):
            yield f"{size!r} is bits, an eighth: write {size[:-1] + 'B'!r} for bytes"
    largest, name = _largest(request)
    usable = {d: s for d, s in budgets.usable.items() if d != "disk" and s >= _SLIP}
    if usable and max(usable.values()) < largest:
        yield (
            f"the largest module, {name}, needs {gib(largest)} GiB; the largest usable budget "
            f"is {gib(max(usable.values()))} GiB"
        )


def _largest(request: Request) -> Tuple[int, str]:
    units = request.units().units
    return max(((unit.size, unit.name) for unit in units), default=(0, ""))


def _no_accelerator() -> Iterator[str]:
    """Why torch may see no GPU though there is one."""
    driver = nvidia_driver()
    if driver and _bitsandbytes_without_gpu():
        yield "bitsandbytes has no GPU library: reinstall it for the CUDA version of torch"
    if accelerators_seen():
        return
    torch: Any = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    built = getattr(version, "cuda", None) or getattr(version, "hip", None)
    if not built:
        there = f"an NVIDIA driver is here ({driver}), but " if driver else ""
        where = ", as pip installs it on Windows" if sys.platform == "win32" else ""
        yield f"{there}torch {getattr(torch, '__version__', '?')} is a build for the CPU{where}"
    elif driver:
        yield f"torch was built for CUDA {built} but sees no GPU: driver or CUDA_VISIBLE_DEVICES"
    else:
        yield "torch sees no GPU"


def _bitsandbytes_without_gpu() -> bool:
    extension: Any = sys.modules.get("bitsandbytes.cextension")
    if extension is None:
        return False
    before = getattr(extension, "COMPILED_WITH_CUDA", False)  # bitsandbytes < 0.43
    return not getattr(extension.lib, "compiled_with_cuda", before)


def _remedy(text: str, load: Load) -> str:
    if "offload_folder" in text or "offload_dir" in text:
        return 'to keep parts on the disk, add offload_folder="offload"'
    if _root_as_device(text, load):
        return (
            f"this release reads only a map with several keys from the disk: device_map="
            f'{_children_on_disk(load)}, offload_folder="offload" (slow), or larger budgets'
        )
    return (
        "larger budgets keep it off the disk; to run it from there, slowly, switch the backport "
        "of accelerate #4083 on or use accelerate 1.15.0"
    )


def _children_on_disk(load: Load) -> str:
    names = ["model", "lm_head"]
    if load.request is not None:
        tensors = (name for name, _ in load.request.model.named_parameters())
        names = list(dict.fromkeys(name.partition(".")[0] for name in tensors))
    return json.dumps(dict.fromkeys(names, "disk"))
