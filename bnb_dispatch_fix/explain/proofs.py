"""Says in a line why no placement exists, or that the search gave up."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, Tuple, Union

from bnb_dispatch_fix.placement.records import (
    Device,
    GaveUp,
    Impossible,
    RoomUnusable,
    SearchComplete,
    TooManyLarge,
    TotalTooLarge,
    UnitTooLarge,
)
from bnb_dispatch_fix.wording import amount, device_name


def told(result: Union[Impossible, GaveUp]) -> str:
    """The proof in one line; what nobody has checked a second time says so."""
    if isinstance(result, GaveUp):
        return f"undecided: the search for a placement gave up after {result.effort} steps"
    text = described(result.certificate)
    return text if result.verified else f"{text} (not verified: that would take too long)"


@singledispatch
def described(certificate: Any) -> str:
    """What a certificate says."""
    raise TypeError(f"no certificate: {certificate!r}")


@described.register(TotalTooLarge)
def _(certificate: TotalTooLarge) -> str:
    needed, usable = certificate.needed, certificate.usable
    if usable == 0:
        return f"needs {amount(needed)}, no device has a budget"
    return f"needs {amount(needed)}, usable {amount(usable)}: short by {amount(needed - usable)}"


@described.register(UnitTooLarge)
def _(certificate: UnitTooLarge) -> str:
    names = " + ".join(f"`{name}`" for name in certificate.names)
    alone = len(certificate.names) == 1
    what = f"{names} alone needs" if alone else f"{names} (tied) together need"
    largest = amount(certificate.largest_budget)
    return f"{what} {amount(certificate.needed)}, the largest budget is {largest}"


@described.register(TooManyLarge)
def _(certificate: TooManyLarge) -> str:
    count = certificate.count
    total = sum(number for _, number in certificate.fits)
    each = _each(certificate.fits, "{} fit on", str, "each of ")
    return f"{count} units of at least {amount(certificate.size)}: {each}, {total} < {count}"


@described.register(RoomUnusable)
def _(certificate: RoomUnusable) -> str:
    total = amount(sum(number for _, number in certificate.usable))
    return (
        f"the units of at least {amount(certificate.size)} need {amount(certificate.needed)}, but "
        f"they cannot be divided and fill at most "
        f"{_each(certificate.usable, '{} of', amount, 'each of ')}: {total}"
    )


@described.register(SearchComplete)
def _(certificate: SearchComplete) -> str:
    return (
        f"searched completely: no way to divide {certificate.units} units among "
        f"{certificate.devices} devices"
    )


def _each(numbers: Tuple[Tuple[Device, int], ...], pattern: str, word: Any, of: str) -> str:
    """What every device does, once where all do the same."""
    different = {number for _, number in numbers}
    if len(different) == 1:
        return f"{pattern.format(word(different.pop()))} {of}{len(numbers)} devices"
    return ", ".join(
        f"{pattern.format(word(number))} {device_name(device)}" for device, number in numbers
    )
