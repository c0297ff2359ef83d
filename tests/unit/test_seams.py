"""Which names are patched: every one under which a package offers, or holds, a patched function."""

from __future__ import annotations

import sys
import types

import pytest
from packaging.specifiers import SpecifierSet

from bnb_dispatch_fix.patching import matrix as matrix_module
from bnb_dispatch_fix.patching.matrix import load_matrix, matrix_path
from bnb_dispatch_fix.patching.replacements import REPLACEMENTS

BALANCED, DISPATCH = "get_balanced_memory", "dispatch_model"
INFER, PLAN = "infer_auto_device_map", "_get_device_map"
LOAD, MIXIN = "PreTrainedModel.from_pretrained", "ModelMixin.from_pretrained"
DIFFUSERS_PLAN = "_determine_device_map"

#: Read off the released packages: release -> module -> names there.
V4 = {
    "transformers.modeling_utils": {BALANCED, DISPATCH, INFER, LOAD},
    "transformers.integrations.peft": {BALANCED, DISPATCH, INFER},
}
V5 = {
    "transformers.modeling_utils": {PLAN, LOAD},
    "transformers.integrations.accelerate": {BALANCED, DISPATCH, PLAN},
    "transformers.integrations.peft": {BALANCED, DISPATCH, INFER},
}
ACCELERATE = {
    "accelerate": {DISPATCH, INFER},
    "accelerate.utils": {BALANCED, INFER},
    "accelerate.utils.modeling": {BALANCED, INFER},
    "accelerate.big_modeling": {BALANCED, DISPATCH, INFER},
    "accelerate.utils.bnb": {BALANCED, DISPATCH, INFER, "get_quantized_model_device_map"},
    "accelerate.inference": {INFER},
}
PEFT = {"peft.peft_model": {BALANCED, DISPATCH, INFER}}
DIFFUSERS = {
    "diffusers.models.model_loading_utils": {BALANCED, INFER, DIFFUSERS_PLAN},
    "diffusers.models.modeling_utils": {DIFFUSERS_PLAN, MIXIN},
    "diffusers.pipelines.pipeline_loading_utils": {DISPATCH},
}


def without(names, *modules):
    return {module: found for module, found in names.items() if module not in modules}


RELEASES = {
    ("transformers", "4.29.2"): {},
    ("transformers", "4.30.0"): without(V4, "transformers.integrations.peft"),
    ("transformers", "4.32.1"): without(V4, "transformers.integrations.peft"),
    ("transformers", "4.33.0"): V4,
    ("transformers", "4.49.0"): V4,
    ("transformers", "4.50.0"): {
        **V4,
        "transformers.modeling_utils": {*V4["transformers.modeling_utils"], PLAN},
    },
    ("transformers", "4.57.6"): {
        **V4,
        "transformers.modeling_utils": {*V4["transformers.modeling_utils"], PLAN},
    },
    ("transformers", "5.0.0rc0"): V5,
    ("transformers", "5.25.0"): V5,
    ("accelerate", "0.19.0"): {},
    ("accelerate", "0.20.3"): without(ACCELERATE, "accelerate.utils.bnb", "accelerate.inference"),
    ("accelerate", "0.26.1"): without(ACCELERATE, "accelerate.inference"),
    ("accelerate", "0.27.0"): ACCELERATE,
    ("accelerate", "1.15.0"): ACCELERATE,
    ("accelerate", "1.16.0"): without(ACCELERATE, "accelerate.inference"),
    ("peft", "0.8.2"): {},
    ("peft", "0.9.0"): PEFT,
    ("peft", "0.21.2"): PEFT,
    ("diffusers", "0.30.3"): {},
    ("diffusers", "0.31.0"): DIFFUSERS,
    ("diffusers", "0.33.1"): {
        **DIFFUSERS,
        "diffusers.models.modeling_utils": {DISPATCH, DIFFUSERS_PLAN, MIXIN},
        "diffusers.loaders.single_file_model": {DISPATCH},
    },
    ("diffusers", "0.42.1"): {
        **DIFFUSERS,
        "diffusers.models.modeling_utils": {DISPATCH, DIFFUSERS_PLAN, MIXIN},
        "diffusers.loaders.single_file_model": {DISPATCH, DIFFUSERS_PLAN},
    },
}


@pytest.fixture(scope="module")
def matrix():
    return load_matrix(matrix_path())


@pytest.mark.parametrize("package, version", RELEASES)
def test_the_names_of_a_release_are_seams_each_once(matrix, package, version):
    found = sorted(
        (seam.module, seam.attribute)
        for seam in matrix.seams
        if seam.package == package
        and SpecifierSet(seam.versions).contains(version, prereleases=True)
    )
    names = RELEASES[package, version]
    assert found == sorted((module, name) for module in names for name in names[module])


def test_what_is_missing_there_and_what_it_is_for(matrix):
    """Whatever the name is, the function behind it is the same one."""
    of = {BALANCED: {4298, 47203, 47211}, DISPATCH: {4083}}
    for seam in matrix.seams:
        name = seam.attribute.rpartition(".")[2]
        assert set(seam.fixes) == of.get(name, set()), seam
        assert seam.implementation.partition(".")[2] == name, seam
        assert seam.implementation in REPLACEMENTS, seam
        assert ("backport" in seam.features) == (name in of), seam
        if name not in (*of, "from_pretrained"):
            assert seam.features == ("rescue", "explain", "even"), seam


def test_even_reaches_every_planner_and_the_budgets_that_accelerate_balances(matrix):
    for seam in matrix.seams:
        home, _, name = seam.implementation.partition(".")
        before_4_50 = seam.id == "transformers-v4-loader"
        wanted = name in (INFER, PLAN, DIFFUSERS_PLAN, "get_quantized_model_device_map")
        wanted = wanted or before_4_50 or (home, name) == ("accelerate", BALANCED)
        assert ("even" in seam.features) == wanted, seam


def test_whose_function_it_is(matrix):
    """transformers has its own budgets since 5.0; it has taken everything else from accelerate."""
    own = {PLAN: "transformers", LOAD: "transformers", DIFFUSERS_PLAN: "diffusers"}
    own[MIXIN] = "diffusers"
    for seam in matrix.seams:
        home = seam.implementation.partition(".")[0]
        v5_budgets = (seam.module, seam.attribute) == (
            "transformers.integrations.accelerate",
            BALANCED,
        )
        expected = "transformers" if v5_budgets else own.get(seam.attribute, "accelerate")
        assert home == expected, seam


@pytest.mark.parametrize("version, has_dispatch", [("0.31.0", False), ("0.33.1", True)])
def test_the_seams_of_other_packages_are_those_of_their_release(
    matrix, monkeypatch, version, has_dispatch
):
    """A name that the release has not taken is neither patched nor said to wait for it."""
    module = "diffusers.models.modeling_utils"
    monkeypatch.setattr(matrix_module, "installed_version", lambda package: version)
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    found = {seam.attribute for seam in matrix.expected() if seam.package == "diffusers"}
    assert found == {DIFFUSERS_PLAN, MIXIN} | ({DISPATCH} if has_dispatch else set())
    (seam,) = (each for each in matrix.seams if each.id == "diffusers-dispatch")
    reason = f"diffusers {version} is not covered; expected >=0.33.0.dev0"
    assert seam.not_covered(version) == (None if has_dispatch else reason)
