"""Stands around `PreTrainedModel.from_pretrained`: notes what it was asked, explains its errors.

Before the installed function nothing keeps it from being called, after it nothing is raised but
what it raised: a model that is loaded is not lost over a line about it.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, Dict, Optional, Tuple

from bnb_dispatch_fix import features
from bnb_dispatch_fix.backport.shapes import Installed
from bnb_dispatch_fix.model.device_map import all_on_host
from bnb_dispatch_fix.model.load import Load, running
from bnb_dispatch_fix.wording import log
from bnb_dispatch_fix.wrappers.contained import contained


def from_pretrained(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    """Stands for `PreTrainedModel.from_pretrained`: notes the budgets, explains errors."""
    load = _noted(installed, args, kwargs)
    try:
        with running(load):
            loaded = installed(*args, **kwargs)
    except Exception as error:
        with contained("unexplained"):
            _explain(error, load)
        raise
    with contained("disk unexplained"):
        _look_at(load)
    return loaded


def _noted(installed: Installed, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Load:
    """What is asked; where it cannot be read, a note that says nothing."""
    with contained("request unread"):
        asked = (kwargs.get("device_map"), kwargs.get("max_memory"))
        return Load(*asked, kwargs, functools.partial(installed, *args), *args[:1])
    return Load(None, None)


def _explain(error: Exception, load: Load) -> None:
    if "explain" in features.on():
        from bnb_dispatch_fix.explain import refusal  # needed for an error only

        refusal.explain_load(error, load)


def _look_at(load: Load) -> None:
    """Say what is odd about the plan of a model that was loaded."""
    if "explain" not in features.on():
        return
    for line, *arguments in load.later:
        log(logging.WARNING, line, *arguments)
    if load.strategy and all_on_host(load.planned):
        from bnb_dispatch_fix.explain import refusal  # needed for an odd plan only

        refusal.warn_of_whole_model(load)
    _pass_on(sys.exc_info()[1])


def _pass_on(caught: Optional[BaseException]) -> None:
    """Log the note on an error that the caller is about to forget, having loaded after all.

    transformers' `pipeline` tries once more in float32 when a load fails, and says nothing of why.
    """
    if caught is None:
        return
    from bnb_dispatch_fix.explain import notes  # needed after an error only

    note = notes.taken(caught)
    if note is not None:
        log(logging.WARNING, "caught", note)
