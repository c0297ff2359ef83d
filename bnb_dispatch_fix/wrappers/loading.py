"""Stands around `PreTrainedModel.from_pretrained`: notes what it was asked, explains its errors."""

from __future__ import annotations

from typing import Any, Callable

from bnb_dispatch_fix import features
from bnb_dispatch_fix.backport.dispatch import all_on_disk
from bnb_dispatch_fix.model.load import Load, running


def from_pretrained(installed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for `PreTrainedModel.from_pretrained`: notes the budgets, explains errors."""
    load = Load(kwargs.get("device_map"), kwargs.get("max_memory"))
    try:
        with running(load):
            loaded = installed(*args, **kwargs)
    except Exception as error:
        if "explain" in features.on():
            from bnb_dispatch_fix.explain import refusal  # needed for an error only

            refusal.explain_load(error, load)
        raise
    if load.strategy and all_on_disk(load.planned) and "explain" in features.on():
        from bnb_dispatch_fix.explain import refusal  # needed for an odd plan only

        refusal.warn_of_disk(load)
    return loaded
