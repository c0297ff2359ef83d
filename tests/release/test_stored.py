"""Checkpoints that are stored quantized: planned without libraries, in the sizes they have."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch", reason="plans real models: needs torch")
pytest.importorskip("bitsandbytes", reason="simulated GPUs need it, before one is pretended")

import planned
import transformers
from cell import TRANSFORMERS
from meta import on_meta
from packaging.version import Version
from plan_jobs import MIB, as_before, job

from bnb_dispatch_fix.planning import formats
from bnb_dispatch_fix.planning.packed import put_in
from bnb_dispatch_fix.planning.records import PlanError
from bnb_dispatch_fix.planning.rehearsal import carry_out
from bnb_dispatch_fix.planning.stored import stored_as

__all__ = ["as_before"]

GIB = 2**30
IS_5 = TRANSFORMERS.major >= 5
WIDTH = {"int32": 4, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "float8_e4m3fn": 1}

LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
HAS_GROUPS = hasattr(transformers.LlamaConfig(), "num_key_value_heads")
#: Rows and columns of the layers of a block of it.
LAYERS = [(4096, 4096), (4096, 4096), (1024, 4096), (1024, 4096),
          (14336, 4096), (14336, 4096), (4096, 14336)]  # fmt: skip
TABLE = 128256 * 4096 * 2
NORMS = 65 * 4096 * 2


def stored_job(config, quantization, budget=80 * GIB):
    """A job about a configuration with a quantization of its own."""
    return {
        "config": {**config, "quantization_config": quantization},
        "strategy": "auto",
        "dtype": "bfloat16",
        "quantization": None,
        "max_memory": [[0, budget], [1, budget], ["cpu", 2**42]],
    }


def each(rows_and_columns):
    return sum(map(rows_and_columns, *zip(*LAYERS)))


#: Bytes of the layers of a block, by hand.
BY_HAND = [
    (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        each(lambda out, inside: out * inside + out // 128 * (inside // 128) * 4),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        each(lambda out, inside: out * inside // 2 + out * inside // 128 * 5 // 2 + inside * 4),
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        each(lambda out, inside: out * inside // 2 + out * inside // 128 * 5 // 2),
    ),
    (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {
            "nbits": 4, "group_size": 64, "axis": 1}}, "skip_modules": ["lm_head"]},
        each(lambda out, inside: out * inside // 2 + out * inside // 64 * 4),
    ),
    (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}}},
        each(lambda out, inside: out * inside + out * 2),
    ),
    (
        {"quant_method": "torchao", "quant_type": {"default": {
            "_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}}},
        each(lambda out, inside: out * inside // 2 + out * inside // 128 * 4),
    ),
]  # fmt: skip
METHODS = [settings["quant_method"] for settings, _ in BY_HAND]


@pytest.mark.parametrize("settings, block", BY_HAND, ids=METHODS)
def test_sizes_of_llama_3_8b_are_those_worked_out_by_hand(settings, block):
    if not HAS_GROUPS:
        pytest.skip("4.30 knows no groups of heads")
    answer = carry_out(stored_job(LLAMA_3_8B, settings))
    assert answer["quantized"] == 32 * block
    rotary = answer["total"] - 32 * block - 2 * TABLE - NORMS
    assert 0 <= rotary <= 32 * (8192 * 128 * 2 * 4 + 64 * 4)  # tables in each block before 4.45
    assert answer["precision"].startswith(f"{settings['quant_method']} as stored")
    assert answer["fits"]


@pytest.mark.parametrize("settings, block", BY_HAND, ids=METHODS)
def test_usable_budgets_are_those_of_its_quantizer(settings, block):
    answer = carry_out(stored_job(LLAMA_3_8B, settings, 10 * GIB))
    usable = answer["runs"][0]["devices"][0][2]
    told = Version("4.50.0") <= TRANSFORMERS  # to the planner, that there is a quantizer
    share = 0.9 if settings["quant_method"] == "torchao" and told else 1
    assert usable == int(10 * GIB * share)


REFUSES = {"hqq"} if IS_5 else {"hqq", "awq"}


@pytest.mark.parametrize("settings, block", BY_HAND, ids=METHODS)
def test_what_its_quantizer_refuses_is_refused(settings, block):
    if Version("4.50.0") > TRANSFORMERS:
        pytest.skip("before 4.50 planning is a part of loading")
    answer = carry_out(stored_job(LLAMA_3_8B, settings, GIB))
    assert not answer["fits"]
    outcomes = {run["outcome"] for run in answer["runs"]}
    assert outcomes == ({"refused"} if settings["quant_method"] in REFUSES else {"offloads"})


OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
        *("model.embed_tokens", "lm_head"),
    ],
}


def needs_gpt_oss():
    if not hasattr(transformers, "GptOssForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no gpt-oss")


def test_gpt_oss_20b_is_as_large_as_its_files_and_beside_it_what_it_takes_dequantized():
    needs_gpt_oss()
    answer = carry_out(stored_job(OSS, MXFP4, 24 * GIB))
    # total_size in the checkpoint's model.safetensors.index.json (openai/gpt-oss-20b), and the
    # frequencies of its rotary embedding, which are not in a file: 32 in fp32.
    assert answer["total"] == pytest.approx(13_761_264_768, abs=1024)
    stored, plain = answer["precisions"]
    assert (stored["name"], stored["devices"]) == ("stored", [0])
    # Its 20,914,757,184 parameters in 16 bits (model card: 21B).
    assert plain["total"] == pytest.approx(2 * 20_914_757_184, abs=1024)
    [note] = [note for note in answer["notes"] if note.startswith("loading needs")]
    assert "triton 3.4 or newer" in note
    assert "kernels" in note
    assert "compute capability 7.5 or newer" in note
    assert note.endswith(f"; without, transformers {transformers.__version__} loads it dequantized")


def as_the_release_has_it(config, settings, monkeypatch):
    """A model on the meta device with the layers that the release itself puts in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    if settings["quant_method"] == "fp8" and importlib.util.find_spec("triton") is None:
        for name in ("triton", "triton.language"):  # 4.x imports it with its layers
            monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=None))
    auto = importlib.import_module("transformers.quantizers.auto")
    own = auto.AutoQuantizationConfig.from_dict(dict(settings))
    quantizer = auto.AutoHfQuantizer.from_config(own, pre_quantized=True)
    model = plain_model(config)
    quantizer.preprocess_model(model=model, device_map={"": 0}, keep_in_fp32_modules=[])
    return model


def plain_model(config):
    settings = dict(config)
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with on_meta():
        return transformers.AutoModelForCausalLM.from_config(made, torch_dtype=torch.bfloat16)


def sizes(model):
    """Bytes by block, layer by layer."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        home = ".".join(name.split(".")[:5])
        found[home] = found.get(home, 0) + tensor.numel() * tensor.element_size()
    return found


SMALL = {**planned.LLAMA_LIKE, "hidden_size": 192, "tie_word_embeddings": False}
FAMILIES = {
    "llama": {"model_type": "llama", **SMALL},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SMALL,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 160,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **SMALL,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 160,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skips", [None, ["lm_head", "model.layers.1.self_attn"]])
def test_fp8_layers_are_those_of_the_release(family, skips, monkeypatch):
    if Version("4.52.0") > TRANSFORMERS:
        pytest.skip("the release has no such layers, or no such models")
    settings = {**FP8, "modules_to_not_convert": skips}
    real = as_the_release_has_it(FAMILIES[family], settings, monkeypatch)
    model = plain_model(FAMILIES[family])
    put_in(model, stored_as(settings))
    assert sizes(model) == sizes(real)


def test_mxfp4_experts_are_those_of_the_release():
    needs_gpt_oss()
    small = {**OSS, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "num_local_experts": 3, "layer_types": ["full_attention"] * 2}  # fmt: skip
    mxfp4 = importlib.import_module("transformers.integrations.mxfp4")
    model = plain_model(small)
    put_in(model, stored_as(MXFP4))
    with on_meta():
        real = mxfp4.Mxfp4GptOssExperts(model.config)
    mine = model.model.layers[0].mlp.experts
    bias = {name for name, _ in mine.named_parameters()}
    assert bias == {"gate_up_proj_bias", "down_proj_bias"}
    packed = sum(tensor.numel() for tensor in mine.buffers())
    assert packed == sum(
        tensor.numel()
        for name, tensor in real.named_parameters()
        if name not in bias and tensor.dtype == torch.uint8
    ) + (0 if hasattr(real, "gate_up_proj_scales") else scales_of(small))


def scales_of(config):
    """transformers 5 has no place for the scales before they are loaded."""
    hidden, inside = config["hidden_size"], config["intermediate_size"]
    return config["num_local_experts"] * (2 * inside * (hidden // 32) + hidden * (inside // 32))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_compressed_tensors_are_counted_as_its_library_has_them(strategy, monkeypatch):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors makes the layers")
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    how = {
        **BY_HAND[METHODS.index("compressed-tensors")][0],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "quantization_status": "compressed",
    }
    real = as_the_release_has_it(FAMILIES["llama"], how, monkeypatch)
    model = plain_model(FAMILIES["llama"])
    put_in(model, stored_as(how))
    assert sizes(model) == sizes(real)


@pytest.mark.parametrize("settings, block", BY_HAND, ids=METHODS)
def test_no_library_is_imported(settings, block):
    """Those that only loading needs; what torch and transformers import themselves is there."""
    carry_out({**job("llama", 40 * MIB), "config": {
        **FAMILIES["llama"], "quantization_config": settings}})  # fmt: skip
    for library in ("gptqmodel", "auto_gptq", "awq", "optimum.gptq"):
        assert library not in sys.modules


def test_experts_count_as_the_linear_layers_of_the_checkpoint():
    if Version("4.51.0") > TRANSFORMERS:
        pytest.skip("the release has no Qwen3")
    settings = BY_HAND[METHODS.index("gptq")][0]
    settings = {**settings, "group_size": 32, "modules_to_not_convert": ["mlp.gate"]}
    config = FAMILIES["qwen3_moe"]
    answer = carry_out({**job("llama", 40 * MIB), "config": {
        **config, "quantization_config": settings}})  # fmt: skip
    told = [note for note in answer["notes"] if "experts as one tensor per layer" in note]
    assert len(told) == (1 if IS_5 else 0)
    hidden, inside = config["hidden_size"], config["moe_intermediate_size"]
    how = {"bits": 4, "group_size": 32}
    expert = sum(
        math.prod(shape) * WIDTH[dtype]
        for rows, columns in ((inside, hidden), (inside, hidden), (hidden, inside))
        for shape, dtype in formats.gptq(how, formats.Weight(rows, columns, 0, "float16")).values()
    )
    attention = sum(
        math.prod(shape) * WIDTH[dtype]
        for rows, columns in ((128, hidden), (64, hidden), (64, hidden), (hidden, 128))
        for shape, dtype in formats.gptq(how, formats.Weight(rows, columns, 0, "float16")).values()
    )
    # Gate and up are one tensor in 5.x, with one index instead of two.
    index = 4 * hidden * config["num_experts"] * planned.LAYERS if IS_5 else 0
    experts = expert * config["num_experts"] * planned.LAYERS
    assert answer["quantized"] == experts + attention * planned.LAYERS - index


def test_what_is_not_known_is_one_line():
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": "NextConfig"}}}
    with pytest.raises(PlanError, match=r"sizes of torchao \(NextConfig\) are not known here"):
        carry_out(stored_job(LLAMA_3_8B, settings))


def test_a_folder_is_planned_as_its_configuration_says(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**FAMILIES["llama"], "quantization_config": FP8}), encoding="utf-8"
    )
    path = {**job("llama", 40 * MIB), "path": str(tmp_path)}
    del path["config"]
    config = {**FAMILIES["llama"], "quantization_config": FP8}
    assert (
        carry_out(path)["total"] == carry_out({**job("llama", 40 * MIB), "config": config})["total"]
    )
