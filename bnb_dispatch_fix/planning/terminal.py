"""A plan as text for a terminal: a bar per device and planner, modules, the map to paste."""

from __future__ import annotations

import textwrap
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from bnb_dispatch_fix.model.layout import Part
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning.records import DeviceLoad, Plan, Run
from bnb_dispatch_fix.wording import HOST, device_name, gib, pasteable

_BAR = 10
_WIDTH = 96
#: More than this share not quantized is said first.
_LARGE_SHARE = 0.5
_ASCII = str.maketrans({"█": "#", "░": ".", "–": "-", "…": "~", "→": ">"})


class Cell(NamedTuple):
    """A bar with its number: how much of it is full, and how it should be read."""

    bar: str
    number: str
    tone: str


def headline(plan: Plan) -> List[str]:
    """The model, its size, and what is not quantized; that first where it is most of it."""
    size = f"{plan.model}, {plan.precision}: {gib(plan.total)} GiB"
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
    release = f"transformers {plan.versions.get('transformers', '')}".strip()
    return {"release": release, "backport": "with backport", "rescue": "with rescue"}


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


def device_rows(plan: Plan) -> List[Tuple[Device, Optional[int], List[Cell]]]:
    """For each device: its usable bytes, and a cell for each run."""
    loads = [{load.device: load for load in run.devices} for run in plan.runs]
    rows = []
    for device in dict.fromkeys(load.device for run in plan.runs for load in run.devices):
        known = [table[device] for table in loads if device in table]
        cells = [_cell(table.get(device), run) for table, run in zip(loads, plan.runs)]
        rows.append((device, known[0].usable, cells))
    return rows


def _cell(load: Optional[DeviceLoad], run: Run) -> Cell:
    if load is None or run.device_map is None:
        return Cell(" " * _BAR, "", "empty")
    if load.placed == 0:
        return Cell("░" * _BAR, gib(0), "empty")
    full = _BAR if not load.usable else min(_BAR, round(_BAR * load.placed / load.usable))
    full = max(full, 1)
    off = load.device in HOST
    over = load.free is not None and load.free < 0
    tone = "bad" if off or over else "good" if run.outcome in ("loads", "offloads") else "plain"
    return Cell("█" * full + "░" * (_BAR - full), gib(load.placed), tone)


def module_lines(run: Run) -> List[str]:
    """What lies on each device, neighbours collapsed; wrapped to the terminal's width."""
    lines: List[str] = []
    for load in run.devices:
        if not load.parts:
            continue
        label = f"  {device_name(load.device):6} {gib(load.placed):>7} GiB  "
        text = label + ", ".join(_short(part) for part in load.parts)
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * len(label)) or [label]
    return lines


def _short(part: Part) -> str:
    return part.name or "the whole model"


def shown_run(plan: Plan) -> Run:
    """The run whose modules are listed: the first that loads, else the last that has a map."""
    with_map = [run for run in plan.runs if run.device_map is not None]
    loading = [run for run in with_map if run.outcome == "loads"]
    return next(iter(loading or with_map[::-1]), plan.runs[-1])


def as_text(plan: Plan) -> str:
    """The whole plan as plain text."""
    return "\n".join([*_before_table(plan), *_table(plan), *_after_table(plan)])


def _before_table(plan: Plan) -> List[str]:
    return [*headline(plan), versions_line(plan), ""]


def _table(plan: Plan) -> List[str]:
    rows = device_rows(plan)
    numbers = max((len(cell.number) for _, _, cells in rows for cell in cells), default=4)
    width = max(_BAR + 1 + numbers, *(len(name) for name in run_names(plan).values()))
    width = max(width, *(len(outcome_text(run)) for run in plan.runs))
    lines = [_line("GiB", "usable", run_names(plan).values(), width)]
    for device, usable, cells in rows:
        texts = [f"{cell.bar} {cell.number:>{numbers}}" for cell in cells]
        lines.append(_line(device_name(device), gib(usable), texts, width))
    lines.append(_line("", "", [outcome_text(run) for run in plan.runs], width))
    return lines


def _line(name: str, usable: str, cells: Iterable[str], width: int) -> str:
    columns = "   ".join(f"{cell:{width}}" for cell in cells)
    return f"{name:7}{usable:>8}   {columns}".rstrip()


def _after_table(plan: Plan) -> List[str]:
    lines = [""]
    errors = list(dict.fromkeys(run.error for run in plan.runs if run.error))
    lines += [line for error in errors for line in textwrap.wrap(error, _WIDTH)]
    run = shown_run(plan)
    if run.device_map is not None:
        lines += [f"Modules, {run_names(plan)[run.name]}:", *module_lines(run), ""]
    lines += [f"note: {note}" for note in plan.notes]
    lines.append(f"-> {plan.verdict}")
    if plan.device_map is not None:
        lines.append(f"device_map = {pasteable(plan.device_map)}")
    return lines


def print_plan(plan: Plan, stream: Any) -> None:
    """Print with rich where it is installed and the stream is a terminal, plainly otherwise."""
    if stream.isatty() and _print_with_rich(plan, stream):
        return
    print(for_encoding(as_text(plan), getattr(stream, "encoding", None)), file=stream)


def for_encoding(text: str, encoding: Optional[str]) -> str:
    """The text, with ASCII in place of blocks and dashes that the encoding does not have."""
    try:
        text.encode(encoding or "ascii")
        return text
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


_STYLES = {"good": "green", "bad": "red", "plain": "yellow", "empty": "dim"}


def _print_with_rich(plan: Plan, stream: Any) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=stream, highlight=False)
    before = _before_table(plan)
    console.print(Text(before[0], style="bold"))
    console.print(Text("\n".join(before[1:])))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("GiB")
    table.add_column("usable", justify="right")
    for name in run_names(plan).values():
        table.add_column(name, no_wrap=True)
    for device, usable, cells in device_rows(plan):
        texts = [Text(f"{c.bar} {c.number:>6}", style=_STYLES[c.tone]) for c in cells]
        table.add_row(device_name(device), gib(usable), *texts)
    table.add_row("", "", *(Text(outcome_text(run), style=_tone(run)) for run in plan.runs))
    console.print(table)
    after = "\n".join(_after_table(plan))
    console.print(Text(after), soft_wrap=True)
    return True


def _tone(run: Run) -> str:
    return "bold green" if run.outcome == "loads" else "bold red"


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
