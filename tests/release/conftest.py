"""What the tests on real releases share: versions, and scenarios in processes of their own."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from cell import HERE, TRANSFORMERS, installed, run
from packaging.version import Version


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Test files import old releases; what these warn about on the way is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return (yield)


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
    """PR numbers that the installed release's planner lacks; before 5.0 it is accelerate's."""
    first_with = {47203: Version("5.14.0"), 47211: Version("5.18.0")}
    accelerate = Version(installed("accelerate") or "0")
    by_id = Version("5.0.0.dev0") > TRANSFORMERS and accelerate >= Version("1.16.0")
    lacks = [] if by_id else [4298]
    return lacks + [pr for pr, first in first_with.items() if first > TRANSFORMERS]


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
