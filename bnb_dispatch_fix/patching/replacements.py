"""What is put in place of each implementation, and what it needs to stand there."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix import features
from bnb_dispatch_fix.backport import accelerate, dispatch, transformers_v5
from bnb_dispatch_fix.patching.patches import Handler
from bnb_dispatch_fix.patching.probe import ProbeResult, probe_balanced_fault, signature_mismatch
from bnb_dispatch_fix.patching.probe_disk import probe_whole_disk
from bnb_dispatch_fix.wrappers import loading, planners


class Replacement(NamedTuple):
    """A function `(installed function, *args, **kwargs)`, and its conditions.

    `parameters` are those the installed function must have: all of them and no others where
    it is replaced (`exact`), at least these where it is only wrapped. `helpers` must be
    callable beside it. `probe` runs code of unknown source on a toy model.
    """

    function: Callable[..., Any]
    parameters: Tuple[str, ...]
    helpers: Tuple[str, ...] = ()
    exact: bool = False
    probe: Callable[[Callable[..., Any]], ProbeResult] = probe_balanced_fault

    def mismatch(self, function: Any) -> Optional[str]:
        """Why an installed function with its signature cannot be stood for; None if it can."""
        if self.exact:
            return signature_mismatch(function, self.parameters)
        try:
            found = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            return f"its signature cannot be read ({error})"
        missing = [name for name in self.parameters if name not in found]
        return f"it has no parameter {', '.join(missing)}" if missing else None


#: By the key of the implementation (see `implementations` in the matrix).
REPLACEMENTS: Mapping[str, Replacement] = {
    "transformers.get_balanced_memory": Replacement(
        transformers_v5.get_balanced_memory,
        transformers_v5.PARAMETERS,
        transformers_v5.HELPERS,
        exact=True,
    ),
    "accelerate.get_balanced_memory": Replacement(
        accelerate.get_balanced_memory,
        accelerate.PARAMETERS,
        accelerate.HELPERS,
        exact=True,
    ),
    "accelerate.dispatch_model": Replacement(
        dispatch.dispatch_model,
        dispatch.PARAMETERS,
        dispatch.HELPERS,
        probe=probe_whole_disk,
    ),
    "transformers._get_device_map": Replacement(
        planners.transformers_planner,
        ("model", "device_map", "max_memory", "hf_quantizer"),
        ("get_max_memory",),
    ),
    "transformers.from_pretrained": Replacement(loading.from_pretrained, ()),
    "accelerate.infer_auto_device_map": Replacement(
        planners.accelerate_planner,
        ("model", "max_memory", "no_split_module_classes", "dtype"),
        ("get_max_memory",),
    ),
    "accelerate.get_quantized_model_device_map": Replacement(
        planners.accelerate_bnb_planner,
        ("model", "bnb_quantization_config", "device_map", "max_memory"),
    ),
}


def handler(implementation: str, on_failure: Callable[[BaseException], None]) -> Handler:
    """The handler a patch calls.

    Where a function is replaced, an error of the replacement counts only if the installed
    function raises too: bad arguments raise what the installed release raises, and a fault
    here costs nobody a model that loaded.
    """
    replacement = REPLACEMENTS[implementation]

    def wrap(wrapped: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        return replacement.function(wrapped, *args, **kwargs)

    def replace(wrapped: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        if "backport" not in features.on():
            return wrapped(*args, **kwargs)
        try:
            return replacement.function(wrapped, *args, **kwargs)
        except Exception as error:
            result = wrapped(*args, **kwargs)
            on_failure(error)
            return result

    return replace if replacement.exact else wrap
