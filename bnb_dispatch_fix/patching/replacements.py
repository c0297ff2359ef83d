"""What is put in place of each implementation, and what it needs to stand there."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix import features, states
from bnb_dispatch_fix.backport import accelerate, dispatch, transformers_v5
from bnb_dispatch_fix.patching.patches import Handler
from bnb_dispatch_fix.patching.probe import ProbeResult, probe_balanced_fault, signature_mismatch
from bnb_dispatch_fix.patching.probe_disk import probe_whole_disk
from bnb_dispatch_fix.wrappers import balancing, diffusers, loading, planners

#: The installed function, and the arguments of a call of it.
_Call = Tuple[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]]


def asks_for_low_zero(installed: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call of a `get_balanced_memory` is for "balanced_low_0"."""
    try:
        return bool(inspect.signature(installed).bind(*args, **kwargs).arguments.get("low_zero"))
    except TypeError:  # the installed function says what is wrong
        return False


class Replacement(NamedTuple):
    """A function `(installed function, *args, **kwargs)`, and its conditions.

    `parameters` are those the installed function must have: all of them and no others where
    it is replaced (`exact`), at least these where it is only wrapped. `helpers` must be
    callable beside it. `probe` runs code of unknown source on a toy model. `touches` tells of
    a PR whether it matters in a call; one that is not named there matters in all. What is asked
    of one that `is_noted` counts later, too (see wrappers/balancing.py).
    """

    function: Callable[..., Any]
    parameters: Tuple[str, ...]
    helpers: Tuple[str, ...] = ()
    exact: bool = False
    probe: Callable[[Callable[..., Any]], ProbeResult] = probe_balanced_fault
    touches: Mapping[int, Callable[..., bool]] = {}
    is_noted: bool = False

    def matters(self, lacks: Tuple[int, ...], call: _Call) -> bool:
        """Whether what the installed function lacks can change this call's answer.

        Where it cannot the installed function answers: a later release may have changed more.
        """
        return not lacks or any(pr not in self.touches or self.touches[pr](*call) for pr in lacks)

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
        touches={4298: asks_for_low_zero},
    ),
    "accelerate.get_balanced_memory": Replacement(
        accelerate.get_balanced_memory,
        accelerate.PARAMETERS,
        accelerate.HELPERS,
        exact=True,
        touches={4298: asks_for_low_zero},
        is_noted=True,
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
    "diffusers._determine_device_map": Replacement(
        diffusers.planner,
        ("model", "device_map", "max_memory", "torch_dtype", "keep_in_fp32_modules"),
        ("get_max_memory", "get_balanced_memory", "infer_auto_device_map"),
    ),
    "diffusers.from_pretrained": Replacement(loading.from_pretrained, ()),
    "accelerate.get_quantized_model_device_map": Replacement(
        planners.accelerate_bnb_planner,
        ("model", "bnb_quantization_config", "device_map", "max_memory"),
    ),
}


def handler(
    implementation: str,
    on_failure: Callable[[BaseException], None],
    lacks: Tuple[int, ...] = (),
) -> Handler:
    """The handler a patch calls; `lacks` are the PRs that the installed function does not have.

    Where a function is replaced, an error of the replacement counts only if the installed
    function raises too: bad arguments raise what the installed release raises, and a fault
    here costs nobody a model that loaded.
    """
    replacement = REPLACEMENTS[implementation]

    def wrap(wrapped: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        with states.at(implementation):
            return replacement.function(wrapped, *args, **kwargs)

    def replace(wrapped: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        if "backport" not in features.on() or not replacement.matters(
            lacks, (wrapped, args, kwargs)
        ):
            return wrapped(*args, **kwargs)
        try:
            return replacement.function(wrapped, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the installed function answers instead
            result = wrapped(*args, **kwargs)
            with states.at(implementation):
                on_failure(error)
            return result

    if not replacement.exact:
        return wrap
    return balancing.noted(implementation, replace) if replacement.is_noted else replace
