"""Warns of a whole model that goes to the CPU or the disk though accelerators are there."""

from __future__ import annotations

import logging
from typing import Any, Iterator

from bnb_dispatch_fix.backport.dispatch import all_on_disk
from bnb_dispatch_fix.explain import reading
from bnb_dispatch_fix.explain.recipes import in_16_bits, on_accelerators
from bnb_dispatch_fix.model.machine import accelerators_seen
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.wording import HOST, log


def warn(request: Request, device_map: Any, decided: bool = True) -> None:
    """Log one line where it is so; no exception leaves it.

    Not where no accelerator is there and none was named: then the CPU is what was meant. Of a
    planner that only measures (accelerate's, called by hand) nothing is said, and of a map that is
    all "disk" elsewhere (see offload_disk.py). While the release has not `decided` whether it
    refuses the map, it is too early: `from_pretrained` asks again when it has loaded.
    """
    try:
        wanted = bool(request.strategy) or request.quantizer is not None
        early = request.refuses_offload and not decided
        if not wanted or early or all_on_disk(device_map) or not _expected(request):
            return
        places = " and ".join(
            {"cpu": "the CPU", "disk": "the disk"}[place]
            for place in HOST
            if place in map(str, device_map.values())
        )
        why = "; ".join(_why(request))
        log(logging.WARNING, "whole model off the accelerators", places, why)
    except Exception as fault:  # noqa: BLE001  # no load is lost to a note
        log(logging.WARNING, "whole model unexplained", fault)


def _expected(request: Request) -> bool:
    """Whether an accelerator is there, or was named."""
    return accelerators_seen() > 0 or any(d not in HOST for d in request.max_memory or ())


def _why(request: Request) -> Iterator[str]:
    yield reading.read_as(request)
    yield from reading.oddities(request)
    yield from reading.no_accelerator()
    for recipe in on_accelerators(request):
        yield f"{recipe.what} it goes to accelerators (planned): {recipe.arguments}"
    for recipe in in_16_bits(request):
        yield f"with {recipe.what} it goes there (planned): {recipe.arguments}"
