"""`bnb_dispatch_fix.plan` against what `from_pretrained` really does in the installed release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from meta import on_meta
from packaging.version import Version

pytest.importorskip("torch", reason="plans real models: needs torch")

import transformers
from cell import STANDS_FOR_OTHERS, TRANSFORMERS
from shapes import SHARE

import bnb_dispatch_fix
from bnb_dispatch_fix.planning import PlanError, simulation
from bnb_dispatch_fix.planning import terminal as report

if not STANDS_FOR_OTHERS:
    pytest.skip(
        "ten processes of 10 s each: one release of each way to plan, and the newest ones",
        allow_module_level=True,
    )

GIB = 2**30
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HAS_BOTH = Version("5.18.0")
#: Llama-3-8B by hand: two tables of 128256 x 4096 and 65 norms in 16 bits, rotary frequencies
#: (64 in fp32, one per model from 4.45 on), and 32 blocks in 4 bits. 4.30 knows no groups of heads.
TABLE = 128256 * 4096 * 2
HAS_GROUPS = hasattr(transformers.LlamaConfig(), "num_key_value_heads")
KEYS = 1024 if HAS_GROUPS else 4096
BLOCK_4BIT = (2 * 4096 * 4096 + 2 * 4096 * KEYS + 3 * 4096 * 14336) // 2
NORMS = 65 * 4096 * 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    simulation.build_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def without_weights(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without_weights")
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def small(without_weights):
    return bnb_dispatch_fix.plan(
        without_weights,
        max_memory=simulation.EIGHT_SMALL_GPUS,
        quantization_config=transformers.BitsAndBytesConfig(**NF4),
    )


def command(*options):
    """The exit code, stdout and stderr of `bnb-dispatch-fix plan`."""
    finished = subprocess.run(
        [sys.executable, "-m", "bnb_dispatch_fix", "plan", *options],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return finished.returncode, finished.stdout, finished.stderr


@pytest.fixture(scope="module")
def llama():
    code, out, err = command(
        *("--example", "llama-3-8b", "--bits", "4", "--max-memory", "8x4GiB,cpu=60GiB", "--json")
    )
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("run, environment", [(0, {"BNB_DISPATCH_FIX": "off"}), (2, {})])
def test_a_run_is_what_from_pretrained_does(small, in_process, run, environment):
    _, real = in_process(["shim", "plan:auto:4"], **environment)()
    planned = small.runs[run]
    assert planned.device_map == real["device_map"]
    assert (planned.outcome == "loads") == real["loads_on_gpus"]
    assert (planned.error is None) == (real["error"] is None)
    if real["error"] is not None:
        assert real["error"].split(".")[0] in planned.error


def test_the_three_planners(small):
    release, backport, rescue = small.runs
    fixed = TRANSFORMERS >= HAS_BOTH
    if is_v5():
        assert release.outcome == ("loads" if fixed else "refused")
    else:  # where each block has rotary tables, the last GPU gets more than it has, besides
        assert release.outcome in ("offloads", "overfull")
        assert release.device_map["lm_head"] == "cpu"
    assert backport.outcome == rescue.outcome == "loads"
    assert small.fits
    assert small.device_map == (release if fixed else backport).device_map
    assert small.notes == ()


def test_the_imbalance_that_comes_with_a_huge_leaf_is_shown():
    """Three GPUs could take a third each; with a buffer for the embedding one stays empty."""
    config = transformers.LlamaConfig(
        vocab_size=60_000,
        hidden_size=4096,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=32,
        tie_word_embeddings=False,
        torch_dtype="float16",
    )
    planned = bnb_dispatch_fix.plan(
        config, max_memory=dict.fromkeys(range(3), GIB * 3 // 2), quantization_config=NF4
    )
    loads = [each.placed for each in planned.runs[1].devices if each.device != "cpu"]
    assert planned.runs[1].outcome == "loads"
    assert min(loads) == 0
    assert max(loads) >= 60_000 * 4096 * 2
    lines = [line for line in report.as_text(planned).splitlines() if line.startswith("GPU ")]
    assert [f"{size / GIB:.2f}" for size in loads] == [line.split()[6] for line in lines]


def is_v5():
    return TRANSFORMERS.major >= 5


def test_a_model_is_planned_as_its_checkpoint_and_this_process_is_left_alone(
    small, without_weights
):
    import torch

    before = bnb_dispatch_fix.status()
    seen = torch.cuda.is_available(), torch.cuda.device_count()
    config = transformers.AutoConfig.from_pretrained(without_weights)
    with on_meta():
        model = transformers.LlamaForCausalLM(config)
    planned = bnb_dispatch_fix.plan(
        model, max_memory=simulation.EIGHT_SMALL_GPUS, quantization_config=NF4
    )
    assert planned == small
    assert bnb_dispatch_fix.status() == before
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == seen
    assert [path.name for path in without_weights.iterdir()] == ["config.json"]


def test_sizes_of_llama_3_8b_are_those_worked_out_by_hand(llama):
    by_hand = 2 * TABLE + 32 * BLOCK_4BIT + NORMS
    assert llama["quantized"] == 32 * BLOCK_4BIT
    # Before 4.45 a block may have rotary tables: 8192 positions, cosine and sine, 128 wide.
    tables = llama["total"] - by_hand
    assert 64 * 4 <= tables <= 32 * (8192 * 128 * 2 * 4 + 64 * 4)
    assert llama["unquantized"] == llama["total"] - llama["quantized"]


def test_llama_3_8b_on_eight_gpus(llama):
    placed = [
        {d["device"]: round(d["placed"] / GIB, 1) for d in run["devices"] if d["placed"]}
        for run in llama["runs"]
    ]
    assert all(
        d["usable"] == int(SHARE * 4 * GIB) or d["device"] == "cpu"
        for d in llama["runs"][0]["devices"]
    )
    if is_v5():
        expected = {"1": 1.6, "2": 1.6, "3": 1.0, "4": 1.0}  # transformers 5.24.0 by itself
        assert {str(device): size for device, size in placed[1].items()} == expected
    if is_v5() and TRANSFORMERS < HAS_BOTH:
        assert llama["runs"][0]["outcome"] == "refused"
        assert "cpu" in placed[0]
    assert [run["outcome"] for run in llama["runs"][1:]] == ["loads", "loads"]


def test_a_model_that_does_not_fit_in_sixteen_bits(llama):
    code, out, err = command(
        *("--example", "llama-3-8b", "--bits", "16", "--json", "--max-memory", "2x6GiB,cpu=60GiB")
    )
    assert code == 1, err
    told = json.loads(out)
    assert told["quantized"] == 0
    # accelerate counts rotary frequencies and tables in 16 bits where there is no quantizer.
    rotary = llama["total"] - 2 * TABLE - 32 * BLOCK_4BIT - NORMS
    assert told["total"] == pytest.approx(
        llama["total"] + 3 * llama["quantized"], abs=2**20 + rotary // 2
    )
    total = told["total"] / GIB
    assert told["verdict"] == (
        f"needs {total:.2f} GiB, usable 12.00 GiB: short by {total - 12:.2f} GiB"
    )
    assert told["device_map"] is None


def test_the_map_can_be_pasted(small, checkpoint):
    with simulation.simulated_gpus():
        outcome = simulation.plan_checkpoint(
            checkpoint, simulation.EIGHT_SMALL_GPUS, device_map=dict(small.device_map)
        )
    assert outcome.error is None
    assert outcome.loads_on_gpus


def test_a_model_that_this_release_does_not_know(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "model_of_next_year"}), encoding="utf-8")
    code, out, err = command(str(path), "--max-memory", "1x1GiB")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "model_of_next_year" in err


def test_examples_name_the_release_that_knows_them():
    if Version("4.51") <= TRANSFORMERS:
        pytest.skip("this release knows every example")
    code, out, err = command("--example", "deepseek-v3", "--max-memory", "8x80GiB")
    assert (code, out) == (2, "")
    assert err == (
        f"bnb-dispatch-fix plan: deepseek-v3 is not known to transformers "
        f"{transformers.__version__}; it came with 4.51\n"
    )


def test_a_picture_of_qwen3_names_its_experts(tmp_path):
    if not is_v5():
        pytest.skip("transformers 4.x holds experts as Linear, which are quantized")
    page = tmp_path / "plan.html"
    code, out, err = command(
        *("--example", "qwen3-30b-a3b", "--bits", "4"),
        *("--max-memory", "2x23GiB", "--html", str(page)),
    )
    assert code == 1, err
    first = out.splitlines()[0]
    assert first.startswith("55.18 of 55.60 GiB are not quantized: model.layers.*.mlp.experts")
    assert "55.18 of 55.60 GiB are not quantized" in page.read_text(encoding="utf-8")
    [note] = [line for line in out.splitlines() if line.startswith("note: in 4 bits")]
    assert note.startswith("note: in 4 bits it takes 55.60 GiB; 54.00 of it are experts")
    # What the same plan says where 4.57.6 is installed.
    assert note.endswith("there the model takes 15.09 GiB")


@pytest.mark.parametrize(
    "family, key, given", [("llama", "num_key_value_heads", 2), ("mistral", "head_dim", 32)]
)
def test_a_shape_that_the_release_does_not_build_is_said(family, key, given, tmp_path):
    name = f"{family.title()}ForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "model_type": family,
        "architectures": [name],
        key: given,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape), encoding="utf-8")
    with on_meta():
        model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
    rows = model.model.layers[0].self_attn.k_proj.weight.shape[0]
    wanted = shape["num_key_value_heads"] * shape.get("head_dim", 16)
    notes = bnb_dispatch_fix.plan(path, max_memory={0: "1GiB"}).notes
    said = [note for note in notes if f"does not know {key}={given} of this model" in note]
    assert len(said) == (0 if rows == wanted else 1), (rows, notes)


def test_what_the_release_cannot_read_is_one_line(without_weights):
    with pytest.raises(PlanError, match="46XB") as raised:
        bnb_dispatch_fix.plan(without_weights, max_memory={0: "46XB"})
    assert "\n" not in str(raised.value)


def test_a_class_of_a_script_is_explained(without_weights):
    class Local(transformers.LlamaForCausalLM):
        pass

    config = transformers.AutoConfig.from_pretrained(without_weights)
    with pytest.raises(PlanError, match="cannot be imported by another process"):
        bnb_dispatch_fix.plan(Local(config), max_memory={0: GIB})


OWN_CONFIGURATION = """
import os
open(os.environ["TRACE"], "a").close()
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "a_type_of_its_own"

    def __init__(self, hidden_size=64, **kwargs):
        self.hidden_size = hidden_size
        super().__init__(**kwargs)
"""
OWN_MODEL = """
import torch
from transformers import PreTrainedModel
from .configuration_own import OwnConfig

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    _no_split_modules = ["Linear"]

    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.post_init()

    def _init_weights(self, module):
        pass
"""
OWN = {
    "model_type": "a_type_of_its_own",
    "architectures": ["OwnModel"],
    "auto_map": {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    },
}


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OWN), encoding="utf-8")
    (folder / "configuration_own.py").write_text(OWN_CONFIGURATION, encoding="utf-8")
    (folder / "modeling_own.py").write_text(OWN_MODEL, encoding="utf-8")
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return folder, tmp_path / "trace"


def test_code_of_a_checkpoint_is_refused_by_its_name(own_code):
    folder, trace = own_code
    code, out, err = command(str(folder), "--max-memory", "1x1GiB")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "it needs code of its own (configuration_own.py), and none was run" in err
    assert not trace.exists()


def test_trusted_code_runs_in_the_other_process(own_code):
    folder, trace = own_code
    planned = bnb_dispatch_fix.plan(
        folder, max_memory="2x1MiB", quantization_config=NF4, trust_remote_code=True
    )
    assert trace.exists()
    assert planned.model == "OwnModel"
    # Weights in 4 bits, biases in 16; 4.x takes the last module for a head and leaves it in 16,
    # but for 4.30.
    plain = int(Version("4.31.0") <= TRANSFORMERS < Version("5.0.0.dev0"))
    assert planned.total == (3 - plain) * 64 * 64 // 2 + plain * 64 * 64 * 2 + 3 * 64 * 2
    assert not [name for name in sys.modules if "configuration_own" in name]


@pytest.mark.parametrize(
    "key, value", [("model_type", "\x1b]0;x\x07\x1b[2J"), ("torch_dtype", "\x1b[2J")]
)
def test_no_value_of_a_configuration_steers_the_terminal(without_weights, tmp_path, key, value):
    settings = json.loads((without_weights / "config.json").read_text("utf-8"))
    settings.pop("dtype", None)  # what 5.x writes, and reads first
    (tmp_path / "config.json").write_text(json.dumps({**settings, key: value}), encoding="utf-8")
    code, out, err = command(str(tmp_path), "--max-memory", "1x1GiB")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.rstrip("\n").isprintable()
    assert r"\x1b" in err


def test_a_quantization_of_null_is_none(without_weights, tmp_path):
    settings = json.loads((without_weights / "config.json").read_text("utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**settings, "quantization_config": None}), encoding="utf-8")
    try:
        transformers.AutoConfig.from_pretrained(path)
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} cannot read it itself")
    code, out, err = command(str(path), "--bits", "4", "--max-memory", "8x1GiB")
    assert code == 0, err
    assert "4-bit nf4 (bitsandbytes)" in out


def test_what_json_prints_is_what_its_schema_says(llama):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks the schema of plans")
    schema = Path(__file__).parents[2] / "docs" / "plan-schema.json"
    jsonschema.validate(llama, json.loads(schema.read_text("utf-8")))
