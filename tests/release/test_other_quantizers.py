"""Quantizers beside bitsandbytes: budgets are corrected for all, rescue only where one refuses."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes", reason="simulated GPUs need it, before one is pretended")

import shapes

if not shapes.HAS_PLANNER:
    pytest.skip("before 4.50 planning is a part of loading", allow_module_level=True)

import bnb_dispatch_fix

importlib.import_module("transformers.quantizers.auto")  # before CUDA is pretended

SHAPE = shapes.Shape(10_000, (5_000,) * 16, 10_000)  # its blocks stay 16-bit: 20,000 each
IS_5 = shapes.TRANSFORMERS.major >= 5


def hqq():
    pytest.importorskip("hqq", reason="HQQ needs it")
    return transformers.HqqConfig(nbits=4)


def quanto():
    pytest.importorskip("optimum.quanto", reason="quanto needs it")
    return transformers.QuantoConfig(weights="int8")


def torchao():
    pytest.importorskip("torchao", reason="torchao needs it")
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def fp8():
    return transformers.FineGrainedFP8Config()


#: Configuration → whether the installed release refuses a map with modules on the CPU.
REFUSES = {hqq: IS_5, quanto: IS_5, torchao: False, fp8: True}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A GPU that can do all this; `simulated_gpus` has none of a certain kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    yield
    bnb_dispatch_fix.deactivate()


def sizes(model, using):
    """Bytes by name, as the installed release counts them for this quantizer."""
    if IS_5:
        from transformers.integrations.accelerate import compute_module_sizes

        return compute_module_sizes(model, using)[0]
    from accelerate.utils.modeling import compute_module_sizes

    special = using.get_special_dtypes_update(model, torch.float16)
    target = using.adjust_target_dtype(torch.float16)
    return compute_module_sizes(model, dtype=target, special_dtypes=special)


def plan(make, strategy="sequential"):
    """The outcome on two GPUs that hold it all, if nothing is kept back; bytes; what is usable."""
    model = shapes.build(SHAPE, torch.nn.Linear)
    using = shapes.quantizer(make(), pre_quantized=False)
    counted = sizes(model, using)
    share = float(using.adjust_max_memory({0: 1.0})[0])
    block, half = counted["layers.0"], counted["embed"] + 8 * counted["layers.0"]
    usable = {0: half, 1: counted[""] - half + block // 2}
    budgets = {gpu: int(size / share) + 1 for gpu, size in usable.items()}
    outcome = shapes.call_planner(model, strategy, {**budgets, "cpu": 10**9}, using)
    return outcome, counted, budgets, share


@pytest.mark.parametrize("make", REFUSES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_rescue_steps_in_where_the_quantizer_refuses(make, strategy):
    bnb_dispatch_fix.activate(["backport"])
    expected = plan(make, strategy)[0]
    bnb_dispatch_fix.activate()
    found, counted, budgets, share = plan(make, strategy)
    if not REFUSES[make]:
        assert "cpu" in expected.device_map.values()
        assert found == expected
        return
    assert "device_map" in str(expected.error)
    assert found.error is None, found.error
    loads = {}
    for name in SHAPE.sizes:
        device = shapes.device_of(name, found.device_map)
        loads[device] = loads.get(device, 0) + counted[name]
    assert loads.keys() <= {0, 1}
    assert all(load <= budgets[gpu] * share for gpu, load in loads.items()), loads


@pytest.mark.parametrize("make", REFUSES, ids=lambda make: make.__name__)
def test_budgets_are_corrected_for_every_quantizer(make):
    """Eight GPUs, each with room for either leaf: without #47211 all but the last stay empty."""
    shape = shapes.Shape(400_000, (1_000,) * 8, 400_000)
    model = shapes.build(shape, torch.nn.Linear)
    using = shapes.quantizer(make(), pre_quantized=False)
    counted = sizes(model, using)
    share = float(using.adjust_max_memory({0: 1.0})[0])
    budget = int(max(counted["embed"], counted["head"]) * 1.3 / share)
    bnb_dispatch_fix.activate(["backport"])
    outcome = shapes.call_planner(
        model, "auto", {**dict.fromkeys(range(8), budget), "cpu": 10**9}, using
    )
    assert outcome.error is None, outcome.error
    assert not outcome.offloaded, outcome.device_map
