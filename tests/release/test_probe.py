"""Installed code is recognised by its source, and unknown code is judged by what it does.

What each release lacks is FIXED_IN, written by hand from the pull requests' release notes: the
matrix and the toy models are both measured against it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import types
from pathlib import Path

import pytest
import wrapt
from packaging.version import Version

from bnb_dispatch_fix.patching.matrix import load_matrix
from bnb_dispatch_fix.patching.patches import original_of
from bnb_dispatch_fix.patching.probe import probe_balanced_fault, signature_mismatch
from bnb_dispatch_fix.patching.recognition import fingerprint_text, source_fingerprint
from bnb_dispatch_fix.patching.verdict import judge

#: PR -> first release with it; no accelerate release has the buffer, no transformers #4298.
FIXED_IN = {
    "transformers": {47203: "5.14.0", 47211: "5.18.0"},
    "accelerate": {4298: "1.16.0"},
}
BUFFER = [47203, 47211]
PRS = [4298, *BUFFER]
HOMES = {
    "transformers": ("transformers.integrations.accelerate", "5.0.0rc0"),
    "accelerate": ("accelerate.utils.modeling", "0.20.0"),
}
NAMES = {package: (home, "get_balanced_memory") for package, (home, _) in HOMES.items()}
PARAMETERS = {
    "transformers": ["model", "max_memory", "no_split_module_classes", "hf_quantizer", "low_zero"],
    "accelerate": [
        *["model", "max_memory", "no_split_module_classes"],
        *["dtype", "special_dtypes", "low_zero"],
    ],
}


def version_of(package):
    """The installed version of a package that has the function, or the test is skipped."""
    try:
        version = Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed in this cell")
    since = HOMES[package][1]
    if version < Version(since):
        pytest.skip(f"{package} {version} plans with accelerate's function (its own: {since})")
    return version


def lacking(package):
    """(lacking, having): PR numbers, for the installed release."""
    version, firsts = version_of(package), FIXED_IN[package]
    lacks = [pr for pr in PRS if pr not in firsts or version < Version(firsts[pr])]
    return lacks, [pr for pr in PRS if pr not in lacks]


def source_file(package):
    """The installed file that defines the function; the package is not imported for it."""
    root = Path(importlib.util.find_spec(package).origin).parent
    parts = HOMES[package][0].split(".")[1:]
    return root.joinpath(*parts).with_suffix(".py")


@pytest.fixture(params=sorted(HOMES))
def package(request):
    version_of(request.param)
    return request.param


@pytest.fixture
def function(package):
    """The installed get_balanced_memory, without the shim over it."""
    pytest.importorskip("torch", reason="running the function needs torch")
    return original_of(importlib.import_module(HOMES[package][0]).get_balanced_memory)


@pytest.fixture
def edited(package, tmp_path):
    """`edited(old, new)`: the function of a copy of the installed module with one edit."""

    def edit(old, new):
        text = source_file(package).read_text("utf-8")
        start = text.index("def get_balanced_memory(")
        assert text.count(old, start) == 1
        path = tmp_path / "edited.py"
        path.write_text(text[:start] + text[start:].replace(old, new), "utf-8")
        module = types.ModuleType("edited")
        module.__package__ = HOMES[package][0].rpartition(".")[0]
        exec(compile(path.read_text("utf-8"), str(path), "exec"), vars(module))
        return module.get_balanced_memory

    pytest.importorskip("torch", reason="running the function needs torch")
    importlib.import_module(HOMES[package][0])
    return edit


def answers(function):
    result = probe_balanced_fault(function)
    return [sorted(result.confirmed), sorted(result.ruled_out), sorted(result.undecided)]


def verdict(package, function):
    """(state, PRs it lacks, reason) where this stands in place of the installed function."""
    matrix = load_matrix()
    [seam] = [seam for seam in matrix.seams if (seam.module, seam.attribute) == NAMES[package]]
    return judge(seam, matrix, function)


def known(package, fingerprint):
    return load_matrix().known(f"{package}.get_balanced_memory", fingerprint)


def test_installed_text_is_in_the_matrix_with_what_it_lacks(package):
    fingerprint = fingerprint_text(source_file(package).read_text("utf-8"), "get_balanced_memory")
    body = known(package, fingerprint)

    assert body is not None, f"{package} {version_of(package)} is not in compat_matrix.yaml"
    assert list(body.lacks) == lacking(package)[0]


def test_loaded_function_has_the_fingerprint_of_the_file(package, function):
    text = source_file(package).read_text("utf-8")
    assert source_fingerprint(function) == fingerprint_text(text, "get_balanced_memory")


def test_behaviour_agrees_with_the_release(package, function):
    lacks, has = lacking(package)
    assert answers(function) == [lacks, has, []]


def test_unknown_text_with_the_same_behaviour_is_judged_the_same(package, edited):
    function = edited("int(1.25 * max(", "int(  # edited\n        1.25 * max(")
    lacks, has = lacking(package)

    assert known(package, source_fingerprint(function)) is None
    assert answers(function) == [lacks, has, []]
    state, missing, reason = verdict(package, function)
    assert (state, list(missing)) == ("applied" if lacks else "already-fixed", lacks)
    assert reason.endswith(
        "unknown source, fault confirmed" if lacks else "not in the matrix; checked by behaviour"
    )


def test_a_repaired_copy_is_not_faulty(package, edited):
    lacks, _ = lacking(package)
    if not set(lacks) & set(BUFFER):
        pytest.skip(f"{package} {version_of(package)} needs no repair")
    others = [pr for pr in lacks if pr not in BUFFER]
    # 1024 bytes are the largest block and the largest leaf of the toy models.
    function = edited("int(1.25 * max(", "int(1.25 * max(1024, ")

    assert known(package, source_fingerprint(function)) is None
    assert answers(function) == [others, [pr for pr in PRS if pr not in others], []]
    state, missing, reason = verdict(package, function)
    assert (state, list(missing)) == ("applied" if others else "already-fixed", others)
    assert reason.endswith(
        "unknown source, fault confirmed" if others else "not in the matrix; checked by behaviour"
    )


def test_an_arithmetic_that_is_neither_is_left_undecided(package, edited):
    lacks, has = lacking(package)
    function = edited("int(1.25 * max(", "int(1.3 * max(")
    state, missing, reason = verdict(package, function)
    if not set(lacks) & set(BUFFER):  # the buffer is large enough, the ids are what they were
        assert answers(function) == [lacks, has, []]
        assert (state, list(missing)) == ("applied" if lacks else "already-fixed", lacks)
        return
    untold = sorted({4298, *lacks})  # not looked at where the arithmetic is unknown
    assert answers(function) == [[], [pr for pr in has if pr != 4298], untold]
    assert (state, list(missing)) == ("skipped", untold)
    assert "a toy model could not tell" in reason


def test_another_signature_is_left_alone(package, edited):
    function = edited("low_zero: bool", "only_last: bool = False, low_zero: bool")
    state, _, reason = verdict(package, function)
    assert state == "skipped"
    assert "unknown source" in reason and "only_last" in reason


def test_wrapped_by_somebody_is_left_alone_and_told(package, function):
    """A replacement would lose the wrapper; what it does shows in the toy models all the same."""
    lacks, has = lacking(package)

    @functools.wraps(function)
    def by_functools(*args, **kwargs):
        return function(*args, **kwargs)

    by_wrapt = wrapt.FunctionWrapper(by_functools, lambda f, _instance, a, k: f(*a, **k))
    for wrapper in (by_functools, by_wrapt):
        assert source_fingerprint(wrapper) is None
        assert answers(wrapper) == [lacks, has, []]
        state, _, reason = verdict(package, wrapper)
        assert state == "skipped"
        assert "would be lost; import bnb_dispatch_fix before it" in reason

    @functools.wraps(function)
    def without_caps(model, max_memory=None, **kwargs):
        return {**function(model, max_memory=max_memory, **kwargs), **max_memory}

    assert answers(without_caps) == [[], [], PRS]


def test_nothing_installed_is_touched_and_nothing_is_logged(function, caplog):
    before = dict(function.__globals__)
    with caplog.at_level(logging.DEBUG):
        probe_balanced_fault(function)

    after = function.__globals__
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []
    assert caplog.records == []


@pytest.mark.parametrize(
    "broken",
    [
        lambda *_, **__: 1 / 0,
        lambda *_, **__: None,
        lambda model, max_memory, **_: max_memory,
        lambda model, max_memory, **_: {0: "1GiB"},
        lambda: None,
        len,
        None,
    ],
    ids=["raises", "no budgets", "unchanged", "text", "takes nothing", "built in", "no function"],
)
def test_what_cannot_be_told_is_undecided_with_a_reason(broken):
    result = probe_balanced_fault(broken)
    assert result[:2] == ((), ())
    assert sorted(result.undecided) == PRS
    assert all(f"#{pr} undecided: " in result.reason for pr in PRS)
    assert "\n" not in result.reason


def test_signature(package, function):
    expected = PARAMETERS[package]

    assert signature_mismatch(function, expected) is None
    assert signature_mismatch(function, expected[:-1]) == (
        f"expected the parameters ({', '.join(expected[:-1])}), found ({', '.join(expected)})"
    )
    assert "found (model, *, low_zero)" in signature_mismatch(
        lambda model, *, low_zero=False: None, ["model", "low_zero"]
    )
    assert "cannot be read" in signature_mismatch(None, expected)
