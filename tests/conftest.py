"""One result file per cell, for the table of tested releases: `--cell-result=FILE`."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from cell import installed

# Whoever started the tests may ignore some (nohup, a shell's background job), and the programs that
# tests start would inherit that. A handler that does nothing shields this process alone.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


PACKAGES = ("transformers", "accelerate", "bitsandbytes", "torch", "wrapt", "PyYAML", "packaging")
CELL = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--cell-result", type=Path, help="write versions and outcome to this file")


def pytest_configure(config):
    config.stash[CELL] = {"started": time.time(), "outcomes": {}, "facts": {}}


def pytest_report_teststatus(report, config):
    """Outcomes, and what tests said with `record_property`; with xdist only in the controller."""
    cell = config.stash[CELL]
    if report.when == "call" or (report.when == "setup" and not report.passed):
        cell["outcomes"][report.nodeid] = report.outcome
        cell["facts"].update(report.user_properties)


def pytest_sessionfinish(session):
    path = session.config.getoption("--cell-result")
    if path is None or hasattr(session.config, "workerinput"):
        return
    cell = session.config.stash[CELL]
    outcomes = list(cell["outcomes"].values())
    result = {
        **cell["facts"],
        **{outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
        "installed": {package: installed(package) for package in PACKAGES},
        "python": ".".join(map(str, sys.version_info[:2])),
        "seconds": round(time.time() - cell["started"], 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
