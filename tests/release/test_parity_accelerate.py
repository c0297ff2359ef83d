"""accelerate's formula with the corrected buffer: transformers 4.x, and accelerate's own callers.

The oracle is the installed accelerate itself. Its function sizes the buffer from the first module
of each no-split class it is given; so it is given a model in which the largest block and the
largest leaf module have classes of their own, and the names of these two classes. That makes it
see what #47203 and #47211 would make it see. No number is computed here.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="sizes real modules: needs torch")
pytest.importorskip("accelerate", reason="the oracle is accelerate's own function")

import accelerate
import accelerate.utils.modeling as oracle
import models
from accelerate.utils import CustomDtype

import bnb_dispatch_fix
from bnb_dispatch_fix import activation
from bnb_dispatch_fix.planning.simulation import simulated_gpus

#: accelerate 0.20 leaves GPU 0 empty under low_zero even where the model then fits nowhere, and
#: divides by zero where there is no other accelerator; there the shim does what 0.21 does.
OLD = accelerate.__version__.startswith("0.20.")
#: Asked everything; the other seams hold the same function, and are asked every ninth case.
MAIN_SEAMS = {"transformers.modeling_utils", "accelerate.utils.modeling"}
NAMES = [name for name in models.MODELS if not name.endswith("nf4")]
CLASSES = [[models.BLOCK], (models.BLOCK, "Embedding"), models.BLOCK, None]
#: Keyword arguments as transformers 4.x passes them for a plain and for a 4-bit model.
SIZINGS = [
    {},
    {"dtype": CustomDtype.INT4, "special_dtypes": {"head.weight": torch.float16}},
]


def seams():
    """The modules in which the shim replaces accelerate's function in this environment."""
    activation.import_targets()
    patches = bnb_dispatch_fix.status().patches
    return sorted(
        {
            patch.module
            for patch in patches
            if patch.attribute == "get_balanced_memory" and patch.state == "applied"
        }
        - {"transformers.integrations.accelerate"}
    )


SEAMS = seams()
if not SEAMS:
    pytest.skip("nothing here plans with accelerate's function", allow_module_level=True)


BY_ID = json.loads(
    (Path(__file__).parent.parent / "data" / "caps_by_id_1.16.0.json").read_text("utf-8")
)["cases"]


def budgets(total):
    for count in (1, 2, 3, 8):
        yield dict.fromkeys(range(count), 2 * total)
        yield {**{device: total * (device + 1) // 2 for device in range(count)}, "cpu": total}
        if count > 2:
            yield {**dict.fromkeys(range(count), 2 * total), count - 1: 0}
    yield {"cpu": total}
    yield {0: "22GiB", 1: "2GB", "cpu": "64GiB"}


def requests(name):
    """(classes, sizing, [(max_memory, low_zero), ...]) for every way to ask about a model."""
    total = sum(p.numel() * p.element_size() for p in models.build(name).parameters()) or 2**20
    strategies = (False,) if OLD else (False, True)
    asked = [(max_memory, low_zero) for max_memory in budgets(total) for low_zero in strategies]
    return [(classes, sizing, asked) for classes in CLASSES for sizing in SIZINGS]


@pytest.fixture(scope="module")
def corrected():
    """What accelerate itself says when it is shown the largest modules; asked without the shim."""
    bnb_dispatch_fix.deactivate()
    answers = {}
    with simulated_gpus():
        for name in NAMES:
            plain = models.build(name)
            answers[name] = []
            for classes, sizing, asked in requests(name):
                sizes = oracle.compute_module_sizes(plain, **sizing)
                model, labels = models.largest_made_first(name, classes, sizes)
                for max_memory, low_zero in asked:
                    try:
                        caps = oracle.get_balanced_memory(
                            model, dict(max_memory), labels, low_zero=low_zero, **sizing
                        )
                    except (ZeroDivisionError, ValueError):  # until 0.21, without accelerators
                        assert accelerate.__version__ < "0.22" and set(max_memory) == {"cpu"}
                        answers[name].append(None)
                    else:
                        answers[name].append(list(caps.items()))
    bnb_dispatch_fix.activate()
    yield answers
    bnb_dispatch_fix.deactivate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seam", SEAMS)
def test_caps_are_accelerates_own_with_the_corrected_buffer(corrected, seam, name):
    planner = importlib.import_module(seam)
    model = models.build(name)
    cases = [(c, sizing, *case) for c, sizing, asked in requests(name) for case in asked]
    assert len(cases) == len(corrected[name])
    pairs = list(zip(cases, corrected[name]))[:: 1 if seam in MAIN_SEAMS else 9]
    different = []
    with simulated_gpus():
        for (classes, sizing, max_memory, low_zero), expected in pairs:
            caps = planner.get_balanced_memory(
                model, dict(max_memory), classes, low_zero=low_zero, **sizing
            )
            if expected is not None and list(caps.items()) != expected:
                different.append((classes, sizing, max_memory, low_zero, caps, expected))
    assert not different, f"{len(different)} of {len(pairs)}, the first: {different[0]}"


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("seam", SEAMS)
def test_budgets_are_read_by_id_as_accelerate_1_16_0_reads_them(corrected, seam, name):
    planner = importlib.import_module(seam)
    model = models.build(name)
    sizing = models.sizing(model)
    cases = [case for case in BY_ID if case["model"] == name]
    assert len(cases) > 30
    different = []
    with simulated_gpus():
        for case in cases:
            given = dict(case["max_memory"])
            caps = planner.get_balanced_memory(
                model, given, case["classes"], low_zero=True, **sizing
            )
            if caps != dict(case["caps"]):  # accelerate 0.20 leaves the caller's order
                different.append((case, caps))
    assert not different, f"{len(different)} of {len(cases)}, the first: {different[0]}"
