"""The corrected balanced budgets of #47203 and #47211, and their adapters to each generation."""
