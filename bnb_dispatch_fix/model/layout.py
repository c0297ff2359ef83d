"""What lies where: device maps as sized parts of the model, device by device, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import AbstractSet, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from bnb_dispatch_fix import wording
from bnb_dispatch_fix.model.device_map import ancestors
from bnb_dispatch_fix.model.units import UnitFacts, Units
from bnb_dispatch_fix.placement.records import Device

#: How many kinds of modules are named as the largest.
_LARGEST = 6


@dataclass(frozen=True)
class Part:
    """A module, or neighbours of one name and one device ("model.layers.0–5"), in bytes."""

    name: str
    size: int
    quantized: int
    modules: int = 1

    @property
    def unquantized(self) -> int:
        """Bytes that stay in a dtype of their own."""
        return self.size - self.quantized


def describe_model(fine: Units) -> Dict[str, Any]:
    """Total and quantized bytes, and the largest kinds of modules."""
    kinds: Dict[str, Part] = {}
    for unit in fine.units:
        kind = wording.kind_of(unit.name)
        before = kinds.get(kind, Part(kind, 0, 0, 0))
        kinds[kind] = Part(
            kind,
            before.size + unit.size,
            before.quantized + fine.facts[unit.name].quantized,
            before.modules + 1,
        )
    return {
        "total": fine.total,
        "quantized": sum(facts.quantized for facts in fine.facts.values()),
        "largest": sorted(kinds.values(), key=lambda piece: -piece.size)[:_LARGEST],
    }


def parts_by_device(
    coarse: Units, fine: Units, device_map: Mapping[str, Device]
) -> Dict[Device, List[Part]]:
    """The units of the model on the device their map key names, in model order.

    A unit that the map divides is shown by its own parts.
    """
    divided = {module for key in device_map for module in ancestors(key)}
    inside = _fine_units_within(coarse, fine, divided)
    placed: Dict[Device, List[Part]] = {}
    for unit in coarse.units:
        for name, size, facts in inside.get(
            unit.name, [(unit.name, unit.size, coarse.facts[unit.name])]
        ):
            device = device_of(name, device_map)
            if device is not None:
                placed.setdefault(device, []).append(Part(name, size, facts.quantized))
    return placed


def _fine_units_within(
    coarse: Units, fine: Units, divided: AbstractSet[str]
) -> Dict[str, List[Tuple[str, int, UnitFacts]]]:
    """For each unit that a map divides, the modules without children it is made of."""
    inside: Dict[str, List[Tuple[str, int, UnitFacts]]] = {
        unit.name: [] for unit in coarse.units if unit.name in divided
    }
    if inside:
        for unit in fine.units:
            home = next((m for m in ancestors(unit.name) if m in inside), unit.name)
            if home in inside:
                inside[home].append((unit.name, unit.size, fine.facts[unit.name]))
    return inside


def device_of(name: str, device_map: Mapping[str, Device]) -> Optional[Device]:
    """The device of the longest key that covers a module or tensor; None where none does."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def collapsed(parts: Sequence[Part]) -> List[Part]:
    """Neighbours with consecutive numbers as one: "model.layers.0–5"."""
    remaining = iter(parts)
    found = []
    for run in wording.collapsed(part.name for part in parts):
        members = list(islice(remaining, run.names))
        found.append(
            Part(
                str(run),
                sum(part.size for part in members),
                sum(part.quantized for part in members),
                sum(part.modules for part in members),
            )
        )
    return found
