"""A plan as one HTML file that needs nothing else: the devices and what lies on them.

No scripts, no external resources; bars are inline SVG that stretches, texts are HTML that wraps,
so that it can be read on a phone, on a wide screen, in the dark and by a screen reader.
"""

from __future__ import annotations

import html
import re
from typing import Dict, List, Mapping, Optional, Tuple, Union

from bnb_dispatch_fix.model.layout import Part
from bnb_dispatch_fix.planning import table
from bnb_dispatch_fix.planning.page import PAGE, STYLE
from bnb_dispatch_fix.planning.records import Change, DeviceLoad, Fewer, Plan, Run
from bnb_dispatch_fix.planning.terminal import (
    evenness_text,
    groups_of_equal_runs,
    headline,
    mostly_unquantized,
    outcome_text,
    versions_line,
)
from bnb_dispatch_fix.wording import HOST, device_name, gib, pasteable, visible

#: Width of a bar in the units of its own coordinate system.
_SCALE = 1000
#: A module is drawn with a line of its own up to this many in one part.
_MOST_LINES = 64
_KINDS: Mapping[str, str] = {
    "block": "blocks, quantized",
    "wide": "blocks, mostly not quantized",
    "leaf": "embeddings, head and other single modules",
    "away": "off the accelerators",
}
#: What a context adds to a device's modules.
_BESIDE: Mapping[str, str] = {
    "scales": "scales of quantized weights",
    "cache": "cache of the context",
    "working": "working memory, at most",
    "reserve": "reserve",
}
_NAMES = {
    "release": "as installed",
    "backport": "with the backport",
    "rescue": "with rescue",
    "even": "with even",
}


def escape(text: str) -> str:
    """A name as HTML, for browsers and for who looks at the file in a terminal."""
    return html.escape(visible(text, "\n"))


def as_html(plan: Plan) -> str:
    """The page as text; every name that comes from the model is escaped."""
    scale = _largest_budget(plan)
    groups = groups_of_equal_runs(plan)
    panels = [_panel(plan, run, names, scale) for run, names in groups]
    panels += _context_panel(plan, scale)
    body = [
        _header(plan),
        _precisions(plan),
        f'<div class="panels n{len(panels)}">',
        *panels,
        "</div>",
        _advice(plan),
        _legend(plan),
        _largest(plan),
        _map(plan),
        _notes(plan),
        f"<footer>{escape(versions_line(plan))}. All sizes in GiB (2<sup>30</sup> bytes).</footer>",
    ]
    title = f"{plan.model}: {'fits' if plan.fits else 'does not fit'}"
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(filter(None, body)))


def _header(plan: Plan) -> str:
    usable = [
        load.usable or 0 for load in plan.runs[0].devices if load.device not in HOST and load.usable
    ]
    devices = f"{len(usable)} device{'' if len(usable) == 1 else 's'}"
    facts = [
        ("needs", gib(plan.total), plan.precision),
        ("usable", gib(sum(usable)), f"on {devices}"),
        ("not quantized", gib(plan.unquantized), f"of {gib(plan.total)} GiB"),
    ]
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{number}</b> GiB"
        f"<small>{escape(more)}</small></dd></div>"
        for name, number, more in facts
    )
    return (
        f'<header class="{"good" if plan.fits else "bad"}">'
        f"<h1>{escape(plan.model)}</h1>"
        f'<p class="verdict">{escape(_sentence(plan.verdict))}</p>{_first_of_all(plan)}'
        f"<dl>{tiles}</dl></header>"
    )


def _first_of_all(plan: Plan) -> str:
    """Where most of the model is not quantized, that; it is the reason for all else."""
    if not plan.quantized or not mostly_unquantized(plan):
        return ""
    return f'<p class="first">{_breakable(_sentence(headline(plan)[0]))}</p>'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _precisions(plan: Plan) -> str:
    """What was compared."""
    rows = table.lines(plan)
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row[:2])}"
        f'<td class="{"no" if row.fits == "no" else "yes"}">{escape(row.fits)}</td>'
        f"<td>{escape(row.where)}</td></tr>"
        for row in rows[1:]
    )
    return (
        '<section class="panel compared"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def _advice(plan: Plan) -> str:
    """What to change."""
    if plan.fewer is not None:
        what = escape(_sentence(table.advice(plan)[0].strip().partition(": ")[0]))
        return f'<section class="panel"><h2>{what}</h2>{_code(plan.fewer)}</section>'
    if not plan.recipes:
        return ""
    items = "".join(
        f"<li>{escape(change.what)}{_code(change) if change.arguments else ''}</li>"
        for change in plan.recipes
    )
    return (
        '<section class="panel"><h2>Any one of these loads it (each was planned)</h2>'
        f"<ol>{items}</ol></section>"
    )


def _code(change: Union[Change, Fewer]) -> str:
    return f"<pre>{escape(change.arguments)}</pre>"


def _panel(plan: Plan, run: Run, names: Tuple[str, ...], scale: int) -> str:
    """One planner, or several that come to the same."""
    release = plan.release
    what = ", ".join(_NAMES[name] for name in names)
    if len(names) > 1:
        what += ": the same"
    tone = "good" if run.outcome == "loads" else "bad"
    rows = [_device(load, scale) for load in run.devices if load.placed or load.device not in HOST]
    error = "" if run.error is None else f'<p class="error">{escape(run.error)}</p>'
    if run.device_map is None:
        rows = []
    return (
        f'<section class="panel {tone}"><h2>{escape(release)} {escape(what)}'
        f'<span class="badge">{escape(outcome_text(run))}</span></h2>'
        f"{''.join(rows)}{_evenness(run)}{error}</section>"
    )


def _evenness(run: Run) -> str:
    """How much more than the best the fullest device holds; nothing where nobody asked."""
    if run.evenness is None:
        return ""
    return (
        f'<p class="modules">{evenness_text(run)}: what the fullest device holds of its budget, '
        "divided by the least that it can be</p>"
    )


def _context_panel(plan: Plan, scale: int) -> List[str]:
    """The map that a context asks for, where it is none of the planners'."""
    room = plan.room
    if room is None or room.shown is not None or not room.devices:
        return []
    tone, badge = ("good", "loads and runs") if room.enough else ("bad", "loads, does not run")
    rows = "".join(_device(load, scale) for load in room.devices)
    return [
        f'<section class="panel {tone}"><h2>The device_map for {room.context} tokens × '
        f'{room.batch}<span class="badge">{badge}</span></h2>{rows}</section>'
    ]


def _context(load: DeviceLoad) -> List[Tuple[str, int]]:
    """What is on a device beside its modules, where a context was asked for."""
    if load.cache is None:
        return []
    sizes = (load.scales, load.cache, load.working or 0, load.reserve)
    return [(kind, size) for kind, size in zip(_BESIDE, sizes) if size]


def _device(load: DeviceLoad, scale: int) -> str:
    """A device: its name and numbers, the bar, the modules on it."""
    away = load.device in HOST
    limit = "" if away or load.usable is None else f" / {gib(load.usable)}"
    modules = ", ".join(part.name or "the whole model" for part in load.parts) or "empty"
    classes = "device" + (" away" if away else "") + ("" if load.placed else " empty")
    return (
        f'<div class="{classes}"><div class="row"><b>{escape(device_name(load.device))}</b>'
        f"<span>{gib(load.placed)}{limit}</span></div>"
        f"{_bar(load, scale, away)}"
        f'<p class="modules">{escape(modules)}</p></div>'
    )


def _bar(load: DeviceLoad, scale: int, away: bool) -> str:
    """The bar: what the caller gave, hatched what the quantizer keeps of it, the parts in colour.

    All accelerators share one scale; the CPU and the disk are drawn by it, without a limit.
    """
    shapes: List[str] = []
    if not away:
        given, usable = (_units(size or 0, scale) for size in (load.given, load.usable))
        shapes.append(_rect("given", 0, given, f"given: {gib(load.given)} GiB"))
        if given > usable:
            kept = f"kept free for the quantizer: {gib((load.given or 0) - (load.usable or 0))} GiB"
            shapes.append(_rect("kept", usable, given - usable, kept))
    start = 0.0
    for part in load.parts:
        width = min(_units(part.size, scale), max(0.0, _SCALE - start))
        shapes.append(_rect(_kind(part, away), start, width, _title(part)))
        shapes += _lines(part, start, width)
        start += width
    for kind, size in _context(load):
        width = min(_units(size, scale), max(0.0, _SCALE - start))
        shapes.append(_rect(kind, start, width, f"{_BESIDE[kind]}: {gib(size)} GiB"))
        start += width
    label = f"{device_name(load.device)}: {gib(load.placed)} GiB"
    return (
        f'<svg viewBox="0 0 {_SCALE} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )


def _rect(kind: str, start: float, width: float, title: str) -> str:
    return (
        f'<rect class="{kind}" x="{start:.2f}" y="0" width="{width:.2f}" height="20">'
        f"<title>{escape(title)}</title></rect>"
    )


def _lines(part: Part, start: float, width: float) -> List[str]:
    """A line between the modules of a part, and one at its end."""
    count = part.modules if part.modules <= _MOST_LINES else 1
    step = width / count
    if step < 4:
        count, step = 1, width
    return [
        f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="20"/>'
        for x in (start + step * number for number in range(1, count + 1))
        if width > 2
    ]


def _title(part: Part) -> str:
    quantized = "quantized" if part.quantized > part.unquantized else "not quantized"
    return f"{part.name or 'the whole model'}: {gib(part.size)} GiB, {quantized}"


def _kind(part: Part, away: bool = False) -> str:
    if away:
        return "away"
    if part.quantized > part.unquantized:
        return "block"
    numbered = re.search(r"(^|\.)(\*|\d)", part.name) is not None
    return "wide" if numbered else "leaf"


def _legend(plan: Plan) -> str:
    kinds = [
        _kind(part, load.device in HOST)
        for run in plan.runs
        for load in run.devices
        for part in load.parts
        if part.size * 200 > plan.total
    ]
    used = [(kind, text) for kind, text in _KINDS.items() if kind in kinds]
    kept = any(
        load.given and load.usable is not None and load.given > load.usable
        for load in plan.runs[0].devices
    )
    loads = [load for run in plan.runs for load in run.devices]
    loads += plan.room.devices if plan.room else ()
    beside = {kind for load in loads for kind, _ in _context(load)}
    used += [(kind, text) for kind, text in _BESIDE.items() if kind in beside]
    items = [*used, *([("kept", "budget that the quantizer keeps free")] if kept else [])]
    entries = "".join(
        f'<li><svg viewBox="0 0 20 20" aria-hidden="true">'
        f'<rect class="{kind}" width="20" height="20"/></svg>{text}</li>'
        for kind, text in items
    )
    return f'<ul class="legend">{entries}</ul>'


def _largest(plan: Plan) -> str:
    """The largest kinds of modules, and how much of each is quantized."""
    most = max((part.size for part in plan.largest), default=0) or 1
    rows = "".join(
        _largest_row(part, most) for part in plan.largest if part.size * 200 > plan.total
    )
    return (
        '<section class="panel"><h2>Largest modules</h2><table><thead><tr><th>module</th>'
        f'<th>GiB</th><th class="wide-only"></th><th>quantized</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _largest_row(part: Part, most: int) -> str:
    count = f" <small>×{part.modules}</small>" if part.modules > 1 else ""
    kind = _kind(part)
    share = "yes" if kind == "block" else "no"
    return (
        f"<tr><td><code>{_breakable(part.name)}</code>{count}</td><td>{gib(part.size)}</td>"
        f'<td class="wide-only"><svg viewBox="0 0 {_SCALE} 20" preserveAspectRatio="none" '
        f'aria-hidden="true"><rect class="{kind}" width="{_units(part.size, most):.2f}" '
        f'height="20"/></svg></td><td class="{share}">{share}</td></tr>'
    )


def _breakable(name: str) -> str:
    """A dotted name that may wrap after its dots."""
    return re.sub(r"\.(?=[a-z_*])", ".<wbr>", escape(name or "the whole model"))


def _map(plan: Plan) -> str:
    if plan.device_map is None:
        return ""
    return (
        '<section class="panel"><details><summary>device_map to paste</summary>'
        f"<pre>device_map = {escape(pasteable(plan.device_map))}</pre></details></section>"
    )


def _notes(plan: Plan) -> str:
    return "".join(f'<p class="error">{escape(note)}</p>' for note in plan.notes)


def _units(size: int, scale: int) -> float:
    return _SCALE * size / scale


def _largest_budget(plan: Plan) -> int:
    """What a full bar stands for: the largest budget, or load, of an accelerator."""
    sizes: Dict[str, Optional[int]] = {}
    for run in plan.runs:
        for load in run.devices:
            if load.device not in HOST:
                sizes[f"{run.name} {load.device}"] = max(load.given or 0, load.placed)
    return max((size or 0 for size in sizes.values()), default=0) or max(plan.total, 1)
