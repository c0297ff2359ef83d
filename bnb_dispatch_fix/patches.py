"""One patch = one seam: put a wrapper over a name, take it away again, say what is on top."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Dict, Tuple

import wrapt

#: Answers a call of the patched name: (installed function, args, kwargs) -> its result.
Handler = Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]


class PatchedFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg,misc,unused-ignore]
    """The wrapper left under a patched name: signature, name and docstring of the original.

    It pickles as the name it stands under, so that what was pickled with the shim loads
    without it.
    """

    def __init__(self, patch: Patch) -> None:
        super().__init__(patch.original, patch.call)
        self._self_patch = patch

    def __reduce_ex__(self, protocol: Any) -> Tuple[Callable[..., Any], Tuple[str, str]]:
        return _named, (self._self_patch.owner.__name__, self._self_patch.attribute)


def _named(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(module), attribute)


class Patch:
    """A wrapper over `owner.attribute`, and the very object that was there before.

    `active` is looked at by every call: a wrapper that somebody else wrapped, and that
    therefore cannot be taken away, passes through to the original when it is off.
    """

    def __init__(self, owner: Any, attribute: str, original: Any, handler: Handler) -> None:
        self.owner = owner
        self.attribute = attribute
        self.original = original
        self.active = False
        self._handler = handler
        self.wrapper = PatchedFunction(self)

    def apply(self) -> None:
        """Put the wrapper over the name."""
        self.active = True
        setattr(self.owner, self.attribute, self.wrapper)

    def undo(self) -> bool:
        """Put the original back where the wrapper is on top; False where it is not any more."""
        self.active = False
        if not self.on_top():
            return False
        setattr(self.owner, self.attribute, self.original)
        return True

    def on_top(self) -> bool:
        """Whether the name still leads to this wrapper."""
        return found_at(self.owner, self.attribute) is self.wrapper

    def call(
        self, wrapped: Callable[..., Any], _instance: Any, args: Tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Answer one call of the patched name."""
        if not self.active:
            return wrapped(*args, **kwargs)
        return self._handler(wrapped, args, kwargs)


def locate(module: Any, dotted: str) -> Tuple[Any, str]:
    """The object that stores a seam's name, and the name: a module, or a class in it.

    Where that class is gone, the module and the whole dotted name, under which nothing stands.
    """
    owner_name, dot, attribute = dotted.rpartition(".")
    owner = vars(module).get(owner_name) if dot else module
    return (module, dotted) if owner is None else (owner, attribute)


def found_at(owner: Any, attribute: str) -> Any:
    """What stands under a name now, as it is stored there; None where the name is gone."""
    return vars(owner).get(attribute)


def original_of(function: Any) -> Any:
    """The installed function behind wrappers of ours (another seam's included), else itself."""
    while isinstance(function, PatchedFunction):
        function = function._self_patch.original
    return function


def wraps_ours(function: Any, patch: Patch) -> bool:
    """Whether a wrapper of somebody else leads to this patch through `__wrapped__`."""
    for _ in range(32):  # a chain that leads back to itself must end
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return False
        if function is patch.wrapper:
            return True
    return False


def describe(function: Any) -> str:
    """Name a function so that a reader can find it: module, qualified name, kind of object."""
    if function is None:
        return "nothing"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    kind = "" if type(function).__name__ == "function" else f" ({type(function).__name__})"
    return f"{getattr(function, '__module__', '?')}.{name}{kind}"
