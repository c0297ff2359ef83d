"""A plan as text for a terminal: a bar per device and planner, modules, the map to paste."""

from __future__ import annotations

import textwrap
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from bnb_dispatch_fix.model.layout import Part
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning import table
from bnb_dispatch_fix.planning.records import DeviceLoad, Plan, Run
from bnb_dispatch_fix.planning.room_text import estimate, room_lines
from bnb_dispatch_fix.wording import (
    HOST,
    columns,
    device_name,
    gib,
    is_plain,
    pasteable,
    say,
    visible,
    wrapped,
)

_BAR = 10
_LEAST_BAR = 4
#: Columns of text, at most; the table may be wider where there is no terminal, or a wide one.
_WIDTH = 96
#: More than this share not quantized is said first.
_LARGE_SHARE = 0.5


class Cell(NamedTuple):
    """A bar with its number: how much of it is full, and how it should be read."""

    bar: str
    number: str
    tone: str


def headline(plan: Plan) -> List[str]:
    """The model, its size, and what is not quantized; that first where it is most of it."""
    scales = f" + {gib(plan.scales)} scales" if gib(plan.scales) != gib(0) else ""
    size = f"{plan.model}, {plan.precision}: {gib(plan.total)} GiB{scales}"
    if not plan.quantized:
        return [size]
    not_quantized = f"{gib(plan.unquantized)} of {gib(plan.total)} GiB are not quantized"
    names = [
        f"{part.name} ({gib(part.unquantized)} GiB)"
        for part in plan.largest
        if part.unquantized > plan.total / 20
    ]
    listed = f"{not_quantized}: {', '.join(names)}" if names else not_quantized
    return [listed, size] if mostly_unquantized(plan) else [size, listed]


def mostly_unquantized(plan: Plan) -> bool:
    """Whether the quantizer leaves more than half of the model as it is."""
    return plan.unquantized > _LARGE_SHARE * plan.total


def versions_line(plan: Plan) -> str:
    """The installed packages and the strategy."""
    packages = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return f'{packages}; device_map="{plan.strategy}"'


def run_names(plan: Plan) -> Dict[str, str]:
    """What each run is called."""
    release = plan.release
    features = [run.name for run in plan.runs if run.name != "release"]
    return {"release": release, **{name: f"with {name}" for name in features}}


def evenness_text(run: Run) -> str:
    """How even its spread is, 1.00 being the best; empty where nobody asked or it is not known."""
    return "" if run.evenness is None else f"evenness {run.evenness:.2f}"


def outcome_text(run: Run) -> str:
    """The outcome in a few words."""
    places = [
        device_name(load.device) for load in run.devices if load.device in HOST and load.parts
    ]
    away = f"{gib(run.offloaded)} GiB on {' and '.join(places)}"
    return {
        "loads": "loads",
        "offloads": away,
        "overfull": "too full",
        "refused": f"refused: {away}" if places else "refused",
        "fails": "raises an error",
    }[run.outcome]


def device_rows(plan: Plan, bar: int = _BAR) -> List[Tuple[Device, Optional[int], List[Cell]]]:
    """For each device: its usable bytes, and a cell for each run; `bar` is a bar's width."""
    loads = [{load.device: load for load in run.devices} for run in plan.runs]
    rows = []
    for device in dict.fromkeys(load.device for run in plan.runs for load in run.devices):
        known = [table[device] for table in loads if device in table]
        cells = [_cell(table.get(device), run, bar) for table, run in zip(loads, plan.runs)]
        rows.append((device, known[0].usable, cells))
    return rows


def _cell(load: Optional[DeviceLoad], run: Run, bar: int) -> Cell:
    if load is None or run.device_map is None:
        return Cell(" " * bar, "", "empty")
    if load.placed == 0:
        return Cell("░" * bar, gib(0), "empty")
    full = bar if not load.usable else min(bar, round(bar * load.placed / load.usable))
    full = max(full, 1)
    off = load.device in HOST
    over = load.free is not None and load.free < 0
    tone = "bad" if off or over else "good" if run.outcome in ("loads", "offloads") else "plain"
    return Cell("█" * full + "░" * (bar - full), gib(load.placed), tone)


def module_lines(run: Run, width: int = _WIDTH) -> List[str]:
    """What lies on each device, neighbours collapsed; wrapped to `width` columns."""
    lines: List[str] = []
    for load in run.devices:
        if not load.parts:
            continue
        label = f"  {device_name(load.device):6} {gib(load.placed):>7} GiB  "
        text = label + ", ".join(_short(part) for part in load.parts)
        lines += _wrapped(text, width, " " * len(label)) or [label]
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> List[str]:
    """Broken between words; a name that is wider than the terminal stays whole."""
    return textwrap.wrap(
        text,
        max(width, len(indent) + 10),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short(part: Part) -> str:
    return visible(part.name) or "the whole model"


def shown_run(plan: Plan) -> Run:
    """The run whose modules are listed: the even one, the first that loads, else the last map."""
    with_map = [run for run in plan.runs if run.device_map is not None]
    loading = [run for run in with_map if run.outcome == "loads"]
    loading = [run for run in loading if run.name == "even"] or loading
    return next(iter(loading or with_map[::-1]), plan.runs[-1])


class Row(NamedTuple):
    """A line of the table: device, usable budget, and what is in the column of each run."""

    name: str
    usable: str
    cells: Tuple[Cell, ...]


def as_text(plan: Plan, width: Optional[int] = None) -> str:
    """The whole plan as plain text; for a terminal of `width` columns, or as wide as it is."""
    digits = _digits(plan)
    rows = [_line(row, _cell_width(plan, width, digits)) for row in _table(plan, width, digits)]
    return "\n".join([*_before_table(plan, width), *rows, *_after_table(plan, width)])


def _text_width(width: Optional[int]) -> int:
    return _WIDTH if width is None else min(width, _WIDTH)


def _before_table(plan: Plan, width: Optional[int]) -> List[str]:
    lines = [visible(line) for line in (*headline(plan), versions_line(plan))]
    if width is not None:
        lines = [part for line in lines for part in wrapped(line, width)]
    return [*table.as_lines(plan, _text_width(width)), *lines, ""]


#: Columns of a row before its cells, and between two of them.
_BEFORE_CELLS, _GAP = 18, 3


def _cell_width(plan: Plan, width: Optional[int], digits: int) -> int:
    """How wide a run's column is: as its longest text, or what the terminal has for it."""
    names = [*run_names(plan).values(), *(outcome_text(run) for run in plan.runs)]
    names += [evenness_text(run) for run in plan.runs]
    bars = _bar_width(plan, width, digits) + 1 + digits
    natural = max(bars, *map(len, names))
    return natural if width is None else max(bars, min(natural, _room(plan, width)))


def _room(plan: Plan, width: int) -> int:
    """How many columns of a terminal there are for each run."""
    return (width - _BEFORE_CELLS - _GAP * (len(plan.runs) - 1)) // len(plan.runs)


def _bar_width(plan: Plan, width: Optional[int], digits: int) -> int:
    """How wide a bar is: narrower only where four runs are side by side on a narrow terminal."""
    if width is None or len(plan.runs) < 4:
        return _BAR
    return min(_BAR, max(_LEAST_BAR, _room(plan, width) - 1 - digits))


def _digits(plan: Plan) -> int:
    """How long the longest number beside a bar is."""
    return max((len(cell.number) for _, _, cells in device_rows(plan) for cell in cells), default=4)


def _table(plan: Plan, width: Optional[int], digits: int) -> List[Row]:
    cell_width = _cell_width(plan, width, digits)
    names = [(name, "name") for name in run_names(plan).values()]
    rows = _texts("GiB", "usable", names, cell_width)
    for device, usable, cells in device_rows(plan, _bar_width(plan, width, digits)):
        bars = (cell._replace(number=f"{cell.number:>{digits}}") for cell in cells)
        rows.append(Row(device_name(device), gib(usable), tuple(bars)))
    outcomes = [(outcome_text(run), _tone(run)) for run in plan.runs]
    rows += _texts("", "", outcomes, cell_width)
    evenness = [(evenness_text(run), "plain") for run in plan.runs]
    return rows + (_texts("", "", evenness, cell_width) if any(dict(evenness)) else [])


def _texts(name: str, usable: str, texts: Sequence[Tuple[str, str]], width: int) -> List[Row]:
    """A row of texts; as many rows as the longest of them needs in its column."""
    columns_of = [(_wrapped(visible(text), width) or [""], tone) for text, tone in texts]
    rows = []
    for number in range(max(len(lines) for lines, _ in columns_of)):
        cells = (
            Cell(lines[number] if number < len(lines) else "", "", tone)
            for lines, tone in columns_of
        )
        rows.append(Row("" if number else name, "" if number else usable, tuple(cells)))
    return rows


def _line(row: Row, width: int) -> str:
    cells = (" " * _GAP).join(f"{_joined(cell):{width}}" for cell in row.cells)
    return f"{_head(row)}{cells}".rstrip()


def _head(row: Row) -> str:
    return f"{row.name:7}{row.usable:>8}   "


def _joined(cell: Cell) -> str:
    return f"{cell.bar} {cell.number}" if cell.number else cell.bar


def _after_table(plan: Plan, width: Optional[int]) -> List[str]:
    limit = _text_width(width)
    lines = [""]
    errors = list(dict.fromkeys(run.error for run in plan.runs if run.error))
    lines += [line for error in errors for line in _wrapped(visible(error), limit)]
    run = shown_run(plan)
    if run.device_map is not None:
        lines += [f"Modules, {run_names(plan)[run.name]}:", *module_lines(run, limit), ""]
    lines += room_lines(plan, run_names(plan))
    told = [*(f"note: {note}" for note in plan.notes), f"-> {plan.verdict}", *estimate(plan)]
    for line in map(visible, told):
        lines += [line] if width is None else wrapped(line, width, 3)
    for line in table.advice(plan):
        lines += [visible(line)] if width is None else wrapped(visible(line), width, 5)
    if plan.device_map is not None:
        lines.append(f"device_map = {pasteable(plan.device_map)}")
    return lines


def print_plan(plan: Plan, stream: Any) -> None:
    """Print as wide as the terminal is, in colours where rich is installed and they are welcome."""
    width = columns(stream)
    if not is_plain(stream) and _print_with_rich(plan, stream, width):
        return
    say(as_text(plan, width), stream, wrap=False)


_STYLES = {"good": "green", "bad": "red", "plain": "yellow", "empty": "dim", "name": "bold"}
_STYLES.update({"loads": "bold green", "not": "bold red"})


def _print_with_rich(plan: Plan, stream: Any, width: Optional[int]) -> bool:
    """The same lines; rich knows what colours the terminal can show."""
    try:
        from rich.console import Console  # found, not required
        from rich.text import Text  # found, not required
    except ImportError:
        return False
    console = Console(file=stream, highlight=False)
    first, *more = _before_table(plan, width)
    lines = [Text(first, style="bold"), *map(Text, more)]
    digits = _digits(plan)
    if _cell_width(plan, width, digits) > _BAR + 6:
        digits = max(digits, 6)
    cell_width = _cell_width(plan, width, digits)
    for row in _table(plan, width, digits):
        line = Text(_head(row))
        for number, cell in enumerate(row.cells):
            line.append(" " * _GAP if number else "")
            line.append(f"{_joined(cell):{cell_width}}", style=_STYLES[cell.tone])
        line.rstrip()
        lines.append(line)
    lines += map(Text, _after_table(plan, width))
    for line in lines:
        console.print(line, soft_wrap=True)
    return True


def _tone(run: Run) -> str:
    return "loads" if run.outcome == "loads" else "not"


def groups_of_equal_runs(plan: Plan) -> Sequence[Tuple[Run, Tuple[str, ...]]]:
    """Runs that come to the same, as one: the run and the names of all of them."""
    found: List[Tuple[Run, Tuple[str, ...]]] = []
    for run in plan.runs:
        if found and _same(found[-1][0], run):
            found[-1] = (found[-1][0], (*found[-1][1], run.name))
        else:
            found.append((run, (run.name,)))
    return found


def _same(one: Run, other: Run) -> bool:
    return (one.outcome, one.device_map) == (other.outcome, other.device_map)
