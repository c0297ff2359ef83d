"""Whatever fails of ours around an installed function, a load that worked still works.

Before `from_pretrained` or a planner nothing keeps it from being called with what it was given;
after it nothing is raised but what it raised.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

import pytest

from bnb_dispatch_fix import features, states
from bnb_dispatch_fix.model import load as loads
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.wrappers import loading, planners


class Fault(Exception):
    """One of ours."""


def broken(*args, **kwargs):
    raise Fault("of our own")


class Unreadable(Mapping):
    """What a caller may hand over as max_memory: its keys cannot be had."""

    def __getitem__(self, device):
        raise Fault(device)

    def __iter__(self):
        raise Fault("keys")

    def __len__(self):
        raise Fault("length")

    def __bool__(self):
        raise Fault("truth")


class Refused(ValueError):
    """The installed function's own error."""


@pytest.fixture(autouse=True)
def everything_on():
    before = features._on
    features.switch_on(frozenset(features.FEATURES))
    yield
    features.switch_on(before)


@pytest.fixture(params=["refusal is gone", "its code raises", "the rest is gone"])
def broken_explanation(request, monkeypatch):
    """The explaining code cannot be imported, or raises where it should not."""
    gone = {"refusal is gone": ["refusal"], "the rest is gone": ["whole_model", "overfilled"]}
    for name in gone.get(request.param, ()):
        monkeypatch.setitem(sys.modules, f"bnb_dispatch_fix.explain.{name}", None)
        monkeypatch.delattr(f"bnb_dispatch_fix.explain.{name}", raising=False)
    if request.param == "its code raises":
        from bnb_dispatch_fix.explain import overfilled, refusal, whole_model

        for module in (overfilled, refusal, whole_model):
            for name in ("explain", "explain_load", "warn_of_whole_model", "warn"):
                monkeypatch.setattr(module, name, broken, raising=False)


def load(installed, **arguments):
    """A `from_pretrained` under the wrapper; the planner said "cpu" for all of it."""

    def from_pretrained(*args, **kwargs):
        running = loads._loads.running[-1]
        running.planned = {"": "cpu"}
        running.later.append(("overfilled", "auto", "GPU 0"))
        return installed(*args, **kwargs)

    return loading.from_pretrained(from_pretrained, "model", **arguments)


def refuse(*args, **kwargs):
    raise Refused("Some modules are dispatched on the CPU")


@pytest.mark.parametrize("max_memory", [None, {}, {"cpu": 5}, Unreadable(), "20GiB", 7])
def test_the_installed_function_is_called_with_what_it_was_given(max_memory):
    given = {"device_map": "auto", "max_memory": max_memory}
    called = []
    found = load(lambda *args, **kwargs: called.append((args, kwargs)) or "loaded", **given)
    assert found == "loaded"
    [(args, kwargs)] = called
    assert args == ("model",)
    assert kwargs.keys() == given.keys()
    assert all(kwargs[name] is given[name] for name in given)


def test_a_loaded_model_is_returned(broken_explanation):
    assert load(lambda *args, **kwargs: "loaded", device_map="auto") == "loaded"


def test_a_line_that_cannot_be_logged_costs_no_model(monkeypatch, caplog):
    monkeypatch.setattr(loading, "log", broken)
    monkeypatch.setattr(states, "_told", set())  # each kind is a WARNING once
    assert load(lambda *args, **kwargs: "loaded", device_map="auto") == "loaded"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_error_is_the_installed_functions_own(broken_explanation):
    with pytest.raises(Refused, match="dispatched on the CPU"):
        load(refuse, device_map="auto")


def test_what_is_due_after_loading_is_said_then_and_only_then(caplog):
    with pytest.raises(Refused):
        load(refuse, device_map="auto")
    assert not [record for record in caplog.records if "puts more on a device" in record.message]
    assert load(lambda *args, **kwargs: "loaded", device_map="auto") == "loaded"
    lines = [record.message for record in caplog.records]
    assert [line.partition(", ")[0] for line in lines if "GPU 0" in line] == [
        "auto puts more on a device than its budget"
    ]


class Quantizer:
    """Quantizes with bitsandbytes, and cannot offload."""

    class quantization_config:  # an attribute
        llm_int8_enable_fp32_cpu_offload = False


class Unasked(Quantizer):
    @property
    def quantization_config(self):
        raise Fault("configuration")


def plan(installed, quantizer):
    """A planner under the wrapper; nothing of the request can be computed."""
    request = Request(
        model=None,
        strategy="auto",
        max_memory={0: 5, "cpu": 5},
        no_split=frozenset(),
        quantizer=quantizer,
        get_max_memory=broken,
        adjust=broken,
        sizer=broken,
    )
    return planners.around(lambda *call: request, installed, (), {})


MAPS = [{"": 0}, {"": "cpu"}, {"a": 0, "b": "cpu"}, {}]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
@pytest.mark.parametrize("quantizer", [None, Quantizer(), Unasked()], ids=["no", "bnb", "odd"])
def test_a_plan_is_returned(broken_explanation, device_map, quantizer):
    # Without the backport, which has an answer of its own, it is the very map.
    features.switch_on(frozenset({"rescue", "explain"}))
    assert plan(lambda: device_map, quantizer) is device_map


@pytest.mark.parametrize("quantizer", [None, Quantizer(), Unasked()], ids=["no", "bnb", "odd"])
def test_an_error_is_the_planners_own(broken_explanation, quantizer):
    with pytest.raises(Refused, match="dispatched on the CPU"):
        plan(refuse, quantizer)


def test_a_request_that_cannot_be_read_leaves_the_planner_alone():
    assert planners.around(broken, lambda: {"": 0}, (), {}) == {"": 0}


def test_what_is_beyond_the_budgets_with_the_backport_is_asked_for_without_it():
    """An exact search that fails is no placement: the answer is that without the shim."""
    answers = []

    def installed():
        answers.append({"": "cpu", "backport": "backport" in features.on()})
        return answers[-1]

    found = plan(installed, Quantizer())
    assert found == {"": "cpu", "backport": False}
    assert len(answers) == 2
