"""Tells by a toy model whether a `dispatch_model` of unknown source refuses an all-disk map."""

from __future__ import annotations

import logging
from typing import Any, Callable

from bnb_dispatch_fix.backport.rebound import rebound
from bnb_dispatch_fix.patching.probe import ProbeResult
from bnb_dispatch_fix.wording import one_line

_WHOLE_DISK_REFUSED = 4083


def probe_whole_disk(function: Callable[..., Any]) -> ProbeResult:
    """Run a copy of `function` on one meta leaf that is entirely on the disk; nothing is read.

    Fault 4083 is confirmed by a ValueError that names the disk, or by an IndexError (accelerate
    0.20 takes the first device that is none of the host's), and ruled out by an answer with hooks.
    Needs torch; without it all is undecided. Never raises.
    """
    pr = (_WHOLE_DISK_REFUSED,)
    try:
        import torch  # found, not required

        model = torch.nn.Sequential(torch.nn.Linear(1, 1, device="meta"))
        silent = logging.Logger("bnb_dispatch_fix.probe", logging.CRITICAL + 1)
        copy = rebound(function, {"logger": silent, "logging": silent})
        dispatched = copy(model, {"": "disk"}, offload_index={})
    except ValueError as error:
        if "disk" in str(error):
            return ProbeResult(pr, (), (), "#4083 confirmed: a map that is all disk is refused")
        return ProbeResult((), (), pr, f"#4083 undecided: ValueError: {error}")
    except IndexError:
        return ProbeResult(pr, (), (), "#4083 confirmed: a map that is all disk has no device")
    except Exception as error:  # noqa: BLE001  # unknown code may fail in any way
        return ProbeResult((), (), pr, f"#4083 undecided: {one_line(error)}")
    if hasattr(dispatched[0], "_hf_hook"):
        return ProbeResult((), pr, (), "#4083 ruled out: a map that is all disk is dispatched")
    return ProbeResult((), (), pr, "#4083 undecided: no hook was attached")
