"""A plan as text, JSON and HTML: the numbers are right, nothing leaks, everything is escaped."""

from __future__ import annotations

import io
import json
import re
import sys
from html.parser import HTMLParser

import plans
import pytest

from bnb_dispatch_fix.model import layout
from bnb_dispatch_fix.model.budgets import Budgets
from bnb_dispatch_fix.model.units import UnitFacts, Units
from bnb_dispatch_fix.placement.certificates import TotalTooLarge
from bnb_dispatch_fix.placement.packing import GaveUp, Impossible, Unit
from bnb_dispatch_fix.planning import picture
from bnb_dispatch_fix.planning import runs as runs_of
from bnb_dispatch_fix.planning import terminal as report
from bnb_dispatch_fix.wording import pasteable

GIB = 2**30


# --- text -------------------------------------------------------------------------------------


def test_one_row_per_device_with_a_bar_for_each_planner():
    lines = report.as_text(plans.plan()).splitlines()
    rows = [line for line in lines if re.match(r"(GPU \d|CPU) ", line)]
    assert [re.sub(r" {2,}", " ", row) for row in rows] == [
        "GPU 0 3.60 ░░░░░░░░░░ 0.00 ██████░░░░ 2.00 ██████░░░░ 2.00",
        "GPU 1 3.60 ██████████ 3.50 ███████░░░ 2.50 ███████░░░ 2.50",
        "CPU 54.00 █░░░░░░░░░ 1.00 ░░░░░░░░░░ 0.00 ░░░░░░░░░░ 0.00",
    ]


def test_the_text_says_what_was_counted_and_what_comes_out():
    text = report.as_text(plans.plan())
    assert "tiny & co, 4-bit nf4 (bitsandbytes), float16: 4.50 GiB" in text
    assert "1.50 of 4.50 GiB are not quantized: model.embed_tokens (1.00 GiB)" in text
    assert 'transformers 5.12.1, accelerate 1.14.0; device_map="auto"' in text
    assert "refused: 1.00 GiB on CPU" in text
    assert "  GPU 1     2.50 GiB  model.layers.4–11, model.norm, lm_head" in text
    assert "-> fits with the backport" in text


def test_what_is_not_quantized_comes_first_where_it_is_most():
    first, second = report.headline(plans.plan(quantized=GIB))
    assert first.startswith("3.50 of 4.50 GiB are not quantized")
    assert second.startswith("tiny & co")
    assert report.headline(plans.plan(quantized=0)) == [second]


def test_a_model_that_does_not_fit_gets_no_map():
    text = report.as_text(plans.plan_that_does_not_fit())
    assert "-> needs 4.50 GiB, usable 3.60 GiB: short by 0.90 GiB" in text
    assert "device_map =" not in text


@pytest.mark.parametrize(
    "device_map",
    [
        plans.BEFORE,
        plans.AFTER,
        {"": 0},
        {"0": 1, "1": 1, "2": "cpu", "3": 1},
        {"a.0": 0, "a.1": 0, "b.2": 0, "a.2": 0, "a.4": 0, "a.05": 0, "a.6.b": "mps"},
        {'odd "name" {i}\\': 0},
    ],
)
def test_the_pasted_map_is_the_map(device_map):
    pasted = eval(pasteable(device_map), {})
    assert list(pasted.items()) == list(device_map.items())


def test_runs_that_come_to_the_same_are_one():
    groups = report.groups_of_equal_runs(plans.plan())
    assert [names for _, names in groups] == [("release",), ("backport", "rescue")]


def test_printing_to_a_stream_that_has_no_blocks():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    report.print_plan(plans.plan(), stream)
    stream.flush()
    assert b"##########" in raw.getvalue()
    assert b"model.layers.0-3" in raw.getvalue()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_a_terminal_without_rich_gets_the_plain_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    report.print_plan(plans.plan(), terminal)
    assert terminal.getvalue() == report.as_text(plans.plan()) + "\n"


def test_rich_prints_the_same_facts():
    pytest.importorskip("rich", reason="rich is optional and not installed here")
    terminal = Terminal()
    report.print_plan(plans.plan(), terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "██████████   3.50" in text
    assert "refused: 1.00 GiB on CPU" in text
    assert "-> fits with the backport" in text


def visible_of(terminal):
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("columns", [80, 100, 72])
def test_a_terminal_of_its_width(monkeypatch, columns, rich):
    if rich:
        pytest.importorskip("rich", reason="rich is optional and not installed here")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(report, "columns", lambda stream: columns)
    monkeypatch.delenv("NO_COLOR", raising=False)
    long = "needs 4.50 GiB: " + "one two three " * 30 + "end"
    error = "ValueError: " + "some words of an error " * 15 + "."
    runs = plans.plan().runs
    first = plans.Run("release", "refused", error, plans.BEFORE, runs[0].devices)
    plan = plans.plan(runs=(first, *runs[1:]), verdict=long, notes=(long,))
    terminal = Terminal()
    report.print_plan(plan, terminal)
    lines = visible_of(terminal).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(visible_of(terminal).split())
    assert " ".join(error.split()) in words
    assert words.count("one two three") == 60
    assert next(line for line in lines if line.startswith("GPU 1")).split() == [
        *("GPU", "1", "3.60", "██████████", "3.50", "███████░░░", "2.50", "███████░░░", "2.50")
    ]


@pytest.mark.parametrize("columns", [None, 80, 120])
def test_even_is_a_fourth_column_with_a_number_for_each(columns):
    text = report.as_text(plans.plan_with_even(), columns)
    lines = text.splitlines()
    assert columns is None or max(map(len, lines)) <= columns
    (names,) = (line for line in lines if "with rescue" in line and "usable" in line)
    assert names.rstrip().endswith("with even")
    (numbers,) = (line.split() for line in lines if "evenness" in line)
    assert numbers == ["evenness", "1.50", "evenness", "1.50", "evenness", "1.00"]
    assert "Modules, with even:" in lines
    assert '    "model.layers": 1,' in lines
    row = next(line for line in lines if line.startswith("GPU 1")).split()
    assert row[4::2] == ["3.50", "2.50", "2.50", "3.50"]


def test_without_even_no_number_is_shown():
    assert "evenness" not in report.as_text(plans.plan())
    assert "evenness" not in picture.as_html(plans.plan())
    assert [run["evenness"] for run in plans.plan().as_dict()["runs"]] == [None] * 3


@pytest.mark.parametrize("plain", ["NO_COLOR", "pipe"])
def test_no_colours_where_none_are_welcome(monkeypatch, plain):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    if plain == "pipe":
        monkeypatch.delenv("NO_COLOR")
        stream.isatty = lambda: False
    monkeypatch.setenv("TERM", "xterm-256color")
    report.print_plan(plans.plan(), stream)
    assert "\x1b" not in stream.getvalue()


def test_colours_where_they_are(monkeypatch):
    pytest.importorskip("rich", reason="rich is optional and not installed here")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    report.print_plan(plans.plan(), terminal)
    assert "\x1b[32m" in terminal.getvalue()


ESCAPE = "\x1b]0;x\x07\u202e\x9b\udc80"
SHOWN = r"\x1b]0;x\x07\u202e\x9b\udc80"


def hostile_plan():
    part = plans.Part(ESCAPE, 2 * GIB, 0)
    run = plans.Run("release", "loads", ESCAPE, {ESCAPE: 0}, (plans.load(0, part),))
    names = ("model", "strategy", "precision", "verdict")
    return plans.plan(
        **dict.fromkeys(names, ESCAPE), versions={ESCAPE: ESCAPE}, runs=(run, run, run),
        largest=(part,), notes=(ESCAPE,), device_map={ESCAPE: ESCAPE},
    )  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [report.as_text, picture.as_html, lambda plan: pasteable(plan.device_map)],
    ids=["text", "HTML", "device map"],
)
def test_no_name_can_steer_a_terminal(made):
    text = made(hostile_plan())
    assert text.replace("\n", "").isprintable()
    assert SHOWN in text.replace("<wbr>", "").replace("u001b", "x1b").replace("u0007", "x07")
    text.encode("utf-8")


def test_a_map_with_such_names_can_be_pasted():
    device_map = {ESCAPE: 0, f"{ESCAPE}.0": 0, f"{ESCAPE}.1": 0, "\U0001f917\n": ESCAPE}
    assert eval(pasteable(device_map), {}) == device_map


@pytest.mark.parametrize(
    "error, shown",
    [
        ("a" * 100 + ". " + "b" * 500, "ValueError: " + "a" * 100 + ". …"),
        ("word " * 100, "ValueError: " + "word " * 76 + "word …"),
        ("Short. " * 20, "ValueError: " + ("Short. " * 20).strip()),
        ("x" * 900, "ValueError: …"),
    ],
)
def test_errors_end_with_a_sentence_or_a_word(error, shown):
    budgets = Budgets({0: 10}, {0: 9})
    attempt = runs_of.Attempt(None, ValueError(error))
    assert runs_of.describe_run("release", attempt, COARSE, FINE, budgets)["error"] == shown


# --- JSON -------------------------------------------------------------------------------------


def test_json_holds_everything():
    told = json.loads(json.dumps(plans.plan().as_dict()))
    assert told["fits"] is True
    assert told["unquantized"] == 3 * GIB // 2
    assert [run["outcome"] for run in told["runs"]] == ["refused", "loads", "loads"]
    second = told["runs"][1]["devices"][1]
    assert {key: second[key] for key in ("device", "given", "usable", "placed", "free")} == {
        "device": 1,
        "given": 4 * GIB,
        "usable": int(3.6 * GIB),
        "placed": 5 * GIB // 2,
        "free": int(3.6 * GIB) - 5 * GIB // 2,
    }
    assert second["parts"][0] == {
        "name": "model.layers.4–11",
        "size": 2 * GIB,
        "quantized": 2 * GIB,
        "modules": 8,
    }
    assert told["device_map"] == plans.AFTER


# --- HTML -------------------------------------------------------------------------------------

VOID = {"meta", "br", "wbr", "rect", "line", "path"}


class Page(HTMLParser):
    """Collects tags, attributes and text; fails where tags are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("plan", [plans.plan(), plans.plan_that_does_not_fit()], ids=["fits", "no"])
def test_the_page_is_well_formed_and_needs_nothing_else(plan):
    text = picture.as_html(plan)
    page = Page(text)
    assert "script" not in page.tags
    assert not {"href", "src", "link", "img", "iframe"} & {name for name, _ in page.attributes}
    assert "link" not in page.tags
    assert not re.search(r"https?:|//|@import", text)
    assert set(re.findall(r"url\((.*?)\)", text)) == {"#hatch"}
    assert ("viewport", "width=device-width, initial-scale=1") in zip(
        [value for name, value in page.attributes if name == "name"],
        [value for name, value in page.attributes if name == "content"],
    )
    assert "prefers-color-scheme:dark" in text


def test_names_of_modules_and_errors_are_escaped():
    text = picture.as_html(plans.plan())
    assert "<script" not in text
    assert "<b>modules</b>" not in text
    page = Page(text)
    assert any(plans.HEAD.name in data for data in page.texts)
    assert "tiny & co" in page.texts


def test_the_page_shows_before_and_after():
    text = picture.as_html(plans.plan())
    visible = " ".join(Page(text).texts)
    assert "as installed" in visible
    assert "with the backport, with rescue: the same" in visible
    assert "3.50 / 3.60" in visible
    assert "2.50 / 3.60" in visible
    assert "Fits with the backport" in visible


def test_the_page_shows_the_even_spread_and_how_even_each_is():
    visible = " ".join(Page(picture.as_html(plans.plan_with_even())).texts)
    assert "with even" in visible
    assert visible.count("evenness 1.50: ") == 1  # two planners that come to the same
    assert visible.count("evenness 1.00: ") == 1


def test_bars_are_to_scale():
    text = picture.as_html(plans.plan())
    widths = re.findall(r'<rect class="leaf" x="0.00" y="0" width="([\d.]+)"', text)
    assert widths == ["250.00", "250.00"]  # 1 GiB of the largest budget, 4 GiB
    kept = re.findall(r'<rect class="kept" x="([\d.]+)" y="0" width="([\d.]+)"', text)
    assert kept == [("900.00", "100.00")] * 4


# --- what lies where --------------------------------------------------------------------------


def units(sizes, **parts):
    facts = {
        name: UnitFacts((name,), (name,), "Block", {"4-bit": size}, size)
        for name, size in sizes.items()
    }
    return Units([Unit(name, size) for name, size in sizes.items()], facts, {})


COARSE = units({"embed": 5, "layers.0": 7, "layers.1": 7, "layers.10": 7, "head": 5})
FINE = units(
    {
        "embed": 5,
        **{f"layers.{i}.{part}": size for i in (0, 1, 10) for part, size in (("a", 3), ("b", 4))},
        "head": 5,
    }
)


def lying(device_map):
    placed = layout.parts_by_device(COARSE, FINE, device_map)
    return {device: [(part.name, part.size) for part in parts] for device, parts in placed.items()}


def test_a_key_covers_everything_below_it():
    assert lying({"embed": 0, "layers": 1, "head": "cpu"}) == {
        0: [("embed", 5)],
        1: [("layers.0", 7), ("layers.1", 7), ("layers.10", 7)],
        "cpu": [("head", 5)],
    }
    assert lying({"": 3})[3][0] == ("embed", 5)


def test_layers_1_is_not_layers_10():
    assert lying({"embed": 0, "layers.1": 0, "layers.10": 1, "layers.0": 0, "head": 0})[1] == [
        ("layers.10", 7)
    ]


def test_a_divided_unit_is_shown_by_its_parts():
    placed = lying({"embed": 0, "layers.0.a": 0, "layers.0.b": 1, "layers": 1, "head": 1})
    assert placed[0] == [("embed", 5), ("layers.0.a", 3)]
    assert placed[1][:2] == [("layers.0.b", 4), ("layers.1", 7)]


def test_modules_that_no_key_covers_lie_nowhere():
    assert lying({"embed": 0}) == {0: [("embed", 5)]}


def test_neighbours_are_collapsed():
    pieces = [layout.Part(f"l.{i}", 2, 1) for i in (0, 1, 2, 5)] + [layout.Part("norm", 1, 0)]
    pieces += [layout.Part("m.6", 2, 1)]
    assert layout.collapsed(pieces) == [
        layout.Part("l.0–2", 6, 3, 3),
        layout.Part("l.5", 2, 1),
        layout.Part("norm", 1, 0),
        layout.Part("m.6", 2, 1),
    ]


def test_kinds_of_modules_are_summed():
    described = layout.describe_model(FINE)
    assert described["total"] == described["quantized"] == 31
    assert described["largest"][:2] == [
        layout.Part("layers.*.b", 12, 12, 3),
        layout.Part("layers.*.a", 9, 9, 3),
    ]


REFUSAL = ValueError("no\n  way")


@pytest.mark.parametrize(
    "device_map, error, outcome",
    [
        ({"embed": 0, "layers": 1, "head": 1}, None, "loads"),
        ({"": 1}, None, "overfull"),
        ({"embed": 0, "layers": 1, "head": "cpu"}, None, "offloads"),
        ({"embed": 0, "layers": 1, "head": "disk"}, REFUSAL, "refused"),
        (None, REFUSAL, "fails"),
    ],
)
def test_outcomes(device_map, error, outcome):
    budgets = Budgets({0: 10, 1: 30, "cpu": 1}, {0: 9, 1: 27, "cpu": 1})
    told = runs_of.describe_run(
        "release", runs_of.Attempt(device_map, error), COARSE, FINE, budgets
    )
    assert told["outcome"] == outcome
    assert told["error"] == (None if error is None else "ValueError: no way")
    assert [entry[:3] for entry in told["devices"][:3]] == [
        (0, 10, 9),
        (1, 30, 27),
        ("cpu", 1, 1),
    ]


def test_verdicts():
    runs = [
        {"name": "release", "outcome": "refused", "device_map": [("", "cpu")]},
        {"name": "backport", "outcome": "loads", "device_map": [("", 0)]},
    ]
    impossible = Impossible(TotalTooLarge(2 * GIB, GIB), verified=True)
    assert runs_of.verdict(impossible, None, runs) == {
        "fits": True,
        "verdict": "fits with the backport",
        "device_map": [("", 0)],
    }
    assert runs_of.verdict(impossible, None, runs[:1]) == {
        "fits": False,
        "verdict": "needs 2.00 GiB, usable 1.00 GiB: short by 1.00 GiB",
        "device_map": None,
    }
    assert runs_of.verdict(GaveUp(7), None, runs[:1])["fits"] is False
    even = {"name": "even", "outcome": "loads", "device_map": [("a", 0), ("b", 1)]}
    assert runs_of.verdict(impossible, None, [*runs, even]) == {
        "fits": True,
        "verdict": "fits with the backport; spread evenly with the device_map below",
        "device_map": even["device_map"],
    }
