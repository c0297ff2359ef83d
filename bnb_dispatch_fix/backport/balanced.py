"""The arithmetic of balanced `max_memory` caps with the corrected buffer; pure, knows no torch.

Rules and numbers: transformers PR #47203 (released in 5.14.0: the buffer covers the largest
instance of every no-split class) and PR #47211 (released in 5.18.0: it also covers the largest
leaf module), accelerate PR #4298 (released in 1.16.0: "balanced_low_0" reads the other GPUs'
budgets by device id). Everything else is the formula that transformers 5.24.0 and accelerate
1.16.0 share.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional, Tuple, Union

from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST

Bytes = Union[int, float]

#: Headroom over the largest indivisible piece, as a factor (unchanged since accelerate 0.12).
BUFFER_FACTOR = 1.25
#: Share of a lone accelerator that is planned when the caller gave no `max_memory`: accelerate
#: 0.22 and newer, transformers 5. Earlier accelerate plans all of it (see `lone_device_share`).
LONE_DEVICE_SHARE = 0.9
_MAX_WRAPPERS = 32


def balanced_caps(
    budgets: Mapping[Device, Bytes],
    total: Bytes,
    largest_no_split: Bytes,
    largest_leaf: Bytes,
    *,
    low_zero: bool = False,
    caller_set_budgets: bool = True,
    lone_share: float = LONE_DEVICE_SHARE,
) -> Dict[Device, Bytes]:
    """Cap each accelerator but the last so that a model spreads over all of them.

    Args:
        budgets: bytes per device in planning order, as `get_max_memory` returned them.
        total: bytes of the whole model.
        largest_no_split: bytes of the largest module that may not be split; 0 if there is none.
        largest_leaf: bytes of the largest leaf module; 0 if there is none.
        low_zero: keep GPU 0 as empty as the others allow ("balanced_low_0"); where it is not in
            `budgets`, which accelerate 1.16.0 answers with a KeyError, the lowest one.
        caller_set_budgets: False where the budgets are free memory.
        lone_share: what is then planned of a lone accelerator; the installed release's own.

    Returns:
        A new dict with the keys and order of `budgets`, in bytes. Budgets without any
        accelerator come back unchanged.
    """
    caps = dict(budgets)
    accelerators = [d for d in caps if d not in HOST and caps[d] > 0]
    if not accelerators:
        return caps
    if len(accelerators) == 1:
        low_zero = False
        if not caller_set_budgets:
            _keep_share_back(caps, lone_share)

    share = total // (len(accelerators) - 1 if low_zero else len(accelerators))
    share += int(BUFFER_FACTOR * max(largest_no_split, largest_leaf))

    numbered = sorted(d for d in caps if isinstance(d, int) and caps[d] > 0)
    for device in numbered[:-1]:
        if not (low_zero and device == 0):
            caps[device] = min(share, caps[device])
    if low_zero and numbered:
        # By id, not by position (accelerate #4298); GPU 0 is named even where it has no budget.
        lowest = 0 if 0 in caps else numbered[0]
        left_over = max(0, total - sum(caps[d] for d in numbered[1:]))
        caps[lowest] = min(left_over, caps[lowest])
    return caps


def _keep_share_back(caps: Dict[Device, Bytes], share: float) -> None:
    for device in caps if share < 1 else ():
        if isinstance(device, int):
            caps[device] *= share
            return


def lone_device_share(function: Any) -> float:
    """What an installed `get_balanced_memory` plans of a lone accelerator without `max_memory`.

    Read off its code: accelerate 0.20 and 0.21 have no such factor there, all later releases
    and transformers 5 have 0.9. Code that cannot be read counts as a later one.
    """
    for _ in range(_MAX_WRAPPERS):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    code = getattr(function, "__code__", None)
    if code is None:
        return LONE_DEVICE_SHARE
    shares = [c for c in code.co_consts if isinstance(c, float) and 0 < c < 1]
    return min(shares, default=1.0)


def no_split_names(classes: Optional[Union[str, Iterable[str]]]) -> Tuple[str, ...]:
    """Class names from any form callers pass: None, one name, a list, a tuple or a set."""
    if classes is None:
        return ()
    if isinstance(classes, str):
        return (classes,)
    return tuple(classes)


def largest_leaf_module(tensor_sizes: Mapping[str, Bytes]) -> Bytes:
    """Bytes of the largest leaf module: a module's own tensors, summed under its name.

    Args:
        tensor_sizes: bytes of every parameter and buffer by its dotted name. A tensor on the
            root belongs to no leaf module (as in transformers' `compute_module_sizes`).
    """
    leaves: Dict[str, Bytes] = {}
    for name, size in tensor_sizes.items():
        owner, dot, _ = name.rpartition(".")
        if dot:
            leaves[owner] = leaves.get(owner, 0) + size
    return max(leaves.values(), default=0)
