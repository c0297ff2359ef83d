"""What `plan` says to change, done: the changed arguments are planned by the installed release."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="plans real models: needs torch")
pytest.importorskip("bitsandbytes", reason="simulated GPUs need it, before one is pretended")

from plan_jobs import MIB, as_before, job

from bnb_dispatch_fix.planning.precisions import QUANTIZATION
from bnb_dispatch_fix.planning.rehearsal import carry_out

__all__ = ["as_before"]
NF4 = QUANTIZATION["4"]


def config_of(**settings):
    return {key: value for key, value in settings.items() if value is not False}


def arguments(text):
    """What is to be pasted, as a dict."""
    names = {"torch": torch, "BitsAndBytesConfig": config_of}
    return eval(f"dict({text})", names) if text else {}


def again(settings, given):
    """The plan with the changed arguments."""
    changes = {}
    if "max_memory" in given:
        changes["max_memory"] = list(map(list, given["max_memory"].items()))
    if "quantization_config" in given:
        changes["quantization"] = given["quantization_config"]
    dtype = given.get("dtype", given.get("torch_dtype"))
    if dtype is not None:
        changes["dtype"] = str(dtype).replace("torch.", "")
    return carry_out({**settings, **changes})


@pytest.mark.parametrize("bits", ["4", "8", "16"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_each_recipe_loads(family, bits):
    settings = job(family, 10, quantization=QUANTIZATION[bits])
    total = carry_out(settings)["total"]
    # Two thirds of what is needed; more for the recipes that change less.
    for share in (0.34, 0.49):
        settings = job(family, int(total * share), quantization=QUANTIZATION[bits])
        answer = carry_out(settings)
        assert not answer["fits"]
        assert answer["recipes"]
        for what, text in answer["recipes"]:
            given = arguments(text)
            if not given:
                assert re.fullmatch(r"\d+ more devices? of .*", what), what
            elif "device_map" in given:
                assert "cpu" in given["device_map"].values()  # judged by the notes' own tests
            else:
                assert again(settings, given)["fits"], (what, text)


def test_what_is_not_quantized_may_be():
    settings = job("llama", 0, quantization=None)
    total = carry_out({**settings, "max_memory": [[0, 40 * MIB]]})["total"]
    settings["max_memory"] = [[0, int(total * 0.8)]]
    recipes = dict(carry_out(settings)["recipes"])
    text = recipes["8-bit with bitsandbytes"]
    assert text == "quantization_config=BitsAndBytesConfig(load_in_8bit=True)"
    assert again(settings, arguments(text))["fits"]


def test_a_model_that_is_spread_and_fits_on_one_card_says_so():
    settings = job("llama", 0, quantization=NF4)
    budgets = {**dict.fromkeys(range(6), 40 * MIB), "cpu": 2**40}
    settings["max_memory"] = list(map(list, budgets.items()))
    answer = carry_out(settings)
    used = [
        {device for _, device in run["device_map"]}
        for run in answer["runs"]
        if run["outcome"] == "loads"
    ]
    assert max(map(len, used)) > 1
    assert answer["fewer"]["devices"] == [0]
    given = arguments(answer["fewer"]["arguments"])
    assert given == {"max_memory": {0: "40MiB"}}
    alone = again(settings, given)
    assert alone["fits"]
    assert {device for _, device in alone["device_map"]} == {0}


def test_two_cards_of_three_are_the_largest_two():
    settings = job("llama", 40 * MIB, quantization=NF4)
    total = carry_out(settings)["total"]
    small, large = int(total * 0.75), int(total * 0.9)
    settings["max_memory"] = [[0, large], [1, small], [2, large], ["cpu", 2**40]]
    answer = carry_out(settings)
    assert answer["fits"]
    used = [len({d for _, d in run["device_map"]}) for run in answer["runs"]]
    if max(used) == 3:
        assert answer["fewer"]["devices"] == [0, 2]
        alone = again(settings, arguments(answer["fewer"]["arguments"]))
        assert {device for _, device in alone["device_map"]} == {0, 2}
    else:
        assert answer["fewer"] is None


def test_one_card_is_not_told_to_be_one():
    answer = carry_out(job("llama", 0, quantization=NF4, max_memory=[[0, 40 * MIB]]))
    assert (answer["fewer"], answer["recipes"]) == (None, [])
