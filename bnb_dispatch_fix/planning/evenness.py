"""How even the spread of each run is, beside the best one in device order."""

from __future__ import annotations

from typing import Any, Dict, List

from bnb_dispatch_fix.model.requests import Measured, Request
from bnb_dispatch_fix.model.search import filled_last, most_even
from bnb_dispatch_fix.model.spread import fullest


def add(request: Request, runs: List[Dict[str, Any]]) -> None:
    """Say of each run that is on accelerators how even it is; see `records.Run`."""
    if request.strategy == "sequential":
        request = request._replace(strategy="auto")
    outcome = most_even(Measured(request))
    if outcome is None:
        return
    usable = outcome.budgets.accelerators
    last = filled_last(request, usable)
    best = fullest(outcome.units.loads(outcome.device_map or {}), usable, last)
    for run in runs:
        loads = {device: placed for device, _, _, placed, _ in run["devices"] if placed}
        if best and run["outcome"] in ("loads", "overfull") and set(loads) <= set(usable):
            run["evenness"] = float(fullest(loads, usable, last) / best)
