"""Stands around diffusers' planner, under each of its names."""

from __future__ import annotations

from typing import Any

from bnb_dispatch_fix.backport.shapes import Installed
from bnb_dispatch_fix.model.diffusers import alone, from_diffusers
from bnb_dispatch_fix.wrappers.planners import around


def planner(installed: Installed, *args: Any, **kwargs: Any) -> Any:
    """Stands for `_determine_device_map` of diffusers 0.31 and newer."""
    return around(from_diffusers, alone(installed), args, kwargs)
