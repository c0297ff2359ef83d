"""What configurations of quantized checkpoints say: which layers, and which tensors."""

from __future__ import annotations

import math

import pytest

from bnb_dispatch_fix.planning import formats
from bnb_dispatch_fix.planning.formats import Weight
from bnb_dispatch_fix.planning.records import PlanError
from bnb_dispatch_fix.planning.stored import Layer, Names, stored_as

WEIGHT = Weight(4096, 14336, 0, "bfloat16")
EXPERTS = Weight(5760, 2880, 32, "bfloat16")
WIDTH = {
    "int32": 4, "float32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1,
}  # fmt: skip


def layer(name="model.layers.3.mlp.down_proj", kind="Linear", in_block=True, weight=WEIGHT):
    return Layer(name, kind, in_block, weight)


def size(tensors):
    return sum(math.prod(shape) * WIDTH[dtype] for shape, dtype in tensors.values())


#: What each takes of 4096 rows of 14336, by hand.
BY_HAND = [
    # Half a byte an element; a half byte and two bytes for each row and group of 128; an index.
    ({"quant_method": "gptq", "bits": 4, "group_size": 128},
     4096 * 14336 // 2 + 4096 * 112 * 5 // 2 + 14336 * 4),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1},
     4096 * 14336 + 4096 * 3 + 14336 * 4),
    ({"quant_method": "awq", "bits": 4, "group_size": 128},
     4096 * 14336 // 2 + 4096 * 112 * 5 // 2),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 4096 * 14336 + 32 * 112 * 4),
    ({"quant_method": "fp8"}, 4096 * 14336 + 32 * 112 * 4),
    ({"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
     4096 * 14336 + 8),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4,
      "group_size": 64, "axis": 1}}}, 4096 * 14336 // 2 + 4096 * 224 * 4),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {
      "targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128,
                                         "symmetric": True}}}},
     4096 * 14336 // 2 + 4096 * 112 * 2 + 16),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig",
      "_data": {"group_size": 128}}}}, 4096 * 14336 // 2 + 4096 * 112 * 4),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, 4096 * 14336 + 4096 * 5),
]  # fmt: skip


@pytest.mark.parametrize("settings, by_hand", BY_HAND)
def test_a_layer_takes_what_was_worked_out_by_hand(settings, by_hand):
    assert size(stored_as(settings).tensors(layer())) == by_hand


def test_mxfp4_is_for_experts_only():
    stored = stored_as({"quant_method": "mxfp4"})
    assert stored.tensors(layer()) is None
    tensors = stored.tensors(layer("model.layers.0.mlp.experts.gate_up_proj", weight=EXPERTS))
    assert size(tensors) == 5760 * 2880 // 2 + 5760 * 2880 // 32  # of one expert


@pytest.mark.parametrize("method", ["bitsandbytes", "quanto", None])
def test_other_methods_are_left_to_the_release(method):
    assert stored_as({"quant_method": method}) is None
    assert stored_as(None) is None


class Enumerated:
    value = "fp8"


def test_a_configuration_may_be_an_object():
    class Config:
        def to_dict(self):
            return {"quant_method": Enumerated()}

    assert stored_as(Config()).method == "fp8"


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"quant_method": "hqq", "quant_config": {"nbits": 5}}, "hqq of 5 bits"),
        ({"quant_method": "torchao", "quant_type": "autoquant"}, "autoquant"),
        ({"quant_method": "torchao"}, "an unnamed configuration"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "marlin-24",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
            },
            "format marlin-24",
        ),
    ],
)
def test_what_is_not_known_is_said(settings, said):
    with pytest.raises(formats.Unknown, match=said):
        stored_as(settings).tensors(layer())


@pytest.mark.parametrize(
    "settings",
    [{"bits": "four"}, {"bits": None}, {"modules_in_block_to_quantize": 3}],
)
def test_what_is_no_configuration_is_an_error_of_one_line(settings):
    with pytest.raises(PlanError, match=r"^quantization_config: gptq cannot be planned: "):
        stored_as({"quant_method": "gptq", **settings})


@pytest.mark.parametrize(
    "text, name, found",
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head.weight", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),  # a part is a whole one
        ("model.layers.1", "model.layers.11.mlp", False),
        ("visual", "model.visual.blocks.0.qkv", True),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.mlp.up_proj", False),
        ("re:.*router", "model.layers.0.router", True),
        ("re:router", "model.layers.0.router", False),
    ],
)
def test_names_are_whole_parts_or_expressions(text, name, found):
    assert (name in Names([text])) == found


def skipped(settings, name, **more):
    return stored_as(settings).tensors(layer(name, **more)) is None


def test_gptq_packs_what_is_in_the_blocks():
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert skipped(settings, "lm_head", in_block=False)
    assert not skipped({**settings, "lm_head": True}, "lm_head", in_block=False)
    only = {**settings, "modules_in_block_to_quantize": [["mlp.down_proj"], ["self_attn.q_proj"]]}
    assert not skipped(only, "model.layers.0.mlp.down_proj")
    assert skipped(only, "model.layers.0.mlp.up_proj")


def test_gptq_has_settings_of_its_own_for_some():
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128,
                "dynamic": {"-:.*\\.gate$": {}, "+:.*\\.down_proj$": {"bits": 8}}}  # fmt: skip
    assert skipped(settings, "model.layers.0.mlp.gate")
    stored = stored_as(settings)
    assert stored.tensors(layer())["qweight"][0] == (14336 // 4, 4096)
    assert stored.tensors(layer("model.layers.0.mlp.up_proj"))["qweight"][0] == (14336 // 8, 4096)


def test_compressed_tensors_have_targets_and_what_is_ignored():
    weights = {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*router", "language_model.model.layers.0.mlp.up_proj"],
        "config_groups": {
            "a": {"targets": ["re:.*self_attn.*"], "weights": {**weights, "strategy": "tensor"}},
            "b": {"targets": ["Linear"], "weights": weights},
        },
    }
    assert skipped(settings, "lm_head")
    assert skipped(settings, "model.layers.0.router")
    assert skipped(settings, "model.language_model.layers.0.mlp.up_proj")  # as 5.x calls it
    assert skipped(settings, "model.embed_tokens", kind="Embedding")
    tensors = stored_as(settings).tensors
    assert tensors(layer())["weight_scale"][0] == (4096, 1)
    assert tensors(layer("model.layers.0.self_attn.q_proj"))["weight_scale"][0] == (1,)


def test_hqq_has_settings_by_the_last_two_parts():
    config = {"self_attn.q_proj": {"weight_quant_params": {"nbits": 8, "group_size": 64}}}
    settings = {"quant_method": "hqq", "quant_config": config, "skip_modules": ["layers.1"]}
    assert skipped(settings, "model.layers.0.mlp.down_proj")
    assert not skipped(settings, "model.layers.0.self_attn.q_proj")
    assert skipped(settings, "model.layers.1.self_attn.q_proj")


def test_torchao_may_take_embeddings_and_names():
    kind = {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}
    settings = {"quant_method": "torchao", "quant_type": kind}
    assert skipped(settings, "model.embed_tokens", kind="Embedding")
    settings["include_input_output_embeddings"] = True
    assert not skipped(settings, "model.embed_tokens", kind="Embedding")
    named = {"fqn_to_config": {"lm_head": None, "_default": kind["default"]}}
    settings["quant_type"] = {"default": {"_type": "FqnToConfig", "_data": named}}
    assert skipped(settings, "lm_head")
    assert not skipped(settings, "model.layers.0.mlp.down_proj")


def test_a_head_is_left_out_unless_the_list_says_otherwise():
    assert stored_as({"quant_method": "fp8"}).skips_head
    assert not stored_as({"quant_method": "fp8", "modules_to_not_convert": []}).skips_head
    assert stored_as({"quant_method": "awq", "modules_to_not_convert": []}).skips_head
