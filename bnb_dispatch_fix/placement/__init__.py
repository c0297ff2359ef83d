"""From a model and budgets to a placement on the accelerators, or the proof that there is none."""
