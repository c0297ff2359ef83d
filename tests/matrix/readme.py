"""Fills the README's marked blocks: what commands print, and the measurements.

`nox -s readme` runs each command in the demo's cell and writes what it printed; the measurements
come from tests/data/measured.json. The tests compare the README with the same functions; the table
of tested releases is report.py's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MEASURED = ROOT / "tests" / "data" / "measured.json"
_BLOCK = re.compile(r"<!-- (output: .+?|measured) -->\n(.*?)<!-- end -->", re.DOTALL)
#: What differs between machines that run the same releases.
_MACHINE = [(r"Python 3\.\d+\.\d+", "Python 3.x"), (r"torch \d[\w.+]*", "torch x")]


def blocks(text: str) -> Iterator[Tuple[str, str]]:
    """The label and the body of every marked block."""
    for match in _BLOCK.finditer(text):
        yield match.group(1), match.group(2)


def fill(text: str, render: Callable[[str], str]) -> str:
    """The text with every marked block rendered anew."""
    return _BLOCK.sub(
        lambda match: f"<!-- {match.group(1)} -->\n{render(match.group(1))}<!-- end -->", text
    )


def render(label: str) -> str:
    """The body of a block."""
    if label == "measured":
        return measured_tables(json.loads(MEASURED.read_text("utf-8")))
    return console(label.partition(" ")[2])


def console(command: str) -> str:
    """A command of this package and what it prints, as a console block."""
    program, *arguments = shlex.split(command)
    assert program == "bnb-dispatch-fix", command
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bnb_dispatch_fix", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=True,
    )
    return f"```console\n$ {command}\n{result.stdout}```\n"


def on_any_machine(body: str) -> str:
    """A block without what differs between machines."""
    for pattern, name in _MACHINE:
        body = re.sub(pattern, name, body)
    return body


def measured_tables(measured: List[Dict[str, Any]]) -> str:
    """A heading, the command that measures it again, and the table, for each measurement."""
    parts = []
    for entry in measured:
        parts.append(f"**{entry['title']}** (`{entry['command']}`)\n")
        header, *rows = entry["table"]
        parts.append(
            "\n".join([_row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)])
            + "\n"
        )
        if entry.get("note"):
            parts.append(f"{entry['note']}\n")
    return "\n".join(parts)


def _row(columns: List[str]) -> str:
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    README.write_text(fill(README.read_text("utf-8"), render), "utf-8")
