"""Who else is at the patched functions: modules that kept the old one, libraries that wrap them."""

from __future__ import annotations

import sys
from typing import Any, Dict, Iterator, List, Tuple

from bnb_dispatch_fix.patching.patches import (
    PatchedFunction,
    describe,
    found_at,
    home_of,
    locate,
    original_of,
)
from bnb_dispatch_fix.states import PatchStatus, Status

#: Code of these packages is expected behind a seam.
_AT_HOME = ("transformers", "accelerate", "bnb_dispatch_fix")


def unpatched_references(status: Status) -> Tuple[str, ...]:
    """The names ("module.attribute") that still lead to a function which is patched elsewhere.

    They were bound before the patch (`from accelerate.utils import get_balanced_memory`), and
    whoever calls through them misses its fixes. The seams themselves do not count.
    """
    originals: Dict[int, Any] = {}
    seams = set()
    for patch, function in _seams(status):
        seams.add((patch.module, patch.attribute))
        if patch.fixes and isinstance(function, PatchedFunction):
            original = original_of(function)
            originals[id(original)] = original
    found = set()
    for name, module in list(sys.modules.items()):
        for attribute, value in list(_variables(module).items()):
            if originals.get(id(value)) is value and value is not None:
                found.add((name, attribute))
    return tuple(f"{name}.{attribute}" for name, attribute in sorted(found - seams))


def other_patchers(status: Status) -> Tuple[Tuple[str, str], ...]:
    """Pairs (seam, patcher) for every function at a seam that is neither upstream's nor ours."""
    found: List[Tuple[str, str]] = []
    for patch, function in _seams(status):
        for layer in _layers(function):
            if home_of(layer).partition(".")[0] not in _AT_HOME:
                patcher = f"{home_of(layer)} ({describe(layer)})"
                found.append((f"{patch.module}.{patch.attribute}", patcher))
    return tuple(found)


def _seams(status: Status) -> Iterator[Tuple[PatchStatus, Any]]:
    """Every seam whose module is loaded, and what stands there."""
    for patch in status.patches:
        module = sys.modules.get(patch.module)
        if module is not None:
            owner, attribute = locate(module, patch.attribute)
            yield patch, found_at(owner, attribute)


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, from the top down; our own wrappers are left out."""
    for _ in range(32):  # a chain that leads back to itself must end
        function = getattr(function, "__func__", function)
        if isinstance(function, PatchedFunction):
            function = original_of(function)
            continue
        if function is None:
            return
        yield function
        function = getattr(function, "__wrapped__", None)


def _variables(module: Any) -> Dict[str, Any]:
    """A module's own names; nothing is looked up, because that could import."""
    try:
        variables = vars(module)
    except TypeError:  # anything may stand in sys.modules
        return {}
    return variables if isinstance(variables, dict) else {}
