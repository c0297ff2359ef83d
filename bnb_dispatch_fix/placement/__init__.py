"""Pure arithmetic: sized units and budgets in, a placement or a proof that there is none out.

Imports nothing but the standard library; every other wing may call it.
"""
