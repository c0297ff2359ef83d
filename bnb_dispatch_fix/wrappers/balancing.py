"""Around accelerate's `get_balanced_memory`: notes what is asked, for the planner that is next."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from bnb_dispatch_fix import features, states
from bnb_dispatch_fix.model import noted as notes
from bnb_dispatch_fix.wrappers.contained import contained

_Handler = Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]


def noted(place: str, answer: _Handler) -> _Handler:
    """`answer`, with a note of what it was asked while `even` is on; `place` is the seam's."""

    def handler(wrapped: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        if "even" not in features.on():
            return answer(wrapped, args, kwargs)
        asked = None
        with states.at(place), contained("budgets unnoted"):
            asked = notes.read(wrapped, args, kwargs)
        caps = answer(wrapped, args, kwargs)
        if asked is not None and isinstance(caps, dict):
            with states.at(place), contained("budgets unnoted"):
                notes.note(*asked, caps)
        return caps

    return handler
