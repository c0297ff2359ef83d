"""A call of a planner in; what was asked, sized units, usable budgets and the exact search out.

The one place that reads what torch, transformers and accelerate are given. Called by explain/,
wrappers/ and planning/.
"""
