"""Usable budgets are what the planner of the installed release is given before it balances."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math

import pytest

torch = pytest.importorskip("torch", reason="runs from_pretrained: needs torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

import models
import numpy
import planned
import shapes
from packaging.version import Version

from bnb_dispatch_fix import activate, deactivate
from bnb_dispatch_fix.model.budgets import (
    adds_unused,
    reserved_but_unused,
    usable_budgets,
)
from bnb_dispatch_fix.planning.simulation import Planned, simulated_gpus

RELEASE = Version(transformers.__version__).release
ACCELERATE = Version(importlib.metadata.version("accelerate")).release
#: accelerate 0.20.3 raises an error for "1.5GiB", 0.26.1 reads it.
READS_FRACTIONS = ACCELERATE >= (0, 26)
#: Of a lone GPU without `max_memory`; accelerate 0.21 did not, 5.x has it of its own.
KEEPS_A_TENTH = RELEASE >= (5,) or ACCELERATE >= (0, 22)

FORMS = {
    "texts": {0: "22GiB", 1: "1GB", "cpu": "3MiB", "disk": "4KB"},
    "numbers": {0: 1_000_001, 1: 1e9 + 0.75, "cpu": 12_345},
    "numpy": {0: numpy.int64(999_999), 1: numpy.float32(1e6), 2: numpy.float64(77.7)},
    "no cpu": {0: 5_000_003, 1: 5_000_003},
    "gaps": {1: 1_000_003, 5: 1_000_033, "cpu": 7},
    "unsorted, zeros": {5: 10**7 + 1, 0: 0, 3: 10**7 + 9, "cpu": 0},
    "one": {0: 10**7 + 1, "cpu": 5},
    "mps": {"mps": 10**7 + 1, "cpu": 5},
    **({"fractions": {0: "1.5GiB", "cpu": "0.5GB"}} if READS_FRACTIONS else {}),
}
FREE = {0: 10**8 + 7, "cpu": 10**9 + 1}
FREE_TWO = {0: 10**8 + 7, 1: 10**8 + 9, "cpu": 10**9 + 1}


@pytest.fixture(autouse=True)
def active():
    activate()
    yield
    deactivate()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    planned.save("opt", folder, torch.float16)
    return folder


def adjust(quantizer):
    """What takes bitsandbytes' tenth: the quantizer since 4.38, `from_pretrained` since 4.33."""
    if quantizer is not None:
        return quantizer.adjust_max_memory
    share = 0.9 if RELEASE >= (4, 33) else 1
    return lambda budgets: {device: size * share for device, size in budgets.items()}


def both(checkpoint, max_memory, free, strategy):
    """(usable budgets, what the planner was given), for one call of `from_pretrained`.

    From 4.50 on the shim reads the planner's own call; before, what it must read is put here.
    """
    names = {4: "accelerate.utils", 5: "transformers.integrations.accelerate"}
    get_max_memory = importlib.import_module(names[planned.GENERATION]).get_max_memory
    seen = []

    def look(model, quantizer, arguments):
        given = arguments["max_memory"]
        seen.append({device: math.floor(size) for device, size in read(given).items()})
        seen.append(
            requests[-1].budgets()
            if requests
            else usable_budgets(
                max_memory,
                get_max_memory=get_max_memory,
                adjust=adjust(quantizer),
                single_device_share=0.9 if strategy == "auto" and KEEPS_A_TENTH else 1,
                unused=reserved_but_unused if adds_unused(RELEASE) else None,
            )
        )

    def read(given):
        return get_max_memory(None if given is None else dict(given))

    with simulated_gpus(free), planned.requests() as requests:
        planned.plan(
            "opt",
            checkpoint,
            4,
            torch.float16,
            look,
            device_map=strategy,
            max_memory=None if max_memory is None else dict(max_memory),
        )
    assert bool(requests) == shapes.HAS_PLANNER
    theirs, ours = seen
    return ours, theirs


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_max_memory(form, checkpoint):
    before = dict(FORMS[form])
    ours, theirs = both(checkpoint, FORMS[form], FREE_TWO, "sequential")
    assert list(ours.usable.items()) == list(theirs.items())
    assert FORMS[form] == before
    assert {type(size) for size in ours.usable.values()} == {int}


@pytest.mark.parametrize("strategy", ["sequential", "auto"])
def test_one_gpu_without_max_memory(strategy, checkpoint):
    ours, theirs = both(checkpoint, None, FREE, strategy)
    assert ours.accelerators == {0: theirs[0]}
    assert ours.given[0] == FREE[0]
    expected = FREE[0]
    if RELEASE >= (4, 33):
        expected *= 0.9
    if strategy == "auto" and KEEPS_A_TENTH:
        expected *= 0.9
    assert ours.usable[0] == math.floor(expected)


@pytest.mark.parametrize("strategy", ["sequential", "auto"])
def test_what_the_shim_reads_of_one_gpu_without_max_memory(strategy, checkpoint):
    """On every release: 4.30-4.49 plan inside `from_pretrained`, where the shim reads it itself."""
    given = []

    def look(model, quantizer, arguments):
        given.append(arguments["max_memory"])

    with simulated_gpus(FREE), planned.requests() as requests:
        with contextlib.suppress(Planned):
            planned.plan(
                *("opt", checkpoint, 4, torch.float16, look), stop=False, device_map=strategy
            )
        read = requests[0].budgets()
    leaves = FREE[0] if given[0] is None else given[0][0]  # 4.30 passes None on for "sequential"
    assert read.accelerators == {0: math.floor(leaves)}


def test_balancing_keeps_back_of_one_gpu_what_the_installed_release_does():
    names = {4: "transformers.modeling_utils", 5: "transformers.integrations.accelerate"}
    planner = importlib.import_module(names[planned.GENERATION])
    model = models.build("tiny")
    quantizer = [models.quantizer()] if planned.GENERATION == 5 else []

    def caps():
        with simulated_gpus(FREE):
            return planner.get_balanced_memory(model, None, [models.BLOCK], *quantizer)

    found = caps()
    deactivate()
    assert found == caps()
    assert found[0] == FREE[0] * (0.9 if KEEPS_A_TENTH else 1)


def test_two_gpus_without_max_memory(checkpoint):
    ours, theirs = both(checkpoint, None, FREE_TWO, "sequential")
    assert ours.accelerators == {0: theirs[0], 1: theirs[1]}


@pytest.mark.parametrize("max_memory", [None, {0: 9 * 10**7, "cpu": 10**9}], ids=["free", "given"])
def test_memory_that_torch_has_reserved_and_does_not_use(max_memory, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *device: 3_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *device: 1_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ours, theirs = both(checkpoint, max_memory, FREE, "sequential")
    assert ours.accelerators == {0: theirs[0]}
    allowed = FREE[0] if max_memory is None else max_memory[0]
    if adds_unused(RELEASE):
        assert ours.usable[0] == math.floor(allowed * 0.9) + 2_000_000
    assert ours.usable[0] <= allowed if max_memory else True


def test_a_device_that_the_release_does_not_know_is_its_error():
    get_max_memory = importlib.import_module("accelerate.utils").get_max_memory
    if ACCELERATE < (0, 22):
        pytest.skip("accelerate before 0.22 does not look at device names")
    with pytest.raises(ValueError, match="not recognized"):
        usable_budgets({"cuda:0": 5}, get_max_memory=get_max_memory)
