"""transformers' `pipeline`: it tries again in float32 what was refused, and forgets the refusal."""

from __future__ import annotations

import contextlib
import re

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="the refusal is of its quantizer")

import transformers
from cell import STANDS_FOR_OTHERS
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

import bnb_dispatch_fix
from bnb_dispatch_fix.planning.simulation import Planned, build_checkpoint, simulated_gpus

if not STANDS_FOR_OTHERS:
    pytest.skip("one release of each way to load", allow_module_level=True)

MIB = 2**20
GENERATION = int(transformers.__version__.split(".")[0])
#: In float16 embedding and head, 1 MiB each, have a GPU each and the blocks have none; in float32
#: nothing has one.
TWO_TOO_SMALL = {0: int(1.13 * MIB), 1: int(1.13 * MIB), "cpu": 2**33}
NEEDED = "needs 2.21 MiB, usable 2.03 MiB"


@pytest.fixture(autouse=True)
def active():
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build_checkpoint(folder, intermediate_size=192)
    return str(folder)


def asked(max_memory):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    return {"quantization_config": config, "max_memory": dict(max_memory)}


def tokenizer():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0}))
    return PreTrainedTokenizerFast(tokenizer_object=words)


def pipeline(folder, max_memory):
    return transformers.pipeline(
        "text-generation",
        model=folder,
        tokenizer=tokenizer(),
        device_map="auto",
        model_kwargs=asked(max_memory),
    )


@contextlib.contextmanager
def gpus_that_load():
    """Simulated GPUs, and a model that goes to the CPU as a whole is loaded there."""
    load = vars(transformers.PreTrainedModel)["_load_pretrained_model"]
    with simulated_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", load)
        yield


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "bnb_dispatch_fix"]


@pytest.mark.skipif(GENERATION < 5, reason="4.x does not load on the CPU as a whole")
def test_the_note_on_the_first_attempt_is_told(folder, caplog):
    with gpus_that_load():
        found = pipeline(folder, TWO_TOO_SMALL)
    assert {parameter.device.type for parameter in found.model.parameters()} == {"cpu"}
    on_cpu, caught = warnings(caplog)
    assert on_cpu.startswith("the whole model goes to the CPU: max_memory was read as: GPU 0 1.13")
    assert "an attempt before it failed" in caught
    assert NEEDED in caught
    assert "any one of these loads it (each was planned)" in caught


@pytest.mark.skipif(GENERATION > 4, reason="5.x loads on the CPU as a whole")
def test_the_note_is_in_the_error_where_every_attempt_fails(folder):
    """One GPU is refused in 4.44, two are in 4.57; the other is accepted, on the CPU."""
    texts = []
    for count in (1, 2):
        with simulated_gpus(), contextlib.suppress(Planned):
            try:
                pipeline(folder, {**dict.fromkeys(range(count), MIB * 2 // 5), "cpu": 2**33})
            except ValueError as error:
                texts.append("\n".join([str(error), *getattr(error, "__notes__", ())]))
    assert texts
    for text in texts:
        assert "Could not load model" in text
        assert "bnb-dispatch-fix: " in text
        assert re.search("GPU 0 +409.60 KiB", text), text


def test_an_error_that_is_handled_elsewhere_is_told_once(folder, caplog):
    """Only the load that is tried while it is handled tells of it; a second one does not again."""
    fine = {**dict.fromkeys(range(8), 4 * MIB), "cpu": 2**33}
    try:
        with simulated_gpus():
            AutoModelForCausalLM.from_pretrained(folder, device_map="auto", **asked(TWO_TOO_SMALL))
    except Planned:
        pytest.skip("this release accepts modules on the CPU")
    except ValueError:
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(folder)
    assert ["an attempt before it failed" in line for line in warnings(caplog)] == [True]
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(folder)
    assert warnings(caplog) == []
    with simulated_gpus(), pytest.raises(Planned) as planned:
        pipeline(folder, fine)
    assert set(planned.value.device_map.values()) <= set(range(8))


def test_explain_switched_off_tells_nothing(folder, caplog):
    bnb_dispatch_fix.activate(["backport", "rescue"])
    try:
        raise ValueError("refused\nbnb-dispatch-fix: a note")
    except ValueError:
        AutoModelForCausalLM.from_pretrained(folder)
    assert warnings(caplog) == []
