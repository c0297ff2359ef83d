"""Which library is tested, and what its loads answer without the shim and with it."""

from __future__ import annotations

import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from cell import run

HERE = pathlib.Path(__file__).parent
ORDERS = ("without", "before", "after")


def pytest_addoption(parser):
    parser.addoption("--loads", help="NAME of loads_NAME.py, of the library that is installed")
    parser.addoption("--sdist", type=pathlib.Path, help="folder of accelerate's unpacked sdist")


@pytest.fixture(scope="session")
def name(request):
    name = request.config.getoption("--loads")
    if name is None:
        pytest.skip("--loads NAME says which library is installed")
    return name


@pytest.fixture(scope="session")
def asked(name):
    """By order, what asking.py printed; two processes at a time."""

    def ask(order):
        return json.loads(run([str(HERE / "asking.py"), name, order]).splitlines()[-1])

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(ORDERS, pool.map(ask, ORDERS)))
