"""Runs tests on a copy of the project, each time in a fork that has pytest already.

Until the first test runs that takes a tenth of a second, a Python of its own takes five times that.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import hypothesis
import pytest
import wrapt  # noqa: F401  # every fork would import it again
import yaml  # noqa: F401  # as above

ROOT = Path(__file__).parents[2]
COPIED = ("bnb_dispatch_fix", "tests", "docs", "compat_matrix.yaml", "pyproject.toml", "README.md")
#: A test may take so many times its own time, and seconds beside it; longer is an endless loop.
PATIENCE, GRACE = 10.0, 10.0
TIME = "time"

# The first failure is all that is asked for; to search for a smaller example takes long.
hypothesis.settings.register_profile(
    "mutation",
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    derandomize=True,
    database=None,
    deadline=None,
)


class Baseline(NamedTuple):
    """The tests on the code as it is: seconds of each, and by line of a module who runs it."""

    seconds: dict[str, float]
    runs: dict[int, list[str]]

    def tests_for(self, lines: range) -> list[str]:
        """Those that run one of the lines; all of them where a child process may be who does."""
        found = {test for line in lines for test in self.runs.get(line, ())}
        return sorted(found) if found and "" not in found else sorted(self.seconds)


class Copy:
    """A copy of the project that goes away again: the working tree stays as it is."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="bnb-dispatch-fix-mutation-"))
        self.folder = self.home / "project"
        self.scratch, self.output = self.home / "tmp", self.home / "output"
        skipped = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.folder / name, ignore=skipped)
            else:
                shutil.copy(ROOT / name, self.folder / name)
        self.second = int(time.time())

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    def path(self, module: str) -> Path:
        return self.folder / "bnb_dispatch_fix" / f"{module}.py"

    def write(self, module: str, source: str) -> None:
        """Put a source in place. Its byte code is known by the second and size of the file."""
        self.path(module).write_text(source, encoding="utf-8")
        self.second += 1
        os.utime(self.path(module), (self.second, self.second))

    def baseline(self, module: str, files: list[str]) -> Baseline:
        """Run the tests on the code as it is; ends the program where one fails."""
        target = self.home / "baseline.json"
        watch = _Watch(str(self.path(module)), target)
        lines = list(self._lines(files, watch, lambda line: 600.0))
        if lines[-1:] != ["0"]:
            sys.exit(f"{self.output.read_text()}\n{module}: a test fails on the code as it is")
        found = json.loads(target.read_text("utf-8"))
        runs = {int(line): tests for line, tests in found["runs"].items()}
        return Baseline(found["seconds"], runs)

    def killer(self, files: list[str], order: list[str], seconds: dict[str, float]) -> str | None:
        """The first test, in this order, that fails; None where all pass, `TIME` without an end."""

        def patience(line: str) -> float:
            return GRACE + PATIENCE * seconds.get(line, 3.0)

        running = "no test can be collected"
        for line in self._lines(files, _Order(order), patience):
            if line in ("0", "1"):
                return None if line == "0" else running
            if line == TIME:
                return f"{TIME}: {running}"
            running = line
        return running  # its process has ended in the middle

    def _lines(
        self, files: list[str], plugin: _Reports, patience: Callable[[str], float]
    ) -> Iterator[str]:
        """Each test as it starts, then "0" or "1"; `TIME` where nothing comes for too long."""
        self.scratch.mkdir()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run_pytest(self, files, plugin, writing)
        os.close(writing)
        try:
            yield from _read(reading, patience)
        finally:
            os.close(reading)
            _end(child)
            shutil.rmtree(self.scratch, ignore_errors=True)


def _read(reading: int, patience: Callable[[str], float]) -> Iterator[str]:
    rest, last = "", ""
    while select.select([reading], [], [], patience(last))[0]:
        text = os.read(reading, 65536).decode()
        if not text:
            return
        *lines, rest = (rest + text).split("\n")
        for last in lines:
            yield last
            if last in ("0", "1"):
                return
    yield TIME


def _end(child: int) -> None:
    """End a fork and what it has started."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _run_pytest(copy: Copy, files: list[str], plugin: _Reports, writing: int) -> None:
    """In the fork: pytest's output is kept, the plugin writes into the pipe. Does not return."""
    status = 1
    try:
        os.setsid()
        os.chdir(copy.folder)
        output = os.open(copy.output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for number, source in enumerate((os.open(os.devnull, os.O_RDWR), output, output)):
            os.dup2(source, number)
        tempfile.tempdir = os.environ["TMPDIR"] = str(copy.scratch)
        os.environ["PYTHONPATH"] = str(copy.folder)
        sys.path.insert(0, str(copy.folder))
        plugin.pipe = writing
        hypothesis.settings.load_profile("mutation")
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={copy.scratch / 'pytest'}"]
        options += ["-W", "ignore:Module already imported"]  # hypothesis, which is not rewritten
        status = int(pytest.main([*options, *files], plugins=[plugin]) != 0)
    except BaseException:  # noqa: BLE001  # whatever a change leads to ends this fork alone
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writing, f"{status}\n".encode())
        os._exit(status)


def _cpu_seconds() -> float:
    """Of this process and those that it has waited for; others on the machine do not count."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _Reports:
    """Writes into a pipe which test starts."""

    pipe = -1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self.pipe, f"{nodeid}\n".encode())


class _Order(_Reports):
    """Runs some tests in a certain order."""

    def __init__(self, order: list[str]) -> None:
        self.rank = {test: rank for rank, test in enumerate(order)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.rank]
        items[:] = sorted(chosen, key=lambda item: self.rank[item.nodeid])


class _Watch(_Reports):
    """Notes which tests run which lines of one file, and how long each takes."""

    def __init__(self, path: str, target: Path) -> None:
        self.path, self.target = path, target
        self.seconds: dict[str, float] = {}
        self.coverage: Any = None

    def pytest_sessionstart(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, include=[self.path], config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        started = _cpu_seconds()
        answer = yield
        self.seconds[item.nodeid] = _cpu_seconds() - started
        self.coverage.switch_context("")
        return answer

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        runs = self.coverage.get_data().contexts_by_lineno(self.path)
        self.target.write_text(json.dumps({"seconds": self.seconds, "runs": runs}))
