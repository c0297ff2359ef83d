"""Proofs, found without a search, that units cannot be divided among budgets."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from .records import (
    Certificate,
    Device,
    RoomUnusable,
    TooManyLarge,
    TotalTooLarge,
    UnitTooLarge,
)

# Different loads of one device that are followed for RoomUnusable.
LOADS = 4096


def too_large(
    together: Sequence[Tuple[int, Tuple[str, ...]]], budgets: Mapping[Device, int]
) -> Optional[Certificate]:
    """Return the proof that the total or one of (bytes, names) exceeds what there is, or None."""
    needed = sum(size for size, _ in together)
    usable = sum(budgets.values())
    if needed > usable or not budgets:
        return TotalTooLarge(needed, usable)
    largest = max(budgets.values())
    size, names = max(together, key=lambda item: item[0])
    return UnitTooLarge(names, size, largest) if size > largest else None


def indivisible(sizes: Sequence[int], budgets: Mapping[Device, int]) -> Optional[Certificate]:
    """Return the proof that the sizes leave too much room on the devices, or None."""
    counted = Counter(size for size in sizes if size > 0)
    descending = sorted(counted, reverse=True)
    for size, count in zip(descending, accumulate(counted[size] for size in descending)):
        if sum(budget // size for budget in budgets.values()) < count:
            fits = tuple((device, budget // size) for device, budget in budgets.items())
            return TooManyLarge(size, count, fits)
    return _unusable(descending, counted, budgets)


def _unusable(
    descending: Sequence[int], counted: Mapping[int, int], budgets: Mapping[Device, int]
) -> Optional[Certificate]:
    limit = max(budgets.values())
    loads: Set[int] = {0}
    needed = 0
    for size in descending:
        needed += size * counted[size]
        for _ in range(min(counted[size], limit // size)):
            new = {load + size for load in loads if load + size <= limit} - loads
            if not new:
                break
            loads |= new
        if len(loads) > LOADS:
            return None
        best = _fullest(sorted(loads), budgets)
        if sum(best.values()) < needed:
            return RoomUnusable(size, needed, tuple(best.items()))
    return None


def _fullest(loads: List[int], budgets: Mapping[Device, int]) -> Dict[Device, int]:
    """Return the largest of the ascending loads within each budget."""
    return {device: loads[bisect_right(loads, b) - 1] for device, b in budgets.items()}
