"""The README says what the project's files say; its commands are run in the demo's cell."""

import ast
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "matrix"))

import readme  # noqa: E402

TEXT = readme.README.read_text("utf-8")


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_measurements_are_those_on_file():
    assert dict(readme.blocks(TEXT))["measured"] == readme.render("measured")


def rows_named(rows):
    packages = ("transformers", "accelerate", "bitsandbytes")
    return {tuple(row.get(package, "–") for package in packages) for row in rows}


def test_table_shows_tested_combinations_and_all_of_the_test_run():
    rows = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text("utf-8"))["tested"]
    table = TEXT.partition("<!-- matrix -->\n")[2].partition("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    found = {tuple(line[1:4]) for line in lines}
    assert rows_named(row for row in rows if row.get("ci")) <= found
    assert found <= rows_named(rows)


def test_python_in_it_is_python():
    for block in fenced("python"):
        ast.parse(block)


def test_its_sessions_exist():
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    named = re.findall(r"nox -s (\w+)", TEXT)
    assert named
    for session in named:
        assert f"def {session}(" in noxfile
