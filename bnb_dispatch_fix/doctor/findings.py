"""The doctor's findings: their levels, as lines for a terminal and as plain data."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.features import VERSION
from bnb_dispatch_fix.wording import visible, wrapped

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


def as_text(checkup: Checkup, *, colour: bool = False, width: Optional[int] = None) -> str:
    """The findings as lines, each hint under its finding, and a count at the end.

    Lines are wrapped at `width` columns; None leaves them as they are.
    """
    topics = max((len(finding.topic) for finding in checkup.findings), default=0)
    indent = 5 + 2 + topics + 2
    lines: List[str] = []
    for level, topic, text, hint in checkup.findings:
        found = [f"{level:5}  {topic:{topics}}  {visible(text)}"]
        if hint:
            found.append(f"{'':5}  {'':{topics}}  -> {visible(hint)}")
        shown = [part for line in found for part in wrapped(line, width or len(line), indent)]
        if colour:
            shown[0] = f"\x1b[{_COLOURS[level]}m{shown[0][:5]}\x1b[0m{shown[0][5:]}"
        lines += shown
    counts = {level: sum(f.level == level for f in checkup.findings) for level in _COLOURS}
    lines.append(f"{counts[PASS]} passed, {counts[WARN]} warnings, {counts[ERROR]} errors")
    return "\n".join(lines)
