"""Prints what the cells of `nox -s downstream` found: `python table.py RESULTS CELL...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = (
    "cell",
    "loads",
    "without the shim",
    "with it",
    "same",
    "signatures",
    "not reached late",
)


def main(results: Path, names: list[str]) -> None:
    rows = [HEAD, *(row for name in names for row in rows_of(name, results / f"{name}.json"))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def rows_of(name: str, file: Path) -> list[tuple[str, ...]]:
    if not file.exists():
        return [(name, "was not run", *[""] * 5)]
    found = json.loads(file.read_text("utf-8"))
    if "cannot install" in found:
        return [(name, "cannot be installed", *[""] * 5)]
    failed = [(name, f"{found['failed']} tests failed", *[""] * 5)] if found["failed"] else []
    figures = [value for key, value in found.items() if key.startswith(("downstream", "own tests"))]
    return failed + [row(name, each) for each in figures]


def row(name: str, figures: dict) -> tuple[str, ...]:
    before, after = counted(figures["without"]), counted(figures["with"])
    if "differs" in figures:
        total, differing = sum(figures["without"].values()), len(figures["differs"])
        return (name, f"{total} tests", before, after, str(total - differing), "", "")
    named = ", ".join(figures["named"]) or "-"
    counts = (str(figures[key]) for key in ("loads", "same", "signatures"))
    loads, same, signatures = counts
    return (name, loads, before, after, same, signatures, named)


def counted(figures: dict) -> str:
    order = ("on cards", "overfull", "on host", "refused", "passed", "failure", "skipped")
    return ", ".join(f"{figures[key]} {key}" for key in order if figures.get(key))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
