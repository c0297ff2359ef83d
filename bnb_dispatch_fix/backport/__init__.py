"""The corrected balanced budgets of #47203 and #47211, and their adapters to each generation."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Tuple

from bnb_dispatch_fix.backport import accelerate, transformers_v5


class Adapter(NamedTuple):
    """A replacement and what it needs: helpers beside the installed function, its parameters."""

    replacement: Callable[..., Any]
    helpers: Tuple[str, ...]
    parameters: Tuple[str, ...]


#: By the key of the implementation it replaces (see `implementations` in the matrix).
ADAPTERS: Mapping[str, Adapter] = {
    "transformers.get_balanced_memory": Adapter(
        transformers_v5.get_balanced_memory, transformers_v5.HELPERS, transformers_v5.PARAMETERS
    ),
    "accelerate.get_balanced_memory": Adapter(
        accelerate.get_balanced_memory, accelerate.HELPERS, accelerate.PARAMETERS
    ),
}


def handler(
    implementation: str, on_failure: Callable[[BaseException], None]
) -> Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]:
    """A handler that answers with the backport, and with the installed function if that fails.

    An error of the backport counts only where the installed function has none: bad arguments
    raise what the installed release raises, and a fault here costs nobody a model that loaded.
    """
    replacement = ADAPTERS[implementation].replacement

    def answer(wrapped: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        try:
            return replacement(wrapped.__globals__, *args, **kwargs)
        except Exception as error:
            result = wrapped(*args, **kwargs)
            on_failure(error)
            return result

    return answer
