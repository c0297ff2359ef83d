"""accelerate's own tests, without the shim and with it: the same results, but for one.

That one expects the budgets that #47211 corrects: beside its share of the model, each GPU has room
for 1.25 times the mean of the leaf modules (215 bytes), with the fix for 1.25 times the largest
(243 bytes).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

import pytest
from cell import QUIET

FILES = ("test_modeling_utils.py", "test_big_modeling.py")
#: Of each release; they ask for a GPU.
EXPECTS_UNFIXED_BUDGETS = {"ModelingUtilsTester.test_get_balanced_memory"}
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def folder(request):
    sdist = request.config.getoption("--sdist")
    if sdist is None:
        pytest.skip("--sdist FOLDER says where accelerate's tests are")
    return sdist.resolve() / "tests"


def results(folder, plugin, switch, junit):
    """Outcome by test."""
    command = ["-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "-W", "default"]
    command += ["-c", os.devnull, f"--rootdir={folder}", f"--junitxml={junit}", *FILES]
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **QUIET, "PYTHONPATH": paths, "BNB_DISPATCH_FIX": switch},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert finished.returncode in (0, 1), finished.stdout + finished.stderr
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):  # noqa: S314  # pytest wrote it
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        test = f"{case.get('classname').rpartition('.')[2]}.{case.get('name')}"
        found[test] = kinds[0] if kinds else "passed"
    return found


@pytest.mark.parametrize(
    ("plugin", "differs"),
    [("bnb_dispatch_fix", set()), ("pretended_gpus", EXPECTS_UNFIXED_BUDGETS)],
    ids=["as they are", "on simulated GPUs"],
)
def test_results_are_the_same(folder, tmp_path, plugin, differs, record_property):
    """On simulated GPUs those that compute there fail either way; those that plan do not."""
    without = results(folder, plugin, "off", tmp_path / "without.xml")
    found = results(folder, plugin, "backport,rescue,explain", tmp_path / "with.xml")
    assert set(found) == set(without)
    assert "passed" in without.values()
    assert {test for test in found if found[test] != without[test]} == differs
    for test in differs:
        assert (without[test], found[test]) == ("passed", "failure")
    figures = [dict(Counter(outcomes.values())) for outcomes in (without, found)]
    told = {"without": figures[0], "with": figures[1], "differs": sorted(differs)}
    record_property(f"own tests, {plugin}", told)
