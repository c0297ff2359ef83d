"""README and docs say what the project's files say; outputs are compared in the demo's cell."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import readme
import report
import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bnb_dispatch_fix"
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text("utf-8") for path in [*readme.DOCUMENTS, *OTHERS]
}
TESTED = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text("utf-8"))["tested"]
ROWS = [row for row in TESTED if not row.get("legacy")]
LEGACY = [row for row in TESTED if row.get("legacy")]


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def prose(text):
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


ON_FILE = [
    (name, label)
    for name, text in TEXTS.items()
    for label, _ in readme.blocks(text)
    if label in readme.ON_FILE
]


@pytest.mark.parametrize(("name", "label"), ON_FILE)
def test_measurements_are_those_on_file(name, label):
    assert dict(readme.blocks(TEXTS[name]))[label] == readme.render(label, "")


def test_every_measurement_is_shown_once():
    assert sorted(ON_FILE) == [("README.md", "headline"), ("docs/measurements.md", "measured")]


def test_every_marker_begins_or_ends_a_block():
    for name, text in TEXTS.items():
        markers = re.findall(r"^<!-- (.+?) -->$", text, re.MULTILINE)
        begun = [label for label, _ in readme.blocks(text)]
        begun += ["matrix"] * text.count(report.BEGIN)
        assert sorted(markers) == sorted([*begun, *["end"] * len(begun)]), name


def test_table_shows_every_tested_row():
    """`nox -s report` writes it; what its rows say is compared in their cells."""
    expected = {
        tuple(row.get(key, "–") for key in (*report.PACKAGES, "python"))
        for row in ROWS
        if "transformers" in row
    }
    lines = report.lines_of(report.DOCUMENT.read_text("utf-8"))
    found = [line[: len(report.PACKAGES) + 1] for line in lines]
    assert set(found) == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_the_readme_names_the_range_of_the_tested_releases(package):
    versions = sorted(Version(row[package]) for row in ROWS if package in row)
    first, last = (f"{v.major}.{v.minor}" for v in (versions[0], versions[-1]))
    [line] = [line for line in TEXTS["README.md"].splitlines() if report.DOCUMENT.name in line]
    assert f"{package} {first}–{last}" in line


def test_the_readme_is_read_in_one_sitting():
    assert len(TEXTS["README.md"].splitlines()) <= 130


def test_python_in_them_is_python():
    for text in TEXTS.values():
        for block in fenced(text, "python"):
            ast.parse(block)


#: What is inside a block runs in the demo's cell, with torch.
SNIPPETS = [
    pytest.param(snippet, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, snippet in enumerate(fenced(readme.outside_blocks(text), "python"))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_in_them_runs(snippet):
    assert readme.printed(snippet) == ""


def test_their_sessions_exist():
    noxfile = (ROOT / "noxfile.py").read_text("utf-8")
    for name, text in TEXTS.items():
        named = re.findall(r"nox -s ['\"]?(\w+)", text)
        assert named or name not in ("README.md", "CONTRIBUTING.md")
        for session in named:
            assert f"def {session}(" in noxfile, name


def test_their_cells_exist():
    cells = re.findall(r"py3\.\d+-transformers[\w.-]+", "".join(TEXTS.values()))
    assert cells
    for cell in cells:
        versions = dict(re.findall(r"-([a-z]+)([\d.]+)", cell))
        python = cell[2:].partition("-")[0]
        assert any({**versions, "python": python}.items() <= row.items() for row in ROWS), cell


def test_their_commands_exist():
    shown = {
        command
        for text in TEXTS.values()
        for command in re.findall(r"`bnb-dispatch-fix ([a-z]+)", text)
    }
    assert {"status", "doctor", "plan", "run", "autoload"} <= shown
    for command in shown:
        subprocess.run(
            [sys.executable, "-m", "bnb_dispatch_fix", command, "--help"],
            check=True,
            stdout=subprocess.DEVNULL,
        )


# --- links ------------------------------------------------------------------------------------


def anchors(text):
    """The anchors of the headings, as repository hosts make them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[name])):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


def test_every_document_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(([^)#\s]+)", TEXTS["README.md"]))
    assert set(TEXTS) - {"README.md"} <= linked


def test_the_picture_is_well_formed_and_shown():
    """What it shows is compared in the demo's cell."""
    ElementTree.parse(readme.PICTURE)  # noqa: S314  # the project's own file
    command = " ".join(("plan", *readme.PICTURED))
    for name, path in (("README.md", "docs/plan.svg"), ("docs/plan.md", "plan.svg")):
        assert f"]({path})" in TEXTS[name]
        assert command in TEXTS[name]


# --- what CONTRIBUTING.md and SECURITY.md say of the code ----------------------------------------


def test_every_wing_is_on_the_map():
    wings = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)/` \|", TEXTS["CONTRIBUTING.md"], re.MULTILINE)) == wings


SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8"))
    for path in PACKAGE.rglob("*.py")
}


def name_of(node):
    """A name as written: "os.system"; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree):
    """The top-level packages that are imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


CONNECTIONS = {"http", "requests", "socket", "ssl", "urllib"}
PICKLES = {"marshal", "pickle", "shelve"}
EVALUATING = {"eval", "exec", "compile", "os.system", "os.popen"}
UNSAFE_YAML = {"yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.unsafe_load"}


@pytest.mark.parametrize("name", SOURCES)
def test_no_code_evaluates_text_or_opens_a_connection(name):
    nodes = list(ast.walk(SOURCES[name]))
    assert imported(SOURCES[name]).isdisjoint(CONNECTIONS | PICKLES)
    assert {name_of(node) for node in nodes}.isdisjoint(EVALUATING | UNSAFE_YAML)
    keywords = [node for node in nodes if isinstance(node, ast.keyword)]
    assert "shell" not in {node.arg for node in keywords}
    trusting = [node.value for node in keywords if node.arg == "trust_remote_code"]
    assert not any(isinstance(value, ast.Constant) and value.value for value in trusting)


# --- the table's own command ----------------------------------------------------------------------


def result(**changes):
    """What a cell of `nox -s matrix` leaves, as far as the table reads it."""
    plan = {"error": None, "device_map": {"model": 0, "lm_head": 1}}
    return {
        "installed": {"transformers": "5.0.0", "accelerate": "1.12.0", "bitsandbytes": "0.49.1"},
        "python": "3.11",
        "failed": 0,
        "fixes": [47203, 47211],
        "without": {**plan, "error": "ValueError: Some modules are dispatched on the CPU"},
        "with": plan,
        **changes,
    }


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The document that the command writes to, with an empty table."""
    document = tmp_path / "compatibility.md"
    document.write_text(f"before\n{report.BEGIN}{report.END}after\n", "utf-8")
    monkeypatch.setattr(report, "DOCUMENT", document)
    return document


def test_report_writes_a_line_per_cell(written, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(result()), "utf-8")
    assert report.main(tmp_path, ["one"]) is None
    before, begin, head, ruler, line, end, after = written.read_text("utf-8").splitlines()
    assert (before, begin, end, after) == ("before", "<!-- matrix -->", "<!-- end -->", "after")
    assert head.count("|") == ruler.count("|") == line.count("|")
    assert line == (
        "| 5.0.0 | 1.12.0 | 0.49.1 | 3.11 | #47203, #47211 | ValueError | loads on GPUs |"
    )


def test_report_names_a_cell_that_did_not_run_or_failed(written, tmp_path):
    before = written.read_text("utf-8")
    (tmp_path / "one.json").write_text(json.dumps(result(failed=1)), "utf-8")
    assert report.main(tmp_path, ["one"]) == "failed: one"
    assert report.main(tmp_path, ["one", "other"]) == "not run: other"
    assert written.read_text("utf-8") == before


def test_report_keeps_the_line_of_a_cell_that_was_not_run(written, tmp_path):
    old = "py3.11-transformers4.30.2-accelerate0.20.3-bitsandbytes0.42.0"
    kept = "| 4.30.2 | 0.20.3 | 0.42.0 | 3.11 | #47203 | lm_head on the CPU | loads on GPUs |"
    written.write_text(f"{report.BEGIN}head\nruler\n{kept}\n{report.END}", "utf-8")
    (tmp_path / "one.json").write_text(json.dumps(result()), "utf-8")
    assert report.main(tmp_path, ["one", old]) is None
    assert written.read_text("utf-8").splitlines()[-2] == kept
    assert report.main(tmp_path, [old.replace("3.11", "3.8")]).startswith("not run: py3.8")
