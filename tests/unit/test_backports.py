"""What stands for each installed function: what it asks of the helpers there, and what it answers.

The installed functions are this file's own; what real releases do is tested in tests/release.
Every expected number is worked out by hand.
"""

from __future__ import annotations

import inspect

import pytest

from bnb_dispatch_fix.backport import accelerate, transformers_v5
from bnb_dispatch_fix.backport import dispatch as dispatch_module
from bnb_dispatch_fix.backport.dispatch import (
    all_on_disk,
    by_children,
    dispatch_model,
    with_tied_names,
)
from bnb_dispatch_fix.backport.transformers_v5 import largest_instance


def installed(source, **helpers):
    """The function `answer` of a module that has these helpers."""
    namespace = dict(helpers)
    exec(source, namespace)
    return namespace["answer"]


class Block:
    """Stands for a module whose class may not be split."""


class Other:
    """And for one that may."""


class Model:
    """Names of modules with what stands there."""

    def __init__(self, **modules):
        self.modules = {"": self, **modules}

    def named_modules(self):
        return self.modules.items()


TOWERS = Model(small=Block(), large=Block(), other=Other(), unsized=Block())
#: The largest leaf module is "large" itself: 30 + 10.
SIZES = {
    "": 400,
    "root_scale": 45,
    "small": 20,
    "small.weight": 20,
    "large": 40,
    "large.weight": 30,
    "large.bias": 10,
    "other": 33,
    "other.weight": 33,
}


class Helpers:
    """`get_max_memory` and `compute_module_sizes`, and what they were asked."""

    def __init__(self, budgets, sizes):
        self.budgets, self.sizes, self.asked = budgets, sizes, []

    def get_max_memory(self, *args):
        self.asked.append(args)
        return dict(self.budgets)

    def compute_module_sizes(self, *args, **kwargs):
        self.asked.append((args, kwargs))
        return self.sizes

    def of(self, source):
        """An installed function beside them."""
        names = ("get_max_memory", "compute_module_sizes")
        return installed(source, **{name: getattr(self, name) for name in names})


ACCELERATE = """
def answer(model, max_memory=None, no_split_module_classes=None, dtype=None, special_dtypes=None,
           low_zero=False):
    budgets = {0: 0.9}  # what it keeps of a lone device stands in its code
    return model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero
"""


# --- accelerate ----------------------------------------------------------------------------------


def test_accelerates_caps_are_asked_of_its_own_helpers():
    helpers = Helpers({0: 1000, 1: 1000, "cpu": 9}, SIZES)
    caps = accelerate.get_balanced_memory(
        helpers.of(ACCELERATE), TOWERS, {0: 7}, ["Block"], "dtype", {"a": "special"}
    )
    assert helpers.asked == [
        ({0: 7},),
        ((TOWERS,), {"dtype": "dtype", "special_dtypes": {"a": "special"}}),
    ]
    # 400 // 2, and a quarter more than the largest block, 40.
    assert caps == {0: 250, 1: 1000, "cpu": 9}


@pytest.mark.parametrize(
    ("classes", "sizes", "expected"),
    [
        # A leaf module of 60 is larger than any block: 400 // 2 + int(1.25 * 60).
        ("Block", {**SIZES, "other": 60, "other.weight": 60}, 275),
        # Nothing may be split but what is in no block; "other" is 33: int(1.25 * 40).
        (None, SIZES, 250),
        # One name, the largest of its instances: int(1.25 * 50); its tensors are small.
        ("Block", {**SIZES, "small": 50}, 262),
        (["Nothing"], {"": 400}, 200),
        # A tensor belongs to the module it lies in: "large.fc" has 38, "large" itself 2.
        (
            None,
            {"": 400, "large": 40, "large.fc": 38, "large.fc.weight": 38, "large.bias": 2},
            247,
        ),
    ],
)
def test_accelerates_buffer_covers_the_largest_block_and_the_largest_leaf(classes, sizes, expected):
    helpers = Helpers({0: 1000, 1: 1000}, sizes)
    caps = accelerate.get_balanced_memory(helpers.of(ACCELERATE), TOWERS, {0: 7}, classes)
    assert caps == {0: expected, 1: 1000}


def test_accelerates_low_zero():
    helpers = Helpers({0: 1000, 1: 150, 2: 150}, SIZES)
    answer = helpers.of(ACCELERATE)
    caps = accelerate.get_balanced_memory(answer, TOWERS, {0: 7}, "Block", low_zero=True)
    # The two others take 300 of 400.
    assert caps == {0: 100, 1: 150, 2: 150}


@pytest.mark.parametrize(
    ("source", "share"),
    [(ACCELERATE, 0.9), (ACCELERATE.replace("0.9", "1"), 1.0)],
    ids=["0.22 and newer", "0.20"],
)
@pytest.mark.parametrize("max_memory", [None, {0: 1000}])
def test_accelerates_lone_device_is_kept_as_the_release_does(source, share, max_memory):
    helpers = Helpers({0: 1000}, SIZES)
    caps = accelerate.get_balanced_memory(helpers.of(source), TOWERS, max_memory)
    assert caps == {0: 1000 * (share if max_memory is None else 1)}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", {0: 250, 1: 1000, "cpu": 50}),
        ("disk", {0: 250, 1: 1000, "disk": 50}),
        # A third accelerator, 400 // 3 + 50; GPU 1 is the last one with a number.
        ("mps", {0: 183, 1: 1000, "mps": 50}),
    ],
)
def test_accelerates_devices_with_a_name(device, expected):
    helpers = Helpers({0: 1000, 1: 1000, device: 50}, SIZES)
    answer = helpers.of(ACCELERATE)
    assert accelerate.get_balanced_memory(answer, TOWERS, {}, "Block") == expected


def test_a_device_that_only_the_installed_function_knows_is_left_to_it():
    helpers = Helpers({"npu": 1000, 0: 5}, SIZES)
    asked = ("model", {"npu": 7}, ["Block"], "dtype", {"a": "special"}, True)
    assert accelerate.get_balanced_memory(helpers.of(ACCELERATE), *asked) == asked
    assert helpers.asked == [({"npu": 7},)]


# --- transformers 5 ------------------------------------------------------------------------------

TRANSFORMERS = """
def answer(model, max_memory=None, no_split_module_classes=None, hf_quantizer=None, low_zero=False):
    return {0: 0.9}
"""
BLOCK_SIZES = {"": 400, "small": 20, "large": 40, "other": 99}


@pytest.mark.parametrize(
    ("classes", "leaves", "expected"),
    [
        (["Block"], {"large": 30, "other": 33}, 250),  # int(1.25 * 40)
        ("Block", {"large": 30, "other": 60}, 275),  # the leaf: int(1.25 * 60)
        (None, {"large": 30, "other": 4}, 237),  # int(1.25 * 30)
        (["Nothing"], {}, 200),
    ],
)
def test_transformers_caps_are_asked_of_its_own_helpers(classes, leaves, expected):
    helpers = Helpers({0: 1000, 1: 1000, "cpu": 9}, (BLOCK_SIZES, leaves))
    answer = helpers.of(TRANSFORMERS)
    caps = transformers_v5.get_balanced_memory(answer, TOWERS, {0: 7}, classes, "quantizer")
    assert helpers.asked == [({0: 7},), ((TOWERS, "quantizer"), {})]
    assert caps == {0: expected, 1: 1000, "cpu": 9}


def test_transformers_low_zero():
    helpers = Helpers({0: 1000, 1: 150, 2: 150}, (BLOCK_SIZES, {}))
    answer = helpers.of(TRANSFORMERS)
    caps = transformers_v5.get_balanced_memory(answer, TOWERS, {0: 7}, "Block", low_zero=True)
    assert caps == {0: 100, 1: 150, 2: 150}


@pytest.mark.parametrize(
    ("source", "share"), [(TRANSFORMERS, 0.9), (TRANSFORMERS.replace("0.9", "1"), 1.0)]
)
@pytest.mark.parametrize("max_memory", [None, {0: 1000}])
def test_transformers_lone_device(source, share, max_memory):
    helpers = Helpers({0: 1000}, (BLOCK_SIZES, {}))
    caps = transformers_v5.get_balanced_memory(helpers.of(source), TOWERS, max_memory)
    assert caps == {0: 1000 * (share if max_memory is None else 1)}


def test_the_largest_instance_of_any_class_named():
    sizes = {"small": 20, "large": 40, "other": 99}
    assert largest_instance(TOWERS, ["Block"], sizes) == 40
    assert largest_instance(TOWERS, iter(["Block", "Other"]), sizes) == 99
    assert largest_instance(TOWERS, ["Nothing"], sizes) == 0
    assert largest_instance(TOWERS, ["Block"], {}) == 0
    assert largest_instance(None, (), sizes) == 0  # nothing to look for: the model is not walked


# --- accelerate's dispatch_model, all on the disk ------------------------------------------------


class Tensor:
    def __init__(self, is_meta=True):
        self.is_meta = is_meta


class Leaf:
    def __init__(self, **parameters):
        self._parameters = parameters


class Dispatched(Model):
    """A model of two layers; each has a weight, on the meta device or in memory."""

    def __init__(self, first=True, second=True):
        layers = {"a": Leaf(weight=Tensor(first), bias=None), "b.c": Leaf(weight=Tensor(second))}
        self._parameters = {"scale": Tensor(first)}
        super().__init__(**layers)

    def named_modules(self, remove_duplicate=True):
        assert remove_duplicate is False  # a module under two names has two names of each tensor
        return self.modules.items()

    def state_dict(self):
        return dict.fromkeys(["scale", "a.weight", "b.c.weight"])


DISPATCH = """
def answer(model, device_map, main_device=None, offload_dir=None, offload_index=None,
           {hooks}):
    seen.update(locals())
    seen["quantized"] = getattr(model, "is_quantized", "not set")
    seen["groups"] = find_tied_parameters(model, any_option=1)
    if isinstance(offload_dir, Exception):
        raise offload_dir
    return model
"""
SINCE_0_23 = DISPATCH.format(hooks="force_hooks=False")
BEFORE = DISPATCH.format(hooks="*, other=False")
TIED = [["a.weight", "b.c.weight"]]


def dispatch(source, model, device_map, **options):
    """What `dispatch_model` gave the installed function of this source, and the answer."""
    seen = {}

    def find_tied_parameters(asked, **_):
        assert asked is model
        return TIED

    answer = installed(source, seen=seen, find_tied_parameters=find_tied_parameters)
    return seen, dispatch_model(answer, model, device_map, **options)


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ({"": "disk"}, {"scale": "disk", "a": "disk", "b": "disk"}),
        ({"a": "disk", "b": "disk"}, {"a": "disk", "b": "disk"}),
    ],
)
def test_a_map_all_on_the_disk_has_hooks_and_a_key_for_each_child(device_map, expected):
    model = Dispatched()
    seen, answer = dispatch(SINCE_0_23, model, device_map, offload_dir="folder")
    assert answer is model
    assert model.hf_device_map == device_map and model.hf_device_map is not device_map
    assert seen["device_map"] == expected
    assert (seen["main_device"], seen["offload_dir"]) == ("cpu", "folder")
    assert seen["offload_index"] is None
    assert seen["force_hooks"] is True
    assert seen["quantized"] == "not set"


def test_what_the_caller_gave_stays():
    index = {"a.weight": {"safetensors_file": "f", "weight_name": "w"}}
    options = {"main_device": 3, "offload_index": index}
    seen, _ = dispatch(SINCE_0_23, Dispatched(), {"": "disk"}, **options)
    assert seen["device_map"] == {"": "disk"}  # with an index the weights are written already
    assert seen["main_device"] == 3
    assert index == {"a.weight": {"safetensors_file": "f", "weight_name": "w"}}
    assert seen["offload_index"] == {**index, "b.c.weight": index["a.weight"]}


@pytest.mark.parametrize(
    ("first", "second", "groups"),
    [(True, True, []), (False, True, []), (True, False, []), (False, False, TIED)],
)
def test_what_is_on_the_meta_device_has_no_address_to_be_tied_by(first, second, groups):
    seen, _ = dispatch(SINCE_0_23, Dispatched(first, second), {"": "disk"})
    assert seen["groups"] == groups


def test_names_of_the_root_and_names_that_are_not_there():
    seen = {}
    groups = [["scale", "b.c.weight"], ["nothing", "b.c.weight"]]
    answer = installed(SINCE_0_23, seen=seen, find_tied_parameters=lambda model, **_: groups)
    dispatch_model(answer, Dispatched(second=False), {"": "disk"})
    assert seen["groups"] == [["nothing", "b.c.weight"]]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("quantized", ["not set", True, False])
def test_releases_without_force_hooks_take_the_model_for_quantized(quantized, fails):
    model = Dispatched()
    if quantized != "not set":
        model.is_quantized = quantized
    folder = ValueError("full") if fails else None
    if fails:
        with pytest.raises(ValueError, match="full"):
            dispatch(BEFORE, model, {"": "disk"}, offload_dir=folder)
    else:
        seen, _ = dispatch(BEFORE, model, {"": "disk"}, other=7)
        assert seen["other"] == 7
        assert seen["quantized"] is (True if quantized == "not set" else quantized)
        assert "force_hooks" not in seen
    assert vars(model).get("is_quantized", "not set") == quantized


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"a": "disk", "b": 0}, {}, "auto", None])
def test_any_other_map_is_the_installed_functions(device_map):
    seen, answer = dispatch(BEFORE, "model", device_map, offload_index="index", other=7)
    assert answer == "model"
    assert (seen["device_map"], seen["main_device"]) == (device_map, None)
    assert (seen["offload_index"], seen["other"]) == ("index", 7)
    assert seen["groups"] is TIED


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ({"": "disk"}, True),
        ({"a": "disk", "b": "disk"}, True),
        ({"a": "disk", "b": "cpu"}, False),
        ({"": 0}, False),
        ({}, False),
        ("disk", False),
        ([("a", "disk")], False),
    ],
)
def test_which_maps_are_all_on_the_disk(device_map, expected):
    assert all_on_disk(device_map) is expected


def test_other_keys_beside_the_root_are_kept():
    found = by_children(Dispatched(), {"": "disk", "b.c": "cpu", "a": "cpu"})
    assert found == {"scale": "disk", "a": "cpu", "b": "disk", "b.c": "cpu"}
    given = {"a": "disk"}
    assert by_children(Dispatched(), given) == given
    assert by_children(Dispatched(), given) is not given


def test_each_name_of_a_tied_weight_leads_to_what_was_saved():
    a = {"safetensors_file": "f", "weight_name": "a in the file"}
    d = {"safetensors_file": "f"}
    index = {"a": a, "c": {"dtype": "float16"}, "d": d}
    tied = [("b", "a", "x"), ("c", "y"), ("d", "e", "a"), ("u", "v")]
    found = with_tied_names(index, tied)
    assert found == {
        **index,
        "b": a,
        "x": a,
        # "c" is in a folder of its own, not in a checkpoint: nothing leads there.
        "e": {"weight_name": "d", **d},
    }
    assert index.keys() == {"a", "c", "d"}
    assert with_tied_names(None, tied) is None


# --- what must stand beside an installed function, and what it must take -----------------------


@pytest.mark.parametrize(
    ("module", "source", "helpers"),
    [
        (accelerate, ACCELERATE, ("get_max_memory", "compute_module_sizes")),
        (transformers_v5, TRANSFORMERS, ("get_max_memory", "compute_module_sizes")),
        (dispatch_module, SINCE_0_23, ("find_tied_parameters",)),
    ],
)
def test_what_is_asked_of_an_installed_function(module, source, helpers):
    assert helpers == module.HELPERS
    taken = inspect.signature(installed(source)).parameters
    assert tuple(name for name in taken if name != "force_hooks") == module.PARAMETERS
