"""Real `from_pretrained`, 4-bit and 8-bit, on eight simulated GPUs: without and with the shim."""

from __future__ import annotations

import sys

import pytest
import report
from cell import installed
from packaging.version import Version

pytest.importorskip("torch", reason="plans real checkpoints: needs torch")

STRATEGIES = ("auto", "balanced", "balanced_low_0")
REFUSAL = "ValueError: Some modules are dispatched on the CPU or the disk"
ALL_FIXED = Version("5.18.0")

OFF = [f"plan:{strategy}:4" for strategy in STRATEGIES] + ["plan:auto:8"]
FIRST = ["shim", *OFF, "status", "call:deactivate", "plan", "call:activate", "plan"]
LAST = ["transformers", "remember", "shim", "plan", "call:deactivate", "same", "plan"]


@pytest.fixture(scope="module")
def runs(in_process):
    started = {
        "off": in_process(["shim", *OFF], BNB_DISPATCH_FIX="off"),
        "first": in_process(FIRST),
        "last": in_process(LAST),
    }
    return {name: wait() for name, wait in started.items()}


@pytest.fixture(scope="module")
def off(runs):
    return dict(zip(OFF, runs["off"][1:]))


@pytest.fixture(scope="module")
def first(runs):
    return dict(zip(OFF, runs["first"][1:]))


def assert_fault(plan, version):
    """What an installed release without the shim does with this checkpoint (FACTS of 5.12, 4.x)."""
    if version >= ALL_FIXED:
        assert plan["loads_on_gpus"]
    elif version.major >= 5:
        assert plan["error"].startswith(REFUSAL)
    else:
        assert plan["error"] is None
        assert plan["device_map"]["lm_head"] == "cpu"


def test_without_the_shim_the_release_has_its_fault(off, transformers_version, record_property):
    assert_fault(off["plan:auto:4"], transformers_version)
    record_property("without", off["plan:auto:4"])


@pytest.mark.parametrize("step", OFF)
def test_with_the_shim_every_module_is_on_a_gpu(first, step, record_property):
    assert first[step]["error"] is None
    assert first[step]["loads_on_gpus"], first[step]["device_map"]
    record_property("with", first["plan:auto:4"])


def test_the_shim_may_come_last(runs):
    assert runs["last"][LAST.index("plan")] == runs["first"][FIRST.index("plan:auto:4")]


def test_deactivate_brings_the_fault_back(runs, transformers_version):
    after = FIRST.index("call:deactivate") + 1
    assert_fault(runs["first"][after], transformers_version)
    assert_fault(runs["last"][-1], transformers_version)


def test_deactivate_restores_the_same_function(runs):
    assert runs["last"][LAST.index("same")] is True


def test_activate_again_fixes_again(runs):
    assert runs["first"][-1] == runs["first"][FIRST.index("plan:auto:4")]


def test_a_release_with_both_fixes_is_left_alone(off, first, transformers_version):
    if transformers_version < ALL_FIXED:
        pytest.skip("only releases from 5.18.0 on have both fixes")
    assert first["plan:auto:4"] == off["plan:auto:4"]


def test_status_names_what_was_missing(runs, missing_fixes):
    status = runs["first"][FIRST.index("status")]
    balanced = [p for p in status["patches"] if p["attribute"] == "get_balanced_memory"]
    patched = [p for p in balanced if p["module"].startswith("transformers.")]
    # Its adapters are placed by accelerate's function, which no release has fixed.
    patched = [p for p in patched if p["module"] != "transformers.integrations.peft"]
    assert patched
    for patch in patched:
        assert patch["state"] == ("applied" if missing_fixes else "already-fixed")
        assert patch["fixes"] == missing_fixes


def test_the_table_of_tested_releases_says_so(off, first, missing_fixes):
    result = {
        "installed": {package: installed(package) for package in report.PACKAGES},
        "python": ".".join(map(str, sys.version_info[:2])),
        "fixes": missing_fixes,
        "without": off["plan:auto:4"],
        "with": first["plan:auto:4"],
    }
    lines = report.table([result]).splitlines()[2:]
    combination = lines[0].split("|")[:5]
    table = report.DOCUMENT.read_text("utf-8").splitlines()
    said = [line for line in table if line.split("|")[:5] == combination]
    assert said in ([], lines)  # a combination of your own is in no table
