"""The environment switch and the names a caller may pass."""

from __future__ import annotations

import pytest

from bnb_dispatch_fix import features

ALL = frozenset({"backport", "rescue", "explain"})


@pytest.mark.parametrize("text", ["off", "0", "false", "no", "none", " OFF\n", "Off"])
def test_off(monkeypatch, text):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    assert features.read_switch()[1:] == (frozenset(), None)


@pytest.mark.parametrize("text", [None, "", " ", "on", "1", "true", "YES", "all"])
def test_on(monkeypatch, text):
    monkeypatch.delenv("BNB_DISPATCH_FIX", raising=False)
    if text is not None:
        monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    assert features.read_switch()[1:] == (ALL, None)


@pytest.mark.parametrize(
    "text, allowed",
    [("backport", {"backport"}), (" Rescue , explain,", {"rescue", "explain"}), (",,", ALL)],
)
def test_a_list(monkeypatch, text, allowed):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    assert features.read_switch()[1:] == (frozenset(allowed), None)


@pytest.mark.parametrize(
    "text, allowed, unknown",
    [
        ("backprot", ALL, "backprot"),
        ("backport,resque", {"backport"}, "resque"),
        ("of", ALL, "of"),
        ("backport rescue", ALL, "backport rescue"),
    ],
)
def test_a_typo_is_named_with_the_valid_values(monkeypatch, text, allowed, unknown):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    switch = features.read_switch()
    assert switch.allowed == frozenset(allowed)
    assert f"{unknown} is no feature" in switch.complaint
    for valid in ("off", "on", *ALL):
        assert valid in switch.complaint


def test_checked_takes_one_name_or_several():
    assert features.checked("rescue") == {"rescue"}
    assert features.checked(["rescue", "explain", "rescue"]) == {"rescue", "explain"}
    assert features.checked([]) == frozenset()


@pytest.mark.parametrize("names", ["rescu", ["backport", "off"], [7]])
def test_checked_names_what_is_unknown(names):
    with pytest.raises(ValueError, match="is unknown; expected names out of backport, rescue"):
        features.checked(names)


@pytest.mark.parametrize(
    "text",
    ['"off"', "'off'", "off,", ",off", "disabled", "n", "No.", '"0"', "“off”", "OFF;"],
)
def test_a_switch_that_fails_fails_safe(monkeypatch, text):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    assert features.is_off()
    assert features.read_switch()[1:] == (frozenset(), None)


@pytest.mark.parametrize("text", ["off,on", "backport,off", "turn it off", "switchoff", "on, no"])
def test_off_beside_anything_else_is_off_and_says_so(monkeypatch, text):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    switch = features.read_switch()
    assert features.is_off()
    assert switch.allowed == frozenset()
    assert switch.complaint.endswith("taken for off")


@pytest.mark.parametrize(
    "text, allowed",
    [("rescue;explain", {"rescue", "explain"}), ("rescue; nonsense", {"rescue"}), ("rescu", ALL)],
)
def test_what_it_was_taken_for_is_said(monkeypatch, text, allowed):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    switch = features.read_switch()
    assert switch.allowed == frozenset(allowed)
    assert switch.complaint.endswith(f"taken for {', '.join(sorted(allowed))}")


@pytest.mark.parametrize("text", ['"on"', "'rescue', explain", '"backport"'])
def test_quotes_are_no_part_of_a_name(monkeypatch, text):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    assert features.read_switch().complaint is None


@pytest.mark.parametrize("text", [None, "", "on", "all"])
def test_even_is_never_on_by_default_and_can_be_asked_for(monkeypatch, text):
    monkeypatch.delenv("BNB_DISPATCH_FIX", raising=False)
    if text is not None:
        monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    switch = features.read_switch()
    assert "even" not in switch.allowed
    assert switch.askable == {"backport", "rescue", "explain", "even"}


@pytest.mark.parametrize("text", ["off", "backport", "backport,rescue,explain", "rescu"])
def test_what_the_environment_leaves_out_cannot_be_asked_for(monkeypatch, text):
    monkeypatch.setenv("BNB_DISPATCH_FIX", text)
    switch = features.read_switch()
    assert "even" not in switch.askable
    assert switch.askable == switch.allowed


def test_even_is_switched_on_by_name(monkeypatch):
    monkeypatch.setenv("BNB_DISPATCH_FIX", "backport,Even")
    assert features.read_switch()[1:] == (frozenset({"backport", "even"}), None)
