"""The precisions that a plan compares, as text and as HTML."""

from __future__ import annotations

import html
import re

import plans
import pytest

from bnb_dispatch_fix.explain import recipes
from bnb_dispatch_fix.planning import table
from bnb_dispatch_fix.planning.picture import as_html
from bnb_dispatch_fix.planning.terminal import as_text

ROWS = [
    ["float16", "7.50", "no", "short by 0.30 GiB"],
    ["8-bit", "6.00", "yes", "GPU 0–1"],
    ["4-bit nf4", "4.88", "barely", "GPU 0–1, 1.00 MiB of its scales too much"],
    ["4-bit nf4, double quantization", "4.56", "yes", "GPU 0"],
]


def test_the_text_begins_with_the_table():
    lines = as_text(plans.plan_that_compares()).splitlines()
    assert lines[0] == "tiny & co"
    assert [re.split(" {2,}", line) for line in lines[2:6]] == ROWS
    assert lines[7].startswith("Below: 4-bit nf4 (bitsandbytes), float16")
    assert lines[9].startswith("tiny & co, 4-bit nf4")


def test_a_plan_of_one_precision_has_no_table():
    assert as_text(plans.plan()).splitlines()[0].startswith("tiny & co, 4-bit nf4")
    assert "double quantization" not in as_html(plans.plan())


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_a_terminal(width):
    lines = table.as_lines(plans.plan_that_compares(), width)
    # A column is as wide as its longest text; what is to be read beside them wraps.
    assert max(map(len, lines)) <= max(width, 46 + len("quantization"))


def test_the_page_has_the_same_rows():
    page = as_html(plans.plan_that_compares())
    body = page[page.index("compared") :].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    cells = [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", r)] for r in rows]
    assert cells == ROWS


def test_what_does_not_fit_for_another_reason_says_it_whole():
    reason = "`lm_head` alone needs 4.00 GiB, the largest budget is 3.60 GiB"
    row = plans.PRECISIONS[0].__class__("16", "x\x1b", 5, 0, False, 0, (), reason)
    line = table.lines(plans.plan(precisions=(row,)))[1]
    assert line == ("x\\x1b", "5 bytes", "no", reason)


@pytest.mark.parametrize(
    "devices, text",
    [
        ((0,), "GPU 0"),
        ((0, 1, 2, 5), "GPU 0–2, 5"),
        (("mps",), "mps"),
        ((3, "mps"), "GPU 3, mps"),
    ],
)
def test_devices_are_listed_as_people_do(devices, text):
    assert table.devices_text(devices) == text


def test_a_plan_that_does_not_fit_says_what_to_change():
    lines = as_text(plans.plan_with_recipes()).splitlines()
    assert lines[-5:] == [
        "-> needs 4.50 GiB, usable 3.60 GiB: short by 0.90 GiB",
        "any one of these loads it (each was planned):",
        "  1. higher budgets:",
        '     max_memory={0: "5GiB", 1: "5GiB"}',
        "  2. 1 more <device> of 4.00 GiB",
    ]
    page = as_html(plans.plan_with_recipes())
    assert "<li>higher budgets<pre>max_memory={0: &quot;5GiB&quot;, 1: &quot;5GiB&quot;}" in page
    assert "<li>1 more &lt;device&gt; of 4.00 GiB</li>" in page


def test_what_was_tried_is_said_as_it_is():
    assert f"up to {recipes._RAISED_AT_MOST} times" in table._TRIED
    assert f"up to {recipes._MORE_DEVICES} more" in table._TRIED


def test_where_nothing_was_found_that_is_said():
    assert as_text(plans.plan_that_does_not_fit()).splitlines()[-1] == (
        "   no change was found that would load it (budgets up to 4 times as large, up to 16 more "
        "devices, fewer bits, offloading)"
    )


def test_fewer_cards_come_with_their_budgets():
    lines = as_text(plans.plan_on_fewer()).splitlines()
    assert '   it fits on one card: max_memory={0: "4GiB"}' in lines
    page = as_html(plans.plan_on_fewer())
    assert "<h2>It fits on one card</h2><pre>max_memory={0: &quot;4GiB&quot;}</pre>" in page
    two = plans.plan(fewer=plans.Fewer((0, 1), "max_memory={}"))
    assert "   it fits on 2 of 2 cards: max_memory={}" in as_text(two).splitlines()


def test_a_plan_that_fits_has_nothing_to_change():
    assert "any one of these" not in as_text(plans.plan())
    assert "no change" not in as_text(plans.plan())
