"""The well-known models of `plan --example`: as large as they were published."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="GPUs are pretended only where it is installed")

import transformers
from cell import TRANSFORMERS
from meta import on_meta
from packaging.version import Version

from bnb_dispatch_fix.planning import PlanError, examples
from bnb_dispatch_fix.planning.rehearsal import carry_out

GIB = 2**30
#: Parameters, and where they were published: "safetensors" is the count on the model's page on the
#: Hugging Face Hub, which is that of the tensors in its files.
PUBLISHED = {
    # README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: 671B, without the 14B that predict tokens ahead.
    "deepseek-v3": 671_026_419_200,
    "gemma-2-27b": 27_227_128_320,  # google/gemma-2-27b, safetensors
    "gemma-3-27b": 27_432_406_640,  # google/gemma-3-27b-it, safetensors
    # zai-org/GLM-4.5, README.md: 106B; PrimeIntellect/INTELLECT-3, safetensors, which has the same
    # layers and, as this, none that predicts tokens ahead (with it: 110,468,824,832).
    "glm-4.5-air": 106_852_251_264,
    "gpt-oss-120b": 116_829_156_672,  # model card of openai/gpt-oss: 116.83B
    "gpt-oss-20b": 20_914_757_184,  # model card of openai/gpt-oss: 20.91B
    "llama-3-70b": 70_553_706_496,  # meta-llama/Meta-Llama-3-70B, safetensors
    "llama-3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B, safetensors
    "llama-4-scout": 108_641_793_536,  # meta-llama/Llama-4-Scout-17B-16E-Instruct, safetensors
    "mistral-small-24b": 23_572_403_200,  # mistralai/Mistral-Small-24B-Instruct-2501, safetensors
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1, safetensors
    "qwen3-235b-a22b": 235_093_634_560,  # Qwen/Qwen3-235B-A22B, safetensors
    "qwen3-30b-a3b": 30_532_122_624,  # Qwen/Qwen3-30B-A3B, safetensors
    "qwen3-8b": 8_190_735_360,  # Qwen/Qwen3-8B, safetensors
}
#: Bytes of the tensors in its files: total_size in model.safetensors.index.json.
STORED = {"gpt-oss-20b": 13_761_264_768, "gpt-oss-120b": 65_248_815_744}


def known(name):
    return Version(examples.SINCE[name]) <= TRANSFORMERS


def needs(name):
    if not known(name):
        pytest.skip(f"{name} came with transformers {examples.SINCE[name]}")


def test_there_is_a_fact_for_each():
    assert set(PUBLISHED) == set(examples.SINCE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_as_many_parameters_as_published(name, tmp_path):
    needs(name)
    if name.startswith("llama-3-") and Version("4.31") > TRANSFORMERS:
        pytest.skip("before 4.31 Llama has no groups of heads; plan says so in a note")
    config = examples.configuration(name)
    layers = config.get("text_config", config)
    # All layers after these are alike: two short models are enough to know the whole one.
    first = config.get("first_k_dense_replace", 0) + 1
    count = layers["num_hidden_layers"]
    few, more = (in_files(config, layers, number, tmp_path) for number in (first, first + 1))
    assert few + (count - first) * (more - few) == PUBLISHED[name]


def in_files(config, layers, count, folder):
    """Elements of the tensors that a model of so many layers writes to its files."""
    layers["num_hidden_layers"] = count
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with on_meta():
        model_class = getattr(transformers, config["architectures"][0])
        model = model_class(transformers.AutoConfig.from_pretrained(folder))
    model.tie_weights()
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("name", examples.SINCE)
def test_an_older_release_says_which_one_knows_it(name):
    if known(name):
        pytest.skip("this release knows it")
    with pytest.raises(PlanError) as raised:
        carry_out(job(name))
    assert str(raised.value) == (
        f"{name} is not known to transformers {transformers.__version__}; "
        f"it came with {examples.SINCE[name]}"
    )


def job(name, budget=80 * GIB):
    return {
        "config": examples.configuration(name),
        "label": name,
        "since": examples.SINCE[name],
        "strategy": "auto",
        "dtype": None,
        "quantization": None,
        "max_memory": [[device, budget] for device in range(4)],
    }


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_quantized_is_as_large_as_its_files(name):
    needs(name)
    answer = carry_out(job(name))
    # Beside them the frequencies of its rotary embedding, 32 in fp32, which are in no file.
    assert answer["total"] == pytest.approx(STORED[name], abs=1024)
    assert answer["fits"]


@pytest.mark.parametrize("name", ["gemma-3-27b", "llama-4-scout"])
def test_what_sees_is_built_with_its_eyes(name):
    """In 16 bits it takes two bytes a parameter: those of both towers."""
    needs(name)
    answer = carry_out(job(name))
    assert answer["total"] == pytest.approx(2 * PUBLISHED[name], rel=1e-3)
    modules = {name for run in answer["runs"] for name, _ in run["device_map"]}
    assert any("vision" in name for name in modules)
    assert any("language_model" in name for name in modules)
