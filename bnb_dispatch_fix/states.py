"""The records that `status()` answers with, and the faults of ours that cost nobody a load."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

#: Every state a seam can be in.
STATES = ("applied", "already-fixed", "pending", "skipped", "replaced", "disabled", "failed")


class PatchStatus(NamedTuple):
    """One seam as it is now.

    `state` is one of `STATES`; `fixes` are the PRs the patch supplies; `missing` are the PRs
    that nobody supplies there.
    """

    id: str
    module: str
    attribute: str
    state: str
    fixes: Tuple[int, ...]
    reason: str
    missing: Tuple[int, ...] = ()


class Status(NamedTuple):
    """The shim, what is installed, and every seam; `problem` is what keeps all of it off.

    `holders` are the names ("module.attribute") of loaded modules that took a function before it
    was patched, and miss what was patched there.
    """

    version: str
    features: Tuple[str, ...]
    installed: Dict[str, Optional[str]]
    patches: Tuple[PatchStatus, ...]
    problem: Optional[str]
    holders: Tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing that is missing stayed unpatched."""
        return self.problem is None and not any(patch.missing for patch in self.patches)

    def as_dict(self) -> Dict[str, Any]:
        """Plain data, as `bnb-dispatch-fix status --json` prints it."""
        data: Dict[str, Any] = {
            "version": self.version,
            "features": list(self.features),
            "installed": dict(self.installed),
            "patches": [
                {
                    "id": patch.id,
                    "module": patch.module,
                    "attribute": patch.attribute,
                    "state": patch.state,
                    "fixes": list(patch.fixes),
                    "reason": patch.reason,
                }
                for patch in self.patches
            ],
        }
        if self.holders:
            data["holders"] = list(self.holders)
        return data


class _Places(threading.local):
    def __init__(self) -> None:
        self.entered: List[str] = []


_places = _Places()
_told: Set[Tuple[str, str]] = set()
_last: Dict[str, str] = {}


@contextmanager
def at(place: str) -> Iterator[None]:
    """What this thread reports while the block runs happened at this seam."""
    _places.entered.append(place)
    try:
        yield
    finally:
        _places.entered.pop()


def contained(kind: str, error: BaseException) -> int:
    """Note a fault of ours that the caller is spared, for `status()`; the level of its log line.

    That is WARNING for the first of a kind at a seam, and DEBUG from then on.
    """
    place = _places.entered[-1] if _places.entered else ""
    _last[place] = f"{kind}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if (place, kind) in _told:
        return logging.DEBUG
    _told.add((place, kind))
    return logging.WARNING


def last_fault(place: str) -> Optional[str]:
    """The last fault that was noted at a seam."""
    return _last.get(place)
