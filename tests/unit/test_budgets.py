"""What may be used of each device: forms of max_memory, shares, rounding."""

from __future__ import annotations

import math
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnb_dispatch_fix.model import load
from bnb_dispatch_fix.model.budgets import (
    UNLIMITED,
    Budgets,
    adds_unused,
    overfull,
    reserved_but_unused,
    usable_budgets,
)

GIB = 2**30


def bitsandbytes_adjust(budgets):
    """As bitsandbytes' quantizers have it since transformers 4.33."""
    return {device: size * 0.90 for device, size in budgets.items()}


def read(free=None):
    """A `get_max_memory` like the installed ones: numbers pass, None asks for `free`."""

    def get_max_memory(max_memory):
        if max_memory is None:
            return dict(free)
        for device in list(max_memory):
            if max_memory[device] == "1GiB":
                max_memory[device] = GIB
        numbers = sorted(device for device in max_memory if isinstance(device, int))
        names = [name for name in ("mps", "cpu", "disk") if name in max_memory]
        return {device: max_memory[device] for device in [*numbers, *names]}

    return get_max_memory


def test_the_callers_dict_is_not_changed():
    max_memory = {1: "1GiB", 0: 5, "cpu": 7}
    budgets = usable_budgets(max_memory, get_max_memory=read())
    assert max_memory == {1: "1GiB", 0: 5, "cpu": 7}
    assert list(budgets.usable.items()) == [(0, 5), (1, GIB), ("cpu", 7)]


def test_accelerators_and_host_are_told_apart_and_empty_devices_hold_nothing():
    budgets = usable_budgets(
        {7: 30, 3: 0, "mps": 9, "disk": 4, "cpu": 2, 5: 20}, get_max_memory=read()
    )
    assert list(budgets.accelerators.items()) == [(5, 20), (7, 30), ("mps", 9)]
    assert budgets.host == {"cpu": 2, "disk": 4}
    assert budgets.given[3] == budgets.usable[3] == 0


def test_no_cpu_is_added():
    assert usable_budgets({0: 10}, get_max_memory=read()).usable == {0: 10}


def test_the_quantizers_share_is_rounded_down():
    budgets = usable_budgets({0: 19, 1: 9}, get_max_memory=read(), adjust=bitsandbytes_adjust)
    assert budgets.given == {0: 19, 1: 9}
    assert budgets.usable == {0: 17, 1: 8}  # 17.1 and 8.1


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ({0: 100, "cpu": 1000}, {0: 81, "cpu": 900}),  # 0.9 x 0.9
        ({0: 100, 1: 100, "cpu": 1000}, {0: 90, 1: 90, "cpu": 900}),
        ({0: 0, 1: 100, "cpu": 1000}, {0: 0, 1: 81, "cpu": 900}),
        ({0: 1, 1: 100, "cpu": 1000}, {0: 0, 1: 90, "cpu": 900}),  # one byte is free on GPU 0
        ({"mps": 100}, {"mps": 90}),
        ({"cpu": 1000}, {"cpu": 900}),
    ],
)
def test_one_accelerator_without_max_memory_keeps_a_tenth_free(free, expected):
    budgets = usable_budgets(None, get_max_memory=read(free), adjust=bitsandbytes_adjust)
    assert budgets.given == free
    assert budgets.usable == expected


def test_sequential_keeps_no_tenth_free():
    budgets = usable_budgets(None, get_max_memory=read({0: 100}), single_device_share=1)
    assert budgets.usable == {0: 100}


def test_one_accelerator_with_max_memory_may_be_filled():
    assert usable_budgets({0: 100}, get_max_memory=read()).usable == {0: 100}


def test_unused_memory_is_added_up_to_what_the_caller_allows():
    options = {"adjust": bitsandbytes_adjust, "unused": {0: 5, 1: 50}.__getitem__}
    free = {0: 100, 1: 100, "cpu": 10}
    assert usable_budgets(None, get_max_memory=read(free), **options).usable == {
        0: 95,
        1: 140,
        "cpu": 9,
    }
    assert usable_budgets(free, get_max_memory=read(), **options).usable == {
        0: 95,
        1: 100,
        "cpu": 9,
    }


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((4, 51, 3), False),
        ((4, 52), True),
        ((4, 52, 1), True),
        ((5, 0, 0), True),
        ((5, 3, 0), True),
        ((5, 4), False),
    ],
)
def test_releases_whose_planner_adds_unused_memory(version, expected):
    assert adds_unused(version) is expected


def test_unusual_numbers():
    budgets = usable_budgets({0: 1.9, 1: -3, 2: math.inf, 3: -math.inf}, get_max_memory=read())
    assert budgets.usable == {0: 1, 1: 0, 2: UNLIMITED, 3: 0}
    with pytest.raises(ValueError, match=r"max_memory\[0\] must be a number of bytes, not nan"):
        usable_budgets({0: math.nan}, get_max_memory=read())


def test_a_share_that_is_no_number_names_the_device():
    with pytest.raises(ValueError, match=r"max_memory\[1\] must be a number of bytes, not nan"):
        usable_budgets({1: 7}, get_max_memory=read(), adjust=lambda sizes: {1: math.nan})


def test_a_device_is_too_full_from_the_first_byte_over_its_budget_on():
    budgets = Budgets({0: 99, 1: 99, 2: 99, "cpu": 9}, {0: 10, 1: 10, 2: 0, "cpu": 1, "disk": 0})
    loads = {0: 10, 1: 13, 2: 1, 3: 5, "cpu": 7, "disk": 7}
    # GPU 0 is full, GPU 3 has no budget, and the host is never too full.
    assert overfull(loads, budgets) == {1: 3, 2: 1}


class Backend:
    """The part of `torch.cuda` or `torch.xpu` that tells what the allocator holds."""

    def __init__(self, reserved, allocated, available=True):
        self.reserved, self.allocated, self.available = reserved, allocated, available

    def is_available(self):
        return self.available

    def memory_reserved(self, device):
        return self.reserved[device]

    def memory_allocated(self, device):
        return self.allocated[device]


CUDA = Backend({0: 100, 1: 50}, {0: 30, 1: 50})


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ({"cuda": CUDA, "xpu": Backend({0: 9, 1: 9}, {0: 2, 1: 1})}, {0: 7, 1: 8, 2: 0}),
        ({"cuda": CUDA, "xpu": Backend({0: 9}, {0: 2}, available=False)}, {0: 70, 1: 0, 2: 0}),
        ({"cuda": CUDA}, {0: 0, 1: 0, 2: 0}),  # no such backend: nothing is added on a guess
        (None, {0: 0, 1: 0, 2: 0}),
    ],
    ids=["XPU", "CUDA", "no xpu", "no torch"],
)
def test_what_torch_has_reserved_and_does_not_use(torch, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch and types.SimpleNamespace(**torch))
    assert {device: reserved_but_unused(device) for device in expected} == expected


@pytest.mark.parametrize(("version", "share"), [("4.32.1", 1.0), ("4.33.0", 0.9), ("4.44.2", 0.9)])
def test_bitsandbytes_keeps_a_tenth_of_free_memory_since_4_33(version, share, monkeypatch):
    release = types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "transformers", release)
    assert load._share_left(None, None, read({0: 100})) == share


DEVICES = st.one_of(st.integers(0, 20), st.sampled_from(["mps", "cpu", "disk"]))
SIZES = st.one_of(st.integers(0, 2**45), st.floats(0, 2**45))


@given(
    st.dictionaries(DEVICES, SIZES, max_size=8),
    st.floats(0.1, 1.5),
    st.integers(0, 2**40),
)
def test_no_budget_is_above_the_callers_and_no_device_is_added(max_memory, share, unused):
    budgets = usable_budgets(
        max_memory,
        get_max_memory=read(),
        adjust=lambda sizes: {device: size * share for device, size in sizes.items()},
        unused=lambda device: unused,
    )
    assert set(budgets.usable) == set(budgets.given) == set(max_memory)
    for device, size in budgets.usable.items():
        assert isinstance(size, int)
        assert 0 <= size <= max_memory[device]
        assert device in ("mps", "cpu", "disk") or size == math.floor(
            min(max_memory[device], max_memory[device] * share + unused)
        )
    assert set(budgets.accelerators) | set(budgets.host) == {
        device for device in max_memory if budgets.usable[device] or device in ("cpu", "disk")
    }
