"""What budgets were read as, and what is odd about them and about this machine."""

from __future__ import annotations

import sys
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from bnb_dispatch_fix.model.machine import (
    accelerators_seen,
    memory_of,
    nvidia_driver,
    reserved_here,
)
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST, MIB, amount, device_name

#: A budget below this is rather a slip than a budget (bytes).
_SLIP = MIB
#: Accelerators with less than this are as good as not there (bytes).
_HARDLY_ANYTHING = 2**30 // 10
#: From this share of a card on, what others hold of it is said.
_HELD = 0.1


def read_as(request: Request) -> str:
    """The budgets, device by device, and what the model needs."""
    source = "max_memory" if request.max_memory is not None else "free memory"
    given = request.budgets().given
    read = ", ".join(f"{device_name(d)} {amount(size)}" for d, size in given.items())
    need = amount(request.units().total)
    return f"{source} was read as: {read or 'nothing'}; the model needs {need}"


def oddities(request: Request) -> Iterator[str]:
    """What is implausible about the budgets, and what to write instead."""
    budgets, asked = request.budgets(), request.max_memory
    given = budgets.given
    named = [device for device in given if device not in HOST]
    if asked is not None and not named and accelerators_seen():
        yield (
            f"max_memory names no GPU though torch sees {accelerators_seen()}: "
            f"add 0: ..., the GPU's number without quotes"
        )
    if asked is not None and set(given) <= {"disk"}:
        yield "only the disk has a budget: name a GPU or the CPU"
    for device, size in given.items():
        if device != "disk" and size < _SLIP:
            yield _slip(device, size, asked)
    for size in (asked or {}).values():
        if isinstance(size, str) and size.endswith("b"):
            yield f"{size!r} is bits, an eighth: write {size[:-1] + 'B'!r} for bytes"
    yield from held_by_others(request)
    largest, name = _largest(request)
    usable = {d: s for d, s in budgets.usable.items() if d != "disk" and s >= _SLIP}
    usable = {d: s for d, s in usable.items() if d not in HOST} or usable
    most = max(usable.values(), default=largest)
    if most < largest:
        yield (
            f"the largest module, {name}, needs {amount(largest)}; the largest usable budget "
            f"is {amount(most)}"
        )


def hardly_anything(request: Request) -> List[str]:
    """What to say where the accelerators' budgets are as good as none; empty where they are not."""
    if max(request.budgets().accelerators.values(), default=0) >= _HARDLY_ANYTHING:
        return []
    return [read_as(request), *(f"- {cause}" for cause in oddities(request))]


def _slip(device: Device, size: int, asked: Optional[Mapping[Device, Any]]) -> str:
    """A budget that no module fits in, by the way it was given."""
    name = device_name(device)
    if asked is None:
        return (
            f"{name} is read as having {amount(size)} free, which is no plausible size: "
            "name max_memory yourself"
        )
    if size == 0:
        return f"{name} has a budget of 0 bytes: leave it out of max_memory or give it a size"
    written = asked.get(device)
    if isinstance(written, str):
        return f"{name} has {amount(size)} (written {written!r}), less than a module needs"
    return (
        f"{name} has {size} bytes: write a text with a unit such as '20GiB'; "
        "a bare number counts bytes"
    )


def held_by_others(request: Request) -> Iterator[str]:
    """Cards of which much is in use, where budgets are what is free."""
    if request.max_memory is not None:
        return
    for device, free in request.budgets().given.items():
        total = memory_of(device)
        if total is None or total - free < _HELD * total:
            continue
        mine = reserved_here(device)
        holder = f", {amount(mine)} of it by this process" if mine >= _HELD * total else ""
        yield (
            f"{device_name(device)}: {amount(free)} of {amount(total)} are free; "
            f"{amount(total - free)} are held already{holder}"
        )


def _largest(request: Request) -> Tuple[int, str]:
    units = request.units().units
    return max(((unit.size, unit.name) for unit in units), default=(0, ""))


def no_accelerator() -> Iterator[str]:
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
        yield (
            f"{there}torch {getattr(torch, '__version__', '?')} sees no GPU: "
            f"it is a build for the CPU{where}"
        )
    elif driver:
        yield f"torch was built for CUDA {built} but sees no GPU: driver or CUDA_VISIBLE_DEVICES"
    else:
        why = ": there is no NVIDIA driver" if getattr(version, "cuda", None) else ""
        yield f"torch {getattr(torch, '__version__', '?')} sees no GPU{why}"


def _bitsandbytes_without_gpu() -> bool:
    extension: Any = sys.modules.get("bitsandbytes.cextension")
    if extension is None:
        return False
    before = getattr(extension, "COMPILED_WITH_CUDA", False)  # bitsandbytes < 0.43
    return not getattr(extension.lib, "compiled_with_cuda", before)
