"""What is stored counts: bitsandbytes' scales, true sizes; and nothing gets worse than without.

A refusal stays a refusal, with numbers; what the release accepts beyond a budget is accepted and
warned of, device by device; a model without a tensor and a `max_memory` without a device are what
they are without the shim.
"""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch", reason="plans real modules: needs torch")
pytest.importorskip("bitsandbytes", reason="its weights and scales are counted")

import bitsandbytes
import meta
import shapes
from shapes import HAS_PLANNER, SHARE, STRATEGIES, Shape
from torch import nn

import bnb_dispatch_fix
from bnb_dispatch_fix.model import requests
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import search
from bnb_dispatch_fix.model.sizers import sizer_for
from bnb_dispatch_fix.model.units import measure
from bnb_dispatch_fix.planning.simulation import build_checkpoint, plan_checkpoint


@pytest.fixture(autouse=True)
def active():
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


def both(act):
    """What comes out without the shim and with it."""
    bnb_dispatch_fix.deactivate()
    without = act()
    bnb_dispatch_fix.activate()
    return without, act()


def note(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "bnb_dispatch_fix"]


# --- the scales of bitsandbytes ------------------------------------------------------------------


def scales_of(model):
    return measure(model, no_split_module_classes=None, sizer=sizer_for(model)).scales


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_scales_of_4_bit_weights(kind, double):
    """1,000 × 640 elements: 10,000 blocks of 64; 39.06 blocks of 256 among these."""
    with meta.on_meta():
        layer = bitsandbytes.nn.Linear4bit(
            640, 1000, bias=False, compress_statistics=double, quant_type=kind
        )
    expected = 10_000 + 10_000 / 256 * 4 if double else 40_000
    assert scales_of(nn.Sequential(layer)) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_scales_are_what_bitsandbytes_keeps_beside_a_weight(double):
    try:
        layer = bitsandbytes.nn.Linear4bit(640, 1024, bias=False, compress_statistics=double)
        state = layer.to("cpu").weight.quant_state
        kept = state.absmax.numel() * state.absmax.element_size()
    except Exception as error:  # noqa: BLE001  # whatever an old release raises
        pytest.skip(f"this bitsandbytes does not quantize on the CPU: {error!r}")
    if double:
        kept += state.state2.absmax.numel() * state.state2.absmax.element_size()
    assert scales_of(nn.Sequential(layer)) == kept


def test_scales_of_8_bit_weights_are_a_float32_per_row():
    with meta.on_meta():
        layer = bitsandbytes.nn.Linear8bitLt(640, 1000, bias=True, has_fp16_weights=False)
    assert scales_of(nn.Sequential(layer)) == 4000


def test_what_is_not_quantized_has_none():
    with meta.on_meta():
        model = nn.Sequential(nn.Linear(640, 100), nn.LayerNorm(100))
    assert scales_of(model) == 0


# --- a placement with room for them --------------------------------------------------------------


def request_for(shape, budgets, double=False):
    """As `_get_device_map` is asked, with bitsandbytes' tenth."""
    model = shapes.build(shape, double=double)
    return Request(
        model=model,
        strategy="sequential",
        max_memory=budgets,
        no_split=frozenset(["Block"]),
        quantizer=shapes.quantizer() if HAS_PLANNER else None,
        get_max_memory=lambda asked: dict(asked),
        adjust=lambda given: {device: size * 0.9 for device, size in given.items()},
        sizer=sizer_for(model, None, torch.float16),
        lone_share=1,
    )


def loads_by_hand(shape, device_map):
    """(as the release counts, as stored without double quantization), bytes by device."""
    counted = shape.loads(device_map)
    blocks = Shape(0, shape.blocks, 0).loads(device_map)
    return counted, {d: size + blocks.get(d, 0) // 8 for d, size in counted.items()}


# A block of 9,000 has scales of 1,125. Counted, 12 blocks are 0.990 of 109,090 and the embedding
# with 9 is 0.995: the fuller one leaves room on the other for the scales of 11.
TIGHT = Shape(27_544, (9_000,) * 20, 2)
GIVEN = {0: 121_212, 1: 121_212}


def test_a_placement_with_room_for_the_scales_is_preferred():
    found = search(request_for(TIGHT, GIVEN))
    counted, stored = loads_by_hand(TIGHT, found.device_map)
    assert all(counted[device] <= 0.9 * GIVEN[device] for device in GIVEN)
    assert all(stored[device] <= GIVEN[device] for device in GIVEN), stored
    # Without scales to speak of it is the emptier one.
    plain = search(request_for(TIGHT, GIVEN, double=True))
    assert TIGHT.loads(plain.device_map)[1] == 12 * 9_000 + 2


def test_what_fits_as_the_release_counts_is_not_refused_for_its_scales():
    """Two GPUs full of blocks: 1.0125 of what was given once stored."""
    shape = Shape(2, (9_000,) * 20, 2)
    given = dict.fromkeys(range(2), 90_002 * 10 // 9 + 2)
    found = search(request_for(shape, given))
    counted, stored = loads_by_hand(shape, found.device_map)
    assert all(counted[device] <= 0.9 * given[device] for device in given)
    assert max(stored[device] - given[device] for device in given) > 0


def test_the_note_says_what_was_counted():
    if SHARE == 1:
        pytest.skip("4.30 counts too little to refuse this")
    gib = 2**30
    shape = Shape(2 * gib, (gib,) * 16, 2 * gib)
    outcome = shapes.plan(shape, "sequential", {0: 10 * gib, "cpu": 99 * gib})
    # 16 GiB in 4 bits have 16 / 8 of scales.
    assert "stored: 20.00 GiB weights + 2.00 GiB scales" in note(outcome.error)


# --- never worse than without --------------------------------------------------------------------

EIGHT_TOO_SMALL = {**dict.fromkeys(range(8), 500_000), "cpu": 10**9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build_checkpoint(folder)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_placement_no_other_answer(strategy, checkpoint, caplog):
    """Embedding and head 1 MiB each, no GPU has half of that."""
    without, found = both(lambda: plan_checkpoint(checkpoint, EIGHT_TOO_SMALL, device_map=strategy))
    assert type(found.error) is type(without.error)
    assert found.device_map == without.device_map
    if found.error is None:
        lines = [line for line in warnings(caplog) if "puts more on a device" in line]
        if not HAS_PLANNER and found.offloaded:  # said once it has loaded; here it is stopped
            assert lines == []
            return
        overfilled = {d for d in found.device_map.values() if str(d) not in ("cpu", "disk")}
        if not overfilled:  # 5.x without the shim: all of it on the CPU
            assert lines == []
            assert any("the whole model goes to the CPU" in line for line in warnings(caplog))
            return
        [line] = lines
        assert any(f"GPU {device}: 1." in line for device in overfilled), line
    elif without.error.__class__ is ValueError:
        assert "bnb-dispatch-fix: " in note(found.error)
        assert "488.28 KiB" in note(found.error)


def test_an_accepted_plan_that_overfills_a_device_is_said_once_device_by_device(caplog):
    """GPU 1 is full of 4-bit weights as the release counts; GPU 0 keeps room for a block."""
    shape = Shape(2, (90_000,) * 20, 2)
    given = {0: int(810_002 / SHARE) + 1, 1: int(1_080_002 / SHARE) + 1}
    without, found = both(lambda: shapes.plan(shape, "sequential", given))
    assert found.error is None and found.device_map == without.device_map
    _, stored = loads_by_hand(shape, found.device_map)
    assert stored == {0: 810_002, 1: 1_215_002}
    [line] = [line for line in warnings(caplog) if "puts more on a device" in line]
    # 12 × 101,250 + 2 bytes are 1.159 MiB; 1,080,002 / 0.9 are 1.144, on 4.30 1.030.
    assert line.endswith(f": GPU 1: 1.16 MiB of {'1.14' if SHARE < 1 else '1.03'} MiB")


def test_room_for_all_is_no_warning(caplog):
    shape = Shape(2, (90_000,) * 20, 2)
    found = shapes.plan(shape, "sequential", dict.fromkeys(range(2), 3_000_000))
    assert found.error is None
    assert warnings(caplog) == []


@pytest.mark.parametrize("given", [3_000_000, 600_000], ids=["accepted", "placed by rescue"])
def test_one_plan_measures_the_model_and_reads_the_budgets_once(given, monkeypatch):
    """A walk over the model is a large part of what a plan costs with the shim."""
    done = []
    for name in ("measure", "usable_budgets"):
        installed = getattr(requests, name)

        def noted(*args, _name=name, _installed=installed, **kwargs):
            done.append(_name)
            return _installed(*args, **kwargs)

        monkeypatch.setattr(requests, name, noted)
    shape = Shape(2, (90_000,) * 20, 2)
    found = shapes.plan(shape, "sequential", dict.fromkeys(range(4), given))
    assert found.error is None
    assert done.count("measure") == done.count("usable_budgets") == 1


# --- models and budgets that are hardly any ------------------------------------------------------

HARDLY_ANY = [{}, {0: 0}, {"cpu": 5}, {0: 100, "cpu": 10**6}, {3: 100}, {"mps": 0, 0: 7}]


class NoTensors(shapes.ShapeModel):
    def __init__(self, config, linear=None):
        shapes.PreTrainedModel.__init__(self, config)
        self.embed = nn.Identity()


@pytest.mark.skipif(not HAS_PLANNER, reason="before 4.50 no checkpoint can hold such a model")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_memory", HARDLY_ANY, ids=str)
def test_a_model_without_a_tensor(max_memory, strategy):
    with meta.on_meta():
        model = NoTensors(shapes.config_of(TIGHT))

    def plan():
        return shapes.call_planner(model, strategy, max_memory, shapes.quantizer())

    without, found = both(plan)
    if without.error is None:
        assert found.error is None
        assert found.device_map in (dict(without.device_map), {"": 0}, {"": 3})
    else:
        assert found.error is not None or found.device_map == {"": next(iter(max_memory))}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_memory", [{}, {0: 0, 1: 0}, {"cpu": 10**9}, {"cpu": 0}], ids=str)
def test_budgets_without_any_accelerator(max_memory, strategy):
    without, found = both(lambda: shapes.plan(TIGHT, strategy, max_memory))
    assert (found.error is None) == (without.error is None)
    if found.error is None:
        assert dict(found.device_map) == dict(without.device_map)


@pytest.mark.parametrize("low_zero", [False, True])
@pytest.mark.parametrize("model", [nn.Module(), nn.Sequential(nn.GELU())], ids=["bare", "gelu"])
@pytest.mark.parametrize("max_memory", HARDLY_ANY[:4], ids=str)
def test_accelerates_own_functions_on_hardly_any(model, max_memory, low_zero):
    import accelerate.big_modeling as own

    def plan():
        with shapes.simulated_gpus():
            try:
                caps = own.get_balanced_memory(model, dict(max_memory), low_zero=low_zero)
                return caps, dict(own.infer_auto_device_map(model, dict(max_memory)))
            except (ZeroDivisionError, ValueError):  # accelerate 0.20 and 0.21, without the shim
                return None

    without, found = both(plan)
    assert found is not None
    assert without is None or found == without


def test_an_empty_device_map_is_dispatched_as_without_the_shim():
    import accelerate

    def dispatch():
        try:
            return type(accelerate.dispatch_model(nn.Linear(2, 2), {})).__name__
        except (ValueError, IndexError) as error:
            return repr(error)

    without, found = both(dispatch)
    assert found == without


def test_nothing_is_logged_about_such_models(caplog):
    with caplog.at_level(logging.WARNING, "bnb_dispatch_fix"):
        test_accelerates_own_functions_on_hardly_any(nn.Module(), {0: 100, "cpu": 10**6}, False)
    assert warnings(caplog) == []
