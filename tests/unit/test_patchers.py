"""Somebody else patches the same function: before us, after us, in every way and order."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
from fakes import (
    BACKPORTED,
    PLAN,
    SEAM,
    fake_packages,
    finished_python,
    run_python,
    shim_with,
    write_files,
)

#: How other libraries patch, each as put on and taken off; they add a note to what they answer.
PATCHERS = """
import functools, sys
import wrapt
import transformers.integrations.accelerate as planner

NAME = "get_balanced_memory"
saved = {}

def note(answer, who):
    return (who, answer)

def by_wrapt(put_on):
    if put_on:
        saved["wrapt"] = vars(planner)[NAME]
        wrapt.wrap_function_wrapper(
            planner, NAME, lambda wrapped, _, args, kwargs: note(wrapped(*args, **kwargs), "wrapt"))
    else:
        setattr(planner, NAME, saved["wrapt"])

def by_functools(put_on):
    if put_on:
        function = saved["functools"] = vars(planner)[NAME]
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return note(function(*args, **kwargs), "functools")
        setattr(planner, NAME, wrapper)
    else:
        setattr(planner, NAME, saved["functools"])

def by_closure(put_on):
    if put_on:
        function = saved["closure"] = vars(planner)[NAME]
        def wrapper(*args, **kwargs):
            return note(function(*args, **kwargs), "closure")
        setattr(planner, NAME, wrapper)
    else:
        setattr(planner, NAME, saved["closure"])

def by_replacement(put_on):
    if put_on:
        saved["replacement"] = vars(planner)[NAME]
        setattr(planner, NAME, lambda *args, **kwargs: note("theirs", "replacement"))
    else:
        setattr(planner, NAME, saved["replacement"])

def _code(model, max_memory=None, no_split_module_classes=None, hf_quantizer=None, low_zero=False):
    return ("code", "theirs")

def by_code(put_on):
    function = vars(planner)[NAME]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if put_on:
        saved["code"] = function.__code__
        function.__code__ = _code.__code__
    else:
        function.__code__ = saved["code"]
"""
WRAPPERS = ["wrapt", "functools", "closure"]
ALL = [*WRAPPERS, "replacement", "code"]


@pytest.fixture
def run(tmp_path):
    folder = fake_packages(tmp_path)
    write_files(folder, {"their_library.py": PATCHERS})

    def run(*steps):
        quiet = "import logging; logging.disable()"
        start = ["import bnb_dispatch_fix", PLAN, quiet]
        return run_python("\n".join([*start, *steps]), folder)

    return run


def put(kind, on=True):
    return f"import their_library; their_library.by_{kind}({on})"


#: Take the shim out of the way until the others have patched.
LATER = "bnb_dispatch_fix.deactivate()"
ON = "bnb_dispatch_fix.activate()"
OFF = "bnb_dispatch_fix.deactivate()"
LOOK = "print(plan(), state()[0][0])"
WHY = "print(state()[0][1])"
RAW = "print(type(vars(__import__('transformers').integrations.accelerate)['get_balanced_memory']))"


class TestAfterUs:
    @pytest.mark.parametrize("kind", WRAPPERS)
    def test_a_wrapper_over_ours_both_work(self, run, kind):
        lines = run("plan()", put(kind), LOOK, WHY, ON, LOOK, OFF, LOOK, ON, LOOK)
        both = f"('{kind}', {BACKPORTED})"
        assert lines[0] == f"{both} replaced"
        assert "wraps our wrapper, which still works" in lines[1]
        assert "their_library" in lines[1]
        assert lines[2:] == [
            f"{both} replaced",
            f"('{kind}', 'installed') disabled",
            f"{both} replaced",
        ]

    @pytest.mark.parametrize("upper, lower", list(itertools.permutations(WRAPPERS, 2)))
    def test_two_wrappers_over_ours(self, run, upper, lower):
        lines = run("plan()", put(lower), put(upper), LOOK, ON, ON, LOOK)
        both = f"('{upper}', ('{lower}', {BACKPORTED})) replaced"
        assert lines == [both, both]

    def test_a_replacement_is_named_and_left_alone(self, run):
        lines = run("plan()", put("replacement"), LOOK, WHY, ON, LOOK, OFF, LOOK)
        theirs = "('replacement', 'theirs')"
        assert lines[0] == f"{theirs} replaced"
        assert "their_library" in lines[1]
        assert "stands in place of our wrapper" in lines[1]
        assert lines[2:] == [f"{theirs} replaced", f"{theirs} disabled"]

    def test_code_that_is_exchanged_below_us_is_not_called_while_ours_answers(self, run):
        """It patched the function that #47203 and #47211 correct; off means that it is back."""
        lines = run("plan()", put("code"), LOOK, OFF, LOOK, put("code", False), ON, LOOK)
        assert lines[1:] == ["('code', 'theirs') disabled", f"{BACKPORTED} applied"]


class TestBeforeUs:
    @pytest.mark.parametrize("kind", ALL)
    def test_it_is_left_alone_and_the_state_says_how_to_have_both(self, run, kind):
        lines = run(LATER, put(kind), ON, LOOK, WHY, OFF, LOOK)
        assert lines[0].endswith(" skipped")
        assert lines[0].startswith(f"('{kind}', ")
        assert "their_library" in lines[1]
        assert lines[2] == lines[0].replace("skipped", "disabled")

    @pytest.mark.parametrize("kind", ["wrapt", "functools", "code"])
    def test_the_reason_names_the_remedy(self, run, kind):
        [line] = run(LATER, put(kind), ON, WHY)
        assert "would be lost; import bnb_dispatch_fix before it" in line

    @pytest.mark.parametrize("kind", ALL)
    def test_when_it_is_gone_we_work(self, run, kind):
        lines = run(LATER, put(kind), ON, put(kind, False), ON, LOOK)
        assert lines == [f"{BACKPORTED} applied"]


class TestEveryOrder:
    @pytest.mark.parametrize("kind", WRAPPERS)
    @pytest.mark.parametrize("order", list(itertools.permutations(["us on", "they on"])))
    @pytest.mark.parametrize("undo", list(itertools.permutations(["us off", "they off"])))
    def test_on_and_off_in_every_order_ends_with_the_installed_function(
        self, run, kind, order, undo
    ):
        """They take off by putting back what they had found, ours too; ours then passes through."""
        steps = {
            "us on": ON,
            "us off": OFF,
            "they on": put(kind),
            "they off": put(kind, False),
        }
        after = [steps[step] for step in (*order, *undo)]
        lines = run(LATER, "plan()", *after, LOOK, OFF, RAW)
        assert lines == ["installed disabled", "<class 'function'>"]

    @pytest.mark.parametrize("kinds", list(itertools.permutations(WRAPPERS, 2)))
    def test_between_two_others_nothing_is_lost_or_called_twice(self, run, kinds):
        lower, upper = kinds
        lines = run("plan()", put(lower), ON, put(upper), ON, OFF, ON, ON, "print(plan())")
        assert lines == [f"('{upper}', ('{lower}', {BACKPORTED}))"]


class TestInTheWayOfAPlanner:
    """A planner is looked after from outside; what it is asked cannot be read through a wrapper."""

    PLANNER = """
def get_max_memory(max_memory=None):
    return dict(max_memory)

def _get_device_map(model, device_map, max_memory, hf_quantizer):
    return {"": 0}
"""
    LIBRARY = """
import functools
from transformers.integrations import accelerate

planner = accelerate._get_device_map

@functools.wraps(planner)
def wrapper(*args, **kwargs):
    return planner(*args, **kwargs)

accelerate._get_device_map = wrapper
"""
    SEAM: ClassVar = {
        **SEAM,
        "features": ["rescue", "explain"],
        "attribute": "_get_device_map",
        "implementation": "transformers._get_device_map",
        "fixes": [],
    }

    @pytest.fixture
    def program(self, tmp_path):
        def run(*imports):
            packages = fake_packages(tmp_path / "packages", self.PLANNER)
            write_files(packages, {"their_library.py": self.LIBRARY})
            shim = shim_with(tmp_path / "shim", [self.SEAM])
            code = "\n".join(
                [
                    "import logging, sys",
                    "logging.basicConfig(stream=sys.stdout, format='%(levelname)s %(message)s')",
                    *(f"import {name}" for name in imports),
                    "[patch] = bnb_dispatch_fix.status().patches",
                    "print(patch.state, patch.reason)",
                ]
            )
            finished = finished_python("-c", code, paths=(packages,), cwd=shim)
            assert finished.returncode == 0, finished.stderr
            return finished.stdout.splitlines()

        return run

    def test_it_is_named_with_the_remedy_in_one_warning(self, program):
        warning, state = program("their_library", "bnb_dispatch_fix")
        for line in (warning, state):
            assert (
                "made in their_library) wraps the installed function and stands in the way" in line
            )
            assert line.endswith("import bnb_dispatch_fix before their_library, then both work")
        assert warning.startswith("WARNING transformers.integrations.accelerate._get_device_map is")
        assert state.startswith("skipped ")

    def test_after_us_both_work_without_a_word(self, program):
        [state] = program("bnb_dispatch_fix", "their_library")
        assert state.startswith("replaced ")
        assert state.endswith("wraps our wrapper, which still works")

    def test_a_planner_that_is_not_there_is_no_warning(self, program):
        self.PLANNER = "def get_max_memory(max_memory=None): ..."
        self.LIBRARY = ""
        [state] = program("their_library", "transformers.integrations.accelerate, bnb_dispatch_fix")
        assert state == "skipped transformers.integrations.accelerate has no _get_device_map"
