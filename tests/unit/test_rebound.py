"""An installed function that calls stand-ins: a copy of it, and nothing installed is changed."""

from __future__ import annotations

import functools
import types

import pytest
import wrapt

from bnb_dispatch_fix.backport.rebound import rebound


def helper():
    return "installed"


def calls(value=1, *, keyword=2):
    return helper(), value, keyword


def renamed():
    return helper()


renamed.__name__ = "another"


def test_a_copy_calls_the_stand_in_and_nothing_installed_is_changed():
    copy = rebound(calls, {"helper": lambda: "stand-in", "unknown": lambda: "never"})
    assert copy() == ("stand-in", 1, 2)
    assert copy(3, keyword=4) == ("stand-in", 3, 4)
    assert rebound(renamed, {"helper": None}).__name__ == "another"
    assert "unknown" not in copy.__globals__
    assert calls() == ("installed", 1, 2)


def test_what_a_wrapper_holds_is_copied_with_it():
    empty = []

    @functools.wraps(calls)
    def wrapper(*args, **kwargs):
        if empty:
            return later  # a cell that is still empty
        return ["wrapped", calls_held(*args, **kwargs), text]

    calls_held, text = calls, "kept"
    copy = rebound(wrapper, {"helper": lambda: "stand-in"})
    assert copy(5, keyword=6) == ["wrapped", ("stand-in", 5, 6), "kept"]
    assert wrapper(5) == ["wrapped", ("installed", 5, 2), "kept"]
    if empty:
        later = 1


def test_a_wrapt_decorator_is_given_the_copy():
    @wrapt.decorator
    def decorated(wrapped, instance, args, kwargs):
        return instance, wrapped(*args, **kwargs), args, kwargs

    copy = rebound(decorated(calls), {"helper": lambda: "stand-in"})
    assert copy(5, keyword=6) == (None, ("stand-in", 5, 6), (5,), {"keyword": 6})


@pytest.mark.parametrize("value", [print, 7, None, functools.partial(calls), types.SimpleNamespace])
def test_what_is_no_function_is_returned_as_it_is(value):
    assert rebound(value, {"helper": None}) is value


def test_a_variable_that_is_shared_stays_shared():
    count = 0

    def counted():
        nonlocal count
        count += 1
        return helper(), count

    copy = rebound(counted, {"helper": lambda: "stand-in"})
    assert [copy(), counted(), copy()] == [("stand-in", 1), ("installed", 2), ("stand-in", 3)]


def in_closure(inner):
    return lambda *args, **kwargs: inner(*args, **kwargs)


@wrapt.decorator
def by_wrapt(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)


@pytest.mark.parametrize("wrap", [in_closure, by_wrapt])
@pytest.mark.parametrize(("depth", "reached"), [(0, True), (32, True), (33, False)])
def test_so_many_wrappers_are_looked_through_and_not_more(wrap, depth, reached):
    function = calls
    for _ in range(depth):
        function = wrap(function)
    copy = rebound(function, {"helper": lambda: "stand-in"})
    assert copy()[0] == ("stand-in" if reached else "installed")


def test_a_function_that_holds_itself_has_an_end():
    def again(count):
        return helper() if count == 0 else again(count - 1)

    assert rebound(again, {"helper": lambda: "stand-in"})(0) == "stand-in"
