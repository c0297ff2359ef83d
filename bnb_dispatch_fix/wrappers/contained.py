"""Keeps a fault of ours from a load: around the installed function nothing else may raise."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Iterator

from bnb_dispatch_fix.wording import log


@contextmanager
def contained(line: str) -> Iterator[None]:
    """End the block at the first exception and log it as `line` (see `wording.LINES`)."""
    try:
        yield
    except Exception as fault:
        log(logging.WARNING, line, fault)
