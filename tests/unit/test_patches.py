"""One patch: applied, undone, wrapped, pickled, described."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types

import pytest
import wrapt

from bnb_dispatch_fix.patching.patches import (
    Patch,
    PatchedFunction,
    describe,
    found_at,
    home_of,
    locate,
    original_of,
    patcher_of,
    wraps_ours,
)


def plan(model, max_memory=None, *, low_zero=False):
    """Plan."""
    return "installed"


class Model:
    @classmethod
    def load(cls, name):
        """Load."""
        return (cls.__name__, name)

    def run(self, x=1):
        return x


@pytest.fixture
def owner():
    """This module under its own name, put back as it was."""
    module = sys.modules[__name__]
    before = {"plan": plan, "load": vars(Model)["load"], "run": vars(Model)["run"]}
    yield module
    module.plan = before["plan"]
    Model.load, Model.run = before["load"], before["run"]


def patch_of(owner, attribute, original, handler, is_on=lambda: True):
    return Patch(owner, attribute, PatchedFunction(original, handler, is_on))


def backport(wrapped, args, kwargs):
    return ("ours", wrapped(*args, **kwargs))


def test_apply_and_undo_restore_the_very_object(owner):
    patch = patch_of(owner, "plan", plan, backport)
    assert not patch.on_top()
    patch.apply()
    assert patch.on_top()
    assert owner.plan(None) == ("ours", "installed")
    assert patch.undo()
    assert vars(owner)["plan"] is patch.original
    assert not patch.undo()


def test_a_class_method_and_a_method_are_restored_as_they_were_stored(owner):
    for attribute, call in (("load", lambda: Model.load("a")), ("run", lambda: Model().run(5))):
        stored = vars(Model)[attribute]
        without = call()
        patch = patch_of(Model, attribute, stored, backport)
        patch.apply()
        assert call() == ("ours", without)
        patch.undo()
        assert vars(Model)[attribute] is stored
        assert call() == without


def test_off_passes_through(owner):
    on = [False]
    patch = patch_of(owner, "plan", plan, backport, lambda: on[0])
    patch.apply()
    assert owner.plan(None) == "installed"
    on[0] = True
    assert owner.plan(None) == ("ours", "installed")


def test_undo_leaves_what_somebody_else_put_on_top(owner):
    patch = patch_of(owner, "plan", plan, backport)
    patch.apply()
    theirs = owner.plan = functools.wraps(owner.plan)(lambda *args: "theirs")
    assert not patch.undo()
    assert vars(owner)["plan"] is theirs


def test_the_wrapper_looks_like_the_function(owner):
    patch = patch_of(owner, "plan", plan, backport)
    original = plan
    patch.apply()
    wrapper = patch.wrapper
    assert inspect.signature(wrapper) == inspect.signature(original)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__globals__", "__code__"):
        assert getattr(wrapper, name) is getattr(original, name)
    assert isinstance(wrapper, types.FunctionType)
    assert inspect.getsource(wrapper) == inspect.getsource(original)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_was_pickled_with_the_patch_loads_without_it(owner, protocol):
    function = patch_of(owner, "plan", plan, backport)
    method = patch_of(Model, "load", vars(Model)["load"], backport)
    plain = patch_of(Model, "run", vars(Model)["run"], backport)
    model = Model()
    for patch in (function, method, plain):
        patch.apply()
    objects = [owner.plan, Model.load, Model.run, functools.partial(Model.load, "a")]
    pickled = [pickle.dumps(thing, protocol) for thing in objects]
    bound = pickle.dumps(model.run, protocol)

    assert pickle.loads(pickled[0]) is owner.plan
    assert pickle.loads(pickled[1])("a") == ("ours", ("Model", "a"))
    for patch in (function, method, plain):
        patch.undo()
    assert pickle.loads(pickled[0]) is function.original
    assert pickle.loads(pickled[1])("a") == ("Model", "a")
    assert pickle.loads(pickled[2]) is Model.run
    assert pickle.loads(pickled[3])() == ("Model", "a")
    assert pickle.loads(bound)(9) == 9


def test_what_a_class_method_is_made_of_is_the_wrapper(owner):
    """Who keeps the function below it is looked after, too."""
    patch = patch_of(Model, "load", vars(Model)["load"], backport)
    patch.apply()
    assert Model.load.__func__ is patch.wrapper
    assert Model.load.__func__(Model, "a") == ("ours", ("Model", "a"))
    assert inspect.ismethod(Model.load)
    assert isinstance(vars(Model)["load"], classmethod)


def test_it_is_copied_as_a_function_is(owner):
    patch = patch_of(owner, "plan", plan, backport)
    assert copy.copy(patch.wrapper) is patch.wrapper
    assert copy.deepcopy({"plan": patch.wrapper})["plan"] is patch.wrapper


def test_a_class_method_of_a_subclass_pickles_as_the_subclass_s(owner):
    patch = patch_of(Model, "load", vars(Model)["load"], backport)
    patch.apply()
    assert pickle.loads(pickle.dumps(Sub.load))("a") == ("ours", ("Sub", "a"))


class Sub(Model):
    pass


def test_locate_and_found_at():
    module = sys.modules[__name__]
    assert locate(module, "plan") == (module, "plan")
    assert locate(module, "Model.load") == (Model, "load")
    assert locate(module, "Gone.load") == (module, "Gone.load")
    assert found_at(*locate(module, "Gone.load")) is None
    assert found_at(*locate(module, "Sub.load")) is None  # inherited, not stored there
    assert found_at(Model, "load") is Model.__dict__["load"]


def test_original_of_goes_through_our_wrappers_only(owner):
    lower = patch_of(owner, "plan", plan, backport)
    upper = patch_of(owner, "plan", lower.wrapper, backport)
    theirs = functools.wraps(plan)(lambda *args: "theirs")
    assert original_of(upper.wrapper) is plan
    assert original_of(theirs) is theirs
    assert original_of(patch_of(owner, "plan", theirs, backport).wrapper) is theirs


def by_wrapt(function):
    return wrapt.FunctionWrapper(
        function, lambda wrapped, _, args, kwargs: ("theirs", wrapped(*args, **kwargs))
    )


def by_functools(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return ("theirs", function(*args, **kwargs))

    return wrapper


def by_closure(function):
    def wrapper(*args, **kwargs):
        return ("theirs", function(*args, **kwargs))

    return wrapper


WRAPPERS = [by_wrapt, by_functools, by_closure]


@pytest.mark.parametrize("upper", WRAPPERS)
@pytest.mark.parametrize("lower", WRAPPERS)
def test_a_wrapper_over_ours_is_seen_through_two_levels(owner, upper, lower):
    patch, other = (patch_of(owner, "plan", plan, backport) for _ in range(2))
    over = upper(lower(patch.wrapper))
    assert wraps_ours(over, patch)
    assert not wraps_ours(over, other)
    assert not wraps_ours(plan, patch)


def test_a_chain_that_leads_back_to_itself_ends(owner):
    patch = patch_of(owner, "plan", plan, backport)
    first, second = by_closure(plan), by_closure(plan)
    first.__wrapped__, second.__wrapped__ = second, first
    assert not wraps_ours(first, patch)
    assert not wraps_ours(by_closure(recursive()), patch)


def recursive():
    def function(*args):
        return function(*args)

    return function


def test_patcher_of():
    assert patcher_of(plan) == ""
    for wrap in (by_wrapt, by_functools):
        assert patcher_of(wrap(plan)) == "wraps the installed function"
    assert "in place of" in patcher_of(functools.partial(plan, None))
    elsewhere: dict = {"__file__": __file__, "__name__": "elsewhere"}
    exec(compile("def f(): pass", "/their/patch.py", "exec"), elsewhere)
    assert patcher_of(elsewhere["f"]) == "runs code of /their/patch.py"
    sourceless = {"__file__": "/app/m.pyc"}
    exec(compile("def f(): pass", "built/m.py", "exec"), sourceless)
    assert patcher_of(sourceless["f"]) == ""


def test_describe_names_the_place_where_the_code_is():
    here = __name__
    assert describe(plan) == f"{here}.plan"
    assert describe(by_wrapt(plan)) == f"{here}.plan (FunctionWrapper)"
    assert describe(None) == "nothing"
    assert describe(7) == "?.int (int)"
    theirs: dict = {"__name__": "their_library"}
    exec("def make(function):\n return lambda *a: function(*a)", theirs)
    wrapper = functools.wraps(plan)(theirs["make"](plan))
    assert home_of(wrapper) == "their_library"
    assert describe(wrapper) == f"{here}.plan (made in their_library)"
