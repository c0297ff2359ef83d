"""The feature `even`, from a planner's call to its answer, against brute force; no torch."""

from __future__ import annotations

import logging
import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
from packing_oracle import best_rank, rank_of

from bnb_dispatch_fix import features, states
from bnb_dispatch_fix.model import noted
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.sizers import Storage
from bnb_dispatch_fix.placement.records import Placement
from bnb_dispatch_fix.wrappers import balancing, planners, spreading

BALANCED = ("auto", "balanced", "balanced_low_0")
BYTES = Storage(1, "bytes", False)
SCALED = Storage(1, "4-bit", True, 0.5)


@pytest.fixture(autouse=True)
def switched(monkeypatch):
    """All features are on, and each fault is worth a WARNING again."""
    monkeypatch.setattr(states, "_told", set())
    before = features._on
    features.switch_on(frozenset(features.FEATURES))
    yield
    features.switch_on(before)


class Weight:
    """A tensor of one byte per element."""

    def __init__(self, size):
        self.size = size

    def numel(self):
        return self.size


class Part:
    """A module; what it holds is given by name."""

    def __init__(self, weights=(), parts=()):
        self._parameters, self._modules, self._buffers = dict(weights), dict(parts), {}

    def parameters(self):
        return list(self._parameters.values())


class Model(Part):
    """Leaves of these sizes in this order; those in `tied` share the first one's tensor."""

    def __init__(self, sizes, tied=(), embedding=0):
        weights = [Weight(size) for size in sizes]
        for place in tied:
            weights[place] = weights[tied[0]]
        super().__init__(parts=[(f"part{n}", Part([("w", w)])) for n, w in enumerate(weights)])
        self.embedding = embedding

    def get_input_embeddings(self):
        return self._modules.get(f"part{self.embedding}")


class Quantizer:
    """bitsandbytes', as far as is asked."""

    def __init__(self, refused=()):
        self.quantization_config = SimpleNamespace(llm_int8_enable_fp32_cpu_offload=False)
        self.asked, self.refused = [], refused

    def validate_environment(self, device_map):
        self.asked.append(device_map)
        if len(set(device_map.values())) in self.refused:
            raise ValueError("not on so many devices")


def request_for(model, max_memory, strategy="auto", quantizer=None, storage=BYTES, **changes):
    request = Request(
        model=model,
        strategy=strategy,
        max_memory=max_memory,
        no_split=frozenset(),
        quantizer=quantizer,
        get_max_memory=lambda budgets: dict(budgets or {}),
        adjust=None,
        sizer=lambda name, tensor, owner: storage,
        counts_true_sizes=True,
    )
    return request._replace(**changes)


def planned(request, answer):
    """What comes out of a planner whose installed function answers, or raises, `answer`."""

    def installed():
        if isinstance(answer, Exception):
            raise answer
        return answer

    return planners.around(lambda *call: request, installed, (), {})


def loads_of(request, device_map):
    return request.units().loads(device_map)


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


# --- the most even placement there is --------------------------------------------------------


def random_case(rng):
    """A model of a few parts, budgets near what it needs, and some map of it."""
    sizes = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.randint(2, 6))]
    tied = sorted(rng.sample(range(len(sizes)), 2)) if rng.random() < 0.3 else ()
    embedding = rng.choice([0, 0, 0, len(sizes) - 1, -1])
    model = Model(sizes, tied, embedding)
    devices = rng.sample([0, 1, 2, 5], rng.randint(1, 3))
    slack = rng.choice([0.6, 1, 1.1, 1.5, 3])
    total = slack * sum(sizes) / len(devices)
    budgets = {device: round(total * rng.choice([0.5, 1, 1, 1.5])) for device in devices}
    places = [*devices, "cpu"] if rng.random() < 0.3 else devices
    chosen = [rng.choice(places) for _ in sizes]
    for place in tied:
        chosen[place] = chosen[tied[0]]
    answer = {f"part{n}": device for n, device in enumerate(chosen)}
    return model, {**budgets, "cpu": 100}, answer


def placement(units, device_map):
    """As the oracle ranks it."""
    devices = {unit.name: device_map.get("", device_map.get(unit.name)) for unit in units}
    return Placement(devices, {}, 0, 0, False, Fraction(0), False)


@pytest.mark.parametrize("strategy", BALANCED)
def test_of_all_placements_in_device_order_the_most_even_one(strategy):
    rng = random.Random(strategy)
    outcomes = {"spread": 0, "as even": 0, "stays": 0}
    for _ in range(700):
        model, max_memory, answer = random_case(rng)
        request = request_for(model, max_memory, strategy)
        found = planned(request, answer)
        budgets = {d: size for d, size in max_memory.items() if d != "cpu" and size > 0}
        units = request.units().units
        low = min(budgets, default=None)
        last = low if strategy == "balanced_low_0" and len(budgets) > 1 else None
        best = best_rank(units, budgets, last, "even") if budgets else None
        if best is None or best[0]:  # there is none in device order
            assert found is answer
            outcomes["stays"] += 1
            continue
        reached = rank_of(placement(units, found), units, budgets, last, "even")
        case = (strategy, [tuple(unit) for unit in units], max_memory, answer, found)
        # Spared bytes, largest fill, changes, embedding; a map that is as good is not changed.
        assert reached[1:5] == best[1:5], case
        assert found is answer or reached[0] is False, case
        outcomes["as even" if found is answer else "spread"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_unequal_cards_are_filled_to_the_same_part_of_their_budgets():
    found = planned(request_for(Model([1] * 36), {0: 48, 1: 24}), {"": 0})
    assert loads_of(request_for(Model([1] * 36), {}), found) == {0: 24, 1: 12}


def test_what_is_free_counts_without_budgets():
    request = request_for(Model([1] * 36), None)
    request = request._replace(get_max_memory=lambda budgets: {0: 40, 1: 20, "cpu": 99})
    assert loads_of(request, planned(request, {"": 0})) == {0: 24, 1: 12}


def test_a_part_goes_from_the_cpu_to_a_card_and_none_the_other_way():
    request = request_for(Model([4, 4, 4]), {0: 6, 1: 9, "cpu": 99})
    answer = {"part0": 0, "part1": 1, "part2": "cpu"}
    assert loads_of(request, planned(request, answer)) == {0: 4, 1: 8}
    without_room = request_for(Model([4, 4, 4]), {0: 6, 1: 7, "cpu": 99})
    assert planned(without_room, answer) is answer


@pytest.mark.parametrize("strategy", ["sequential", ""])
def test_other_strategies_are_not_touched(strategy):
    answer = {"": 0}
    assert planned(request_for(Model([1, 1]), {0: 9, 1: 9}, strategy), answer) is answer


def test_off_unless_it_is_asked_for():
    features.switch_on(frozenset(features.DEFAULTS))
    answer = {"": 0}
    assert planned(request_for(Model([1, 1]), {0: 9, 1: 9}), answer) is answer


def test_parameters_without_a_place_stay_so_only_where_the_model_does_not_fit_with_them():
    model = Model([2, 2])
    model._modules["part1"]._parameters["extra"] = Weight(6)
    asked = {"no_split": frozenset({"Part"}), "no_placement": frozenset({"extra"})}
    roomy = request_for(model, {0: 10, 1: 10})._replace(**asked)
    assert planned(roomy, {"": 0}) == {"part0": 0, "part1": 1}
    tight = request_for(model, {0: 3, 1: 3})._replace(**asked)
    assert planned(tight, {"": 0}) == {"part0": 0, "part1.w": 1}
    # With it they fit in another order of the cards only.
    model = Model([2, 2])
    model._modules["part0"]._parameters["extra"] = Weight(6)
    turned = request_for(model, {0: 3, 1: 9})._replace(**asked)
    answer = {"part0": 1, "part1": 0}
    assert planned(turned, answer) is answer


# --- with rescue, and with what quantizers say -------------------------------------------------


def test_what_is_refused_is_rescued_evenly(caplog):
    request = request_for(Model([4, 4, 4, 4]), {0: 16, 1: 16}, quantizer=Quantizer())
    refused = {"part0": 0, "part1": "cpu", "part2": "cpu", "part3": "cpu"}
    for answer in (refused, ValueError("dispatched on the CPU or the disk")):
        assert loads_of(request, planned(request, answer)) == {0: 8, 1: 8}
    assert len(lines(caplog, logging.WARNING)) == 2


def test_without_rescue_what_was_accepted_with_parts_on_the_cpu_is_spread():
    features.switch_on(frozenset({"even"}))
    request = request_for(Model([4, 4]), {0: 16, 1: 16}, quantizer=Quantizer())
    assert planned(request, {"part0": 0, "part1": "cpu"}) == {"part0": 0, "part1": 1}
    error = ValueError("dispatched on the CPU or the disk")
    with pytest.raises(ValueError, match="dispatched"):
        planned(request, error)


def test_where_there_is_none_in_device_order_rescue_answers_as_before():
    request = request_for(Model([5, 3]), {0: 3, 1: 5}, quantizer=Quantizer())
    answer = {"part0": 1, "part1": "cpu"}
    found = planned(request, answer)
    features.switch_on(frozenset(features.DEFAULTS))
    assert found == planned(request, answer) == {"part0": 1, "part1": 0}


def test_a_map_that_the_quantizer_refuses_is_not_used(caplog):
    caplog.set_level(logging.INFO)
    quantizer, answer = Quantizer(refused=[2]), {"": 0}
    request = request_for(Model([1, 1]), {0: 9, 1: 9}, quantizer=quantizer)
    assert planned(request, answer) is answer
    # What it notes about the map is about the one that is used.
    assert quantizer.asked == [{"part0": 0, "part1": 1}, answer]
    asked = request._replace(quantizer=None, refuses=lambda device_map: len(device_map) > 1)
    assert planned(asked, answer) is answer
    assert [line for line in lines(caplog, logging.INFO) if "the quantizer refuses" in line]


def with_scales(given, usable):
    """A part of 9, and one of 15 that takes half as much again with its scales."""
    request = request_for(Model([9, 15]), given, adjust=lambda budgets: usable)
    return request._replace(sizer=lambda name, *_: SCALED if name == "part1.w" else BYTES)


def test_no_card_is_overfilled_with_scales_that_was_not_before(caplog):
    caplog.set_level(logging.INFO)
    request = with_scales({0: 30, 1: 20}, {0: 24, 1: 16})
    roomy, overfull = {"part0": 1, "part1": 0}, {"": 0}  # 22.5 of 30, 31.5 of 30
    assert planned(request, roomy) is roomy
    assert [line for line in lines(caplog, logging.INFO) if "no room for the scales" in line]
    assert planned(request, overfull) == {"part0": 0, "part1": 1}


def test_one_with_room_for_the_scales_is_preferred():
    request = with_scales({0: 32, 1: 20}, {0: 24, 1: 17})
    assert planned(request, {"part0": 1, "part1": 0}) == {"": 0}


# --- accelerate's callers -----------------------------------------------------------------------


def balance(model, max_memory=None, no_split_module_classes=None, dtype=None, low_zero=False):
    """As accelerate's: every card but the last is capped."""
    return {**max_memory, 0: 9}


def infer(model, max_memory=None, no_split_module_classes=None, dtype=None):
    """Fills the first card to the brim."""
    return {"": 0} if max_memory[0] >= 8 else {"": 1}


def accelerates(model, max_memory, change=None, **options):
    """Balance, perhaps change the result, and plan, as accelerate's own callers do."""
    capped = balancing.noted("a seam", lambda wrapped, args, kwargs: wrapped(*args, **kwargs))
    caps = capped(balance, (model,), {"max_memory": max_memory, **options})
    caps = caps if change is None else change(caps)
    return planners.around(
        lambda *call: request_for(model, caps, "", balanced=noted.behind(model, caps)),
        infer,
        (model,),
        {"max_memory": caps},
    )


def test_accelerates_callers_are_spread_within_what_they_were_given():
    model = Model([4, 4])
    assert accelerates(model, {0: 80, 1: 20}) == {"": 0}  # half of the small card would be more
    assert accelerates(model, {0: 8, 1: 8}) == {"part0": 0, "part1": 1}


def test_low_zero_is_told_to_the_planner():
    model = Model([4, 4, 4])
    found = accelerates(model, {0: 20, 1: 20, 2: 20}, low_zero=True)
    assert set(found.values()) == {1, 2}


@pytest.mark.parametrize("change", [dict, lambda caps: caps.pop(1) and caps], ids=["copy", "less"])
def test_budgets_that_nobody_balanced_are_not_spread(change):
    assert accelerates(Model([4, 4]), {0: 9, 1: 9}, change) == {"": 0}


def test_budgets_of_another_model_are_not_spread():
    caps, model = {0: 9, 1: 9}, Model([1])
    noted.note(model, noted.Balanced({0: 9, 1: 9}, False, 1.0), caps)
    assert noted.behind(model, caps) is not None
    assert noted.behind(Model([1]), caps) is None
    assert noted.behind(model, None) is None


def test_nothing_is_noted_while_even_is_off(monkeypatch):
    monkeypatch.setattr(noted._thread, "note", None)
    features.switch_on(frozenset(features.DEFAULTS))
    accelerates(Model([4, 4]), {0: 9, 1: 9})
    assert noted._thread.note is None


# --- what is logged, and faults ------------------------------------------------------------------


def test_one_line_says_what_the_spread_was_and_is(caplog):
    caplog.set_level(logging.INFO)
    planned(request_for(Model([2**30] * 4), {0: 2**33, 1: 2**33}), {"": 0})
    (line,) = lines(caplog, logging.INFO)
    assert "device_map='auto': spread evenly" in line
    assert "is 25% full and was 50%: " in line
    assert line.endswith("GPU 0: 2.00 of 8.00 GiB, GPU 1: 2.00 of 8.00 GiB")


@pytest.mark.parametrize(
    "max_memory, answer, why",
    [
        ({0: 9, 1: 9}, {"part0": 0, "part1": 1}, "none is more even, the fullest device is 11%"),
        ({0: 1, 1: 1, "cpu": 9}, {"": "cpu"}, None),
        ({0: 0, "cpu": 9}, {"": "cpu"}, "no placement in device order within the budgets"),
    ],
)
def test_a_map_that_stays_is_told_with_the_reason(caplog, max_memory, answer, why):
    caplog.set_level(logging.INFO)
    found = planned(request_for(Model([1, 1]), max_memory), answer)
    assert (found is answer) == (why is not None)
    (line,) = lines(caplog, logging.INFO)
    assert (why or "was 2 bytes on the CPU") in line


@pytest.mark.parametrize("broken", ["most_even", "spread_of", "overfilled", "log"])
def test_a_fault_costs_no_plan_and_is_one_warning(monkeypatch, caplog, broken):
    def fault(*args, **kwargs):
        raise RuntimeError("of our own")

    monkeypatch.setattr(spreading, broken, fault)
    answer = {"": 0}
    for _ in range(2):
        assert planned(request_for(Model([1, 1]), {0: 9, 1: 9}), answer) is answer
    (line,) = lines(caplog, logging.WARNING)
    assert "not spread evenly" in line
    assert "of our own" in line


def test_a_call_that_cannot_be_noted_is_answered(monkeypatch, caplog):
    monkeypatch.setattr(noted.inspect, "signature", lambda function: 1 / 0)
    assert accelerates(Model([4, 4]), {0: 9, 1: 9}) == {"": 0}
    assert [line for line in lines(caplog, logging.WARNING) if "ZeroDivisionError" in line]


def test_wrong_arguments_are_the_installed_functions_to_refuse(caplog):
    handler = balancing.noted("a seam", lambda wrapped, args, kwargs: wrapped(*args, **kwargs))
    with pytest.raises(TypeError):
        handler(balance, (), {"nonsense": 1})
    assert not caplog.records
