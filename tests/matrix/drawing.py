"""Draws a plan as an SVG picture: a column per planner, a bar per device; light and dark."""

from __future__ import annotations

from html import escape
from typing import Any, Dict, List, Mapping

GIB = 2**30
COLUMN, GAP, MARGIN = 264, 24, 20
TOP, ROW, BAR = 92, 54, 16
HOST = ("cpu", "disk")
TITLES = {"release": "as installed", "backport": "with the backport", "rescue": "with rescue"}
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1b1f27}
.head{font-size:14px;font-weight:600}.dim{fill:#5d6675}.small{font-size:10.5px;fill:#5d6675}
.card{fill:#fff;stroke:#dfe3ea}.track{fill:#e9ecf1}.kept{fill:url(#kept)}.hatch{stroke:#5d6675}
.block{fill:#2f7fd6}.leaf{fill:#d99a1c}.away{fill:#d4453c}
.good{fill:#17803d}.bad{fill:#c22f27}.end{text-anchor:end}
@media(prefers-color-scheme:dark){text{fill:#e8ebf0}.dim,.small{fill:#9aa4b4}
.card{fill:#1b2029;stroke:#2e3541}.track{fill:#2a303b}.hatch{stroke:#9aa4b4}
.block{fill:#4c97ea}.leaf{fill:#e0ab45}.away{fill:#e8645b}.good{fill:#55c57a}.bad{fill:#f0776f}}
"""


def svg(plan: Mapping[str, Any]) -> str:
    """The picture of what `bnb-dispatch-fix plan --json` prints, as text."""
    runs = plan["runs"]
    shown = [device_of(load) for load in runs[0]["devices"]]
    wanted = [name for name in shown if name not in HOST or _placed_anywhere(plan, name)]
    width = 2 * MARGIN + len(runs) * COLUMN + (len(runs) - 1) * GAP
    height = TOP + len(wanted) * ROW + 38
    version = plan["versions"]["transformers"]
    title = f"{plan['model']}, {plan['precision']}: {gib(plan['total'])} GiB"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="title what" width="{width}">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="what">{escape(in_words(plan))}</desc>',
        f"<style>{STYLE}</style>",
        '<defs><pattern id="kept" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<path class="hatch" d="M0 6 6 0" opacity=".6"/></pattern></defs>',
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        _text(MARGIN, 28, f"{title}; on transformers {version}, sizes in GiB", "head"),
    ]
    for number, run in enumerate(runs):
        lines += _column(plan, run, wanted, MARGIN + number * (COLUMN + GAP))
    lines += _legend(height - 16)
    return "\n".join([*lines, "</svg>"]) + "\n"


def in_words(plan: Mapping[str, Any]) -> str:
    """What the picture shows, for who does not see it."""
    told = []
    for run in plan["runs"]:
        loads = ", ".join(
            f"{device_of(load)} {gib(load['placed'])} GiB"
            for load in run["devices"]
            if load["placed"] or load["device"] not in HOST
        )
        told.append(f"{TITLES[run['name']]}: {outcome(run)} ({loads})")
    return "; ".join(told)


def outcome(run: Mapping[str, Any]) -> str:
    """What became of a plan, in a few words."""
    away = [load for load in run["devices"] if load["device"] in HOST and load["placed"]]
    if not away:
        return str(run["outcome"])
    listed = " and ".join(f"{gib(load['placed'])} GiB on the {device_of(load)}" for load in away)
    return f"{run['outcome']}: {listed}"


def gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def device_of(load: Mapping[str, Any]) -> str:
    """A device's name; the CPU and the disk keep theirs."""
    device = load["device"]
    return f"GPU {device}" if isinstance(device, int) else str(device).replace("cpu", "CPU")


def _placed_anywhere(plan: Mapping[str, Any], name: str) -> bool:
    return any(
        load["placed"] for run in plan["runs"] for load in run["devices"] if device_of(load) == name
    )


def _column(
    plan: Mapping[str, Any], run: Mapping[str, Any], wanted: List[str], left: int
) -> List[str]:
    loads = {device_of(load): load for load in run["devices"]}
    tone = "good" if run["outcome"] == "loads" else "bad"
    lines = [
        _text(left, 54, TITLES[run["name"]], "head"),
        _text(left, 73, outcome(run), tone),
    ]
    for number, name in enumerate(wanted):
        lines += _device(loads[name], left, TOP + number * ROW, _scale(plan))
    return lines


def _scale(plan: Mapping[str, Any]) -> float:
    """Pixels for a byte: the largest budget of an accelerator fills a column."""
    given = [
        load["given"] or 0
        for run in plan["runs"]
        for load in run["devices"]
        if load["device"] not in HOST
    ]
    return COLUMN / max(given)


def _device(load: Mapping[str, Any], left: int, top: int, scale: float) -> List[str]:
    """A device's name and numbers, its bar, and the modules on it."""
    away = load["device"] in HOST
    if away and not load["placed"]:
        return []
    limit = "" if away else f" of {gib(load['usable'])}"
    bar = top + 17
    lines = [
        _text(left, top + 12, device_of(load), "away" if away else ""),
        _text(left + COLUMN, top + 12, f"{gib(load['placed'])}{limit}", "dim end"),
    ]
    if not away:
        given, usable = load["given"] * scale, load["usable"] * scale
        lines.append(_rect("track", left, bar, given))
        lines.append(_rect("kept", left + usable, bar, given - usable))
    start = 0.0
    for part in load["parts"]:
        width = min(part["size"] * scale, COLUMN - start)
        if width >= 0.5:
            lines.append(_rect("away" if away else _kind(part), left + start, bar, width))
        start += width
    names = [part["name"] for part in load["parts"] if part["size"] * scale >= 0.5]
    lines.append(_text(left, bar + BAR + 12, ", ".join(names) or "empty", "small"))
    return lines


def _kind(part: Mapping[str, Any]) -> str:
    return "block" if 2 * part["quantized"] > part["size"] else "leaf"


def _legend(top: int) -> List[str]:
    entries: Dict[str, str] = {
        "block": "quantized blocks",
        "leaf": "not quantized: embedding, head",
        "away": "off the GPUs: the quantizer refuses it",
        "kept": "kept free for the quantizer",
    }
    lines, left = [], MARGIN
    for kind, text in entries.items():
        lines += [_rect(kind, left, top - 10, 12, 12), _text(left + 18, top, text, "small")]
        left += 34 + int(5.6 * len(text))
    return lines


def _rect(kind: str, x: float, y: float, width: float, height: float = BAR) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
