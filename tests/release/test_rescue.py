"""Rescue on the installed release: a placement wherever one exists, and no touch elsewhere."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="what refuses a device map is its quantizer")

import shapes
from accelerate.utils.modeling import check_device_map
from packaging.version import Version
from shapes import LISTED, SHARE, STRATEGIES, Shape

import bnb_dispatch_fix
from bnb_dispatch_fix.model import search

#: 4.30 counts embedding and head as 4-bit, later 4.x only the embedding.
COUNTS_THE_HEAD = Version("4.31.0") <= shapes.TRANSFORMERS
needs_refusal = pytest.mark.skipif(
    not COUNTS_THE_HEAD, reason="4.30 counts too little to refuse this"
)
#: accelerate 0.20 divides by the number of other devices, of which a lone one has none.
DIVIDES_BY_OTHERS = Version(importlib.metadata.version("accelerate")) < Version("0.21")
REFUSAL = "Some modules are dispatched on the CPU or the disk"


@pytest.fixture(autouse=True)
def active():
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


def budgets_of(case):
    """`max_memory` in bytes; it leaves what the case says, whatever the release keeps back."""
    scale = shapes.MIB * case["factor"] / SHARE
    return {
        device if device == "cpu" else int(device): int(size * scale) + 1
        for device, size in case["max_memory"].items()
    }


@pytest.mark.parametrize(("case", "strategy"), LISTED)
def test_a_case_loads_if_and_only_if_it_fits(case, strategy):
    shape, max_memory = shapes.from_mib(case["shape"]), budgets_of(case)
    assert sum(shape.sizes.values()) == pytest.approx(case["total"] * shapes.MIB, rel=0.005)
    outcome = shapes.plan(shape, strategy, max_memory)
    if case["fits_on_accelerators"]:
        shapes.assert_placed(shape, outcome, max_memory)
        check_device_map(shapes.build(shape), dict(outcome.device_map))
        return
    uncounted = 0 if COUNTS_THE_HEAD else 3 * (shape.embed + shape.head) // 4
    if sum(shape.sizes.values()) - uncounted > sum(shapes.usable(max_memory).values()):
        assert REFUSAL in " ".join(str(outcome.error).split())
    elif strategy == "balanced_low_0" and DIVIDES_BY_OTHERS and len(max_memory) == 2:
        assert isinstance(outcome.error, ZeroDivisionError)  # as without the shim
    else:  # what the release would have done stands: it thinks that the model fits
        assert outcome.loads_on_gpus


# Embedding 10, sixteen blocks of 5 and head 10, in bytes × 1000: 100 in all.
HUNDRED = Shape(10_000, (5_000,) * 16, 10_000)


def budget(*sizes, cpu=1_000_000):
    """`max_memory` of which the release leaves `sizes`."""
    return {**{device: int(size / SHARE) + 1 for device, size in enumerate(sizes)}, "cpu": cpu}


#: Room for ten blocks beside the embedding; the planners keep room for another one back there.
TIGHT = budget(60_000, 41_000)
ROOMY = budget(130_000, 130_000)


def both(plan):
    """The outcome without the shim and with it."""
    bnb_dispatch_fix.deactivate()
    without = plan()
    bnb_dispatch_fix.activate()
    return without, plan()


def on_cpu(outcome):
    return outcome.offloaded or REFUSAL in " ".join(str(outcome.error).split())


@needs_refusal
def test_what_the_installed_planner_refuses_is_placed():
    without, found = both(lambda: shapes.plan(HUNDRED, "sequential", TIGHT))
    assert on_cpu(without)
    shapes.assert_placed(HUNDRED, found, TIGHT)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_accepted_map_is_not_touched(strategy, caplog):
    """What the backport changes is not looked at here: it is off on both sides."""
    bnb_dispatch_fix.activate(["backport"])
    expected = shapes.plan(HUNDRED, strategy, ROOMY)
    bnb_dispatch_fix.activate()
    found = shapes.plan(HUNDRED, strategy, ROOMY)
    shapes.assert_placed(HUNDRED, expected, ROOMY)
    assert found == expected
    assert not warnings_of(caplog)


def warnings_of(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "bnb_dispatch_fix" and record.levelno >= logging.WARNING
    ]


@pytest.mark.skipif(not shapes.HAS_PLANNER, reason="from_pretrained asks the quantizer before")
def test_what_the_quantizer_refuses_for_another_reason_reaches_the_caller(monkeypatch):
    using = shapes.quantizer()

    def validate_environment(*args, **kwargs):
        raise ValueError("this quantizer needs another machine")

    monkeypatch.setattr(using, "validate_environment", validate_environment)
    found = shapes.call_planner(shapes.build(HUNDRED), "auto", ROOMY, using)
    assert str(found.error) == "this quantizer needs another machine"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.skipif(not shapes.HAS_PLANNER, reason="from_pretrained would have to load weights")
def test_a_model_without_quantizer_is_not_touched(strategy, caplog):
    model = shapes.build(HUNDRED, torch.nn.Linear)
    total = sum(p.numel() * 2 for p in model.parameters())
    max_memory = {0: int(total * 0.55), 1: int(total * 0.55), "cpu": 10 * total}
    bnb_dispatch_fix.activate(["backport"])
    expected = shapes.call_planner(model, strategy, max_memory, None)
    bnb_dispatch_fix.activate()
    assert shapes.call_planner(model, strategy, max_memory, None) == expected
    assert expected.error is None
    assert not warnings_of(caplog)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloading_that_the_caller_allowed_is_not_touched(strategy, caplog):
    max_memory = budget(60_000, 30_000)
    bnb_dispatch_fix.activate(["backport"])
    allowed = {"llm_int8_enable_fp32_cpu_offload": True}
    expected = shapes.plan(HUNDRED, strategy, max_memory, **allowed)
    bnb_dispatch_fix.activate()
    found = shapes.plan(HUNDRED, strategy, max_memory, **allowed)
    assert found.device_map == expected.device_map
    assert repr(without_note(found.error)) == repr(without_note(expected.error))
    assert on_cpu(expected)
    # Before 4.38 the release refuses such a map all the same, where it made it itself.
    assert (expected.error is None) == (Version("4.38.0") <= shapes.TRANSFORMERS)
    assert not warnings_of(caplog)


@needs_refusal
def test_rescue_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("BNB_DISPATCH_FIX", "backport,explain")
    bnb_dispatch_fix.activate()
    assert on_cpu(shapes.plan(HUNDRED, "sequential", TIGHT))
    monkeypatch.delenv("BNB_DISPATCH_FIX")
    bnb_dispatch_fix.activate()
    shapes.assert_placed(HUNDRED, shapes.plan(HUNDRED, "sequential", TIGHT), TIGHT)


@needs_refusal
def test_one_warning_line_says_why_where_and_how_to_switch_it_off(caplog):
    found = shapes.plan(HUNDRED, "sequential", TIGHT)
    (line,) = warnings_of(caplog)
    assert "\n" not in line
    assert "device_map='sequential'" in line
    assert "BNB_DISPATCH_FIX=backport,explain" in line
    for device, load in HUNDRED.loads(found.device_map).items():
        told = f"{device}: {load / 1024:.2f} KiB + "
        assert told in line
        scales, _, budget = line.partition(told)[2].partition(" scales of ")
        assert scales.endswith(" KiB") and float(scales[:-4]) > 1
        assert budget.startswith(f"{TIGHT[device] / 1024:.2f} KiB")


#: The embedding fits on GPU 0 only, where planners keep room for the head: all goes to the CPU,
#: which newer releases accept. 4.x counts a quarter of the embedding and goes on.
LARGE_ENDS = Shape(40_000, (1_000, 1_000), 30_000)
LARGE_THEN_SMALL = budget(45_000, 35_000)
counts_true_sizes = pytest.mark.skipif(
    shapes.TRANSFORMERS.major < 5, reason="4.x counts a quarter of the embedding"
)


@counts_true_sizes
def test_a_map_that_is_all_cpu_is_mended_where_there_are_accelerators():
    without, found = both(lambda: shapes.plan(LARGE_ENDS, "sequential", LARGE_THEN_SMALL))
    assert set(without.device_map.values()) == {"cpu"}
    shapes.assert_placed(LARGE_ENDS, found, LARGE_THEN_SMALL)


@counts_true_sizes
def test_a_map_that_is_all_cpu_is_right_where_there_are_none(monkeypatch):
    monkeypatch.setattr(search, "accelerators_seen", lambda: 0)
    without, found = both(lambda: shapes.plan(LARGE_ENDS, "sequential", LARGE_THEN_SMALL))
    assert set(without.device_map.values()) == {"cpu"}
    assert found == without


# Valid arguments on which planners raise: gaps in the ids, ids not from 0, a class without an
# instance (5.14-5.24 take the maximum of nothing).


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "devices", [(0, 3), (1, 2), (2, 5, 9), (7, 1)], ids=lambda d: "-".join(map(str, d))
)
def test_any_device_ids(devices, strategy):
    max_memory = {**dict.fromkeys(devices, int(70_000 / SHARE)), "cpu": 1_000_000}
    shapes.assert_placed(HUNDRED, shapes.plan(HUNDRED, strategy, max_memory), max_memory)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_no_split_class_without_an_instance(strategy, monkeypatch):
    monkeypatch.setattr(shapes.ShapeModel, "_no_split_modules", ["Block", "Absent"])
    shapes.assert_placed(HUNDRED, shapes.plan(HUNDRED, strategy, TIGHT), TIGHT)


def test_low_zero_fills_the_first_device_last():
    """80 of 100 fit on the other two devices; where no tenth is kept back for the scales, 70."""
    max_memory = budget(60_000, 46_000, 46_000)
    found = shapes.plan(HUNDRED, "balanced_low_0", max_memory)
    shapes.assert_placed(HUNDRED, found, max_memory)
    assert HUNDRED.loads(found.device_map)[0] == (10_000 if SHARE == 0.9 else 20_000)


@pytest.mark.parametrize(
    "max_memory",
    [{0: "1 potato", "cpu": "1GiB"}, {"gpu": "1GiB"}, {0: "1GiB", "cuda:1": "1GiB"}],
    ids=str,
)
def test_bad_budgets_raise_what_the_release_raises(max_memory):
    without, found = both(lambda: shapes.plan(HUNDRED, "auto", max_memory))
    assert without.error is not None or without.device_map == found.device_map  # until 0.21
    assert repr(without_note(found.error)) == repr(without.error)


def without_note(error):
    """As the release has raised it: before Python 3.11 the shim's note ends its text."""
    if error is not None and not hasattr(error, "add_note"):
        return type(error)(*(str(text).partition("\nbnb-dispatch-fix: ")[0] for text in error.args))
    return error
