"""Each kind of input that planners get wrong: the right answer on every seam that has it."""

from __future__ import annotations

import importlib.metadata

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="what refuses a device map is its quantizer")

import accelerate.utils.bnb
import kinds
import shapes
from accelerate.utils import BnbQuantizationConfig
from kinds import KINDS, K
from packaging.version import Version
from shapes import HAS_PLANNER, SHARE, STRATEGIES

import bnb_dispatch_fix
from bnb_dispatch_fix.simulation import Outcome, simulated_gpus

ACCELERATE = Version(importlib.metadata.version("accelerate"))
REFUSAL = "Some modules are dispatched on the CPU or the disk"
PLACES_ALL = "before 5.16.0 everything has a place"


def transformers_seam(kind, strategy):
    """`_get_device_map`; its quantizer takes a tenth."""
    if kind.no_placement and Version("5.16.0") > shapes.TRANSFORMERS:
        pytest.skip(PLACES_ALL)
    model = kinds.build(kind, declare=shapes.TRANSFORMERS.major >= 5)
    max_memory = {gpu: int(size * K / SHARE) + (size > 0) for gpu, size in kind.usable.items()}
    found = shapes.call_planner(model, strategy, {**max_memory, "cpu": 10**9}, shapes.quantizer())
    return model, found


def accelerate_seam(kind, strategy):
    """`get_quantized_model_device_map`, which leaves all of each budget."""
    if kind.no_placement:
        pytest.skip("accelerate gives everything a place")
    model = kinds.build(kind, declare=False)
    config = BnbQuantizationConfig(
        load_in_4bit=True, torch_dtype=torch.float16, skip_modules=[], keep_in_fp32_modules=[]
    )
    max_memory = {gpu: int(size * K) for gpu, size in kind.usable.items()}
    with simulated_gpus():
        try:
            device_map = accelerate.utils.bnb.get_quantized_model_device_map(
                model, config, strategy, {**max_memory, "cpu": 10**9}, list(kind.classes)
            )
            return model, Outcome(device_map, None)
        except Exception as error:
            return model, Outcome(None, error)


SEAMS = {"accelerate": accelerate_seam}
if HAS_PLANNER:
    SEAMS["transformers"] = transformers_seam


@pytest.fixture(autouse=True)
def active():
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seam", SEAMS)
def test_every_kind_is_placed_right(seam, name, strategy):
    kind = KINDS[name]
    model, found = SEAMS[seam](kind, strategy)
    if kind.fits:
        assert found.error is None, found.error
        kinds.checked(kind, model, found.device_map)
    else:
        assert REFUSAL in " ".join(str(found.error).split())


# --- faults that upstream still has ---------------------------------------------------------

NEWEST = "99"
#: (seam, kind, strategy) → what the newest releases do without the shim, and in which they do.
#: A release that is mended fails here: then its version ends the range.
UNFIXED = {
    ("transformers", "gaps", "balanced_low_0"): (KeyError, "4.50.0", NEWEST),
    ("transformers", "not from 0", "balanced_low_0"): (KeyError, "4.50.0", NEWEST),
    ("transformers", "only absent classes", "auto"): (ValueError, "5.14.0", NEWEST),
    ("transformers", "towers tied in pairs", "sequential"): (IndexError, "4.50.0", NEWEST),
    ("transformers", "a small device after a large one", "auto"): ("spills", "4.50.0", NEWEST),
    ("accelerate", "gaps", "balanced_low_0"): (KeyError, "0.21.0", NEWEST),
    ("accelerate", "not from 0", "balanced_low_0"): (KeyError, "0.21.0", NEWEST),
    ("accelerate", "towers tied in pairs", "sequential"): (IndexError, "0.21.0", NEWEST),
    ("accelerate", "a small device after a large one", "auto"): ("spills", "0.21.0", NEWEST),
}


@pytest.mark.parametrize(
    ("seam", "name", "strategy"),
    [pytest.param(*key, id="-".join(key)) for key in UNFIXED if key[0] in SEAMS],
)
def test_faults_that_upstream_has(seam, name, strategy):
    fault, first, fixed = UNFIXED[seam, name, strategy]
    version = shapes.TRANSFORMERS if seam == "transformers" else ACCELERATE
    bnb_dispatch_fix.deactivate()
    _, found = SEAMS[seam](KINDS[name], strategy)
    assert (seen(found) == fault) == (Version(first) <= version < Version(fixed)), found


def seen(outcome):
    """None where everything is placed."""
    if outcome.offloaded or REFUSAL in " ".join(str(outcome.error).split()):
        return "spills"
    return None if outcome.error is None else type(outcome.error)
