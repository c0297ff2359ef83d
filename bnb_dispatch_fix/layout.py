"""What lies where: device maps as sized parts of the model, device by device, as plain data."""

from __future__ import annotations

import re
from typing import AbstractSet, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

from bnb_dispatch_fix.placement.budgets import Budgets
from bnb_dispatch_fix.placement.device_map import ancestors
from bnb_dispatch_fix.placement.packing import GaveUp, Impossible, Placement
from bnb_dispatch_fix.placement.units import UnitFacts, Units

Device = Union[int, str]

_HOST = ("cpu", "disk")
#: How many kinds of modules are named as the largest.
_LARGEST = 6


class Piece(NamedTuple):
    """A module on a device: its name, all its bytes, the quantized ones of them, its parts."""

    name: str
    size: int
    quantized: int
    modules: int = 1


class Attempt(NamedTuple):
    """What one planner answered: a device map, an error, or the refusal of a map."""

    device_map: Optional[Dict[str, Device]]
    error: Optional[Exception]


def describe_model(fine: Units) -> Dict[str, Any]:
    """Total and quantized bytes, and the largest kinds of modules."""
    kinds: Dict[str, Piece] = {}
    for unit in fine.units:
        kind = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", unit.name)
        before = kinds.get(kind, Piece(kind, 0, 0, 0))
        kinds[kind] = Piece(
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


def describe_run(
    name: str, attempt: Attempt, coarse: Units, fine: Units, budgets: Budgets
) -> Dict[str, Any]:
    """One planner's answer: its outcome, its map as pairs, what lies on each device."""
    device_map = attempt.device_map
    placed = {} if device_map is None else pieces_by_device(coarse, fine, device_map)
    devices: List[Tuple[Any, ...]] = [
        (
            device,
            budgets.given.get(device),
            budgets.usable.get(device),
            sum(piece.size for piece in placed.get(device, ())),
            collapsed(placed.get(device, ())),
        )
        for device in dict.fromkeys([*budgets.given, *placed])
    ]
    over = any(
        usable is not None and size > usable and device not in _HOST
        for device, _, usable, size, _ in devices
    )
    offloads = any(device in _HOST for device in placed)
    error = attempt.error
    return {
        "name": name,
        "outcome": outcome(attempt, offloads=offloads, over=over),
        "error": None if error is None else one_line(error),
        "device_map": None if device_map is None else list(device_map.items()),
        "devices": devices,
    }


def outcome(attempt: Attempt, *, offloads: bool, over: bool) -> str:
    """One of the outcomes of `planning.Run`."""
    if attempt.error is not None:
        return "fails" if attempt.device_map is None else "refused"
    if over:
        return "overfull"
    return "offloads" if offloads else "loads"


def pieces_by_device(
    coarse: Units, fine: Units, device_map: Mapping[str, Device]
) -> Dict[Device, List[Piece]]:
    """The units of the model on the device their map key names, in model order.

    A unit that the map divides is shown by its own parts.
    """
    divided = {module for key in device_map for module in ancestors(key)}
    inside = _fine_units_within(coarse, fine, divided)
    placed: Dict[Device, List[Piece]] = {}
    for unit in coarse.units:
        for name, size, facts in inside.get(
            unit.name, [(unit.name, unit.size, coarse.facts[unit.name])]
        ):
            device = device_of(name, device_map)
            if device is not None:
                placed.setdefault(device, []).append(Piece(name, size, facts.quantized))
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


def collapsed(pieces: Any) -> List[Piece]:
    """Neighbours with consecutive numbers as one: "model.layers.0–5"."""
    runs: List[Tuple[str, int, int, Piece]] = []  # stem, first and last number, sum
    for piece in pieces:
        stem, _, last = piece.name.rpartition(".")
        number = int(last) if last.isdigit() else -1
        if number >= 0 and runs and runs[-1][0] == stem and runs[-1][2] == number - 1 >= 0:
            _, first, _, total = runs[-1]
            merged = Piece(
                f"{stem}.{first}–{number}" if stem else f"{first}–{number}",
                total.size + piece.size,
                total.quantized + piece.quantized,
                total.modules + 1,
            )
            runs[-1] = (stem, first, number, merged)
        else:
            runs.append((stem, number, number, piece))
    return [piece for _, _, _, piece in runs]


def verdict(
    result: Union[Placement, Impossible, GaveUp],
    exact: Optional[Dict[str, Device]],
    runs: List[Dict[str, Any]],
) -> Dict[str, Any]:
    """Whether the model fits, why, and the device map to use."""
    loading = next((run for run in runs if run["outcome"] == "loads"), None)
    if loading is not None:
        return {
            "fits": True,
            "verdict": _HELP[loading["name"]],
            "device_map": loading["device_map"],
        }
    if isinstance(result, Placement):
        pairs = None if exact is None else list(exact.items())
        return {"fits": True, "verdict": "fits with the device_map below", "device_map": pairs}
    why = result.certificate if isinstance(result, Impossible) else result
    return {"fits": False, "verdict": why.describe(), "device_map": None}


_HELP = {
    "release": "fits, and the installed release places it by itself",
    "backport": "fits with the backport",
    "rescue": "fits with rescue",
}


def one_line(error: BaseException) -> str:
    """Type and text of an exception, cut at 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"
