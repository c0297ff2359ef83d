"""What a context takes: events on devices, the largest that runs, and how it is asked and told."""

from __future__ import annotations

import json
from dataclasses import replace

import plans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnb_dispatch_fix.cli import main
from bnb_dispatch_fix.planning import PlanError, config_law
from bnb_dispatch_fix.planning import command as plan_command
from bnb_dispatch_fix.planning.picture import as_html
from bnb_dispatch_fix.planning.room import Event, Need, Pass, most_tokens, needs, short_of
from bnb_dispatch_fix.planning.room_text import estimate, room_lines
from bnb_dispatch_fix.planning.run_arguments import asked_room

GIB = 2**30


def place(**devices):
    """A device map as `needs` asks it: modules are on the device of their first part's name."""
    return lambda module: devices.get(module.partition(".")[0])


def test_a_storage_lies_where_the_module_computes_that_made_it():
    events = (
        Event("take", "", 0, 5),  # before any module: on the first device
        Event("enter", "a"),
        Event("take", "a", 1, 10),
        Event("take", "a", 2, 20),
        Event("free", "", 2),
        Event("leave", "a"),
        Event("enter", "b", storages=(1,)),
        Event("take", "b", 3, 7),
        Event("leave", "b"),
        Event("take", "", 4, 100),  # after b: where b is
    )
    found = needs(Pass(events, (("a", 10), ("b", 7))), place(a=0, b=1), 0)
    # Device 0: 5 + 10 + 20 at most; device 1: 10 of a, handed over, with 7; then 7 with 100.
    assert found == {0: Need(10, 25), 1: Need(7, 100)}


def test_what_is_handed_over_is_there_twice_only_while_the_module_computes():
    events = (
        Event("take", "", 0, 50),
        Event("enter", "b", storages=(0,)),
        Event("leave", "b"),
        Event("enter", "b"),
        Event("take", "b", 1, 40),
        Event("leave", "b"),
    )
    assert needs(Pass(events, ()), place(b=1), 0) == {0: Need(0, 50), 1: Need(0, 50)}


def test_a_part_of_a_module_that_is_divided_stays_where_the_last_was():
    events = (Event("enter", "b"), Event("leave", "b"), Event("enter", "split"))
    events += (Event("take", "split", 0, 3),)
    assert needs(Pass(events, ()), place(b=1), 0) == {1: Need(0, 3)}


def test_what_is_short():
    needed = {0: Need(3, 4), 1: Need(1, 1), "cpu": Need(9, 9)}
    assert short_of(needed, {0: 5, 1: 5, "cpu": 1}) == {0: 2, 1: -3}


@st.composite
def bends(draw):
    """A function that never falls, of straight pieces and steps."""
    pieces = draw(
        st.lists(
            st.tuples(st.integers(1, 400), st.integers(0, 50), st.integers(0, 300)), max_size=5
        )
    )
    base = draw(st.integers(-2000, 500))

    def short(tokens):
        return base + sum(
            max(0, tokens - start) * slope + (step if tokens >= start else 0)
            for start, slope, step in pieces
        )

    return short


@given(bends(), st.integers(1, 600))
@settings(max_examples=400, deadline=None)
def test_the_largest_context_is_exact(short, asked):
    short_at_asked = short(asked)
    if short_at_asked <= 0:
        return
    expected = max((n for n in range(1, asked) if short(n) <= 0), default=0)
    assert most_tokens(short, asked) == expected


def test_a_straight_line_is_asked_few_times():
    asked_for = []

    def short(tokens):
        asked_for.append(tokens)
        return 131_072 * tokens - 10**9

    assert most_tokens(short, 2**20) == 10**9 // 131_072
    assert len(asked_for) <= 6


class Config:
    """A configuration as a release has it: it knows of groups of heads."""

    def __init__(self, **settings):
        vars(self).update({"num_key_value_heads": None, **settings})


def config(**settings):
    plain = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
    }
    return Config(**{**plain, **settings})


NAMES = ["model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]


def by_configuration(tokens, batch=1, width=2, **settings):
    widths = config_law.Widths(width, 2)
    law = config_law.law_of(config(**settings), NAMES, batch, widths, all_logits=False)
    return [size for _, size in law(tokens).cache]


def test_keys_and_values_by_the_configuration():
    assert by_configuration(10) == [10 * 2 * 2 * 16 * 2] * 3
    assert by_configuration(10, batch=3, width=1) == [3 * 10 * 2 * 2 * 16] * 3
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    assert by_configuration(10, **latent) == [10 * 4 * 18 * 2] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    windowed = by_configuration(10, layer_types=kinds, sliding_window=4)
    assert windowed == [4 * 128, 10 * 128, 4 * 128]
    assert by_configuration(10, is_encoder_decoder=True) == [2 * 10 * 128] * 3


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"layer_types": ["mamba", "attention", "mamba"]}, "a state of their own .mamba"),
        ({"mamba_d_state": 16}, "a state of their own .mamba_d_state"),
        ({"num_hidden_layers": 5}, "no 5 layers are seen"),
        ({"num_attention_heads": None}, "has no num_heads or the like"),
    ],
)
def test_what_a_configuration_does_not_say(settings, said):
    with pytest.raises(config_law.Unknown, match=said):
        by_configuration(10, **settings)


def test_layers_are_found_among_the_parts_of_a_model():
    names = ["vision.layers.0", "vision.layers.1", "model.layers.0.q", "model.layers.0.k"]
    names += ["model.layers.1.q", "head"]
    assert config_law.layer_names(names, 2) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ("0", None, None, None),
            "--context: expected a whole number of tokens from 1 on, found '0'",
        ),
        (("-4", None, None, None), "--context: expected a whole number"),
        (("8k", None, None, None), "--context: .*found '8k'"),
        (("1.5", None, None, None), "--context: .*found '1.5'"),
        (("²", None, None, None), "--context: expected a whole number"),
        (("9" * 5000, None, None, None), "--context: expected a whole number"),
        (("999999999999", None, None, None), "--context: 999999999999 is too large; at most"),
        (("1", "0", None, None), "--batch: expected a whole number of sequences"),
        (("1", None, "fp7", None), "--kv-dtype: expected one of float32, .*found 'fp7'"),
        (("1", None, None, "-1GiB"), "--reserve: '-1GiB' is no size"),
        (("1", None, None, "1"), "--reserve: '1' has no unit"),
    ],
)
def test_options_that_cannot_be_used(arguments, said):
    with pytest.raises(PlanError, match=said) as refusal:
        asked_room(*arguments, options=True)
    assert len(str(refusal.value)) < 220


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((True, 1, None, 0), "^context: .*found True"),
        ((2.5, 1, None, 0), "^context: .*found 2.5"),
        ((1, -1, None, 0), "^batch: .*found -1"),
        ((1, 1, "bool", 0), "^kv_dtype: .*found 'bool'"),
        ((1, 1, None, -1), "^reserve: .*found -1"),
        ((1, 1, None, 1.5), "^reserve: .*found 1.5"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, said):
    with pytest.raises(PlanError, match=said):
        asked_room(*arguments)


def test_what_is_asked_for():
    assert asked_room(None, 1, None, 0) == {}
    assert asked_room(4096, 2, "torch.float8_e4m3fn", "1GiB") == {
        "context": 4096,
        "batch": 2,
        "kv_dtype": "float8_e4m3fn",
        "reserve": GIB,
    }
    asked = asked_room("4096", "2", "fp8", "1GiB", options=True)
    assert asked == {"context": 4096, "batch": 2, "kv_dtype": "fp8", "reserve": GIB}


def test_the_table_of_a_context():
    lines = room_lines(plans.plan(room=plans.room()), {"backport": "with backport"})
    assert lines[0] == "With 4096 tokens × 2, bfloat16, with backport:"
    assert lines[1].split() == ["GiB", "given", "weights", "cache", "working", "reserve", "left"]
    assert lines[2].split()[2:] == ["4.00", "2.25", "0.50", "1.00", "0.12", "0.12"]
    assert lines[3].split()[2:] == ["4.00", "3.00", "1.00", "0.50", "0.12", "-0.62"]
    assert "measured on a release" in lines[4]
    assert room_lines(plans.plan(), {}) == []


def test_without_a_context_a_line_says_what_there_is_room_for():
    nothing = {"context": None, "enough": None, "shown": None, "devices": ()}
    [line] = estimate(plans.plan(room=plans.room(most=12_345, **nothing)))
    assert "room for about 12000 tokens × 2, more than the 8192 that the model was made for" in line
    [line] = estimate(plans.plan(room=plans.room(most=8_192, **nothing)))
    assert "room for about 8100 tokens × 2, of 8192 that the model was made for" in line
    [line] = estimate(plans.plan(room=plans.room(most=0, **nothing)))
    assert "no room for a context" in line
    assert estimate(plans.plan(room=plans.room())) == estimate(plans.plan()) == []


@pytest.mark.parametrize("enough, code", [(True, 0), (None, 0), (False, 1)])
def test_the_exit_code_says_whether_it_runs(monkeypatch, capsys, enough, code):
    planned = plans.plan(room=plans.room(enough=enough))
    jobs = []
    monkeypatch.setattr(plan_command, "rehearse", lambda job, on_wait: jobs.append(job) or planned)
    command = ["plan", "--example", "llama-3-8b", "--max-memory", "2x4GiB", "--context", "4096"]
    assert main([*command, "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["room"]["devices"][1]["left"] == -5 * GIB // 8
    assert jobs[0]["context"] == 4096


def test_the_command_refuses_in_one_line(capsys):
    command = ["plan", "--example", "llama-3-8b", "--max-memory", "2x4GiB", "--context", "-1"]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_the_picture_shows_cache_and_reserve_apart():
    planned = plans.plan(room=plans.room(shown=None))
    page = as_html(planned)
    # On each of two bars, the first of which has scales; and once in the legend.
    assert page.count('<rect class="cache"') == 2 + 1
    assert page.count('<rect class="reserve"') == 2 + 1
    assert page.count('<rect class="scales"') == 1 + 1
    assert "cache of the context: 1.00 GiB" in page
    assert "The device_map for 4096 tokens × 2" in page
    assert 'class="cache"' not in as_html(plans.plan())


def test_the_picture_shows_the_context_on_a_planners_own_map():
    run = plans.run_after("backport")
    devices = tuple(replace(load, cache=GIB, working=GIB // 2, reserve=1) for load in run.devices)
    planned = plans.plan(runs=(replace(run, devices=devices),), room=plans.room())
    page = as_html(planned)
    assert page.count("cache of the context: 1.00 GiB") == 2  # the CPU is empty, and not drawn
    assert "</svg>cache of the context" in page
    assert "The device_map for" not in page
