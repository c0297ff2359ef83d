"""Whether units cover a model: every tensor lies under one key of every placement's map."""

from __future__ import annotations

import random
import warnings

from accelerate.utils.modeling import check_device_map
from device_maps import covers


def check_coverage(model, units, *, rounds=20):
    """Every tensor lies under one key; accelerate accepts random placements and reads them so."""
    key_units = {key: unit for unit, facts in units.facts.items() for key in facts.keys}
    names = {name for name, _ in model.named_buffers()} | set(model.state_dict())
    over = {name: [key for key in key_units if covers(key, name)] for name in names}
    assert {name: len(keys) for name, keys in over.items()} == {
        **dict.fromkeys(names - set(units.excluded), 1),
        **dict.fromkeys(units.excluded, 0),
    }
    for seed in range(rounds):
        placement = random_placement(units, random.Random(seed))
        device_map = units.device_map(placement)
        with warnings.catch_warnings():
            # Keys that are tensors of a split module; the planners write these as well.
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            if not units.excluded:
                check_device_map(model, device_map)
        for name in names:
            covering = [key for key in device_map if covers(key, name)]
            if name in units.excluded:
                assert covering == []
            else:
                assert [device_map[key] for key in covering] == [
                    placement[key_units[over[name][0]]]
                ]


def random_placement(units, draw):
    """Runs of units on three devices, tied units together."""
    placement, ties, device = {}, {}, 0
    for unit in units.units:
        device = draw.choice([device, device, device, 0, 1, 2])
        placement[unit.name] = device if unit.tie is None else ties.setdefault(unit.tie, device)
    return placement
