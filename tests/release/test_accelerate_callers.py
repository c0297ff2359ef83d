"""accelerate's own callers, which no release has fixed: without and with the shim."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("accelerate.utils.bnb", reason="accelerate 0.21 and newer")
pytest.importorskip("bitsandbytes", reason="load_and_quantize_model asks for it")

import accelerate
import accelerate.big_modeling
import accelerate.utils.bnb
import kinds
import models
import shapes
from accelerate.utils import BnbQuantizationConfig
from shapes import LISTED, MIB, STRATEGIES, Shape

import bnb_dispatch_fix
from bnb_dispatch_fix.patching.patches import PatchedFunction
from bnb_dispatch_fix.planning.simulation import simulated_gpus

REFUSAL = "Some modules are dispatched on the CPU or the disk"
#: "tiny" of models.py takes 2.6 MiB, in 4-bit 2.2; embedding and head are 1 MiB each.
EIGHT_GPUS = {**dict.fromkeys(range(8), int(1.4 * MIB)), "cpu": 1024 * MIB}
EIGHT_SMALLER_GPUS = {**dict.fromkeys(range(8), int(1.2 * MIB)), "cpu": 1024 * MIB}
TWO_SMALLER_GPUS = {**dict.fromkeys(range(2), int(1.2 * MIB)), "cpu": 1024 * MIB}


@pytest.fixture(autouse=True)
def off():
    bnb_dispatch_fix.deactivate()
    yield
    bnb_dispatch_fix.deactivate()


@pytest.fixture
def planned(monkeypatch):
    """`planned(call)`: the device map that accelerate would load to, or the error it raises."""
    seen = []

    class Planned(BaseException):
        pass

    def load_checkpoint_in_model(model, checkpoint, device_map=None, **_):
        seen.append(device_map)
        raise Planned

    for module in (accelerate.big_modeling, accelerate.utils.bnb):
        monkeypatch.setattr(module, "load_checkpoint_in_model", load_checkpoint_in_model)

    def call(load, **changes):
        with simulated_gpus():
            try:
                load(**changes)
            except Planned:
                return seen.pop()
            except Exception as error:  # noqa: BLE001  # any error is the outcome
                return error
        raise AssertionError("nothing was planned")

    return call


def load_and_dispatch(max_memory=EIGHT_GPUS, strategy="auto"):
    accelerate.load_checkpoint_and_dispatch(
        models.build("tiny"),
        "no weights",
        device_map=strategy,
        max_memory=dict(max_memory),
        no_split_module_classes=[models.BLOCK],
    )


def load_and_quantize(max_memory, strategy):
    accelerate.utils.load_and_quantize_model(
        models.build("tiny"),
        BnbQuantizationConfig(load_in_4bit=True, torch_dtype=torch.float16, skip_modules=["head"]),
        weights_location="no weights",
        device_map=strategy,
        max_memory=dict(max_memory),
        no_split_module_classes=[models.BLOCK],
    )


def on_host(answer):
    return isinstance(answer, dict) and bool({"cpu", "disk"} & {str(d) for d in answer.values()})


def refused(answer):
    return isinstance(answer, ValueError) and REFUSAL in " ".join(str(answer).split())


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0"])
def test_load_checkpoint_and_dispatch_spills_without_the_shim_only(planned, strategy):
    assert on_host(planned(load_and_dispatch, strategy=strategy))
    bnb_dispatch_fix.activate()
    assert set(planned(load_and_dispatch, strategy=strategy).values()) <= set(range(8))


TOWERS = kinds.Kind(lambda: kinds.towers(4, kinds.Plain), {0: 5, 1: 5}, ties=kinds.pairs(4))


@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_load_checkpoint_and_dispatch_is_rescued_where_the_planner_stumbles(planned, strategy):
    model = kinds.build(TOWERS, declare=False)

    def load():
        accelerate.load_checkpoint_and_dispatch(
            model, "no weights", device_map=strategy, max_memory={0: 5000, 1: 5000, "cpu": 10**6}
        )

    assert isinstance(planned(load), IndexError)
    bnb_dispatch_fix.activate()
    device_map = planned(load)
    assert isinstance(device_map, dict), device_map
    kinds.checked(TOWERS, model, device_map)


@pytest.mark.parametrize(
    ("max_memory", "strategy"),
    [(EIGHT_SMALLER_GPUS, s) for s in STRATEGIES if s != "sequential"]
    + [(TWO_SMALLER_GPUS, s) for s in STRATEGIES],
)
def test_load_and_quantize_model_refuses_without_the_shim_only(planned, max_memory, strategy):
    asked = {"max_memory": max_memory, "strategy": strategy}
    assert refused(planned(load_and_quantize, **asked))
    bnb_dispatch_fix.activate()
    device_map = planned(load_and_quantize, **asked)
    assert isinstance(device_map, dict), device_map
    assert not on_host(device_map)


@pytest.mark.parametrize(("case", "strategy"), LISTED)
def test_a_case_loads_if_and_only_if_it_fits(case, strategy):
    """The cases of transformers, through accelerate's planner, which keeps nothing back."""
    shape = shapes.from_mib(case["shape"])
    max_memory = {
        gpu if gpu == "cpu" else int(gpu): int(size * case["factor"] * MIB)
        for gpu, size in case["max_memory"].items()
    }
    bnb_dispatch_fix.activate()
    answer = plan_quantized(shape, strategy, max_memory)
    if case["fits_on_accelerators"]:
        assert isinstance(answer, dict), answer
        for device, load in shape.loads(answer).items():
            assert load <= max_memory[device], (device, load, answer)
    else:
        assert refused(answer), answer


def plan_quantized(shape, strategy, max_memory, **config):
    model = shapes.build(shape)
    if shape.tied:
        model.head.weight = model.embed.weight
    asked = BnbQuantizationConfig(
        **{"load_in_4bit": True, "torch_dtype": torch.float16, **config},
        skip_modules=["head"],
        keep_in_fp32_modules=[],
    )
    with simulated_gpus():
        try:
            return accelerate.utils.bnb.get_quantized_model_device_map(
                model, asked, strategy, dict(max_memory), ["Block"]
            )
        except (ValueError, KeyError) as error:
            return error


def test_eight_bit_models_may_be_offloaded():
    """accelerate accepts that, so that nothing is changed."""
    shape = Shape(10_000, (5_000,) * 16, 10_000)
    max_memory = {0: 40_000, 1: 40_000, "cpu": 10**9}
    options = {"load_in_4bit": False, "load_in_8bit": True}
    bnb_dispatch_fix.activate(["backport"])
    expected = plan_quantized(shape, "auto", max_memory, **options)
    assert on_host(expected)
    bnb_dispatch_fix.activate()
    assert plan_quantized(shape, "auto", max_memory, **options) == expected


def test_every_name_that_holds_the_function_is_patched():
    names = [
        name
        for _, name, _ in pkgutil.walk_packages(accelerate.__path__, "accelerate.")
        if not name.startswith(("accelerate.commands", "accelerate.test_utils"))
        and name != "accelerate.memory_utils"  # warns that it has moved
    ]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112  # it needs a package that is not here; so do its callers
            continue
    bnb_dispatch_fix.activate()
    holders = {
        name: vars(module)["get_balanced_memory"]
        for name, module in list(sys.modules.items())
        if name.startswith("accelerate.") and "get_balanced_memory" in vars(module)
    }
    callers = {"accelerate.utils.modeling", "accelerate.big_modeling", "accelerate.utils.bnb"}
    assert callers < set(holders)
    assert {type(function) for function in holders.values()} == {PatchedFunction}, holders


def test_pipeline_stages_are_planned_without_balanced_budgets():
    """`prepare_pippy` never asks for them: the faults are not there, and nothing changes."""
    inference = pytest.importorskip("accelerate.inference", reason="accelerate 0.27 and newer")
    model = models.build("tiny")

    def stages():
        with simulated_gpus():
            return inference.generate_device_map(model, 2, [models.BLOCK])

    expected = stages()
    bnb_dispatch_fix.activate()
    assert stages() == expected
    assert set(expected.values()) == {0, 1}
