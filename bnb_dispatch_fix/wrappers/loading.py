"""Stands around `PreTrainedModel.from_pretrained`: notes what it was asked, explains its errors."""

from __future__ import annotations

import functools
from typing import Any, Callable

from bnb_dispatch_fix import features
from bnb_dispatch_fix.model.device_map import all_on_host
from bnb_dispatch_fix.model.load import Load, running


def from_pretrained(installed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for `PreTrainedModel.from_pretrained`: notes the budgets, explains errors."""
    asked = (kwargs.get("device_map"), kwargs.get("max_memory"))
    load = Load(*asked, kwargs, functools.partial(installed, *args), *args[:1])
    try:
        with running(load):
            loaded = installed(*args, **kwargs)
    except Exception as error:
        if "explain" in features.on():
            from bnb_dispatch_fix.explain import refusal  # needed for an error only

            refusal.explain_load(error, load)
        raise
    if load.strategy and all_on_host(load.planned) and "explain" in features.on():
        from bnb_dispatch_fix.explain import refusal  # needed for an odd plan only

        refusal.warn_of_whole_model(load)
    return loaded
