"""Loads of public reports that got a wrong answer or none: what must be readable, pasted back."""

from __future__ import annotations

import json
import logging
import re
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="what refuses a device map is its quantizer")

import transformers
from cell import TRANSFORMERS, installed
from packaging.version import Version
from transformers import BitsAndBytesConfig

import bnb_dispatch_fix
from bnb_dispatch_fix.planning.simulation import build_checkpoint, outcome_of

DATA = json.loads((Path(__file__).parent.parent / "data" / "answers.json").read_text("utf-8"))
#: Before accelerate 0.22 a budget's text is read by int().
WHOLE_NUMBERS = Version(installed("accelerate") or "1") < Version("0.22.0")
UNITS = {"GiB": 2**30, "MiB": 2**20}


@pytest.fixture(autouse=True)
def active(monkeypatch):
    monkeypatch.delenv("BNB_DISPATCH_FIX", raising=False)
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


@pytest.fixture(scope="module")
def folders():
    """Llama-3-8B without weights: to be quantized, and stored quantized."""
    with TemporaryDirectory() as plain, TemporaryDirectory() as stored:
        write(plain)
        write(
            stored,
            quantization_config={
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "bfloat16",
            },
        )
        yield {False: plain, True: stored}


def write(folder, **settings):
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        **settings,
    )
    config.save_pretrained(folder)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    Path(folder, "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def in_bytes(size):
    return int(size[:-3]) * UNITS[size[-3:]] if isinstance(size, str) else size


def keys(mapping):
    """JSON's keys as devices; "model.layers.0-9" as the names it stands for."""
    found = {}
    for key, value in mapping.items():
        run = re.fullmatch(r"(.+\.)(\d+)-(\d+)", key)
        if run:
            numbers = range(int(run[2]), int(run[3]) + 1)
            found.update({f"{run[1]}{number}": value for number in numbers})
        else:
            found[int(key) if key.isdigit() else key] = value
    return found


def arguments(entry):
    """What the report's call passes."""
    call = {name: keys(v) if isinstance(v, dict) else v for name, v in entry["call"].items()}
    call.setdefault("device_map", "auto")
    if not entry.get("stored") and "free" in entry:
        eight = entry.get("bits") == 8
        settings = {"load_in_8bit": True} if eight else {"load_in_4bit": True}
        settings.update({} if eight else {"bnb_4bit_quant_type": "nf4"})
        call["quantization_config"] = BitsAndBytesConfig(**settings, **entry.get("config", {}))
    return call


def load(folder, free, call):
    given = {name: dict(v) if isinstance(v, dict) else v for name, v in call.items()}
    loader = transformers.AutoModelForCausalLM.from_pretrained
    return outcome_of(lambda: loader(folder, torch_dtype=torch.bfloat16, **given), free)


def said(error, caplog):
    """The note on the error and the warnings of this package."""
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("bnb_dispatch_fix")]
    notes = "" if error is None else "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "\n".join([*warnings, notes.partition("bnb-dispatch-fix: ")[2]])


def recipes(text):
    """The arguments in it, as a program that pastes them has them."""
    names = {"torch": torch, "BitsAndBytesConfig": BitsAndBytesConfig}
    lines = re.findall(r"^     (\S.*)$|\(planned\): ([^;\n]*)", text, re.MULTILINE)
    return [eval(f"dict({line or other})", names) for line, other in lines]


def skip_where_it_is_another_case(entry):
    if entry.get("old_accelerate") and not WHOLE_NUMBERS:
        pytest.skip("accelerate 0.22 and newer read fractions")
    if entry.get("stored") and Version("4.38.0") > TRANSFORMERS:
        pytest.skip("before 4.38 what is stored quantized is offloaded without an error")


LOADS = [pytest.param(entry, id=entry["id"]) for entry in DATA["loads"]]


@pytest.mark.parametrize("entry", LOADS)
def test_the_answer_is_readable_and_its_recipes_load(entry, folders, caplog):
    skip_where_it_is_another_case(entry)
    caplog.set_level(logging.WARNING)
    folder = folders[bool(entry.get("stored"))]
    free = {device: in_bytes(size) for device, size in keys(entry["free"]).items()}
    call = arguments(entry)
    text = said(load(folder, free, call).error, caplog)
    for pattern in entry["says"]:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    found = recipes(text)
    assert bool(found) == bool(entry.get("recipes")), text
    for recipe in found:
        again = load(folder, free, {**call, **recipe})
        assert again.error is None, (recipe, again.error)
        config = recipe.get("quantization_config")
        offloads = getattr(config, "llm_int8_enable_fp32_cpu_offload", False)
        assert again.loads_on_gpus or offloads, (recipe, again.device_map)


def test_nothing_was_found_is_said_only_where_nothing_is(folders, caplog):
    """4 GiB for 8.46: neither no max_memory nor other budgets help, 4 bits do not either."""
    free = {0: 3 * 2**30, "cpu": 2**30}
    call = arguments({"free": {}, "bits": 8, "call": {}})
    text = said(load(folders[False], free, call).error, caplog)
    assert "more devices of 3.00 GiB" in text
    assert "no change of budgets" not in text


# --- a whole model on the CPU --------------------------------------------------------------------


def test_no_word_where_no_accelerator_is_there_and_none_was_named(folders, caplog):
    caplog.set_level(logging.WARNING)
    outcome = load(folders[False], {"cpu": 60 * 2**30}, {"device_map": "auto"})
    assert outcome.error is None
    assert set(map(str, outcome.device_map.values())) == {"cpu"}
    assert said(None, caplog).strip() == ""


def test_a_map_that_asks_for_the_cpu_is_no_surprise(folders, caplog):
    caplog.set_level(logging.WARNING)
    free = {0: 24 * 2**30, "cpu": 60 * 2**30}
    outcome = load(folders[False], free, {"device_map": {"": "cpu"}})
    assert outcome.error is None
    assert said(None, caplog).strip() == ""


def test_a_whole_model_on_the_cpu_is_one_warning(folders, caplog):
    """An unquantized one is accepted by every release."""
    caplog.set_level(logging.WARNING)
    free = {0: 512, "cpu": 60 * 2**30}
    outcome = load(folders[False], free, {"device_map": "auto"})
    assert outcome.error is None
    [line] = said(None, caplog).strip().splitlines()
    assert line.startswith("the whole model goes to the CPU: free memory was read as: GPU 0 512")
    assert "name max_memory yourself" in line


@pytest.mark.parametrize("switch", ["off", "backport,rescue"])
def test_explain_switched_off_says_nothing(switch, folders, caplog, monkeypatch):
    monkeypatch.setenv("BNB_DISPATCH_FIX", switch)
    bnb_dispatch_fix.activate()
    caplog.set_level(logging.WARNING)
    outcome = load(folders[False], {0: 512, "cpu": 60 * 2**30}, {"device_map": "auto"})
    assert outcome.error is None
    assert said(None, caplog).strip() == ""


# --- without simulated GPUs ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint():
    with TemporaryDirectory() as folder:
        build_checkpoint(folder, intermediate_size=192)
        yield folder


@pytest.mark.parametrize("entry", [pytest.param(e, id=e["id"]) for e in DATA["real"]])
def test_an_argument_that_nothing_can_load_with(entry, checkpoint, caplog):
    if torch.cuda.is_available():
        pytest.skip("torch sees GPUs here")
    with pytest.raises(Exception) as caught:  # each release raises another
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **arguments(entry))
    text = said(caught.value, caplog)
    for pattern in entry["says"]:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"


@pytest.mark.parametrize("budget", ["1500KB", "100KB"])
def test_without_a_gpu_a_budget_of_the_cpu_is_no_slip(budget, checkpoint, caplog):
    if torch.cuda.is_available():
        pytest.skip("torch sees GPUs here")
    if Version("4.50.0") > TRANSFORMERS:
        pytest.skip("before 4.50 bitsandbytes quantizes on GPUs only")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    call = {"device_map": "auto", "quantization_config": config}
    loader = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match="CPU or the disk") as caught:
        loader(checkpoint, **call, max_memory={"cpu": budget})
    text = said(caught.value, caplog)
    assert re.search("torch .* sees no GPU", text)
    assert "write a text with a unit" not in text
    assert re.search(r"the CPU's .* do not hold the model", text)
    [recipe] = recipes(text)
    model = loader(checkpoint, **call, **recipe)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


# --- nothing else changes ------------------------------------------------------------------------


def test_an_explanation_leaves_no_trace(folders, caplog):
    free = {0: 4 * 2**30, "cpu": 60 * 2**30}
    call = arguments({"free": {}, "bits": 8, "call": {}})
    before = state(call)
    assert "any one of these" in said(load(folders[False], free, call).error, caplog)
    assert state(call) == before


def test_measuring_a_hand_written_map_leaves_no_trace(folders, caplog):
    entry = next(entry for entry in DATA["loads"] if entry["id"] == "hand-written-map")
    free, call = {0: 24 * 2**30, "cpu": 60 * 2**30}, arguments(entry)
    before = state(call)
    assert "all of it fits" in said(load(folders[False], free, call).error, caplog)
    assert state(call) == before


def state(call):
    loggers = [logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict)]
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "filters": {logger.name: list(logger.filters) for logger in loggers if logger.filters},
        "config": call["quantization_config"].to_dict(),
        "map": call["device_map"],
    }
