"""What to change about a plan: recipes where it is refused, fewer cards where they are enough."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from bnb_dispatch_fix.explain.offloading import Recipe
from bnb_dispatch_fix.explain.recipes import recipes, typeable, written_budgets
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome, search
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.planning.asking import Question
from bnb_dispatch_fix.planning.comparison import Ask
from bnb_dispatch_fix.planning.fewer import fewest, max_memory_of
from bnb_dispatch_fix.planning.precisions import QUANTIZATION, TITLES
from bnb_dispatch_fix.wording import bytes_in

_UNTRIED = "other changes were not tried: planning this model takes long"


def added(
    job: Mapping[str, Any],
    question: Question,
    outcome: Outcome,
    answer: Mapping[str, Any],
    ask: Optional[Ask],
) -> Dict[str, Any]:
    """What an answer says of it: "recipes", "fewer", and notes with what was not tried.

    To be called with rescue on: recipes are planned as a program with the shim plans. `ask` takes
    another quantization; None where the checkpoint has its own.
    """
    request = question.request._replace(max_memory=_typed(question.request.max_memory))
    if answer["fits"]:
        fewer = None if job.get("context") else _fewer(request, outcome, answer)
        return {"recipes": [], "fewer": fewer}
    found = recipes(request, outcome)
    quantized = [] if ask is None or job.get("compare") else _quantized(request, ask)
    told = [list(recipe) for recipe in (*quantized, *found.recipes)]
    notes = list(answer["notes"]) if found.complete else [*answer["notes"], _UNTRIED]
    return {"recipes": told, "fewer": None, "notes": notes}


def _typed(max_memory: Optional[Mapping[Device, Any]]) -> Optional[Dict[Device, Any]]:
    """Budgets as people write them, where that comes to the same bytes."""
    if max_memory is None:
        return None
    return {device: _text(size) for device, size in max_memory.items()}


def _text(size: Any) -> Any:
    text = typeable(size, up=False) if isinstance(size, int) and size else ""
    return text if bytes_in(text) == size else size


def _fewer(
    request: Request, outcome: Outcome, answer: Mapping[str, Any]
) -> Optional[Dict[str, Any]]:
    """The fewest accelerators, where a map that loads uses more; planned."""
    loading = [run["device_map"] for run in answer["runs"] if run["outcome"] == "loads"]
    maps = [*loading, answer["device_map"] or ()]
    used = max(len({device for _, device in pairs}) for pairs in maps)
    devices = fewest(outcome) if used > 1 else []
    if not devices or len(devices) >= used:
        return None
    max_memory = max_memory_of(request, outcome, devices)
    if max_memory is None:
        return None
    return {"devices": devices, "arguments": f"max_memory={written_budgets(max_memory)}"}


def _quantized(request: Request, ask: Ask) -> List[Recipe]:
    """The precisions of bitsandbytes that fit, where none was asked for."""
    if request.quantizer is not None:
        return []
    found = []
    for bits in ("8", "4", "4dq"):
        settings = QUANTIZATION[bits] or {}
        question = ask(settings)
        if search(question.request).device_map is None:
            continue
        if question.attempts(False)["rescue"].error is None:
            given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            arguments = f"quantization_config=BitsAndBytesConfig({given})"
            found.append(Recipe(f"{TITLES[bits]} with bitsandbytes", arguments))
    return found[:1]
