"""Keeps a fault of ours from a load: around the installed function nothing else may raise."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from bnb_dispatch_fix import states
from bnb_dispatch_fix.wording import log


@contextmanager
def contained(line: str) -> Iterator[None]:
    """End the block at the first exception, note it, and log it as `line` (`wording.LINES`)."""
    try:
        yield
    except Exception as fault:  # noqa: BLE001  # whatever it is, it is ours and not the load's
        log(states.contained(line, fault), line, fault)
