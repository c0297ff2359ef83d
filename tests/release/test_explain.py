"""What a refusal says on the installed release: numbers worked out by hand, recipes applied."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="what refuses a device map is its quantizer")

import shapes
import transformers
from cell import installed
from packaging.version import Version
from safetensors.torch import save_file
from shapes import SHARE, TRANSFORMERS, Shape
from transformers import BitsAndBytesConfig

import bnb_dispatch_fix
from bnb_dispatch_fix.planning.simulation import build_checkpoint, outcome_of

GIB = 2**30
REFUSAL = "Some modules are dispatched on the CPU or the disk"

#: Before Python 3.11 an error has no notes; the lines then end its message.
HAS_NOTES = hasattr(BaseException, "add_note")
TITLE = "bnb-dispatch-fix: "
#: Before accelerate 0.22 a budget's text is read by int().
WHOLE_NUMBERS = Version(installed("accelerate") or "1") < Version("0.22.0")

pytestmark = pytest.mark.skipif(SHARE != 0.9, reason="transformers before 4.33 keep no tenth back")


@pytest.fixture(autouse=True)
def active(monkeypatch):
    monkeypatch.delenv("BNB_DISPATCH_FIX", raising=False)
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


def gib(size):
    return shapes.even(size * GIB)


# The public reports in GiB: 40 blocks of 0.28 between 1.25 and 1.25, on 14 × 0.9; 12.6 - 13.7.
ONE_T4 = Shape(gib(1.25), (gib(0.28),) * 40, gib(1.25))
#: 48 blocks of 1.13 between 0.58 and 0.58, on 2 × 23 × 0.9 = 41.4: 55.4 in all.
TWO_23 = Shape(gib(0.58), (gib(1.13),) * 48, gib(0.58))
#: 8.5 in all: it fits neither 0.81 × 10 nor 0.9 × 9.
EIGHT_AND_A_HALF = Shape(gib(0.25), (gib(0.5),) * 16, gib(0.25))
#: The head alone is larger than either budget.
LARGE_HEAD = Shape(gib(1), (gib(0.5),) * 4, gib(3))
#: In 8 bits twice as much as in 4: 8 + 1 and 4 + 1.
EIGHT_BIT = Shape(gib(0.5), (gib(0.5),) * 8, gib(0.5))


def load(shape, *, free=None, bits=4, **arguments):
    """The outcome of the real `from_pretrained`, up to the moment when weights are read."""
    given = {
        "device_map": "auto",
        "torch_dtype": torch.float16,
        "quantization_config": shapes.quantization(bits),
        **arguments,
    }
    with shapes.checkpoint(shape) as folder:
        return outcome_of(lambda: shapes.ShapeModel.from_pretrained(folder, **given), free)


def note(error):
    """The one note of this package."""
    texts = error.__notes__ if HAS_NOTES else str(error).split(f"\n{TITLE}")[1:]
    (text,) = texts
    assert text.startswith(TITLE) == HAS_NOTES
    return text if HAS_NOTES else TITLE + text


def without_note(error):
    """What the release itself says."""
    return str(error).partition(f"\n{TITLE}")[0]


def assert_not_explained(error):
    assert not hasattr(error, "__notes__")
    assert TITLE not in str(error)


def recipes(text):
    """The arguments of each recipe, as a program that pastes them has them."""
    names = {"torch": torch, "BitsAndBytesConfig": BitsAndBytesConfig}
    listed = text.partition("any one of these loads it")[2].splitlines()[1:]
    lines = [line.strip() for line in listed if line.startswith("     ")]
    return [eval(f"dict({line})", names) for line in lines]


def assert_loads(shape, outcome, max_memory):
    assert outcome.error is None
    for device, size in shape.loads(outcome.device_map).items():
        assert size <= max_memory[device] * 0.9


def assert_budgets(recipe, max_memory, least):
    """Budgets in tenths of a GiB; in whole MiB, between the least and these, where it must be."""
    assert list(recipe) == ["max_memory"]
    if not WHOLE_NUMBERS:
        assert recipe["max_memory"] == max_memory
        return
    assert list(recipe["max_memory"]) == list(max_memory)
    for device, size in recipe["max_memory"].items():
        if device == "cpu":
            assert size == max_memory["cpu"]
        else:
            assert size.endswith("MiB")
            assert least * 1024 <= int(size[:-3]) <= float(max_memory[device][:-3]) * 1024


def assert_offload_loads(shape, recipe, outcome):
    """Accepted as it is, within the budget of 14, with the modules on the CPU unquantized there."""
    assert outcome.error is None
    assert outcome.device_map == recipe["device_map"]
    loads = shape.loads(recipe["device_map"])
    on_cpu = [size for name, size in shape.sizes.items() if device_of(name, recipe) == "cpu"]
    assert len(on_cpu) == 8  # by hand: 12.6 - 4 × 0.28 kept free - 2.5 = 8.98 = 32 blocks of 0.28
    assert loads[0] + 4 * max(on_cpu) <= 14 * GIB * 0.9
    assert 4 * loads["cpu"] <= 12 * GIB


def assert_head_loads(recipe, outcome):
    """Head and embedding away, 2.5: 11.2 stay, and 1.25 are kept free to run the larger of them."""
    assert outcome.error is None
    loads = ONE_T4.loads(recipe["device_map"])
    assert loads == {"cpu": ONE_T4.embed + ONE_T4.head, 0: sum(ONE_T4.blocks)}
    assert loads[0] + ONE_T4.head <= 14 * GIB * 0.9


def device_of(name, recipe):
    return shapes.device_of(name, recipe["device_map"])


# --- the refusal itself ------------------------------------------------------------------------

T4 = {0: "14GiB", "cpu": "12GiB"}


def test_numbers_of_a_shortage_and_every_recipe():
    outcome = load(ONE_T4, max_memory=dict(T4))
    text = note(outcome.error)
    assert "needs 13.70 GiB, usable 12.60 GiB: short by 1.10 GiB" in text
    assert re.search(r"GPU 0 +14\.00 +12\.60 ", text)
    assert re.search(r"CPU +12\.00 +10\.80 ", text)
    assert "usable = given × 0.9" in text
    assert "layers.*.linear 11.20 (40 of them) 4-bit" in text
    assert "head 1.25" in text
    assert "1 more device of 14.00 GiB" in text
    budgets, head, offload = recipes(text)
    assert_head_loads(head, load(ONE_T4, **head))
    # 13.7 / 0.9 = 15.22
    assert_budgets(budgets, {0: "15.3GiB", "cpu": "12GiB"}, least=15.22)
    assert_loads(ONE_T4, load(ONE_T4, **budgets), {0: 15.3 * GIB})
    assert_offload_loads(ONE_T4, offload, load(ONE_T4, **offload))


def test_the_table_adds_up():
    text = note(load(ONE_T4, max_memory=dict(T4)).error)
    rows = {name: [float(n) for n in numbers.split()] for name, numbers in ROW.findall(text)}
    (given, usable, placed, left), cpu = rows["GPU 0"], rows["CPU"]
    assert placed + cpu[2] == pytest.approx(13.7, abs=0.011)
    assert usable - placed == pytest.approx(left, abs=0.011)
    assert (given, usable) == (14.0, 12.6)
    named = re.search(r"on the CPU: (.+)", text).group(1)
    sizes = [float(size) for size in re.findall(r" (\d+\.\d\d)", named)]
    assert sum(sizes) == pytest.approx(cpu[2], abs=0.02)


ROW = re.compile(r"^  (GPU \d|CPU) +([\d. ]+)$", re.MULTILINE)


def test_two_devices():
    budgets = {0: "23GiB", 1: "23GiB", "cpu": "200GiB"}
    text = note(load(TWO_23, max_memory=budgets).error)
    assert "needs 55.40 GiB, usable 41.40 GiB: short by 14.00 GiB" in text
    found, *_ = recipes(text)
    # Half of the model is 27.7, and 27.7 / 0.9 = 30.78.
    assert_budgets(found, {0: "30.8GiB", 1: "30.8GiB", "cpu": "200GiB"}, least=30.78)
    assert_loads(TWO_23, load(TWO_23, **found), dict.fromkeys((0, 1), 30.8 * GIB))
    assert "1 more device of 23.00 GiB" in text


@pytest.mark.skipif(
    Version("5.0.0.dev0") > TRANSFORMERS,
    reason="4.x counts the head in 4 bits and accepts a map that is too large",
)
def test_a_module_larger_than_every_budget():
    text = note(load(LARGE_HEAD, max_memory={0: 2 * GIB, 1: 3 * GIB, 2: 3 * GIB}).error)
    assert "`head` alone needs 3.00 GiB, the largest budget is 2.70 GiB" in text
    assert text.splitlines()[0].endswith(
        ": 4.00 of 6.00 GiB are not quantized: head 3.00, embed 1.00"
    )


@pytest.mark.skipif(WHOLE_NUMBERS, reason="accelerate before 0.22 keeps no tenth of a lone GPU")
def test_one_gpu_without_max_memory():
    """Free 10: the planner uses 0.9 of it and the quantizer leaves 0.9 of that."""
    free = {0: 10 * GIB, "cpu": 100 * GIB}
    text = note(load(EIGHT_AND_A_HALF, free=free).error)
    assert "needs 8.50 GiB, usable 8.10 GiB: short by 0.40 GiB" in text
    assert "free × 0.9 because there is one accelerator and no max_memory × 0.9" in text
    assert "(0.81)" in text
    found, *_ = recipes(text)
    # 8.5 / 0.9 = 9.44, less than the 10 that are free.
    assert found == {"max_memory": {0: "9.5GiB"}}
    assert_loads(EIGHT_AND_A_HALF, load(EIGHT_AND_A_HALF, free=free, **found), {0: 9.5 * GIB})


def test_what_is_free_is_all_there_is():
    """8.5 / 0.9 = 9.44 are needed: with 9 free, no budget helps."""
    text = note(load(EIGHT_AND_A_HALF, free={0: 9 * GIB, "cpu": 100 * GIB}).error)
    assert "max_memory={" not in text


def test_four_bits_instead_of_eight():
    budgets = {0: 6 * GIB, "cpu": 50 * GIB}
    text = note(load(EIGHT_BIT, bits=8, max_memory=budgets).error)
    assert "needs 9.00 GiB, usable 5.40 GiB: short by 3.60 GiB" in text
    four = next(r for r in recipes(text) if list(r) == ["quantization_config"])
    assert four["quantization_config"].load_in_4bit
    outcome = load(EIGHT_BIT, max_memory=budgets, **four)
    assert_loads(EIGHT_BIT, outcome, {0: 6 * GIB})


def test_experts_are_named_first():
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 × 2048 × 768, two bytes each: 54.00 GiB."""
    if Version("5.0.0.dev0") > TRANSFORMERS:
        pytest.skip("before transformers 5 each expert has linear layers of its own")
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        weights = {"lm_head.weight": torch.zeros(1, dtype=torch.bfloat16)}
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        outcome = outcome_of(
            lambda: transformers.Qwen3MoeForCausalLM.from_pretrained(
                folder,
                device_map="auto",
                max_memory={0: "23GiB", 1: "23GiB", "cpu": "200GiB"},
                quantization_config=shapes.quantization(),
            )
        )
    first, second, third, *_ = note(outcome.error).splitlines()
    assert re.search(r"55\.\d\d of 55\.60 GiB are not quantized: .*experts", first)
    assert second.startswith("54.00 of it are experts")
    # 54 × 0.25 = 13.5, and 55.6 - 54 stay: what 4.57.6 plans, see the test below.
    assert "4.57.6 has a linear layer for each expert" in third
    assert third.endswith("15.09 GiB")


# --- the error stays the same -----------------------------------------------------------------


def test_type_text_and_place_of_the_error_stay():
    found = load(ONE_T4, max_memory=dict(T4)).error
    bnb_dispatch_fix.deactivate()
    expected = load(ONE_T4, max_memory=dict(T4)).error
    assert type(found) is type(expected)
    assert without_note(found) == str(expected)
    assert found.args == expected.args or not HAS_NOTES
    assert_not_explained(expected)
    last = [traceback.extract_tb(error.__traceback__)[-1] for error in (found, expected)]
    assert last[0] == last[1]
    assert (found.__cause__, found.__context__) == (expected.__cause__, expected.__context__)


@pytest.mark.parametrize("switch", ["off", "backport", "backport,rescue"])
def test_explain_can_be_switched_off(switch, monkeypatch):
    monkeypatch.setenv("BNB_DISPATCH_FIX", switch)
    bnb_dispatch_fix.activate()
    error = load(ONE_T4, max_memory=dict(T4)).error
    assert REFUSAL in " ".join(str(error).split())
    assert_not_explained(error)


def test_a_placement_that_rescue_would_have_made(monkeypatch):
    """Six blocks and four: "sequential" keeps room for another one on the first device."""
    monkeypatch.setenv("BNB_DISPATCH_FIX", "explain")
    bnb_dispatch_fix.activate()
    shape = Shape(2**21, (gib(1),) * 10, 2**21)
    budgets = {0: gib(6.7), 1: gib(4.6), "cpu": gib(100)}  # usable: 6.03 and 4.14
    outcome = load(shape, device_map="sequential", max_memory=budgets)
    text = note(outcome.error)
    assert "it fits" in text
    assert "BNB_DISPATCH_FIX=backport,rescue,explain" in text
    (found,) = recipes(text)
    assert_loads(shape, load(shape, **found), budgets)


def test_a_model_that_loads_is_not_looked_at(monkeypatch):
    from bnb_dispatch_fix.explain import refusal as diagnosis

    monkeypatch.setattr(diagnosis, "lines", lambda *_: pytest.fail("explained without an error"))
    outcome = load(ONE_T4, max_memory={0: "20GiB", "cpu": "12GiB"})
    assert outcome.error is None


# --- arguments, as this release refuses them ---------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint():
    with TemporaryDirectory() as folder:
        build_checkpoint(folder)
        yield folder


WRONG = [
    ({"max_memory": {"0": "5GiB"}}, "write the number 0, without quotes"),
    ({"max_memory": {"cuda:1": "5GiB", "cpu": "9GiB"}}, "write the number 1, without quotes"),
    ({"max_memory": "46GB"}, "expected a dict"),
    ({"max_memory": {0: "46G"}}, "write '46GiB'"),
    ({"device_map": "atuo"}, "did you mean 'auto'?"),
    ({"device_map": "Balanced"}, "did you mean 'balanced'?"),
]


@pytest.mark.parametrize(("wrong", "right"), WRONG, ids=str)
def test_a_misspelt_argument_is_refused_as_before_and_explained(wrong, right, checkpoint):
    def attempt():
        options = {"device_map": "auto", "quantization_config": shapes.quantization(), **wrong}
        return outcome_of(
            lambda: transformers.LlamaForCausalLM.from_pretrained(checkpoint, **options)
        ).error

    found = attempt()
    bnb_dispatch_fix.deactivate()
    expected = attempt()
    assert type(found) is type(expected)
    assert without_note(found) == str(expected)
    assert right in note(found)


def test_a_map_that_misses_modules(checkpoint, tmp_path):
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    with pytest.raises((ValueError, KeyError)) as caught:
        transformers.LlamaForCausalLM.from_pretrained(
            checkpoint, device_map=device_map, offload_folder=str(tmp_path)
        )
    assert "device_map has no device for model.layers" in note(caught.value)
