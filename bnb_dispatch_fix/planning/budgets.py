"""Budgets as people write them, "2x24GiB,1x12GiB,cpu=60GiB", read or refused in one line."""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning.records import PlanError
from bnb_dispatch_fix.wording import bytes_in, folded

#: torch keeps the number of a device in eight bits with a sign.
MOST_DEVICES = 128
#: Bytes: 1024 PiB; no device has them, and every number up to here is exact enough.
LARGEST = 2**60
#: A number without a unit below this is no number of bytes.
_FEWEST_BYTES = 1024
#: Longer texts are cut where they are shown.
_SHOWN = 40
_COUNT = re.compile(r"([0-9]+)\s*[xX*×]\s*(.+)", re.DOTALL)
_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")
#: "22g" and "22Gi" are what programs call 22 GiB that count memory in powers of two.
_SHORT = re.compile(r"(.*[0-9]\s*)([kmgt])i?", re.IGNORECASE | re.DOTALL)


def parse_budgets(text: str, where: str = "--max-memory") -> List[Tuple[Device, int]]:
    """Read "8x3GiB,cpu=60GiB" or "0=22GiB,1=2GiB": pairs of device and bytes, in that order.

    COUNTxSIZE goes on after the largest number so far. `where` is what a refusal begins with.

    Raises:
        PlanError: what was found, and what was expected instead.
    """
    budgets: Dict[Device, int] = {}
    for entry in text.split(","):
        taken = [device for device in budgets if isinstance(device, int)]
        for device, size in _entry(entry.strip(), max(taken, default=-1) + 1, where):
            if device in budgets:
                raise PlanError(f"{where}: device {device} is there twice")
            budgets[device] = size
    return list(budgets.items())


def _entry(entry: str, following: int, where: str) -> List[Tuple[Device, int]]:
    many = _COUNT.fullmatch(entry)
    if many:
        size = parse_size(many.group(2), where)
        return [(device, size) for device in _numbers(many.group(1), following, entry, where)]
    name, equals, size_text = (part.strip() for part in entry.partition("="))
    if not equals:
        likely = f"1x{entry}GiB" if _BARE.fullmatch(entry) else "2x22GiB,cpu=60GiB"
        raise PlanError(
            f"{where}: expected COUNTxSIZE or DEVICE=SIZE, found {_quoted(entry)}; such as {likely}"
        )
    if re.fullmatch("[0-9]+", name):
        return [(_number(name, where), parse_size(size_text, where))]
    if name.lower() in ("cpu", "disk", "mps"):
        return [(name.lower(), parse_size(size_text, where))]
    raise PlanError(
        f"{where}: {_quoted(name)} is no device; "
        "expected a number (0, not cuda:0), cpu, disk or mps"
    )


def _numbers(count: str, first: int, entry: str, where: str) -> range:
    digits = count.lstrip("0")
    if not digits:
        raise PlanError(f"{where}: {_quoted(entry)} names no device; expected 1 to {MOST_DEVICES}")
    if len(digits) > 9 or first + int(digits) > MOST_DEVICES:
        raise PlanError(
            f"{where}: {_quoted(entry)} names too many devices; "
            f"at most {MOST_DEVICES}, 0 to {MOST_DEVICES - 1}"
        )
    return range(first, first + int(digits))


def _number(name: str, where: str) -> int:
    digits = name.lstrip("0") or "0"
    if len(digits) > 9 or int(digits) >= MOST_DEVICES:
        raise PlanError(
            f"{where}: {_quoted(name)} is no device; the largest number is {MOST_DEVICES - 1}"
        )
    return int(digits)


def parse_size(text: str, where: str = "--max-memory") -> int:
    """Bytes of "22GiB", "22g", "1.5 GB" or "4096".

    Raises:
        PlanError: it is no size, one of a few bytes, or larger than `LARGEST`.
    """
    short = _SHORT.fullmatch(text.strip())
    size = bytes_in(f"{short.group(1)}{short.group(2)}iB" if short else text)
    if size is not None and size <= LARGEST:
        if 0 < size < _FEWEST_BYTES and _BARE.fullmatch(text.strip()):
            raise PlanError(
                f"{where}: {_quoted(text)} has no unit, which is bytes; "
                f"{text.strip()}GiB is likely meant"
            )
        return size
    if size is not None or re.match(r"\s*[0-9]{19}", text):
        raise PlanError(f"{where}: {_quoted(text)} is too large; at most {LARGEST // 2**50} PiB")
    raise PlanError(
        f"{where}: {_quoted(text)} is no size; expected bytes, or a number with KiB, MiB, GiB, "
        "TiB (powers of two) or KB, MB, GB, TB (powers of ten)"
    )


def _quoted(text: str) -> str:
    return repr(folded(text, _SHOWN))
