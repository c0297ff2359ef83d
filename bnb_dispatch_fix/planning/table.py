"""Beside the planners' table: the precisions that were compared, and what to change."""

from __future__ import annotations

from itertools import groupby
from typing import Any, List, NamedTuple, Sequence, Tuple

from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning.records import Plan, Precision
from bnb_dispatch_fix.wording import HOST, amount, cell, device_name, span, visible, wrapped

#: See explain/recipes.py.
_TRIED = "budgets up to 4 times as large, up to 16 more devices, fewer bits, offloading"


class Line(NamedTuple):
    """A row as texts; the first of a table is its head."""

    title: str
    needs: str
    fits: str
    where: str


def lines(plan: Plan) -> List[Line]:
    """Head and rows; none where nothing was compared."""
    if not plan.precisions:
        return []
    return [Line("precision", "GiB", "fits", "where"), *map(_line, plan.precisions)]


def _line(row: Precision) -> Line:
    fits = "no" if not row.fits else "barely" if row.over else "yes"
    return Line(visible(row.title), cell(row.total + row.scales), fits, _where(row))


def _where(row: Precision) -> str:
    if not row.fits:
        return _reason(row.reason or "")
    full = f", {amount(row.over)} of its scales too much" if row.over else ""
    return f"{devices_text(row.devices)}{full}"


def _reason(text: str) -> str:
    """Why it does not fit; what it needs stands beside it."""
    start, _, rest = text.partition(": short by ")
    return f"short by {rest}" if rest and start.startswith("needs ") else text


def devices_text(devices: Sequence[Device]) -> str:
    """Devices as people list them: "GPU 0–3, 5"."""
    numbers = sorted(device for device in devices if isinstance(device, int))
    # Numbers in a row differ from their position by the same.
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    named = [device_name(device) for device in devices if not isinstance(device, int)]
    spans = ", ".join(span(run[0], run[-1]) for run in runs)
    return ", ".join([*([f"GPU {spans}"] if runs else []), *named])


def as_lines(plan: Plan, width: int) -> List[str]:
    """The table as text of `width` columns, and what the lines below it are about."""
    rows = lines(plan)
    if not rows:
        return []
    columns = _widths(rows)
    found = []
    for row in rows:
        head = f"{row.title:{columns[0]}}  {row.needs:>{columns[1]}}  {row.fits:{columns[2]}}  "
        found += wrapped(f"{head}{row.where}".rstrip(), width, len(head))
    another = "" if plan.precisions[0].name == "stored" else "; --bits shows another"
    shown = f"Below: {plan.precision}{another}."
    return [visible(plan.model), *found, "", *wrapped(shown, width), ""]


def _widths(rows: Sequence[Any]) -> Tuple[int, ...]:
    return tuple(max(len(row[column]) for row in rows) for column in range(3))


def advice(plan: Plan) -> List[str]:
    """What to change: where it does not fit, and where fewer devices are enough."""
    if plan.fewer is not None:
        cards = [load for load in plan.runs[0].devices if load.usable and load.device not in HOST]
        count = len(plan.fewer.devices)
        enough = "one card" if count == 1 else f"{count} of {len(cards)} cards"
        return [f"   it fits on {enough}: {plan.fewer.arguments}"]
    if plan.fits:
        return []
    if not plan.recipes:
        return [f"   no change was found that would load it ({_TRIED})"]
    found = ["any one of these loads it (each was planned):"]
    for number, change in enumerate(plan.recipes, 1):
        found.append(f"  {number}. {change.what}{':' if change.arguments else ''}")
        if change.arguments:
            found.append(f"     {change.arguments}")
    return found
