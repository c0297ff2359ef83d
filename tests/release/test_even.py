"""The feature `even` on the installed release: the most even spread, and nothing that is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="most models here are quantized by it")

import evenness
import shapes
from shapes import LISTED, SHARE, STRATEGIES, Shape
from transformers import LlamaConfig

import bnb_dispatch_fix
from bnb_dispatch_fix.planning.simulation import (
    EIGHT_SMALL_GPUS,
    build_checkpoint,
    plan_checkpoint,
    replaced,
    simulated_gpus,
)

EVERYTHING = ["backport", "rescue", "explain", "even"]
SPREAD = ("auto", "balanced")

#: Embedding 10, sixteen blocks of 5 and head 10, in bytes × 1000; then larger ends, and tied ones.
SHAPES = {
    "plain": Shape(10_000, (5_000,) * 16, 10_000),
    "large ends": Shape(40_000, (3_000,) * 20, 30_000),
    "tied": Shape(20_000, (5_000, 7_000) * 8, 0, True),
    "two kinds": Shape(2_000, (9_000,) * 5 + (1_000,) * 30, 6_000),
}
#: Usable budgets by device, as a part of the model.
BUDGETS = {
    "two": {0: 0.8, 1: 0.8},
    "eight": dict.fromkeys(range(8), 0.5),
    "24+12": {0: 1.2, 1: 0.6},
    "80+8": {0: 2, 1: 0.5},
    "24+24+8": {0: 1.2, 1: 1.2, 2: 0.4},
    "gaps": {1: 0.7, 4: 0.7, 6: 0.5},
}


@pytest.fixture(autouse=True)
def off():
    bnb_dispatch_fix.deactivate()
    yield
    bnb_dispatch_fix.deactivate()


def budgets_of(shape, parts, share=SHARE):
    """`max_memory` that leaves these parts of the model, and what is usable of it in bytes."""
    total = sum(shape.sizes.values())
    given = {device: int(total * part / share) + 1 for device, part in parts.items()}
    return {**given, "cpu": 10 * total}, {d: int(size * share) for d, size in given.items()}


def lines(shape):
    """The parts in model order; what is tied is one part, at the beginning or at the end."""
    embed, *blocks, head = shape.sizes.values()
    return [[embed, *blocks], [*blocks, embed]] if shape.tied else [[embed, *blocks, head]]


def optimum(shape, budgets):
    fills = [evenness.smallest_largest_fill(sizes, budgets) for sizes in lines(shape)]
    return min((fill for fill in fills if fill is not None), default=None)


def assert_even(shape, device_map, usable, strategy="auto"):
    """The best there is, by an oracle of its own."""
    loads = shape.loads(device_map)
    budgets = [usable[device] for device in sorted(usable)]
    best = optimum(shape, budgets)
    if strategy == "balanced_low_0":
        (sizes,) = lines(shape)
        spared = evenness.least_on_first(sizes, budgets)
        assert loads.pop(min(usable), 0) == spared, device_map
        while spared > 0:
            spared -= sizes.pop(0)
        best = evenness.smallest_largest_fill(sizes, budgets[1:])
    assert evenness.largest_fill(loads, usable) == best, (device_map, loads)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0"])
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_fullest_card_is_as_empty_as_can_be(shape, budgets, strategy):
    max_memory, usable = budgets_of(shape, BUDGETS[budgets])
    if shape.tied and strategy == "balanced_low_0":
        strategy = "balanced"  # where the tied ones go is a matter of taste there
    if strategy == "balanced_low_0" and SHARE == 1 and len(usable) == 2:
        pytest.skip("before 4.33 the scales have to fit in the second card's budget, too")
    bnb_dispatch_fix.activate(EVERYTHING)
    found = shapes.plan(shape, strategy, max_memory)
    shapes.assert_placed(shape, found, max_memory)
    assert_even(shape, found.device_map, usable, strategy)


@pytest.mark.parametrize("features", [["even"], ["backport", "even"], EVERYTHING], ids=len)
def test_it_needs_no_other_feature(features):
    shape = SHAPES["plain"]
    max_memory, usable = budgets_of(shape, BUDGETS["24+12"])
    bnb_dispatch_fix.activate(features)
    assert_even(shape, shapes.plan(shape, "auto", max_memory).device_map, usable)


def test_without_budgets_what_is_free_counts():
    shape = SHAPES["plain"]
    free, usable = budgets_of(shape, {0: 1.5, 1: 0.5, 2: 1})
    bnb_dispatch_fix.activate(EVERYTHING)
    assert_even(shape, shapes.plan(shape, "auto", None, free).device_map, usable)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("budgets", ["eight", "80+8"])
def test_switched_off_nothing_is_another(budgets, strategy):
    """And "sequential" is not touched with it."""
    for shape in SHAPES.values():
        max_memory, _ = budgets_of(shape, BUDGETS[budgets])
        bnb_dispatch_fix.activate(EVERYTHING[:3])
        expected = shapes.plan(shape, strategy, max_memory)
        bnb_dispatch_fix.activate()
        default = shapes.plan(shape, strategy, max_memory)
        bnb_dispatch_fix.activate(EVERYTHING)
        spread = shapes.plan(shape, strategy, max_memory)
        bnb_dispatch_fix.deactivate()
        for found in (default, spread) if strategy == "sequential" else (default,):
            assert list(found.device_map.items()) == list(expected.device_map.items())
            assert found.error is expected.error is None


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.skipif(not shapes.HAS_PLANNER, reason="from_pretrained would have to load weights")
def test_a_model_that_is_not_quantized_is_spread_too(strategy):
    shape = SHAPES["plain"]
    model = shapes.build(shape, torch.nn.Linear)  # a block is four times as large
    whole = Shape(shape.embed, tuple(4 * size for size in shape.blocks), shape.head)
    max_memory, usable = budgets_of(whole, BUDGETS["24+12"], 1)
    bnb_dispatch_fix.activate(EVERYTHING)
    found = shapes.call_planner(model, strategy, max_memory, None)
    assert found.error is None
    assert_even(whole, found.device_map, usable)


@pytest.mark.parametrize(("case", "strategy"), LISTED)
def test_a_case_loads_if_and_only_if_it_does_without(case, strategy):
    shape = shapes.from_mib(case["shape"])
    max_memory = {
        gpu if gpu == "cpu" else int(gpu): int(size * shapes.MIB * case["factor"] / SHARE) + 1
        for gpu, size in case["max_memory"].items()
    }
    bnb_dispatch_fix.activate(EVERYTHING[:3])
    expected = shapes.plan(shape, strategy, max_memory)
    bnb_dispatch_fix.activate(EVERYTHING)
    found = shapes.plan(shape, strategy, max_memory)
    assert (found.error is None) == (expected.error is None)
    if case["fits_on_accelerators"]:
        shapes.assert_placed(shape, found, max_memory)
        usable = {d: int(size * SHARE) for d, size in max_memory.items() if d != "cpu"}
        budgets = [usable[device] for device in sorted(usable)]
        if strategy in SPREAD and optimum(shape, budgets) is not None:
            assert_even(shape, found.device_map, usable)


def test_from_pretrained_plans_a_llama_evenly(tmp_path):
    """Embedding and head take 1 MiB each, all else together less: alone on a card, each of them."""
    build_checkpoint(tmp_path)
    bnb_dispatch_fix.activate(EVERYTHING)
    found = plan_checkpoint(tmp_path, EIGHT_SMALL_GPUS)
    assert found.loads_on_gpus, found.error
    alone = {
        name: [other for other, device in found.device_map.items() if device == place]
        for name, place in found.device_map.items()
    }
    assert alone["model.embed_tokens"] == ["model.embed_tokens"]
    assert alone["lm_head"] == ["lm_head"]


# --- the plan ---------------------------------------------------------------------------------


def test_a_plan_says_how_even_each_spread_is():
    """A Llama in 16 bits; its parts in bytes are counted here, by hand."""
    hidden, wide, tokens = 512, 1024, 8192
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        torch_dtype="float16",
    )
    block = 2 * (4 * hidden * hidden + 3 * hidden * wide + 2 * hidden)
    sizes = [2 * tokens * hidden, *[block] * 12, 2 * hidden, 2 * tokens * hidden]
    budgets = {0: sum(sizes), 1: sum(sizes) // 3, 2: sum(sizes) // 2}
    found = bnb_dispatch_fix.plan(config, max_memory=budgets, even=True)
    best = evenness.smallest_largest_fill(sizes, list(budgets.values()))
    assert [run.name for run in found.runs] == ["release", "backport", "rescue", "even"]
    assert found.runs[3].evenness == 1
    assert found.device_map == found.runs[3].device_map
    for run in found.runs:
        assert run.outcome == "loads"
        fullest = max(load.placed / load.usable for load in run.devices if load.device in budgets)
        assert run.evenness == pytest.approx(fullest / float(best), rel=0.005)  # rotary tables
    assert found.runs[0].evenness > 1
    assert bnb_dispatch_fix.plan(config, max_memory=budgets).runs == tuple(
        replace(run, evenness=None) for run in found.runs[:3]
    )


# --- accelerate's own callers -------------------------------------------------------------------


def dispatched(shape, strategy, max_memory):
    """The map that `load_checkpoint_and_dispatch` would load to."""
    import accelerate.big_modeling

    class Planned(BaseException):
        pass

    def load_checkpoint_in_model(model, checkpoint, device_map=None, **_):
        raise Planned(device_map)

    with simulated_gpus(), replaced(
        accelerate.big_modeling, "load_checkpoint_in_model", load_checkpoint_in_model
    ):
        try:
            accelerate.load_checkpoint_and_dispatch(
                shapes.build(shape, torch.nn.Linear),
                "no weights",
                device_map=strategy,
                max_memory=dict(max_memory),
                no_split_module_classes=["Block"],
            )
        except Planned as planned:
            return planned.args[0]
    raise AssertionError("nothing was planned")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("features", [["even"], EVERYTHING], ids=len)
def test_load_checkpoint_and_dispatch(features, strategy):
    shape = SHAPES["plain"]
    whole = Shape(shape.embed, tuple(4 * size for size in shape.blocks), shape.head)
    max_memory, usable = budgets_of(whole, BUDGETS["24+24+8"], 1)
    without = dispatched(shape, strategy, max_memory)
    bnb_dispatch_fix.activate(features)
    found = dispatched(shape, strategy, max_memory)
    if strategy == "sequential":
        assert list(found.items()) == list(without.items())
    else:
        assert_even(whole, found, usable, strategy)


@pytest.mark.parametrize("strategy", ["auto", "balanced_low_0"])
def test_load_and_quantize_model(strategy):
    pytest.importorskip("accelerate.utils.bnb", reason="accelerate 0.21 and newer")
    from test_accelerate_callers import plan_quantized

    shape = SHAPES["plain"]
    max_memory, usable = budgets_of(shape, BUDGETS["24+24+8"], 1)
    bnb_dispatch_fix.activate(EVERYTHING)
    assert_even(shape, plan_quantized(shape, strategy, max_memory), usable, strategy)
