"""A checker of proofs that no placement exists; it knows nothing of how they were found."""

from __future__ import annotations

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

# Beyond this many intermediate results the checker does not try to follow a proof.
CHECK_LIMIT = 300_000


class CannotVerify(Exception):
    """The proof is too long to be checked independently; it is neither confirmed nor refuted."""


def verify(certificate: Certificate, units: Sequence[Unit], budgets: Mapping[Device, int]) -> bool:
    """Tell whether the certificate proves that no placement of the units exists.

    Everything is computed again from the units and budgets (bytes). For SearchComplete this is a
    search of its own, breadth first over what is left for the remaining devices.
    Raises CannotVerify where that, or RoomUnusable, takes more than CHECK_LIMIT results.
    """
    usable = {device: budget for device, budget in budgets.items() if budget > 0}
    together = _tied_sizes(units)
    sizes = [size for size, _ in together]
    if isinstance(certificate, TotalTooLarge):
        matches = certificate == TotalTooLarge(sum(sizes), sum(usable.values()))
        return matches and bool(units) and (sum(sizes) > sum(usable.values()) or not usable)
    if isinstance(certificate, UnitTooLarge):
        limit = certificate.largest_budget
        known = (certificate.needed, certificate.names) in together
        return (
            known
            and all(budget <= limit for budget in usable.values())
            and certificate.needed > limit
        )
    if isinstance(certificate, TooManyLarge):
        fits = dict(certificate.fits)
        return (
            certificate.size > 0
            and fits.keys() == usable.keys()
            and all((fits[device] + 1) * certificate.size > usable[device] for device in usable)
            and sum(size >= certificate.size for size in sizes) >= certificate.count
            and certificate.count > sum(fits.values())
        )
    if isinstance(certificate, RoomUnusable):
        return _room_is_unusable(certificate, sizes, usable)
    return not _divisible([size for size in sizes if size], sorted(usable.values()))


def _tied_sizes(units: Sequence[Unit]) -> List[Tuple[int, Tuple[str, ...]]]:
    """Return (bytes, names) of what has to share a device."""
    found: Dict[Tuple[str, Union[int, str]], List[Unit]] = {}
    for position, unit in enumerate(units):
        key = ("alone", position) if unit.tie is None else ("tied", unit.tie)
        found.setdefault(key, []).append(unit)
    return [(sum(u.size for u in group), tuple(u.name for u in group)) for group in found.values()]


def _room_is_unusable(
    certificate: RoomUnusable, sizes: Sequence[int], usable: Mapping[Device, int]
) -> bool:
    large = [size for size in sizes if size >= certificate.size]
    claimed = dict(certificate.usable)
    if sum(large) != certificate.needed or claimed.keys() != usable.keys():
        return False
    if certificate.needed <= sum(claimed.values()):
        return False
    for budget, claim in {(budget, claimed[device]) for device, budget in usable.items()}:
        if _least_left_over(large, budget) < budget - claim:
            return False
    return True


def _least_left_over(sizes: Sequence[int], budget: int) -> int:
    """Return the least room that a set of the sizes leaves of the budget."""
    rooms: Set[int] = {budget}
    for size in sorted(sizes):
        rooms |= {room - size for room in rooms if room >= size}
        if len(rooms) > CHECK_LIMIT:
            raise CannotVerify(f"more than {CHECK_LIMIT} different loads of one device")
    return min(rooms)


def _divisible(sizes: Sequence[int], budgets: Sequence[int]) -> bool:
    """Tell whether the sizes can be divided among the budgets."""
    kinds = sorted(set(sizes))
    left = {tuple(sizes.count(kind) for kind in kinds)}
    work = 0
    for number, budget in enumerate(budgets, 1):
        later = sum(budgets[number:])
        after = set()
        for counts in left:
            for rest in _maximal_loads(kinds, counts, budget):
                work += 1
                if work > CHECK_LIMIT:
                    raise CannotVerify(
                        f"more than {CHECK_LIMIT} steps through the loads of the devices"
                    )
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
