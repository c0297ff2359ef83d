"""Units of real models on the real releases: true sizes, ties, and maps that accelerate accepts."""

from __future__ import annotations

import random
import warnings

import pytest

torch = pytest.importorskip("torch", reason="measures real modules: needs torch")
transformers = pytest.importorskip("transformers")
bitsandbytes = pytest.importorskip("bitsandbytes")

import planned
from accelerate.utils.modeling import check_device_map
from packaging.version import Version
from planned import EXPERTS, FAMILIES, FFN, GENERATION, HIDDEN, LAYERS, VOCABULARY
from torch import nn

from bnb_dispatch_fix.placement.sizers import call_sizer, sizer_for
from bnb_dispatch_fix.placement.units import measure
from bnb_dispatch_fix.simulation import simulated_gpus

LOADS_ON_CPU = Version(bitsandbytes.__version__) >= Version("0.49")
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


def check_coverage(model, units, *, rounds=20):
    """Every tensor lies under one key; accelerate accepts random placements and reads them so."""
    key_units = {key: unit for unit, facts in units.facts.items() for key in facts.keys}
    names = {name for name, _ in model.named_buffers()} | set(model.state_dict())
    over = {name: [key for key in key_units if covers(key, name)] for name in names}
    assert {name: len(keys) for name, keys in over.items()} == dict.fromkeys(
        names - set(units.excluded), 1
    ) | dict.fromkeys(units.excluded, 0)
    for seed in range(rounds):
        placement = random_placement(units, random.Random(seed))
        device_map = units.device_map(placement)
        with warnings.catch_warnings():
            # Keys that are tensors of a split module; the planners write these as well.
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            if not units.excluded:
                check_device_map(model, device_map)
        for name in names:
            covering = [key for key in device_map if covers(key, name)]
            if name in units.excluded:
                assert covering == []
            else:
                assert [device_map[key] for key in covering] == [
                    placement[key_units[over[name][0]]]
                ]


def covers(key, name):
    return key in ("", name) or name.startswith(f"{key}.")


def random_placement(units, draw):
    """Runs of units on three devices, tied units together."""
    placement, ties, device = {}, {}, 0
    for unit in units.units:
        device = draw.choice([device, device, device, 0, 1, 2])
        placement[unit.name] = device if unit.tie is None else ties.setdefault(unit.tie, device)
    return placement


# --- shapes that need torch only --------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
        self.scale = nn.Parameter(torch.empty(4))


def sizes(model, classes=("Block",), **options):
    units = measure(model, no_split_module_classes=classes, sizer=sizer_for(model), **options)
    return units, {unit.name: unit.size for unit in units.units}


def test_a_split_module_gives_its_parameters_children_and_buffers():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.empty(3, dtype=torch.bool), persistent=False)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.dropout = nn.Dropout()
            self.prompt = nn.Parameter(torch.empty(5))

    model = nn.ModuleDict({"tower": Tower()})
    units, by_name = sizes(model)
    assert by_name == {
        "tower.prompt": 20,
        "tower.blocks.0": 80,
        "tower.blocks.1": 80,
        "tower.mask": 3,
    }
    assert list(by_name) == ["tower.prompt", "tower.blocks.0", "tower.blocks.1", "tower.mask"]
    assert units.facts["tower.mask"].sizes == {"bool": 3}
    check_coverage(model, units)
    assert units.device_map(dict.fromkeys(by_name, 3)) == {"": 3}
    assert units.device_map({**dict.fromkeys(by_name, 0), "tower.blocks.1": 1}) == {
        "tower.prompt": 0,
        "tower.blocks.0": 0,
        "tower.blocks.1": 1,
        "tower.mask": 0,
    }


@pytest.mark.parametrize("classes", [None, "Block", ["Block"], ("Block",), {"Block"}])
def test_forms_of_no_split_module_classes(classes):
    _, by_name = sizes(nn.ModuleList([Block()]), classes)
    whole = {"0": 80}
    assert by_name == ({"0.scale": 16, "0.inner.0": 64} if classes is None else whole)


def test_a_module_under_two_names_is_one_unit():
    block, leaf = Block(), nn.Linear(2, 2, bias=False)
    shared = nn.ModuleDict({"leaf": leaf})
    model = nn.ModuleDict({"a": block, "b": nn.ModuleList([block]), "c": shared, "d": shared})
    units, by_name = sizes(model)
    assert by_name == {"a": 80, "c.leaf": 16}
    assert units.facts["a"].names == ("a", "b.0")
    assert units.facts["c.leaf"].names == ("c.leaf", "d.leaf")
    check_coverage(model, units)
    assert units.device_map({"a": 0, "c.leaf": 1}) == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_a_module_inside_a_block_and_outside_of_it_is_tied():
    block = Block()
    model = nn.ModuleDict({"block": block, "free": nn.Linear(3, 3), "again": block.inner})
    units, by_name = sizes(model)
    assert by_name == {"block": 80, "free": 48, "again.0": 0}
    ties = {unit.name: unit.tie for unit in units.units}
    assert ties["block"] is not None
    assert ties["block"] == ties["again.0"]
    assert ties["free"] is None
    check_coverage(model, units)


def test_towers_tied_layer_by_layer():
    model = nn.ModuleDict({"left": nn.ModuleList(), "right": nn.ModuleList()})
    for _ in range(3):
        left, right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        right.weight = left.weight
        model["left"].append(left)
        model["right"].append(right)
    units, by_name = sizes(model)
    assert by_name == {
        **{f"left.{index}": 64 for index in range(3)},
        **{f"right.{index}": 0 for index in range(3)},
    }
    ties = {unit.name: unit.tie for unit in units.units}
    assert [ties[f"left.{index}"] for index in range(3)] == [
        ties[f"right.{index}"] for index in range(3)
    ]
    assert len(set(ties.values())) == 3


def test_declared_ties_count_at_the_source_even_if_it_comes_later():
    model = nn.ModuleDict({"head": nn.Linear(8, 4, bias=False), "embed": nn.Embedding(4, 8)})
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    units, by_name = sizes(model)
    assert by_name == {"head": 0, "embed": 128}
    assert units.units[0].tie == units.units[1].tie is not None
    model["head"].weight = model["embed"].weight  # tied in the meantime: same answer
    assert sizes(model)[1] == by_name


def test_a_declared_tie_without_its_source_still_takes_memory():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model.all_tied_weights_keys = {"a.weight": "gone", "b.weight": "gone"}
    units, by_name = sizes(model)
    assert by_name == {"a": 64, "b": 0}
    assert units.units[0].tie == units.units[1].tie is not None


def test_leaves_and_nothing_at_all():
    units, by_name = sizes(nn.Linear(4, 4))
    assert by_name == {"": 80}
    assert units.device_map({"": 0}) == {"": 0}
    check_coverage(nn.Linear(4, 4), units)
    units, by_name = sizes(nn.Sequential(nn.ReLU(), nn.Dropout()))
    assert by_name == units.device_map({}) == {}
    _, by_name = sizes(Block())  # the root itself may not be split
    assert by_name == {"": 80}


def test_placement_can_leave_parameters_out():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.ModuleDict({"rows": nn.Embedding(100, 4), "norm": nn.LayerNorm(4)})
            self.linear = nn.Linear(4, 4, bias=False)

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Linear(4, 4)})
    units, by_name = sizes(model, ["Layer"], no_placement_params=["table.rows.weight"])
    assert by_name == {"layers.0": 96, "layers.1": 96, "head": 80}
    assert units.excluded == {f"layers.{index}.table.rows.weight": 1600 for index in range(2)}
    check_coverage(model, units)
    assert units.device_map(dict.fromkeys(by_name, 1)) == {
        **dict.fromkeys(["layers.0.linear", "layers.0.table.norm"], 1),
        **dict.fromkeys(["layers.1.linear", "layers.1.table.norm"], 1),
        "head": 1,
    }
    assert sizes(model, ["Layer"])[1]["layers.0"] == 1696


def test_a_model_deeper_than_the_recursion_limit():
    model = nn.Linear(2, 2, bias=False)
    for _ in range(3000):
        parent = nn.Module()
        parent._modules["m"] = model
        model = parent
    units, _ = sizes(model, ())
    assert units.total == 16
    assert units.device_map({units.units[0].name: 0}) == {"": 0}
