"""From a model and its budgets to a placement on the accelerators, or the proof that none exists."""
