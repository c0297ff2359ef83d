"""A checker of proofs that no placement exists; it knows nothing of how they were found."""

from __future__ import annotations

from bisect import bisect_right
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

from .records import (
    Certificate,
    Device,
    RoomUnusable,
    SearchComplete,
    TooManyLarge,
    TotalTooLarge,
    Unit,
    UnitTooLarge,
)

__all__ = [
    "CannotVerify",
    "Certificate",
    "RoomUnusable",
    "SearchComplete",
    "TooManyLarge",
    "TotalTooLarge",
    "UnitTooLarge",
    "verify",
]

# Beyond this many steps, below a microsecond each, the checker does not try to follow a proof.
CHECK_LIMIT = 300_000


class CannotVerify(Exception):
    """The proof is too long to be checked independently; it is neither confirmed nor refuted."""


def verify(
    certificate: Certificate,
    units: Sequence[Unit],
    budgets: Mapping[Device, int],
    steps: int = CHECK_LIMIT,
) -> bool:
    """Tell whether the certificate proves that no placement of the units exists.

    Everything is computed again from the units and budgets (bytes). For SearchComplete this is a
    search of its own, breadth first over what is left for the remaining devices.
    Raises CannotVerify where that, or RoomUnusable, takes more than so many steps.
    """
    usable = {device: budget for device, budget in budgets.items() if budget > 0}
    together = _tied_sizes(units)
    sizes = [size for size, _ in together]
    if isinstance(certificate, TotalTooLarge):
        matches = certificate == TotalTooLarge(sum(sizes), sum(usable.values()))
        return matches and bool(units) and (sum(sizes) > sum(usable.values()) or not usable)
    if isinstance(certificate, UnitTooLarge):
        known = (certificate.needed, certificate.names) in together
        largest = max(usable.values(), default=0)
        return known and certificate.needed > certificate.largest_budget == largest
    if isinstance(certificate, TooManyLarge):
        fits = dict(certificate.fits)
        return (
            fits.keys() == usable.keys()
            and all((fits[device] + 1) * certificate.size > usable[device] for device in usable)
            and sum(size >= certificate.size for size in sizes) >= certificate.count
            and certificate.count > sum(fits.values())
        )
    if isinstance(certificate, RoomUnusable):
        return _room_is_unusable(certificate, sizes, usable, steps)
    if certificate != SearchComplete(len(sizes), len(usable)):
        return False
    return not _divisible([size for size in sizes if size], sorted(usable.values()), steps)


def _tied_sizes(units: Sequence[Unit]) -> List[Tuple[int, Tuple[str, ...]]]:
    """Return (bytes, names) of what has to share a device."""
    found = [(size, (name,)) for name, size, tie, _ in units if tie is None]
    tied: Dict[Union[int, str], List[Unit]] = {}
    for unit in units:
        if unit.tie is not None:
            tied.setdefault(unit.tie, []).append(unit)
    groups = [(sum(u.size for u in group), tuple(u.name for u in group)) for group in tied.values()]
    return [*found, *groups]


def _room_is_unusable(
    certificate: RoomUnusable, sizes: Sequence[int], usable: Mapping[Device, int], steps: int
) -> bool:
    large = [size for size in sizes if size >= certificate.size]
    claimed = dict(certificate.usable)
    if sum(large) != certificate.needed or claimed.keys() != usable.keys():
        return False
    if certificate.needed <= sum(claimed.values()):
        return False
    loads = sorted(_loads_of_one_device(large, max(usable.values(), default=0), steps))
    fullest = {device: loads[bisect_right(loads, budget) - 1] for device, budget in usable.items()}
    return all(fullest[device] <= claimed[device] for device in usable)


def _loads_of_one_device(sizes: Sequence[int], budget: int, steps: int) -> Set[int]:
    """Return what the sets of the sizes come to, as far as that is within the budget."""
    loads = {0}
    left = steps
    complete = -1  # one more of this size gives nothing new
    for size in sorted(sizes):
        if size == complete:
            continue
        left -= len(loads)
        if left < 0:
            raise CannotVerify(f"more than {steps} steps through the loads of one device")
        before = len(loads)
        loads |= {load + size for load in loads if load + size <= budget}
        complete = size if len(loads) == before else -1
    return loads


def _divisible(sizes: Sequence[int], budgets: Sequence[int], steps: int) -> bool:
    """Tell whether the sizes can be divided among the budgets."""
    kinds = sorted(set(sizes))
    left = {tuple(sizes.count(kind) for kind in kinds)}
    each = 1 + len(kinds) // 8  # results with many kinds take longer
    work = 0
    for number, budget in enumerate(budgets, 1):
        later = sum(budgets[number:])
        after = set()
        for counts in left:
            for rest in _maximal_loads(kinds, counts, budget):
                work += each
                if work > steps:
                    raise CannotVerify(f"more than {steps} steps through the loads of the devices")
                if (
                    rest is not None
                    and sum(kind * count for kind, count in zip(kinds, rest)) <= later
                ):
                    after.add(rest)
        left = after
    return any(not any(counts) for counts in left)


def _maximal_loads(
    kinds: Sequence[int], counts: Tuple[int, ...], budget: int
) -> Iterator[Optional[Tuple[int, ...]]]:
    """Yield what remains of the counts for each load to which nothing could be added.

    None stands for a step on the way, so that the caller can count them.
    """
    partial: List[Tuple[Tuple[int, ...], int, Optional[int]]] = [((), budget, None)]
    while partial:
        rest, room, missing = partial.pop()
        at = len(rest)
        if at == len(kinds):
            yield rest if missing is None or room < missing else None
            continue
        yield None
        for taken in range(min(counts[at], room // kinds[at]) + 1):
            left = counts[at] - taken
            smallest = kinds[at] if left and missing is None else missing
            partial.append(((*rest, left), room - taken * kinds[at], smallest))
