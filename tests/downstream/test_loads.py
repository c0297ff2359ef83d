"""A library's own loading function on simulated GPUs, without the shim and with it.

In processes of their own: without the shim, with the shim imported before the library, and after.
"""

from __future__ import annotations

from collections import Counter

import pytest
from bins import fits

HOST = ("cpu", "disk")
SERVED = ("applied", "already-fixed")
PATCHED = (
    "get_balanced_memory",
    "infer_auto_device_map",
    "dispatch_model",
    "_determine_device_map",
)


def bytes_on(answer):
    """Bytes by device of what a map places; every part is within one of its keys."""
    found = Counter()
    places = dict(answer["map"])
    for part, size in answer["parts"].items():
        keys = [key for key in places if key == "" or f"{part}.".startswith(f"{key}.")]
        found[places[max(keys, key=len)]] += size
    return found


def outcome(answer):
    if answer["error"] is not None:
        return "refused"
    placed = bytes_on(answer)
    if any(placed[device] for device in HOST):
        return "on host"
    return "overfull" if any(placed[gpu] > room for gpu, room in answer["rooms"]) else "on cards"


def has_place(answer):
    """Whether a placement on the cards exists, by an oracle."""
    _, room = answer["rooms"][0]
    return fits(list(answer["parts"].values()), room, len(answer["rooms"]))


@pytest.fixture(scope="module")
def pairs(asked):
    """By load, the answers without the shim and with it."""
    without, before = asked["without"]["answers"], asked["before"]["answers"]
    assert list(without) == list(before)
    return {load: (answer, before[load]) for load, answer in without.items()}


@pytest.fixture(scope="module")
def refuses(asked):
    return asked["without"]["refuses"]


def test_nobody_loses(pairs):
    for load, (without, before) in pairs.items():
        if without["error"] is None:
            assert before["error"] is None, (load, before["error"])
            on_host = [sum(bytes_on(each)[d] for d in HOST) for each in (without, before)]
            assert on_host[1] <= on_host[0], (load, without["map"], before["map"])


def test_what_has_a_place_on_the_cards_is_there(pairs, refuses):
    if not refuses:
        pytest.skip("this library accepts modules on the CPU, and so does the shim")
    placed = [load for load, (_, before) in pairs.items() if has_place(before)]
    assert placed
    for load in placed:
        assert outcome(pairs[load][1]) == "on cards", (load, pairs[load][1])


def test_what_has_none_ends_as_without_the_shim(pairs, refuses):
    if not refuses:
        pytest.skip("this library accepts modules on the CPU: nothing is refused")
    others = [load for load, (_, before) in pairs.items() if not has_place(before)]
    assert others
    for load in others:
        without, before = pairs[load]
        assert before["error"] == without["error"], load
        if before["error"] is not None:
            told = "\n".join([before["error"][1], *before["notes"]])
            assert "bnb-dispatch-fix: " in told, load
            assert "any one of these loads it (each was planned)" in told, load


def test_what_is_right_stays(pairs):
    """Where nobody balances, a map with everything on the cards is not touched."""
    right = [
        load
        for load, (without, _) in pairs.items()
        if "sequential" in load and outcome(without) == "on cards"
    ]
    for load in right:
        assert pairs[load][1]["map"] == pairs[load][0]["map"], load


def test_it_is_of_use(pairs):
    """Or the tests above would show nothing."""
    better = [
        load
        for load, (without, before) in pairs.items()
        if outcome(before) == "on cards" and outcome(without) != "on cards"
    ]
    more_cards = [
        load for load, (without, before) in pairs.items() if without["map"] != before["map"]
    ]
    assert better
    assert set(better) <= set(more_cards)


def test_their_warnings_are_the_same(asked, pairs):
    for load, (without, before) in pairs.items():
        assert before["theirs"] == without["theirs"], load
        assert asked["after"]["answers"][load]["theirs"] == without["theirs"], load


def test_signatures_are_the_same(asked):
    assert asked["without"]["signatures"]
    for order in ("before", "after"):
        assert asked[order]["signatures"] == asked["without"]["signatures"]


def test_every_name_is_served_in_either_order(asked):
    for order, wrapped in {"before": "replaced", "after": "skipped"}.items():
        states = dict(asked[order]["states"])
        for name in asked[order]["wraps"]:
            assert states.pop(name) == wrapped
        assert set(states.values()) <= {*SERVED, "pending", "skipped"}
        assert "applied" in states.values()
    assert asked["before"]["holders"] == []
    assert asked["after"]["holders"] == asked["after"]["holds"]


def test_what_the_library_holds_is_patched_at_its_own_name(asked):
    after = asked["after"]
    held = [name for name in after["held"] if name.startswith(f"{after['package']}.")]
    held = [name for name in held if name.rpartition(".")[2] in PATCHED]
    unserved = [name for name in held if after["states"].get(name) not in SERVED]
    assert sorted(unserved) == sorted(after["holds"])


def test_what_is_not_served_is_named_once(asked):
    told = asked["after"]["on activation"]
    for name in asked["after"]["wraps"]:
        assert sum(f"{name} is not patched" in line for line in told) == 1, told
    for name in asked["after"]["holds"]:
        assert sum(name in line for line in told) == 1, told
    expected = len(asked["after"]["wraps"]) + bool(asked["after"]["holds"])
    assert len(told) == expected, told


def test_imported_after_the_library_it_does_the_same(asked):
    if asked["after"]["wraps"]:
        pytest.skip("this library wraps the planner; what the shim says of that is tested above")
    before, after = asked["before"]["answers"], asked["after"]["answers"]
    for load in before:
        assert (after[load]["map"], after[load]["error"]) == (
            before[load]["map"],
            before[load]["error"],
        )


def test_figures_for_the_table(asked, pairs, record_property):
    counts = [dict(Counter(outcome(pair[which]) for pair in pairs.values())) for which in (0, 1)]
    record_property(
        "downstream",
        {
            "loads": len(pairs),
            "without": counts[0],
            "with": counts[1],
            "same": sum(without["map"] == before["map"] for without, before in pairs.values()),
            "signatures": len(asked["before"]["signatures"]),
            "named": [*asked["after"]["holds"], *asked["after"]["wraps"]],
        },
    )
    assert sum(counts[0].values()) == sum(counts[1].values())
