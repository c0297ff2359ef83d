"""docs/legacy.md builds the legacy rows of compat_matrix.yaml: every one, with every pin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from bnb_dispatch_fix.features import VERSION

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "legacy.md").read_text("utf-8")
ROWS = [
    row
    for row in yaml.safe_load((ROOT / "compat_matrix.yaml").read_text("utf-8"))["tested"]
    if row.get("legacy")
]
NAMED = ("python", "torch", "transformers", "accelerate", "bitsandbytes")
#: Not installed by its line: pip installs, and the others are no packages.
NOT_PINNED = {"python", "pip", "legacy", "ci"}


def built():
    """Each line that builds a row: its Python and its pins."""
    lines = re.findall(r"^python([\d.]+) -m pip install (.*?)\n```", TEXT, re.DOTALL | re.MULTILINE)
    return [(python, set(pins.replace("\\", " ").split())) for python, pins in lines]


def test_there_are_rows():
    assert len(ROWS) == 7
    assert len(built()) == len(ROWS)
    assert sum(row.get("ci", False) for row in ROWS) == 2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['python']}-{row['transformers']}")
def test_a_row_is_in_the_table_and_has_its_line(row):
    assert f"| {' | '.join(row[key] for key in NAMED)} |" in TEXT
    pins = {f"{key}=={row[key]}" for key in row if key not in NOT_PINNED}
    assert (row["python"], pins) in built()


def test_the_snippets_pin_this_release():
    assert set(re.findall(r"bnb-dispatch-fix(?:==| = \")([\d.]+)", TEXT)) == {VERSION}
