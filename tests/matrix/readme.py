"""Fills the marked blocks of README.md and docs/: what commands print, examples, measurements.

`nox -s readme` runs each command and each example in the demo's cell and writes what it printed;
the measurements come from tests/data/measured.json. The tests compare the documents with the same
functions; the table of tested releases is report.py's.

A block begins with a marker line and ends with `<!-- end -->`:

    output: COMMAND    what a command of this package prints
    python             an example, and what it prints
    explained          an example on simulated GPUs, and what is said about its error (explained.py)
    setup              what stands before the examples of explained.py
    measured           every measurement; "headline" is a few of them
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
PICTURE = ROOT / "docs" / "plan.svg"
MEASURED = ROOT / "tests" / "data" / "measured.json"
#: What the documents' picture shows.
PICTURED = ("--example", "llama-3-8b", "--bits", "4", "--max-memory", "4x1.6GiB,cpu=60GiB")
#: Blocks that need no torch to be rendered.
ON_FILE = ("measured", "headline")
_BLOCK = re.compile(
    r"<!-- (output: .+?|python|explained(?:: .+?)?|setup|measured|headline) -->\n(.*?)<!-- end -->",
    re.DOTALL,
)
_CODE = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
#: What differs between machines that run the same releases.
_MACHINE = [
    (r"Python 3\.\d+\.\d+", "Python 3.x"),
    (r"torch( +)\d[\w.+]*", r"torch\1x"),
]


def blocks(text: str) -> Iterator[Tuple[str, str]]:
    """The label and the body of every marked block."""
    for match in _BLOCK.finditer(text):
        yield match.group(1), match.group(2)


def fill(text: str, render: Callable[[str, str], str]) -> str:
    """The text with every marked block rendered anew."""
    return _BLOCK.sub(
        lambda match: f"<!-- {match.group(1)} -->\n{render(*match.groups())}<!-- end -->", text
    )


def outside_blocks(text: str) -> str:
    """The text without its marked blocks."""
    return _BLOCK.sub("", text)


def render(label: str, body: str) -> str:
    """The body of a block, as it should be; an example's own code is taken from what is there."""
    if label in ON_FILE:
        measured = json.loads(MEASURED.read_text("utf-8"))
        return measured_tables(measured) if label == "measured" else headline(measured)
    if label == "setup":
        from explained import SETUP

        return _example(SETUP, "")
    if label.startswith("explained"):
        from explained import said_about

        return _example(code_of(body), said_about(code_of(body), label.partition(": ")[2]))
    if label == "python":
        return _example(code_of(body), printed(code_of(body)))
    return console(label.partition(" ")[2])


def code_of(body: str) -> str:
    """The code of an example."""
    match = _CODE.search(body)
    assert match is not None, body
    return match.group(1)


def _example(code: str, output: str) -> str:
    shown = f"\n```text\n{output}```\n" if output else ""
    return f"```python\n{code}```\n{shown}"


def console(command: str) -> str:
    """A command of this package and what it prints, as a console block; plans may end with 1."""
    program, *arguments = shlex.split(command)
    assert program == "bnb-dispatch-fix", command
    ends = (0, 1) if arguments[0] == "plan" else (0,)
    printed = _python("-m", "bnb_dispatch_fix", *arguments, ends=ends)
    assert printed, command
    return f"```console\n$ {command}\n{printed}```\n"


def printed(code: str) -> str:
    """What a program prints that runs beside the checkpoints of `write_checkpoints`."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder))
        return _python("-c", code, cwd=folder)


def write_checkpoints(folder: Path) -> None:
    """A folder for each of the package's examples: what can be planned, without weights."""
    from bnb_dispatch_fix.planning import examples

    for name in examples.SINCE:
        checkpoint = folder / name
        checkpoint.mkdir()
        config = examples.configuration(name)
        (checkpoint / "config.json").write_text(json.dumps(config), "utf-8")
        header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
        weights = len(header).to_bytes(8, "little") + header
        (checkpoint / "model.safetensors").write_bytes(weights)


def _python(*arguments: str, cwd: str = ".", ends: Sequence[int] = (0,)) -> str:
    """What a Python prints that imports this package and stays silent otherwise."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BNB_")}
    entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(Path(entry).absolute()) for entry in entries]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={
            **environment,
            **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        },
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if ended.returncode not in ends:
        ended.check_returncode()
    return ended.stdout.replace(sys.executable, "/venv/bin/python")


def on_any_machine(body: str) -> str:
    """A block without what differs between machines."""
    for pattern, name in _MACHINE:
        body = re.sub(pattern, name, body)
    return body


def picture() -> str:
    """The documents' picture of a plan."""
    from drawing import svg

    return svg(json.loads(_python("-m", "bnb_dispatch_fix", "plan", *PICTURED, "--json")))


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


def headline(measured: List[Dict[str, Any]]) -> str:
    """The measurements in a few lines: models loaded, planning time, cost at start-up."""

    def table(title: str) -> List[List[str]]:
        [entry] = [entry for entry in measured if entry["title"].startswith(title)]
        return list(entry["table"][1:])

    loaded = [[row[0], *row[1].split(" → ")] for row in table("Models loaded, of 323")]
    head = ["transformers", "as installed", "with backport", "with rescue"]
    rows = [_row(row) for row in [head, ["---"] * len(head), *loaded]]
    times = [float(cell) for row in table("Time of a plan") for cell in row[1:]]
    bare = table("Cost at start-up")[0]
    return (
        'Models loaded with `device_map="auto"`, of 323 that fit in device order (`nox -s bench`):'
        "\n\n" + "\n".join(rows) + "\n\n"
        f"A plan takes {min(times):.2f} to {max(times):.2f} times as long as without the shim "
        "(`nox -s bench`).\n"
        f"Importing the shim adds {_added(bare[3])} to the instructions of `python -c pass`, "
        f"autoload {_added(bare[2])}\n(`nox -s startup`).\n"
    )


def _added(factor: str) -> str:
    return f"{float(factor) - 1:.1%}".replace("%", " %")


def _row(columns: List[str]) -> str:
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(fill(document.read_text("utf-8"), render), "utf-8")
    PICTURE.write_text(picture(), "utf-8")
