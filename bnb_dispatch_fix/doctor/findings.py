"""The doctor's findings: their levels, as lines for a terminal and as plain data."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

from bnb_dispatch_fix.features import VERSION

PASS, WARN, ERROR = "PASS", "WARN", "ERROR"
_COLOURS = {PASS: "32", WARN: "33", ERROR: "31"}


class Finding(NamedTuple):
    """One line: how bad, about what, what was seen, and what to do ("" where nothing is)."""

    level: str
    topic: str
    text: str
    hint: str = ""


class Checkup(NamedTuple):
    """All findings, in the order they are shown."""

    findings: Tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no ERROR."""
        return all(finding.level != ERROR for finding in self.findings)

    def as_dict(self) -> Dict[str, Any]:
        """Plain data, as `bnb-dispatch-fix doctor --json` prints it."""
        return {
            "version": VERSION,
            "healthy": self.healthy,
            "findings": [finding._asdict() for finding in self.findings],
        }


def as_text(checkup: Checkup, *, colour: bool = False) -> str:
    """The findings as lines, each hint under its finding, and a count at the end."""
    width = max((len(finding.topic) for finding in checkup.findings), default=0)
    lines: List[str] = []
    for level, topic, text, hint in checkup.findings:
        mark = f"{level:5}"
        if colour:
            mark = f"\x1b[{_COLOURS[level]}m{mark}\x1b[0m"
        lines.append(f"{mark}  {topic:{width}}  {text}")
        if hint:
            lines.append(f"{'':5}  {'':{width}}  -> {hint}")
    counts = {level: sum(f.level == level for f in checkup.findings) for level in _COLOURS}
    lines.append(f"{counts[PASS]} passed, {counts[WARN]} warnings, {counts[ERROR]} errors")
    return "\n".join(lines)
