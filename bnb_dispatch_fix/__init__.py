"""Repairs the device-map planning of transformers and accelerate in place, on import.

`import bnb_dispatch_fix` activates it, before or after transformers; nothing else has to be
called. Until one of the two is imported this costs next to nothing: everything heavier than
`sys` and `os` is loaded when there is something to patch. (`from __future__ import annotations`
would be another file to read at every start: see tripwire.py.)
"""

import sys

from bnb_dispatch_fix.features import VERSION as __version__
from bnb_dispatch_fix.features import checked, is_off
from bnb_dispatch_fix.tripwire import WIRE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Mapping, Optional, Union

    from bnb_dispatch_fix.placement.records import Device
    from bnb_dispatch_fix.planning import Plan
    from bnb_dispatch_fix.states import Status

__all__ = ["__version__", "activate", "deactivate", "plan", "status"]

_TARGETS = ("transformers", "accelerate")


def activate(features: "Optional[Iterable[str]]" = None, *, strict: bool = False) -> None:
    """Patch what is imported, and the rest as soon as it is; safe to call again.

    Args:
        features: names out of "backport", "rescue", "explain", "even"; None means those of the
            environment variable BNB_DISPATCH_FIX (the first three, where it is not set). The
            variable also bounds what can be asked for here.
        strict: raise instead of going on.

    Raises:
        ValueError: a name in `features` is unknown (always, a typo in code is a bug).
        bnb_dispatch_fix.activation.ActivationError: with `strict`, where a patch that is
            missing here could not be applied; the message says which and why.
    """
    wanted = None if features is None else checked(features)
    WIRE.disarm()  # what is asked for here is not to be overruled later
    try:
        from bnb_dispatch_fix import activation  # heavy: only where there is something to patch

        activation.activate(wanted, strict)
    except Exception:
        raise
    except BaseException:  # an interrupt: the next import of a target does what was asked for
        WIRE.arm(_TARGETS, lambda: _activate_quietly(wanted))
        raise


def deactivate() -> None:
    """Put the very same function objects back, and patch nothing until `activate()`.

    Where somebody else has patched over a wrapper of ours it stays in place and passes
    through; `status()` names who is on top.
    """
    WIRE.disarm()
    from bnb_dispatch_fix import activation  # heavy: only where there is something to patch

    activation.deactivate()


def status() -> "Status":
    """What is patched, what is not, and why; looked up now, nothing is imported for it."""
    if WIRE.armed:
        activate()
    from bnb_dispatch_fix import activation  # heavy: only where there is something to patch

    return activation.status()


def import_targets() -> None:
    """Import every module here that has a function to patch, for `status()` of a new process."""
    from bnb_dispatch_fix import activation  # as above

    activation.import_targets()


def plan(
    model: "Any",
    *,
    max_memory: "Union[Mapping[Device, Any], str, None]" = None,
    quantization_config: "Any" = None,
    device_map: str = "auto",
    dtype: "Any" = None,
    trust_remote_code: bool = False,
    context: "Optional[int]" = None,
    batch: int = 1,
    kv_dtype: "Any" = None,
    reserve: "Union[int, str]" = 0,
    even: bool = False,
) -> "Plan":
    """Where a model would go: as installed, with the backport and with rescue.

    No weights are read and no GPU is needed: the installed planner is asked in a process of its
    own, about the model on the meta device. Takes what `from_pretrained` takes.

    Args:
        model: a checkpoint folder, the path of a config.json, the name of a model in the local
            Hugging Face cache, a transformers configuration, or a model (loaded or meta).
        max_memory: bytes, or texts such as "22GiB", by device; or all of it as one text, such as
            "2x22GiB,cpu=60GiB"; None takes what is free here.
        quantization_config: a BitsAndBytesConfig, or None for the model as its configuration is.
        device_map: "auto", "balanced", "balanced_low_0" or "sequential".
        dtype: torch dtype, or its name; None means that of the configuration, else float16.
        trust_remote_code: run the code that a checkpoint brings, in that process.
        context: tokens of each sequence that the model is to run with; None asks whether it loads.
        batch: sequences at once.
        kv_dtype: dtype of keys and values, such as "fp8"; None means what the release has.
        reserve: bytes, or a text such as "1GiB", to be left on each accelerator.
        even: show the spread with the feature `even`, too, and how even each spread is.

    Raises:
        bnb_dispatch_fix.planning.PlanError: an argument cannot be used, or the installed
            transformers cannot build the model; a ValueError of one line.
    """
    from bnb_dispatch_fix.planning import question as planning  # heavy, and for this function only

    return planning.plan(
        model,
        max_memory=max_memory,
        quantization_config=quantization_config,
        device_map=device_map,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        context=context,
        batch=batch,
        kv_dtype=kv_dtype,
        reserve=reserve,
        even=even,
    )


def _start() -> None:
    """Activate, or wait for the first import of a target; no exception leaves it."""
    try:
        if is_off():
            return
        if any(sys.modules.get(name) is not None for name in _TARGETS):
            _activate_quietly()
        else:
            WIRE.arm(_TARGETS, _activate_quietly)
    except Exception as error:  # noqa: BLE001  # importing never breaks the program
        _say("could not start", error)


def _activate_quietly(features: "Optional[Iterable[str]]" = None) -> None:
    try:
        activate(features)
    except Exception as error:  # noqa: BLE001  # importing never breaks the program
        _say("could not activate", error)


def _say(what: str, error: Exception) -> None:
    try:
        import logging  # only where there is something to say

        logging.getLogger(__name__).warning("bnb_dispatch_fix %s: %r", what, error)
    except Exception:  # noqa: BLE001, S110  # without logging there is nobody to tell
        pass  # without logging there is nobody to tell


_start()
