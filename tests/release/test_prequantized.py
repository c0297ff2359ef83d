"""Checkpoints that GPTQ or AWQ has quantized: budgets are corrected, and AWQ's refusal is rescued.

These take a long calibration to make, so that users load what others have quantized: the config
says how, `from_pretrained` swaps the layers in, then plans. All of that is real here.
"""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes", reason="simulated GPUs need it, before one is pretended")

import planned
import shapes
from safetensors.torch import save_file
from shapes import MIB

import bnb_dispatch_fix
from bnb_dispatch_fix.model.sizers import sizer_for
from bnb_dispatch_fix.model.units import measure
from bnb_dispatch_fix.planning.simulation import outcome_of

if not shapes.HAS_PLANNER:
    pytest.skip("before 4.50 planning is a part of loading", allow_module_level=True)

IS_5 = shapes.TRANSFORMERS.major >= 5
#: Method → its config in a checkpoint, and the modules that swap the layers in, by generation.
METHODS = {
    "gptq": (
        {"bits": 4, "group_size": 64, "desc_act": False, "sym": True},
        {4: ["auto_gptq", "optimum.gptq"], 5: ["gptqmodel", "optimum.gptq"]},
    ),
    "awq": (
        {"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        {4: ["awq.modules.linear"], 5: ["gptqmodel"]},
    ),
}
#: What refuses a map with modules on the CPU; the others go on to load.
REFUSES = {"gptq": False, "awq": not IS_5}
EIGHT_GPUS = {**dict.fromkeys(range(8), int(2.4 * MIB)), "cpu": 1024 * MIB}


@pytest.fixture(params=METHODS)
def method(request):
    for module in METHODS[request.param][1][shapes.TRANSFORMERS.major]:
        pytest.importorskip(module, reason=f"{request.param} needs it")
    return request.param


@pytest.fixture
def load(method, tmp_path, monkeypatch):
    """`load(max_memory, strategy)`: the outcome for embedding and head of 2 MiB, eight layers."""
    importlib.import_module("transformers.quantizers.auto")  # before CUDA is pretended
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        quantization_config={"quant_method": method, **METHODS[method][0]},
    ).save_pretrained(tmp_path)
    norm = {"model.norm.weight": torch.zeros(128, dtype=torch.float16)}
    save_file(norm, tmp_path / "model.safetensors", {"format": "pt"})

    def call(max_memory, strategy="auto"):
        return outcome_of(
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path,
                device_map=strategy,
                max_memory=dict(max_memory),
                torch_dtype=torch.float16,
            )
        )

    yield call
    bnb_dispatch_fix.deactivate()


def counted(load):
    """Bytes by name, as the installed release counts the layers that were swapped in."""
    found = []

    def look(model, arguments):
        if IS_5:
            from transformers.integrations.accelerate import compute_module_sizes

            found.append(compute_module_sizes(model, arguments["hf_quantizer"])[0])
        else:
            from accelerate.utils.modeling import compute_module_sizes

            how = {key: arguments[key] for key in ("dtype", "special_dtypes")}
            found.append(compute_module_sizes(model, **how))

    with planned.watched(look):
        load({0: 1024 * MIB, "cpu": 1024 * MIB}, "sequential")
    return found[0]


def test_layers_are_swapped_in_before_planning(load):
    """Half a byte an element and its scales: the model here is not as it was before."""
    layer = counted(load)["model.layers.0"]
    elements = 4 * 128 * 128 + 3 * 128 * 256
    assert elements / 2 < layer < elements


def test_units_are_as_large_and_as_packed(load):
    """In all what the release counts; only embedding, head and norms are not quantized."""
    found, units = [], []

    def look(model, arguments):
        sizer = sizer_for(model, found[-1], torch.float16)
        units.append(measure(model, no_split_module_classes=["LlamaDecoderLayer"], sizer=sizer))

    with planned.quantizers(found), planned.watched(look):
        load({0: 1024 * MIB, "cpu": 1024 * MIB}, "sequential")
    [measured] = units
    assert measured.total == counted(load)[""]
    plain = {name: facts.unquantized for name, facts in measured.facts.items()}
    assert plain.pop("model.embed_tokens") == plain.pop("lm_head") == 8192 * 128 * 2
    assert sum(plain.values()) < 8 * 128 * 128  # the norms, and what rotates positions


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0"])
def test_nothing_leaves_the_gpus_where_all_fits(load, method, missing_fixes, strategy):
    bnb_dispatch_fix.deactivate()
    without = load(EIGHT_GPUS, strategy)
    assert without.loads_on_gpus == (47211 not in missing_fixes), without
    assert (without.error is not None) == (REFUSES[method] and not without.loads_on_gpus)
    bnb_dispatch_fix.activate()
    assert load(EIGHT_GPUS, strategy).loads_on_gpus


def test_rescue_steps_in_where_the_method_refuses(load, method):
    """Room for half of the layers on each side, which no planner dares to use."""
    sizes = counted(load)
    layer = sizes["model.layers.0"]
    front = sizes["model.embed_tokens"] + 4 * layer
    budgets = {0: front, 1: sizes[""] - front + layer // 2, "cpu": 1024 * MIB}
    bnb_dispatch_fix.activate(["backport"])
    expected = load(budgets, "sequential")
    bnb_dispatch_fix.activate()
    found = load(budgets, "sequential")
    if not REFUSES[method]:
        assert expected.offloaded
        assert found == expected
        return
    assert "CPU or disk" in str(expected.error)
    assert found.error is None, found.error
    loads = {0: 0, 1: 0}
    for name in ["model.embed_tokens", "model.norm", "lm_head"]:
        loads[found.device_map[name]] += sizes[name]
    for index in range(8):
        loads[shapes.device_of(f"model.layers.{index}", found.device_map)] += layer
    assert all(load <= budgets[gpu] for gpu, load in loads.items()), loads
