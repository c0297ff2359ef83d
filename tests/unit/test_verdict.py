"""The verdict on a function: what it lacks, whether it may be replaced, and the reason told.

The functions are this file's own, and so are their numbers of fixes: 1, 2 and 3.
"""

from __future__ import annotations

import functools
import sys
import types

import pytest

from bnb_dispatch_fix.patching import verdict
from bnb_dispatch_fix.patching.matrix import Implementation, Matrix, Seam
from bnb_dispatch_fix.patching.probe import ProbeResult
from bnb_dispatch_fix.patching.recognition import source_fingerprint
from bnb_dispatch_fix.patching.replacements import Replacement
from bnb_dispatch_fix.patching.verdict import Verdict, judge

KEY = "fakelib.plan"
HERE = f"{__name__}.plan"


def helper():
    """Must stand beside `plan`."""


def plan(model, max_memory=None):
    return model, max_memory


class Loader:
    @classmethod
    def load(cls, model, max_memory=None):
        return cls, model, max_memory


def seam(**changes):
    told = {
        "id": "fake",
        "features": ("backport",),
        "package": "other",
        "versions": ">=5",
        "module": "other.planning",
        "attribute": "plan",
        "implementation": KEY,
        "fixes": (1, 2),
    }
    return Seam(**{**told, **changes})


def matrix(lacks=None, function=plan):
    """A matrix that knows the source of a function, and another one; or only the other."""
    bodies = [Implementation("of another release", (1, 2, 3), ("4.0",))]
    if lacks is not None:
        bodies.append(Implementation(source_fingerprint(function), lacks, ("5.0",)))
    return Matrix((), (), {KEY: tuple(bodies), "fakelib.other": ()})


@pytest.fixture(autouse=True)
def fakelib(monkeypatch):
    """A library that is loaded, with its version."""
    library = types.SimpleNamespace(__version__="5.0")
    monkeypatch.setitem(sys.modules, "fakelib", library)
    return library


@pytest.fixture(autouse=True)
def needs(monkeypatch):
    """`needs(...)` says what stands for `plan`, by default a function with its parameters."""

    def change(parameters=("model", "max_memory"), helpers=("helper",), exact=True, probe=None):
        replacement = Replacement(lambda: None, parameters, helpers, exact=exact, probe=probe)
        monkeypatch.setitem(verdict.REPLACEMENTS, KEY, replacement)

    change()
    return change


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        ((1, 2), Verdict("applied", (1, 2), "fakelib 5.0 lacks #1, #2")),
        ((2, 3), Verdict("applied", (2,), "fakelib 5.0 lacks #2")),
        ((), Verdict("already-fixed", (), "fakelib 5.0 has #1, #2")),
        ((3,), Verdict("already-fixed", (), "fakelib 5.0 has #1, #2")),
    ],
)
def test_a_known_source_lacks_what_the_matrix_says(lacks, expected):
    assert judge(seam(), matrix(lacks), plan) == expected


def test_a_seam_without_fixes_is_looked_after():
    looked_after = seam(fixes=(), features=("rescue", "explain"))
    reason = "fakelib 5.0: called as it is, with rescue and explain"
    for known in (matrix((1,)), matrix(())):
        assert judge(looked_after, known, plan) == Verdict("applied", (), reason)


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ("5.0", "fakelib 5.0"),
        ("unknown", "fakelib of version 'unknown'"),
        (None, "fakelib of unknown version"),
    ],
)
def test_the_version_is_told_as_it_is(version, label, fakelib):
    fakelib.__version__ = version
    assert judge(seam(), matrix((1,)), plan).reason == f"{label} lacks #1"


# --- nothing stands there ------------------------------------------------------------------------


def test_a_name_that_is_gone():
    expected = Verdict("skipped", (1, 2), "other.planning has no plan")
    assert judge(seam(), matrix((1,)), None) == expected


def test_a_name_that_is_gone_in_a_library_of_unknown_version(fakelib):
    fakelib.__version__ = None
    expected = Verdict("skipped", (1, 2), "other.planning has no plan")
    assert judge(seam(), matrix((1,)), None) == expected


def test_a_library_that_is_there_and_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "fakelib")
    monkeypatch.setattr(verdict, "installed_version", {"fakelib": "5.0"}.get)
    expected = Verdict("skipped", (1, 2), "other.planning has no plan")
    assert judge(seam(), matrix((1,)), None) == expected


def test_a_library_that_is_not_there_lacks_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "fakelib")
    reason = "other.planning has no plan: fakelib is not installed"
    assert judge(seam(), matrix((1,)), None) == Verdict("skipped", (), reason)


# --- what the replacement needs ------------------------------------------------------------------


def test_a_known_source_that_does_not_fit_is_left_alone(needs):
    needs(helpers=("helper", "other_helper", "__name__"))
    expected = Verdict("skipped", (1,), "its module has no other_helper, __name__")
    assert judge(seam(), matrix((1, 3)), plan) == expected


def test_a_known_source_with_another_signature_is_left_alone(needs):
    needs(parameters=("model", "max_memory", "dtype"))
    found = judge(seam(), matrix((1,)), plan)
    assert (found.state, found.lacks) == ("skipped", (1,))
    assert "dtype" in found.reason


def test_a_known_source_that_does_not_fit_and_lacks_nothing_is_fixed(needs):
    needs(helpers=("other_helper",))
    assert judge(seam(), matrix(()), plan).state == "already-fixed"


def test_unknown_source_that_does_not_fit_is_not_run(needs):
    needs(helpers=("other_helper",), probe=pytest.fail)
    reason = f"unknown source in {HERE}: its module has no other_helper"
    assert judge(seam(), matrix(), plan) == Verdict("skipped", (1, 2), reason)


def test_a_function_without_a_module_has_no_helpers(needs):
    needs(parameters=(), exact=False, probe=pytest.fail)
    found = judge(seam(), matrix(), functools.partial(plan))
    assert found.state == "skipped"
    assert found.reason.startswith("functools.partial (partial, made in ")
    assert "stands in the way; import bnb_dispatch_fix before " in found.reason


# --- unknown source ------------------------------------------------------------------------------


def answers(confirmed=(), ruled_out=()):
    """A probe with this answer, and what it was run on."""
    seen = []

    def probe(function):
        seen.append(function)
        undecided = tuple({1, 2, 3} - {*confirmed, *ruled_out})
        return ProbeResult(confirmed, ruled_out, undecided, "it raised")

    return probe, seen


UNDECIDED = f"unknown source in {HERE}, and a toy model could not tell: it raised"


@pytest.mark.parametrize(
    ("confirmed", "ruled_out", "expected"),
    [
        ((3, 2), (1,), Verdict("applied", (2,), "fakelib 5.0: unknown source, fault confirmed")),
        (
            (3,),
            (2, 1),
            Verdict("already-fixed", (), "fakelib 5.0: not in the matrix; checked by behaviour"),
        ),
        ((), (1, 3), Verdict("skipped", (2,), UNDECIDED)),
        ((), (), Verdict("skipped", (1, 2), UNDECIDED)),
    ],
)
def test_unknown_source_is_run(confirmed, ruled_out, expected, needs):
    probe, seen = answers(confirmed, ruled_out)
    needs(probe=probe)
    assert judge(seam(), matrix(), plan) == expected
    assert seen == [plan]


def test_unknown_source_of_a_seam_without_fixes_is_not_run(needs):
    needs(probe=pytest.fail)
    reason = "fakelib 5.0: called as it is, with backport"
    assert judge(seam(fixes=()), matrix(), plan) == Verdict("applied", (), reason)


def test_a_class_method_is_judged_by_its_function(needs):
    needs(parameters=("cls", "model", "max_memory"))
    stored = vars(Loader)["load"]
    known = matrix((1,), stored.__func__)
    assert judge(seam(), known, stored) == Verdict("applied", (1,), "fakelib 5.0 lacks #1")
    assert judge(seam(), known, Loader.load) == Verdict("applied", (1,), "fakelib 5.0 lacks #1")


@functools.wraps(plan)
def patched(model, max_memory=None):
    return plan(model, max_memory)


def test_somebody_elses_patch_would_be_lost_under_a_replacement(needs):
    needs(probe=pytest.fail)
    reason = (
        f"{HERE} wraps the installed function and would be lost; import bnb_dispatch_fix before "
        f"it, then both work"
    )
    assert judge(seam(), matrix((1,)), patched) == Verdict("skipped", (1, 2), reason)


def test_somebody_elses_patch_is_wrapped_where_nothing_is_replaced(needs):
    probe, seen = answers(confirmed=(1,))
    needs(exact=False, probe=probe)
    assert judge(seam(), matrix((1,)), patched).state == "applied"
    assert seen == [patched]
