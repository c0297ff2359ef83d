"""Units of real models on the real releases: true sizes, ties, and maps that accelerate accepts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="measures real modules: needs torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

import planned
from cell import installed
from coverage_of import check_coverage
from packaging.version import Version
from planned import EXPERTS, FAMILIES, FFN, GENERATION, HIDDEN, LAYERS, VOCABULARY

from bnb_dispatch_fix.model.sizers import call_sizer, sizer_for
from bnb_dispatch_fix.model.units import measure
from bnb_dispatch_fix.planning.simulation import simulated_gpus

LOADS_ON_CPU = Version(installed("bitsandbytes")) >= Version("0.49")
HALF = torch.float16

ALL_ATTENTION = HIDDEN * HIDDEN * 4
HAS_GROUPS = hasattr(transformers.LlamaConfig(), "num_key_value_heads")  # since 4.31
ATTENTION = HIDDEN * HIDDEN * 3 if HAS_GROUPS else ALL_ATTENTION  # key and value have half
EMBEDDING = VOCABULARY * HIDDEN


def by_hand(family):
    """Elements that get quantized, that stay 16-bit, that stay 32-bit; no buffers."""
    if family == "llama":
        return LAYERS * (ATTENTION + 3 * HIDDEN * FFN), 2 * EMBEDDING + (2 * LAYERS + 1) * HIDDEN, 0
    if family == "gemma2":  # the head is the embedding
        return LAYERS * (ATTENTION + 3 * HIDDEN * FFN), EMBEDDING + (4 * LAYERS + 1) * HIDDEN, 0
    if family == "mixtral":
        experts = LAYERS * (EXPERTS * 3 * HIDDEN * FFN + EXPERTS * HIDDEN)
        rest = 2 * EMBEDDING + (2 * LAYERS + 1) * HIDDEN
        if GENERATION == 5:  # experts and router are plain parameters there
            return LAYERS * ATTENTION, rest + experts, 0
        return LAYERS * ATTENTION + experts, rest, 0
    if family == "opt":
        biases = 4 * HIDDEN + FFN + HIDDEN
        per_layer = biases + 2 * 2 * HIDDEN
        rest = EMBEDDING + 64 * HIDDEN + LAYERS * per_layer + 2 * HIDDEN
        return LAYERS * (ALL_ATTENTION + 2 * HIDDEN * FFN), rest, 0
    assert family == "t5"
    quantized = LAYERS * (3 * ALL_ATTENTION + 2 * HIDDEN * FFN)
    norms = (5 * LAYERS + 2) * HIDDEN
    return quantized, EMBEDDING + norms + 2 * 32 * 4, 2 * LAYERS * HIDDEN * FFN


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folders = {}

    def get(family, dtype=HALF):
        if not planned.available(family):
            pytest.skip(f"transformers {transformers.__version__} has no {FAMILIES[family][2]}")
        if (family, dtype) not in folders:
            folders[family, dtype] = tmp_path_factory.mktemp(family)
            planned.save(family, folders[family, dtype], dtype)
        return folders[family, dtype]

    return get


@pytest.fixture
def at_planner(checkpoint):
    """`at_planner(family, bits)`: (model, quantizer, arguments) at the moment of planning."""

    def get(family, bits):
        seen = []
        with simulated_gpus({0: 2**30, "cpu": 2**30}):
            planned.plan(family, checkpoint(family), bits, HALF, lambda *what: seen.append(what))
        assert len(seen) == 1
        return seen[0]

    return get


def measured(model, quantizer, arguments, dtype=HALF):
    return measure(
        model,
        no_split_module_classes=arguments["no_split_module_classes"],
        sizer=sizer_for(model, quantizer, dtype),
    )


def buffer_bytes(model):
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_total_is_the_sum_by_hand(family, bits, at_planner):
    model, quantizer, arguments = at_planner(family, bits)
    units = measured(model, quantizer, arguments)
    quantized, half, full = by_hand(family)
    assert units.total == quantized * bits // 8 + half * 2 + full * 4 + buffer_bytes(model)
    assert sum(facts.quantized for facts in units.facts.values()) == quantized * bits // 8
    assert sum(facts.sizes.get("float32", 0) for facts in units.facts.values()) == full * 4 + sum(
        buffer.numel() * 4 for buffer in model.buffers() if buffer.dtype == torch.float32
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.skipif(GENERATION != 5, reason="4.x counts everything as quantized")
def test_total_is_that_of_transformers_5_but_for_what_is_kept_in_fp32(family, bits, at_planner):
    from transformers.integrations.accelerate import compute_module_sizes

    model, quantizer, arguments = at_planner(family, bits)
    theirs = compute_module_sizes(model, quantizer)[0]
    units = measured(model, quantizer, arguments)
    kept = by_hand(family)[2]  # 5.x loads these as fp32 and counts them as fp16
    assert units.total == theirs[""] + 2 * kept
    if not kept:
        assert {unit.name: unit.size for unit in units.units} == {
            unit.name: theirs[unit.name] for unit in units.units
        }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.skipif(GENERATION != 4, reason="5.x does not pass dtypes to its planner")
def test_the_planners_arguments_are_enough_on_4x(family, bits, at_planner):
    model, quantizer, arguments = at_planner(family, bits)
    sizer = call_sizer(model, arguments["dtype"], arguments["special_dtypes"])
    units = measure(
        model, no_split_module_classes=arguments["no_split_module_classes"], sizer=sizer
    )
    assert units == measured(model, quantizer, arguments)


@pytest.mark.parametrize("family", ["gemma2", "opt", "t5"])
def test_tied_units_share_a_group_and_count_once(family, at_planner):
    model, quantizer, arguments = at_planner(family, 4)
    units = measured(model, quantizer, arguments)
    source = {"gemma2": "model.embed_tokens", "opt": "model.decoder.embed_tokens", "t5": "shared"}
    copies = {"t5": {"encoder.embed_tokens", "decoder.embed_tokens"}}.get(family, set())
    groups = {unit.tie for unit in units.units if unit.tie is not None}
    assert len(groups) == 1
    tied = [unit for unit in units.units if unit.tie is not None]
    names = {name for unit in tied for name in units.facts[unit.name].names}
    assert names == {source[family], "lm_head"} | copies
    assert [unit.name for unit in tied if unit.size] == [source[family]]
    assert [unit.name for unit in units.units if unit.is_input_embedding] == [source[family]]


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_covered_once_and_maps_mean_their_placement(family, at_planner):
    model, quantizer, arguments = at_planner(family, 4)
    units = measured(model, quantizer, arguments)
    check_coverage(model, units)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.skipif(not LOADS_ON_CPU, reason="bitsandbytes before 0.49 needs a GPU to quantize")
def test_planned_bytes_are_the_bytes_that_are_loaded(family, dtype, bits, checkpoint):
    units, model = load(family, checkpoint(family, dtype), bits, dtype)
    assert units.total == pytest.approx(loaded_bytes(model), rel=0.01)


def load(family, folder, bits, dtype=HALF, **options):
    """(units when it was planned, the model loaded on the CPU)"""
    seen = []

    def look(*what):
        seen.append(measured(*what, dtype))

    model = planned.plan(family, folder, bits, dtype, look, stop=False, **options)
    return seen[0], model


def loaded_bytes(model):
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.skipif(not LOADS_ON_CPU, reason="bitsandbytes before 0.49 needs a GPU to quantize")
def test_a_checkpoint_that_is_quantized_already(checkpoint, tmp_path):
    before, model = load("llama", checkpoint("llama"), 4)
    model.save_pretrained(tmp_path)
    units, model = load("llama", tmp_path, 16)
    assert units == before
    assert units.total == loaded_bytes(model)


@pytest.mark.skipif(not LOADS_ON_CPU, reason="bitsandbytes before 0.49 needs a GPU to quantize")
def test_eight_bit_layers_that_are_trained_in_sixteen(checkpoint):
    units, model = load("llama", checkpoint("llama"), 8, llm_int8_has_fp16_weight=True)
    assert units.total == loaded_bytes(model)
    assert {facts.quantized for facts in units.facts.values()} == {0}


@pytest.mark.parametrize("bits", [4, 8])
def test_what_accelerate_quantizes_itself_is_loaded_in_its_dtype(bits):
    pytest.importorskip("accelerate.utils.bnb", reason="accelerate 0.21 and newer")
    from accelerate import init_empty_weights
    from accelerate.utils import BnbQuantizationConfig
    from accelerate.utils.bnb import replace_with_bnb_layers

    config = BnbQuantizationConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        torch_dtype=HALF,
        skip_modules=["lm_head"],
        keep_in_fp32_modules=["norm"],
    )
    llama = transformers.LlamaConfig(**planned.LLAMA_LIKE)
    with init_empty_weights():  # in fp32, as a caller of accelerate has it
        model = transformers.LlamaForCausalLM(llama)
        model = replace_with_bnb_layers(model, config, ["lm_head"])
    assert model.dtype == torch.float32
    units = measured(model, config, {"no_split_module_classes": ["LlamaDecoderLayer"]}, None)
    quantized, half, _ = by_hand("llama")
    norms = (2 * LAYERS + 1) * HIDDEN
    buffers = buffer_bytes(model)
    assert units.total == quantized * bits // 8 + (half - norms) * 2 + norms * 4 + buffers


@pytest.mark.skipif(not LOADS_ON_CPU, reason="bitsandbytes before 0.49 needs a GPU to quantize")
def test_a_loaded_model_is_measured_as_it_is(checkpoint):
    seen = []
    folder = checkpoint("llama")
    model = planned.plan("llama", folder, 4, HALF, lambda *what: seen.append(what), stop=False)
    _, quantizer, arguments = seen[0]
    tensors = [*model.parameters(), *model.buffers()]
    loaded = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    units = measured(model, quantizer, arguments)
    assert units.total == loaded
    quantized = by_hand("llama")[0]
    assert sum(facts.quantized for facts in units.facts.values()) == quantized // 2
