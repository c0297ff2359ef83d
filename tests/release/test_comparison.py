"""The precisions that `plan` compares, against a plan of each of them in the installed release."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="plans real models: needs torch")
pytest.importorskip("bitsandbytes", reason="it is what quantizes to 8 and 4 bits")

import planned
import transformers
from plan_jobs import MIB, as_before, job
from shapes import SHARE

from bnb_dispatch_fix.planning.precisions import QUANTIZATION
from bnb_dispatch_fix.planning.rehearsal import carry_out

__all__ = ["as_before"]
#: Scales are rounded up to bytes, once per block here and once per layer there.
ROUNDED = 3 * 20


@pytest.mark.parametrize("family", planned.FAMILIES)
def test_each_precision_is_what_a_plan_of_it_says(family):
    if not planned.available(family):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    rows = carry_out(job(family, 40 * MIB, compare=True))["precisions"]
    assert [row["name"] for row in rows] == list(QUANTIZATION)
    for row in rows:
        alone = carry_out(job(family, 40 * MIB, quantization=QUANTIZATION[row["name"]]))
        assert row["total"] == alone["total"], row["name"]
        assert row["scales"] == pytest.approx(alone["scales"], abs=ROUNDED), row["name"]
        assert (row["fits"], row["devices"]) == (True, [0])
    sixteen, eight, four, nested = (row["total"] for row in rows)
    assert sixteen > eight > four == nested


def test_the_largest_that_fits_is_planned_in_detail():
    rows = carry_out(job("llama", 40 * MIB, compare=True))["precisions"]
    shown = {}
    for row in rows:  # room for it on the first of two devices and for nothing on the second
        budget = int((row["total"] + row["scales"]) / 0.9 * 1.01)
        budgets = [[0, budget], [1, 0], ["cpu", 2**40]]
        answer = carry_out(job("llama", 0, max_memory=budgets, compare=True))
        assert answer["fits"]
        assert [run["outcome"] for run in answer["runs"]][-1] == "loads"
        shown[row["name"]] = answer["precision"]
    assert list(shown.values())[:2] == ["bfloat16", "8-bit (bitsandbytes), bfloat16"]
    assert shown["4"] == shown["4dq"] == "4-bit nf4 (bitsandbytes), bfloat16"


def test_what_has_no_room_for_its_scales_barely_fits():
    """Almost all of it is quantized: the scales are an eighth, and a tenth is kept for them."""
    if SHARE == 1:
        pytest.skip("before 4.33 nothing is kept for scales, and no precision has room for them")
    settings = job("llama", 0)
    few = {"vocab_size": 16, "pad_token_id": 0, "max_position_embeddings": 2}
    settings["config"] = {**settings["config"], **few}  # older releases keep a table of positions
    small = {row["name"]: row for row in carry_out({**settings, "compare": True})["precisions"]}
    assert small["4"]["scales"] > 0.11 * small["4"]["total"]
    budget = int(small["4"]["total"] / SHARE) + 16
    answer = carry_out({**settings, "max_memory": [[0, budget]], "compare": True})
    barely, nested = answer["precisions"][2:]
    assert barely["fits"]
    over = barely["total"] + barely["scales"] - budget
    assert barely["over"] == pytest.approx(over, abs=ROUNDED)
    assert (nested["fits"], nested["over"]) == (True, 0)
    assert answer["scales"] == pytest.approx(nested["scales"], abs=ROUNDED)


def test_where_nothing_fits_the_smallest_is_planned():
    answer = carry_out(job("llama", 1000, compare=True))
    assert not answer["fits"]
    assert answer["precision"].startswith("4-bit")
    assert not [row for row in answer["precisions"] if row["fits"] or not row["reason"]]
    nested = answer["precisions"][-1]
    assert answer["scales"] == pytest.approx(nested["scales"], abs=ROUNDED)


def test_the_model_is_built_once(monkeypatch):
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    installed, built = layer.__init__, []

    def counted(self, *args, **kwargs):
        built.append(self)
        installed(self, *args, **kwargs)

    monkeypatch.setattr(layer, "__init__", counted)
    budget = carry_out(job("llama", 40 * MIB, compare=True))["precisions"][1]["total"]
    built.clear()
    # 8 bits, which are loaded, too, where they are what fits.
    budgets = [[0, int(budget * 1.15)], ["cpu", 2**40]]
    answer = carry_out(job("llama", 0, max_memory=budgets, compare=True))
    assert answer["precision"].startswith("8-bit")
    assert len(built) == planned.LAYERS
