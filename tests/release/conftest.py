"""What the tests on real releases share: versions, scenarios in processes of their own, results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.version import Version

HERE = Path(__file__).parent
#: No network, no chatter; several processes on few cores: more threads would only wait.
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
PACKAGES = ("transformers", "accelerate", "bitsandbytes", "torch", "wrapt", "PyYAML", "packaging")


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


TRANSFORMERS = Version(installed("transformers") or "0")


def pytest_collection_modifyitems(items):
    """Warnings of old releases are theirs; those of this package are errors."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:::bnb_dispatch_fix"))


@pytest.fixture(scope="session")
def transformers_version():
    return TRANSFORMERS


@pytest.fixture(scope="session")
def missing_fixes():
    """PR numbers that the installed release lacks."""
    first_with = {47203: Version("5.14.0"), 47211: Version("5.18.0")}
    return [pr for pr, first in first_with.items() if first > TRANSFORMERS]


def run(command, **environment):
    """Run Python with arguments in a clean environment; its stdout, or a failure that tells all."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BNB_DISPATCH")}
    result = subprocess.run(
        [sys.executable, *command],
        env={**clean, **QUIET, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if result.returncode:
        pytest.fail(f"{command} ended with {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


@pytest.fixture(scope="session")
def in_process(request):
    """`in_process(steps, **environment)` starts scenario.py; call the answer to wait for it.

    Two at a time: importing is most of the work and a process uses one core.
    """
    pool = ThreadPoolExecutor(max_workers=2)
    request.addfinalizer(pool.shutdown)

    def start(steps, **environment):
        def answer():
            output = run([str(HERE / "scenario.py"), *steps], **environment)
            return json.loads(output.splitlines()[-1])

        return pool.submit(answer).result

    return start


# --- one result file per cell, for the table of tested releases -----------------------------


def pytest_addoption(parser):
    parser.addoption("--cell-result", type=Path, help="write versions and outcome to this file")


def pytest_configure(config):
    config.stash[CELL] = {"started": time.time(), "passed": 0, "failed": 0, "skipped": 0}


CELL = pytest.StashKey()


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
