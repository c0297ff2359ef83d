"""Where a model would go: a checkpoint and budgets in, a `Plan` out; as text, HTML and JSON.

Public: `Plan` and `PlanError`; `bnb_dispatch_fix.plan()` makes one. The installed release is asked
in a process of its own (rehearsal.py), on GPUs that are simulated (simulation.py).
"""

from bnb_dispatch_fix.planning.records import Plan, PlanError

__all__ = ["Plan", "PlanError"]
