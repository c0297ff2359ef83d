"""What accelerate's `get_balanced_memory` was asked, for who plans with its answer afterwards.

accelerate's own callers balance first and then call a planner that is told the result alone. Noted
per thread, only while `even` is on.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.backport.balanced import lone_device_share
from bnb_dispatch_fix.placement.records import Device


class Balanced(NamedTuple):
    """The caller's budgets (None: what is free), before they were capped.

    `lone_share` is what the release uses of a lone accelerator's free memory.
    """

    max_memory: Optional[Dict[Device, Any]]
    low_zero: bool
    lone_share: float

    @property
    def strategy(self) -> str:
        """The strategy that balances so."""
        return "balanced_low_0" if self.low_zero else "balanced"


class _Note(NamedTuple):
    model: Callable[[], Any]  # a weak reference
    caps: Dict[Device, Any]
    values: Dict[Device, Any]  # of `caps`, when they were new
    asked: Balanced


class _Thread(threading.local):
    note: Optional[_Note] = None


_thread = _Thread()


def read(
    installed: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Tuple[Any, Balanced]]:
    """The model and the question of a call; to be read before it, which may change the budgets."""
    try:
        given = inspect.signature(installed).bind(*args, **kwargs).arguments
    except TypeError:  # the installed function says what is wrong
        return None
    budgets = given.get("max_memory")
    copied = None if budgets is None else dict(budgets)
    asked = Balanced(copied, bool(given.get("low_zero")), lone_device_share(installed))
    return given["model"], asked


def note(model: Any, asked: Balanced, caps: Dict[Device, Any]) -> None:
    """Remember the last answer of this thread, and what was asked for it."""
    _thread.note = _Note(weakref.ref(model), caps, dict(caps), asked)


def behind(model: Any, max_memory: Optional[Mapping[Device, Any]]) -> Optional[Balanced]:
    """What was asked for these very budgets; None where nobody balanced, or changed them since."""
    noted = _thread.note
    if noted is None or max_memory is not noted.caps or noted.model() is not model:
        return None
    return noted.asked if noted.caps == noted.values else None
