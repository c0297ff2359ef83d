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

    def describe(self) -> str:
        """Return one line of English, sizes in GiB."""
        if self.usable == 0:
            return f"needs {_gib(self.needed)} GiB, no device has a budget"
        short = _gib(self.needed - self.usable)
        return (
            f"needs {_gib(self.needed)} GiB, usable {_gib(self.usable)} GiB: short by {short} GiB"
        )


@dataclass(frozen=True)
class UnitTooLarge:
    """These units (more than one if their weights are tied) need more than the largest budget."""

    names: Tuple[str, ...]
    needed: int
    largest_budget: int

    def describe(self) -> str:
        """Return one line of English, sizes in GiB."""
        names = " + ".join(f"`{name}`" for name in self.names)
        what = f"{names} alone needs" if len(self.names) == 1 else f"{names} (tied) together need"
        return (
            f"{what} {_gib(self.needed)} GiB, the largest budget is {_gib(self.largest_budget)} GiB"
        )


@dataclass(frozen=True)
class TooManyLarge:
    """Of `count` units of at least `size` bytes each device holds no more than `fits` says."""

    size: int
    count: int
    fits: Tuple[Tuple[Device, int], ...]

    def describe(self) -> str:
        """Return one line of English, sizes in GiB."""
        numbers = {number for _, number in self.fits}
        if len(numbers) == 1:
            each = f"{numbers.pop()} fit on each of {len(self.fits)} devices"
        else:
            each = ", ".join(f"{number} fit on {device}" for device, number in self.fits)
        total = sum(number for _, number in self.fits)
        return (
            f"{self.count} units of at least {_gib(self.size)} GiB: {each}, {total} < {self.count}"
        )


@dataclass(frozen=True)
class RoomUnusable:
    """No set of the units of at least `size` bytes fills more of a device than `usable` bytes."""

    size: int
    needed: int
    usable: Tuple[Tuple[Device, int], ...]

    def describe(self) -> str:
        """Return one line of English, sizes in GiB."""
        numbers = {number for _, number in self.usable}
        if len(numbers) == 1:
            each = f"{_gib(numbers.pop())} GiB of each of {len(self.usable)} devices"
        else:
            each = ", ".join(f"{_gib(number)} GiB of {device}" for device, number in self.usable)
        total = sum(number for _, number in self.usable)
        return (
            f"the units of at least {_gib(self.size)} GiB need {_gib(self.needed)} GiB, but they "
            f"cannot be divided and fill at most {each}: {_gib(total)} GiB"
        )


@dataclass(frozen=True)
class SearchComplete:
    """All ways to divide the units (tied ones count as one) among the devices were searched."""

    units: int
    devices: int

    def describe(self) -> str:
        """Return one line of English."""
        return (
            f"searched completely: no way to divide {self.units} units among {self.devices} devices"
        )


Certificate = Union[TotalTooLarge, UnitTooLarge, TooManyLarge, RoomUnusable, SearchComplete]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


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

    def describe(self) -> str:
        """Return one line of English."""
        return f"undecided: the search for a placement gave up after {self.effort} steps"
