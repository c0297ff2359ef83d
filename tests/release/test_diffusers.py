"""diffusers: the same refusal on accelerate's planner, without and with the shim."""

from __future__ import annotations

import inspect
import json
import re

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("diffusers", reason="not every cell has it")
pytest.importorskip("bitsandbytes", reason="the refusal is of its quantizer")

import diffusers
import evenness
import flux
from bins import fits
from cell import run
from diffusers.models import model_loading_utils, modeling_utils
from flux import FIFTY, RELEASE, STRATEGIES
from packaging.version import Version

import bnb_dispatch_fix
from bnb_dispatch_fix.model.diffusers import from_diffusers
from bnb_dispatch_fix.patching.patches import original_of
from bnb_dispatch_fix.planning.records import PlanError

quantized_maps = pytest.mark.skipif(
    Version("0.32") > RELEASE, reason="diffusers 0.31 refuses every device_map of a quantized model"
)
REFUSAL = "Some modules are dispatched on the CPU or the disk"


@pytest.fixture(autouse=True)
def off():
    bnb_dispatch_fix.deactivate()
    yield
    bnb_dispatch_fix.deactivate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    torch.manual_seed(0)
    flux.build().half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def parts():
    return flux.parts(flux.build())


def device_of(name, device_map):
    return device_map[max((k for k in device_map if is_within(name, k)), key=len)]


def is_within(name, key):
    return key in ("", name) or name.startswith(f"{key}.")


def loads(parts, device_map):
    """Bytes by device; a part that the map divides would have no key of its own."""
    found = {}
    for name, size in parts:
        device = device_of(name, device_map)
        found[device] = found.get(device, 0) + size
    return found


def refused(answer):
    return isinstance(answer, ValueError) and REFUSAL in str(answer)


@quantized_maps
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fifty_loads(folder, parts, strategy, record_property):
    total = sum(size for _, size in parts)
    before, after = [], []
    for count, times in FIFTY:
        max_memory = flux.budgets(total, count, times)
        usable = max_memory[0] * 0.9
        exists = fits([size for _, size in parts], usable, count)
        bnb_dispatch_fix.deactivate()
        before.append(flux.load(folder, device_map=strategy, max_memory=dict(max_memory)))
        bnb_dispatch_fix.activate()
        answer = flux.load(folder, device_map=strategy, max_memory=dict(max_memory))
        after.append(answer)
        if exists:
            assert isinstance(answer, dict), (count, times, answer)
            assert all(load <= usable for load in loads(parts, answer).values()), answer
            assert set(answer.values()) <= set(range(count)), answer
        else:
            assert refused(answer), (count, times, answer)
            assert_explained(answer)
        if isinstance(before[-1], dict) and max(loads(parts, before[-1]).values()) <= usable:
            assert answer == before[-1]  # what was right stays
    refusals = [sum(map(refused, answers)) for answers in (before, after)]
    record_property("diffusers", {strategy: refusals})
    assert refusals == [18, 10]


def assert_explained(error):
    note = "\n".join(getattr(error, "__notes__", [str(error)]))
    assert re.search("need|fit", note), note
    assert "any one of these loads it (each was planned)" in note, note


@quantized_maps
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recipes_work_elsewhere(folder, parts, strategy):
    """What the note says to write, written: it loads in a process that has no shim."""
    total = sum(size for _, size in parts)
    max_memory = flux.budgets(total, 8, 1.1)
    bnb_dispatch_fix.activate()
    error = flux.load(folder, device_map=strategy, max_memory=dict(max_memory))
    note = "\n".join(getattr(error, "__notes__", [str(error)]))
    recipes = re.findall(r"^     (\w+=.*)$", note, re.MULTILINE)
    assert any("device_map=" in recipe for recipe in recipes), note
    assert any("max_memory=" in recipe for recipe in recipes), note
    for recipe in recipes:
        # A placement that only rescue finds needs it; a map written by hand needs nobody.
        if "device_map=" in recipe:
            bnb_dispatch_fix.deactivate()
        changed = eval(f"dict({recipe})", {"BitsAndBytesConfig": diffusers.BitsAndBytesConfig})
        asked = {"device_map": strategy, "max_memory": dict(max_memory), **changed}
        answer = flux.load(folder, **asked)
        bnb_dispatch_fix.activate()
        assert isinstance(answer, dict), (recipe, answer)
        if "device_map" not in changed:
            assert set(map(str, answer.values())).isdisjoint({"cpu", "disk"}), (recipe, answer)


@quantized_maps
def test_eight_bits_are_rescued_too(folder, parts):
    sizes = [(name, flux_eight(size, name)) for name, size in flux.parts(flux.build())]
    total = sum(size for _, size in sizes)
    config = diffusers.BitsAndBytesConfig(load_in_8bit=True)
    max_memory = flux.budgets(total, 4, 1.35)
    asked = {"device_map": "auto", "quantization_config": config}
    assert refused(flux.load(folder, max_memory=dict(max_memory), **asked))
    bnb_dispatch_fix.activate()
    answer = flux.load(folder, max_memory=dict(max_memory), **asked)
    assert isinstance(answer, dict), answer
    assert set(answer.values()) <= set(range(4))


def flux_eight(size, name):
    """Bytes in 8-bit of a part: a linear weight takes one byte an element."""
    module = dict(flux.build().named_modules())[name]
    weights = sum(
        leaf.weight.numel() for leaf in module.modules() if isinstance(leaf, torch.nn.Linear)
    )
    return size + weights // 2


@quantized_maps
@pytest.mark.parametrize("count", [2, 4, 8])
def test_even_spreads_over_the_cards(folder, parts, count):
    """The best that runs along the model in the order of the cards allow, found by an oracle."""
    parts = [(name, int(size)) for name, size in parts]  # weights of an even number of elements
    sizes = [size for _, size in parts]
    max_memory = {**flux.budgets(sum(sizes), count, 4)}
    max_memory[0] *= 2
    usable = {gpu: int(size * 0.9) for gpu, size in max_memory.items() if gpu != "cpu"}
    best = evenness.smallest_largest_fill(sizes, list(usable.values()))
    bnb_dispatch_fix.activate()
    planned = flux.load(folder, device_map="auto", max_memory=dict(max_memory))
    assert evenness.largest_fill(loads(parts, planned), usable) > best  # or it would show nothing
    bnb_dispatch_fix.activate(["backport", "rescue", "explain", "even"])
    answer = flux.load(folder, device_map="auto", max_memory=dict(max_memory))
    assert evenness.largest_fill(loads(parts, answer), usable) == best


@quantized_maps
def test_offload_that_is_allowed_stays_as_it_is(folder, parts):
    total = sum(size for _, size in parts)
    asked = {
        "device_map": "sequential",
        "max_memory": flux.budgets(total, 4, 1.2),
        "quantization_config": flux.nf4(llm_int8_enable_fp32_cpu_offload=True),
    }
    expected = flux.load(folder, **asked)
    assert "cpu" in expected.values()
    bnb_dispatch_fix.activate()
    assert flux.load(folder, **asked) == expected


ORDERS = {
    "before": "import bnb_dispatch_fix, diffusers",
    "after": "import diffusers.models.modeling_utils, bnb_dispatch_fix",
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_name_is_patched_in_either_order(order):
    code = f"""
import warnings; warnings.simplefilter("ignore")
{ORDERS[order]}
import diffusers.models.modeling_utils, diffusers.loaders.single_file_model
patches = [p for p in bnb_dispatch_fix.status().patches if p.id.startswith("diffusers")]
print(sorted(p.id for p in patches if p.state == "applied"))
print({{p.reason for p in patches if p.state != "applied"}})
print(bnb_dispatch_fix.status().holders)
"""
    names = ["budgets", "infer", "device-map", "loader", "modeling-device-map"]
    names += ["single-file-device-map"] if Version("0.36") <= RELEASE else []
    applied, others, holders = run(["-c", code]).splitlines()[-3:]
    assert holders == "()"
    assert {f"diffusers-{name}" for name in names} <= set(eval(applied))
    assert others == "set()" or "is not covered" in others or "has no" in others


def test_nothing_of_diffusers_is_imported():
    code = (
        "import sys, bnb_dispatch_fix; bnb_dispatch_fix.status();"
        "print([name for name in sys.modules if name.partition('.')[0] == 'diffusers'])"
    )
    assert run(["-c", code]).splitlines()[-1] == "[]"


def test_budgets_have_room_for_the_largest_block():
    """Unquantized: the buffer covers the largest block of any class, not the first of one."""
    model = flux.build().half()
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters()) * 2
        for name, module in model.named_modules()
    }
    largest = max(sizes["transformer_blocks.0"], sizes["single_transformer_blocks.0"])
    expected = sizes[""] // 4 + int(1.25 * largest)
    max_memory = {**dict.fromkeys(range(4), 2**40), "cpu": 2**40}
    bnb_dispatch_fix.activate(["backport"])
    with flux.gpus():
        caps = model_loading_utils.get_balanced_memory(
            model, dict(max_memory), ["FluxSingleTransformerBlock", "FluxTransformerBlock"]
        )
    assert [caps[gpu] for gpu in range(4)] == [expected, expected, expected, 2**40]


def test_what_is_kept_in_fp32_counts_so():
    """A model that names parts which load in float32: a norm, and a parameter of its own."""

    class Kept(diffusers.ModelMixin, diffusers.ConfigMixin):
        config_name = "config.json"
        _no_split_modules = ("ModuleList",)
        _keep_in_fp32_modules = ("norm", "table")

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)])
            self.norm = torch.nn.LayerNorm(64)
            self.normal = torch.nn.LayerNorm(64)
            self.table = torch.nn.Parameter(torch.empty(64))

    with torch.device("meta"):
        model = Kept()
    planner = original_of(modeling_utils._determine_device_map)
    args = (model, "auto", {0: 10**6, "cpu": 10**6}, torch.bfloat16, ["norm", "table"])
    request = from_diffusers(planner, args, {})
    sizes = {unit.name: unit.size for unit in request.units().units}
    assert sizes == {
        "table": 64 * 4,
        "layers": 2 * (64 * 64 + 64) * 2,
        "norm": 128 * 4,
        "normal": 128 * 2,
    }


def test_pipelines_keep_their_own_placement(tmp_path, monkeypatch):
    """device_map="balanced" of a pipeline: whole components, by diffusers' own rule."""
    from diffusers.pipelines import pipeline_utils

    pipeline = diffusers.DDPMPipeline(
        unet=diffusers.UNet2DModel(
            sample_size=8,
            block_out_channels=(32,),
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        ),
        scheduler=diffusers.DDPMScheduler(),
    )
    pipeline.save_pretrained(tmp_path)
    chosen = []
    choose = pipeline_utils._get_final_device_map

    class Chosen(BaseException):
        pass

    def spy(*args, **kwargs):
        chosen.append(choose(*args, **kwargs))
        raise Chosen

    monkeypatch.setattr(pipeline_utils, "_get_final_device_map", spy)
    for features in ([], ["backport", "rescue", "explain"]):
        bnb_dispatch_fix.activate(features)
        with flux.gpus(), pytest.raises(Chosen):
            diffusers.DDPMPipeline.from_pretrained(
                tmp_path, device_map="balanced", max_memory={0: 2**30, 1: 2**31}
            )
    assert chosen == [{"unet": 1}] * 2


def test_wrong_arguments_are_explained(folder):
    bnb_dispatch_fix.activate()
    asked = {"max_memory": {"gpu0": "1GiB"}, "quantization_config": None}
    error = flux.load(folder, device_map="auto", **asked)
    assert isinstance(error, ValueError), error
    note = "\n".join(getattr(error, "__notes__", [str(error)]))
    assert "write the number 0, without quotes" in note, note


def test_the_signature_stays(monkeypatch):
    before = inspect.signature(original_of(modeling_utils._determine_device_map))
    bnb_dispatch_fix.activate()
    assert inspect.signature(modeling_utils._determine_device_map) == before
    assert modeling_utils._determine_device_map.__name__ == "_determine_device_map"


@quantized_maps
def test_plan_takes_a_component(folder, parts):
    """The folder of a transformer: its own planner refuses, rescue finds a place."""
    total = sum(size for _, size in parts)
    planned = bnb_dispatch_fix.plan(
        str(folder),
        max_memory=flux.budgets(total, 4, 1.2),
        quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        dtype="float16",
    )
    outcomes = {run.name: (run.error is None, run.device_map) for run in planned.runs}
    assert [ok for ok, _ in outcomes.values()] == [False, False, True], planned
    assert planned.versions["diffusers"] == diffusers.__version__
    assert all(
        load <= flux.budgets(total, 4, 1.2)[gpu] * 0.9
        for gpu, load in loads(parts, planned.device_map).items()
    )


def test_plan_names_the_components_of_a_pipeline(folder, tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text((folder / "config.json").read_text())
    index = {"_class_name": "FluxPipeline", "scheduler": ["diffusers", "Euler"]}
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match=r"plan one of them: .*transformer"):
        bnb_dispatch_fix.plan(str(tmp_path), max_memory={0: "1GiB"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match=r"no config.json there, nor a model_index"):
        bnb_dispatch_fix.plan(str(tmp_path / "empty"), max_memory={0: "1GiB"})
