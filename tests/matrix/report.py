"""Renders the table of tested combinations from the result files of `nox -s matrix`.

`python tests/matrix/report.py RESULTS CELL...` replaces what stands between the two marker lines of
docs/compatibility.md. A cell that was not run keeps its line; one that has none yet, or with a
failed test, is named and nothing is written.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- matrix -->\n"
END = "<!-- end -->\n"
PACKAGES = ("transformers", "accelerate", "bitsandbytes")
HEAD = (*PACKAGES, "Python", "backported", "without the shim", "with it")


def outcome(plan):
    """A plan of the tests' checkpoint in a few words; results without torch have none."""
    if plan is None:
        return "–"
    if plan["error"]:
        return plan["error"].split(":")[0]
    on_cpu = [name for name, device in plan["device_map"].items() if device in ("cpu", "disk")]
    return f"{', '.join(on_cpu)} on the CPU" if on_cpu else "loads on GPUs"


def line(result):
    found = result["installed"]
    cells = [found[package] or "–" for package in PACKAGES]
    fixes = ", ".join(f"#{pr}" for pr in result.get("fixes", ())) or "–"
    cells += [result["python"], fixes, outcome(result.get("without")), outcome(result.get("with"))]
    return f"| {' | '.join(cells)} |"


def table(results):
    """Markdown, in the order given; rows that would read the same stand once."""
    return as_table(line(result) for result in results)


def as_table(lines):
    lines = dict.fromkeys(lines)
    return "\n".join([f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *lines]) + "\n"


def lines_of(text):
    """The cells of the document's table, a tuple per line."""
    found = text.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in found]


def key_of(name):
    """What a line begins with, read off a cell's name: versions of the packages, and Python's."""
    parts = dict(re.findall(r"(?:^|-)(py|[a-z_]+)(\d[^-]*)", name))
    return (*(parts.get(package, "–") for package in PACKAGES), parts.get("py"))


def replaced(text, new):
    """The document with a new table; ValueError where its markers are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + begin + new + end + after


def main(folder, names):
    """Render the results of the cells called `names`; an exit message where one is not green."""
    text = DOCUMENT.read_text("utf-8")
    known = {cells[: len(PACKAGES) + 1]: f"| {' | '.join(cells)} |" for cells in lines_of(text)}
    files = {name: folder / f"{name}.json" for name in names}
    results = {
        name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.exists()
    }
    missing = [name for name in names if name not in results and key_of(name) not in known]
    if missing:
        return "not run: " + ", ".join(missing)
    failed = [name for name, result in results.items() if result["failed"]]
    if failed:
        return "failed: " + ", ".join(failed)
    rows = (line(results[name]) if name in results else known[key_of(name)] for name in names)
    DOCUMENT.write_text(replaced(text, as_table(rows)), "utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
