"""The arithmetic of the balanced caps; every expected number is worked out by hand."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnb_dispatch_fix.backport.balanced import (
    balanced_caps,
    largest_leaf_module,
    lone_device_share,
    no_split_names,
)


def test_share_is_a_part_of_the_total_plus_a_quarter_more_than_the_largest_piece():
    # 1000 // 4 = 250, buffer int(1.25 * 100) = 125; the last accelerator keeps its budget.
    caps = balanced_caps({0: 900, 1: 900, 2: 900, 3: 900, "cpu": 5}, 1000, 100, 40)
    assert caps == {0: 375, 1: 375, 2: 375, 3: 900, "cpu": 5}


def test_largest_leaf_counts_where_it_is_larger_than_the_largest_block():
    # #47211: buffer int(1.25 * 333) = 416; 1000 // 2 = 500.
    assert balanced_caps({0: 2000, 1: 2000}, 1000, 100, 333) == {0: 916, 1: 2000}


def test_a_budget_smaller_than_the_share_stays():
    assert balanced_caps({0: 300, 1: 2000}, 1000, 100, 0) == {0: 300, 1: 2000}


def test_low_zero_leaves_on_gpu_0_what_the_others_cannot_take():
    # 1000 // 2 = 500, buffer 125: GPU 1 takes 400, GPU 2 keeps 500, so 100 stay for GPU 0.
    caps = balanced_caps({0: 900, 1: 400, 2: 500}, 1000, 100, 0, low_zero=True)
    assert caps == {0: 100, 1: 400, 2: 500}


def test_low_zero_empties_gpu_0_where_the_others_take_all():
    caps = balanced_caps({0: 900, 1: 900, 2: 900}, 1000, 100, 0, low_zero=True)
    assert caps == {0: 0, 1: 625, 2: 900}


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        # The only other device takes 400 of 1000, so 600 stay for the lowest one.
        ({0: 900, 3: 400}, {0: 600, 3: 400}),
        ({1: 900, 2: 400}, {1: 600, 2: 400}),
    ],
)
def test_low_zero_works_where_device_ids_have_gaps(budgets, expected):
    # transformers 5.24.0 and accelerate 1.15.0 raise KeyError here, 1.16.0 where 0 is missing.
    # The share is 1000 // 1 + 125 = 1125, more than any budget.
    assert balanced_caps(budgets, 1000, 100, 0, low_zero=True) == expected


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        # Positions 1..n-1 are there, but not those of the GPUs in use: GPU 2 takes all of it.
        ({0: 2000, 1: 0, 2: 2000}, {0: 0, 1: 0, 2: 2000}),
        # GPU 2 takes 700 of 1000, GPU 1 nothing: 300 stay for GPU 0.
        ({0: 2000, 1: 0, 2: 700}, {0: 300, 1: 0, 2: 700}),
        # GPU 0 has no budget and keeps none; GPU 1 is capped at the share, 1000 // 1 + 125.
        ({0: 0, 1: 2000, 2: 2000}, {0: 0, 1: 1125, 2: 2000}),
    ],
)
def test_low_zero_reads_budgets_by_device_id(budgets, expected):
    # accelerate #4298: before it, all of the model stayed on GPU 0 in the first two.
    assert balanced_caps(budgets, 1000, 100, 0, low_zero=True) == expected


def test_an_accelerator_of_one_byte_is_one():
    # GPU 1 takes all 1000, so that nothing is left for GPU 0.
    assert balanced_caps({0: 1, 1: 1000}, 1000, 100, 0, low_zero=True) == {0: 0, 1: 1000}


@pytest.mark.parametrize("share", [1, 1.0, 0.9, 0.5])
def test_a_lone_accelerator_keeps_back_what_the_release_does(share):
    caps = balanced_caps({0: 1000}, 500, 0, 0, caller_set_budgets=False, lone_share=share)
    assert caps == {0: 1000 * share}
    assert isinstance(caps[0], int if share == 1 else float)  # nothing is rounded on the way


def test_the_share_of_a_lone_accelerator_is_read_off_the_code():
    def keeps_a_tenth(budgets):
        for device in budgets:
            budgets[device] *= 0.9
        return int(1.25 * budgets[0])

    def keeps_nothing(budgets):
        return int(1.25 * budgets[0])

    @functools.wraps(keeps_nothing)
    def wrapped(budgets):
        return keeps_nothing(budgets) * 0.5

    def keeps_a_half_at_times(budgets):
        return 0.0, 0.9 * budgets[0], 0.5 * budgets[1]

    assert lone_device_share(keeps_a_half_at_times) == 0.5
    assert lone_device_share(keeps_a_tenth) == 0.9
    assert lone_device_share(keeps_nothing) == 1
    assert lone_device_share(wrapped) == 1
    assert lone_device_share(None) == 0.9
    assert lone_device_share(print) == 0.9


def test_a_lone_accelerator_keeps_a_tenth_back_only_of_free_memory():
    assert balanced_caps({0: 1000, "cpu": 7}, 500, 0, 0, caller_set_budgets=False) == {
        0: 900.0,
        "cpu": 7,
    }
    assert balanced_caps({0: 1000, "cpu": 7}, 500, 0, 0) == {0: 1000, "cpu": 7}


def test_low_zero_is_off_on_a_lone_accelerator():
    assert balanced_caps({0: 1000, 1: 0}, 500, 0, 0, low_zero=True) == {0: 1000, 1: 0}


@pytest.mark.parametrize("budgets", [{}, {"cpu": 10}, {"cpu": 10, "disk": 10}, {0: 0, "cpu": 10}])
def test_without_an_accelerator_budgets_stay(budgets):
    assert balanced_caps(budgets, 1000, 100, 100) == budgets


def test_the_callers_dict_stays_as_it_is():
    budgets = {0: 900, 1: 900}
    balanced_caps(budgets, 1000, 100, 0, low_zero=True)
    assert budgets == {0: 900, 1: 900}


@given(
    budgets=st.dictionaries(
        st.one_of(st.integers(0, 9), st.sampled_from(["cpu", "disk", "mps"])),
        st.integers(0, 10**12),
    ),
    total=st.integers(0, 10**12),
    block=st.integers(0, 10**11),
    leaf=st.integers(0, 10**11),
    low_zero=st.booleans(),
    given_by_caller=st.booleans(),
)
def test_no_cap_is_above_its_budget_or_negative(
    budgets, total, block, leaf, low_zero, given_by_caller
):
    caps = balanced_caps(
        budgets, total, block, leaf, low_zero=low_zero, caller_set_budgets=given_by_caller
    )
    assert list(caps) == list(budgets)
    assert all(0 <= caps[device] <= budgets[device] for device in budgets)


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (None, ()),
        ("Block", ("Block",)),
        (["Block", "Other"], ("Block", "Other")),
        (("Block",), ("Block",)),
        ({"Block"}, ("Block",)),
        ([], ()),
    ],
)
def test_no_split_classes_come_in_any_form(classes, names):
    assert no_split_names(classes) == names


def test_a_leaf_module_is_the_sum_of_its_own_tensors():
    sizes = {
        "scale": 900,
        "norm.weight": 3,
        "norm.bias": 2,
        "block.weight": 4,
        "block.fc.weight": 2,
    }
    assert largest_leaf_module(sizes) == 5


def test_a_model_of_root_tensors_has_no_leaf_module():
    assert largest_leaf_module({"weight": 10}) == 0
