"""How even a spread can be at best: an oracle that knows nothing of the shim.

The smallest largest fill (load ÷ budget) of all ways to cut a line of parts into runs and to give
these to the devices in their order, each no more than its budget; a device may stay empty.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate


def smallest_largest_fill(sizes, budgets):
    """The optimum, exactly; None where no such division is within the budgets (bytes)."""
    ends = [0, *accumulate(sizes)]
    # By number of parts that lie on the devices so far: the best that can be reached.
    best = {0: Fraction(0)}
    for budget in budgets:
        after = dict(best)
        for start, reached in best.items():
            for end in range(start + 1, len(ends)):
                load = ends[end] - ends[start]
                if load > budget:
                    break
                fill = max(reached, Fraction(load, budget))
                if end not in after or fill < after[end]:
                    after[end] = fill
        best = after
    return best.get(len(sizes))


def largest_fill(loads, budgets):
    """That of a spread that was planned, by device."""
    return max(Fraction(load, budgets[device]) for device, load in loads.items())


def least_on_first(sizes, budgets):
    """For "balanced_low_0": bytes that the first device holds at least; None where nothing fits."""
    ends = [0, *accumulate(sizes)]
    counts = range(len(ends))
    rest = (n for n in counts if smallest_largest_fill(sizes[n:], budgets[1:]) is not None)
    # What lies on the first device in order is the beginning of the line.
    return next((ends[n] for n in rest if ends[n] <= budgets[0]), None)
