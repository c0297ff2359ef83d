"""Measures the precisions that `plan` compares, and finds the one to look at in detail.

The model is loaded in 16 bits and in 4; what 8 bits take follows from the second, because
bitsandbytes converts the same layers, and is loaded, too, where it is the one to look at.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

from bnb_dispatch_fix.explain import proofs
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome, search
from bnb_dispatch_fix.model.sizers import Storage
from bnb_dispatch_fix.placement.records import Placement
from bnb_dispatch_fix.planning.asking import Question
from bnb_dispatch_fix.planning.fewer import fewest
from bnb_dispatch_fix.planning.precisions import QUANTIZATION, TITLES

Ask = Callable[[Optional[Mapping[str, Any]]], Question]


class Compared(NamedTuple):
    """The rows of the table, and of the largest precision that fits what its planner is asked.

    `quantized` is the request that tells what bitsandbytes leaves unquantized.
    """

    rows: List[Dict[str, Any]]
    question: Question
    outcome: Outcome
    quantized: Optional[Request] = None


def compare(ask: Ask) -> Compared:
    """Measure every precision, the largest first; the last one is chosen where none fits."""
    plain, four = ask(None), ask(QUANTIZATION["4"])
    requests = {
        "16": plain.request,
        "8": _in_eight_bits(four.request),
        "4": four.request,
        "4dq": _nested(four.request),
    }
    outcomes = {bits: search(request) for bits, request in requests.items()}
    titles = {"16": str(getattr(plain.request.model, "dtype", "")).replace("torch.", ""), **TITLES}
    rows = {bits: row(bits, titles[bits], outcomes[bits]) for bits in outcomes}
    chosen = _largest(rows)
    question = {"16": plain, "4": four}.get(chosen) or ask(QUANTIZATION[chosen])
    outcome = outcomes[chosen]
    if question.request is not requests[chosen]:
        outcome = search(question.request)
        rows[chosen] = row(chosen, titles[chosen], outcome)
    return Compared(list(rows.values()), question, outcome, four.request)


def as_stored(method: str, packed: Question, plain: Optional[Question]) -> Compared:
    """A checkpoint as it is stored, and unquantized where the release may load it so."""
    outcome = search(packed.request)
    if plain is None:
        return Compared([], packed, outcome)
    dtype = str(getattr(plain.request.model, "dtype", "")).replace("torch.", "")
    rows = [
        row("stored", f"{method}, as stored", outcome),
        row("dequantized", f"{dtype}, dequantized", search(plain.request)),
    ]
    return Compared(rows, packed, outcome)


def _largest(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The first that fits with its scales, else the first that fits, else the smallest."""
    fitting = [bits for bits, row in rows.items() if row["fits"]]
    roomy = [bits for bits in fitting if not rows[bits]["over"]]
    return next(iter(roomy or fitting), list(rows)[-1])


def row(name: str, title: str, outcome: Outcome) -> Dict[str, Any]:
    """A precision as plain data; `over` is what its scales take beyond the caller's budgets."""
    result = outcome.result
    fits = isinstance(result, Placement)
    devices = fewest(outcome) if fits else []
    if fits and not devices:
        used = set((outcome.device_map or {}).values())
        devices = [device for device in outcome.budgets.usable if device in used]
    return {
        "name": name,
        "title": title,
        "total": outcome.units.total,
        "scales": outcome.units.scales,
        "fits": fits,
        "over": _over(outcome),
        "devices": devices,
        "reason": None if isinstance(result, Placement) else proofs.told(result),
    }


def _over(outcome: Outcome) -> int:
    """Bytes beyond the caller's budgets, counted as they are stored."""
    loads = outcome.units.stored().loads(outcome.device_map or {})
    given = outcome.budgets.given
    return sum(max(0, load - given.get(device, load)) for device, load in loads.items())


def _in_eight_bits(four: Request) -> Request:
    """The request in 8 bits; bitsandbytes keeps a float32 per row of a weight beside it."""

    def size(name: str, tensor: Any, owner: Any) -> Storage:
        storage = four.sizer(name, tensor, owner)
        if not storage.quantized:
            return storage
        return Storage(1, "8-bit", True, 4 / tensor.shape[-1])

    return four._replace(sizer=size)


def _nested(four: Request) -> Request:
    """The request with double quantization: a byte per 64 elements, a float32 per 256 of these."""

    def size(name: str, tensor: Any, owner: Any) -> Storage:
        storage = four.sizer(name, tensor, owner)
        return storage._replace(scales=(1 + 4 / 256) / 64) if storage.quantized else storage

    return four._replace(sizer=size)
