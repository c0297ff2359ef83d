"""One result file per cell, for the table of tested releases: `--cell-result=FILE`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from cell import installed

PACKAGES = ("transformers", "accelerate", "bitsandbytes", "torch", "wrapt", "PyYAML", "packaging")
CELL = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--cell-result", type=Path, help="write versions and outcome to this file")


def pytest_configure(config):
    config.stash[CELL] = {"started": time.time(), "passed": 0, "failed": 0, "skipped": 0}


def pytest_report_teststatus(report, config):
    if report.when == "call" or (report.when == "setup" and not report.passed):
        config.stash[CELL][report.outcome] += 1


@pytest.fixture(scope="session")
def record(request):
    """`record(key, value)`: a fact for the result file."""
    return request.config.stash[CELL].__setitem__


def pytest_sessionfinish(session):
    path = session.config.getoption("--cell-result")
    if path is None:
        return
    facts = dict(session.config.stash[CELL])
    facts["seconds"] = round(time.time() - facts.pop("started"), 1)
    facts["python"] = ".".join(map(str, sys.version_info[:2]))
    facts["installed"] = {package: installed(package) for package in PACKAGES}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
