"""`bnb-dispatch-fix status --json` on real releases: nothing that is missing stays unpatched."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cell import installed, run
from packaging.version import Version

COMMAND = ["-m", "bnb_dispatch_fix", "status", "--json"]
WITHOUT_TORCH = installed("torch") is None
needs_torch = pytest.mark.skipif(WITHOUT_TORCH, reason="the planners cannot be imported: no torch")


@pytest.fixture(scope="module")
def status():
    return json.loads(run(COMMAND))


@needs_torch
def test_every_seam_is_applied_or_already_fixed(status, record_property):
    states = {patch["id"]: patch["state"] for patch in status["patches"]}
    record_property("patches", states)
    assert states
    assert set(states.values()) <= {"applied", "already-fixed"}, states


@needs_torch
def test_fixes_are_those_the_release_lacks(status, missing_fixes, record_property):
    balanced = [p for p in status["patches"] if p["attribute"] == "get_balanced_memory"]
    transformers = [p for p in balanced if p["module"].startswith("transformers.")]
    accelerate = [p for p in balanced if p["module"].startswith("accelerate.")]
    record_property("fixes", transformers[0]["fixes"])
    assert transformers[0]["module"].endswith((".integrations.accelerate", ".modeling_utils"))
    assert transformers[0]["fixes"] == missing_fixes
    # Others of transformers' modules hold accelerate's function.
    assert all(p["fixes"] == accelerate[0]["fixes"] for p in transformers[1:])
    lacks = [4298] if Version(installed("accelerate") or "0") < Version("1.16.0") else []
    assert all(p["fixes"] == [*lacks, 47203, 47211] for p in accelerate)


@needs_torch
def test_its_shape(status):
    assert set(status) == {"version", "features", "installed", "patches"}
    assert status["installed"]["transformers"] == installed("transformers")
    for patch in status["patches"]:
        assert set(patch) == {"id", "module", "attribute", "state", "fixes", "reason"}
        assert patch["reason"]


@pytest.mark.skipif(not WITHOUT_TORCH, reason="torch is installed")
def test_without_torch_it_says_so(missing_fixes):
    result = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, check=False)
    assert result.returncode == 1 or not missing_fixes, result.stderr
    patches = json.loads(result.stdout)["patches"]
    reasons = [p["reason"] for p in patches if p["state"] == "failed"]
    assert reasons
    assert all("No module named 'torch'" in reason for reason in reasons)


@pytest.mark.parametrize(
    "order", ["bnb_dispatch_fix, transformers", "transformers, bnb_dispatch_fix"]
)
def test_importing_prints_nothing_and_changes_no_exit_code(order):
    code = f"import warnings; warnings.simplefilter('ignore'); import {order}; print('done')"
    assert run(["-c", code]) == "done\n"
