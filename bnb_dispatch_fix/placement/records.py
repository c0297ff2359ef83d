"""What goes into the placement search and what comes out of it: records, nothing that searches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from typing import Dict, Iterable, List, Literal, NamedTuple, Optional, Tuple, Union

Device = Union[int, str]
# What counts first among placements of a kind; see `pack`.
Merit = Literal["fewest_changes", "even"]


class SearchFault(Exception):
    """The search came to a result that its own check refuses; there is no answer then."""


class Unit(NamedTuple):
    """A part of the model that goes to one device whole; units are listed in model order.

    `size` is in bytes; bytes that tied units share count in one of them only. Units with the same
    `tie` go to the same device. The first unit marked as input embedding is the one that counts.
    """

    name: str
    size: int
    tie: Optional[Union[int, str]] = None
    is_input_embedding: bool = False


def device_order(budgets: Iterable[Device]) -> List[Device]:
    """Return the devices in order: numbers ascending, then names as they come."""
    devices = list(budgets)
    numbers: List[Device] = sorted(device for device in devices if isinstance(device, int))
    return numbers + [device for device in devices if not isinstance(device, int)]


class Kind(IntEnum):
    """How a placement follows the model; the smaller, the better.

    Contiguous is a placement in which each device holds one run of the model, when of each group
    of tied units some (not all) are left out of the count because they follow the others.
    """

    DEVICE_ORDER = 0
    OTHER_ORDER = 1
    SCATTERED = 2


@dataclass(frozen=True)
class Placement:
    """Every unit's device, in model order.

    `changes` counts neighbours in the model on different devices; `fill` is the largest load ÷
    budget. `optimal` says that no placement ranks better (see `pack`); where it is False the
    search ended early, but the placement is valid all the same.
    """

    devices: Dict[str, Device]
    loads: Dict[Device, int]  # bytes on each device in use, in device order
    kind: Kind
    changes: int
    embedding_first: bool
    fill: Fraction
    optimal: bool


@dataclass(frozen=True)
class TotalTooLarge:
    """All units together need more than all budgets (bytes), or no budget is above 0."""

    needed: int
    usable: int


@dataclass(frozen=True)
class UnitTooLarge:
    """These units (more than one if their weights are tied) need more than the largest budget."""

    names: Tuple[str, ...]
    needed: int
    largest_budget: int


@dataclass(frozen=True)
class TooManyLarge:
    """Of `count` units of at least `size` bytes each device holds no more than `fits` says."""

    size: int
    count: int
    fits: Tuple[Tuple[Device, int], ...]


@dataclass(frozen=True)
class RoomUnusable:
    """No set of the units of at least `size` bytes fills more of a device than `usable` bytes."""

    size: int
    needed: int
    usable: Tuple[Tuple[Device, int], ...]


@dataclass(frozen=True)
class SearchComplete:
    """All ways to divide the units (tied ones count as one) among the devices were searched."""

    units: int
    devices: int


Certificate = Union[TotalTooLarge, UnitTooLarge, TooManyLarge, RoomUnusable, SearchComplete]


@dataclass(frozen=True)
class Impossible:
    """No placement exists, as the certificate says.

    `verified` says that the certificate was confirmed by `certificates.verify`, which computes
    everything anew; where it is False that would have taken too long.
    """

    certificate: Certificate
    verified: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class GaveUp:
    """The search ended after `effort` nodes without a placement and without a proof."""

    effort: int
