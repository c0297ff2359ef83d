"""transformers 5.x with the shim gives the caps of transformers 5.24.0, byte for byte.

From 5.18.0 on the release's own function answers but for "balanced_low_0": there the same is asked
where it does not raise. What that strategy does with device ids is accelerate 1.16.0's (#4298).
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="sizes real modules: needs torch")
transformers = pytest.importorskip("transformers")
if transformers.__version__.startswith("4."):
    pytest.skip("4.x plans with accelerate's function", allow_module_level=True)

import models
from cell import TRANSFORMERS
from packaging.version import Version

import bnb_dispatch_fix
from bnb_dispatch_fix.planning.simulation import simulated_gpus

DATA = Path(__file__).parent.parent / "data" / "caps_5.24.0.json"
CASES = json.loads(DATA.read_text("utf-8"))["cases"]
BY_ID = json.loads((DATA.parent / "caps_by_id_1.16.0.json").read_text("utf-8"))["cases"]
BACKPORTED = Version("5.18.0") > TRANSFORMERS


@pytest.fixture(scope="module")
def planner():
    bnb_dispatch_fix.activate()
    yield importlib.import_module("transformers.integrations.accelerate")
    bnb_dispatch_fix.deactivate()


def planned(planner, case, model, quantizer):
    """(caps, budgets) for one case, each as [device, bytes] pairs."""
    given = case["max_memory"] and dict(case["max_memory"])
    free = case["free"] and dict(case["free"])
    with simulated_gpus(free):
        budgets = planner.get_max_memory(None if given is None else dict(given))
        caps = planner.get_balanced_memory(
            model,
            given,
            models.FORMS[case["form"]](case["classes"]),
            quantizer,
            low_zero=case["low_zero"],
        )
    return [[*item] for item in caps.items()], [[*item] for item in budgets.items()]


def expected(case, budgets):
    """5.24.0's caps; without `max_memory` the CPU's share is the installed release's own."""
    if case["free"] is None:
        return case["caps"]
    own = dict(budgets)
    return [[device, own["cpu"] if device == "cpu" else cap] for device, cap in case["caps"]]


def by_position(case):
    """Whether the GPUs in use are 0, 1, 2, ...: then 5.24.0 reads the right budgets."""
    used = [device for device, size in case["max_memory"] or case["free"] if size]
    numbers = sorted(device for device in used if isinstance(device, int))
    return numbers == list(range(len(numbers)))


@pytest.mark.parametrize("name", models.MODELS)
def test_caps_are_those_of_5_24_0(planner, name):
    model = models.build(name)
    quantizer = models.quantizer() if name.endswith("nf4") else None
    cases = [case for case in CASES if case["model"] == name and "caps" in case]
    cases = [case for case in cases if by_position(case) or not case["low_zero"]]
    if not BACKPORTED:
        cases = [case for case in cases if "raises" not in case]
    assert len(cases) >= 30
    different = []
    for case in cases:
        caps, budgets = planned(planner, case, model, quantizer)
        if caps != expected(case, budgets):
            different.append((case, caps))
    assert not different, f"{len(different)} of {len(cases)}, the first: {different[0]}"


# accelerate's function, which answered these, does not know of ties that are only declared.
@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "declared tied"])
def test_budgets_are_read_by_id_as_accelerate_1_16_0_reads_them(planner, name):
    model = models.build(name)
    quantizer = models.quantizer() if name.endswith("nf4") else None
    cases = [case for case in BY_ID if case["model"] == name]
    assert len(cases) > 30
    different = []
    with simulated_gpus():
        for case in cases:
            given = dict(case["max_memory"])
            caps = planner.get_balanced_memory(
                model, given, case["classes"], quantizer, low_zero=True
            )
            if [[*item] for item in caps.items()] != case["caps"]:
                different.append((case, caps))
    assert not different, f"{len(different)} of {len(cases)}, the first: {different[0]}"


@pytest.mark.skipif(not BACKPORTED, reason="the release's own function raises here, too")
@pytest.mark.parametrize("name", models.MODELS)
def test_where_5_24_0_raises_caps_stay_within_budgets(planner, name):
    model = models.build(name)
    quantizer = models.quantizer() if name.endswith("nf4") else None
    cases = [case for case in CASES if case["model"] == name and "caps" not in case]
    assert cases
    for case in cases:
        caps, budgets = planned(planner, case, model, quantizer)
        limits = dict(budgets)
        assert [device for device, _ in caps] == list(limits), case
        assert all(0 <= cap <= limits[device] for device, cap in caps), case
