"""Who else is at the patched functions: modules that kept the old one, libraries that wrap them."""

from __future__ import annotations

import sys
from typing import Any, Dict, Iterable, Iterator, List, Set, Tuple, Union

from bnb_dispatch_fix.patching.matrix import Seam
from bnb_dispatch_fix.patching.patches import (
    describe,
    found_at,
    home_of,
    is_module,
    locate,
    original_of,
    wrapper_at,
)
from bnb_dispatch_fix.states import PatchStatus, Status

Name = Union[Seam, PatchStatus]

#: Code of these packages is expected behind a seam.
_AT_HOME = ("transformers", "accelerate", "bnb_dispatch_fix")


def unpatched_references(seams: Iterable[Name]) -> Tuple[str, ...]:
    """The names ("module.attribute") that still lead to a function which is patched elsewhere.

    They were bound before the patch (`from accelerate.utils import get_balanced_memory`), and
    whoever calls through them misses what was patched. The seams themselves do not count. Only
    modules that are loaded are looked at, and nothing is looked up in them.
    """
    originals: Dict[int, Any] = {}
    names = set()
    for seam, stored in _stored(seams):
        names.add((seam.module, seam.attribute))
        wrapper = wrapper_at(stored)
        if wrapper is not None:
            originals[id(wrapper.__wrapped__)] = wrapper.__wrapped__
    found: Set[Tuple[str, str]] = set()
    seen: Set[int] = set()
    for name, module in sorted(sys.modules.items(), key=_main_first) if originals else ():
        variables = _variables(module)
        if id(variables) in seen or originals.keys().isdisjoint(map(id, list(variables.values()))):
            continue
        seen.add(id(variables))  # the main script has two names in a spawned child
        for attribute, value in list(variables.items()):
            if originals.get(id(value)) is value and value is not None:
                found.add((name, attribute))
    return tuple(f"{name}.{attribute}" for name, attribute in sorted(found - names))


def _main_first(item: Tuple[str, Any]) -> Tuple[bool, str]:
    return item[0] != "__main__", item[0]


def other_patchers(status: Status) -> Tuple[Tuple[str, str], ...]:
    """Pairs (seam, patcher) for every function at a seam that is neither upstream's nor ours."""
    found: List[Tuple[str, str]] = []
    for patch, function in _stored(status.patches):
        for layer in _layers(function):
            if home_of(layer).partition(".")[0] not in _AT_HOME:
                patcher = f"{home_of(layer)} ({describe(layer)})"
                found.append((f"{patch.module}.{patch.attribute}", patcher))
    return tuple(found)


def _stored(seams: Iterable[Name]) -> Iterator[Tuple[Name, Any]]:
    """Every seam whose module is loaded, and what stands there."""
    for seam in seams:
        module = sys.modules.get(seam.module)
        if is_module(module):
            yield seam, found_at(*locate(module, seam.attribute))


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, from the top down; our own wrappers are left out."""
    for _ in range(32):  # a chain that leads back to itself must end
        function = getattr(function, "__func__", function)
        if wrapper_at(function) is not None:
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
