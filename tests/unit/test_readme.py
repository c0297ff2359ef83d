"""The README says what the project's files say; its commands are run in the demo's cell."""

import ast
import re
from pathlib import Path

import readme
import report
import yaml

ROOT = Path(__file__).parents[2]
TEXT = readme.README.read_text("utf-8")


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_measurements_are_those_on_file():
    assert dict(readme.blocks(TEXT))["measured"] == readme.render("measured")


def test_table_shows_every_tested_row():
    """`nox -s report` writes it; what its rows say is compared in their cells."""
    rows = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text("utf-8"))["tested"]
    expected = {
        tuple(row.get(key, "–") for key in (*report.PACKAGES, "python"))
        for row in rows
        if "transformers" in row
    }
    found = {line[: len(report.PACKAGES) + 1] for line in report.lines_of(TEXT)}
    assert found == expected


def test_python_in_it_is_python():
    for block in fenced("python"):
        ast.parse(block)


def test_its_sessions_exist():
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    named = re.findall(r"nox -s (\w+)", TEXT)
    assert named
    for session in named:
        assert f"def {session}(" in noxfile
