"""One patch = one seam: put a wrapper over a name, take it away again, say what is on top."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Dict, Iterator, Tuple

import wrapt

#: Answers a call of the patched name: (installed function, args, kwargs) -> its result.
Handler = Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]


class _PatchedMethod(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg,misc,unused-ignore]
    """What a patched method becomes on access: it pickles as the method does."""

    def __reduce_ex__(self, protocol: Any) -> Tuple[Callable[..., Any], Tuple[Any, str]]:
        owner = getattr(self.__wrapped__, "__self__", self._self_parent._self_patch.owner)
        return getattr, (owner, self.__name__)


class PatchedFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg,misc,unused-ignore]
    """The wrapper left under a patched name: signature, name and docstring of the original.

    It pickles as the name it stands under, so that what was pickled with the shim loads
    without it.
    """

    __bound_function_wrapper__ = _PatchedMethod

    def __init__(self, patch: Patch) -> None:
        super().__init__(patch.original, patch.call)
        self._self_patch = patch

    def __reduce_ex__(self, protocol: Any) -> Tuple[Callable[..., Any], Tuple[str, ...]]:
        owner, attribute = self._self_patch.owner, self._self_patch.attribute
        if isinstance(owner, type):
            return _named, (owner.__module__, *owner.__qualname__.split("."), attribute)
        return _named, (owner.__name__, attribute)


def _named(module: str, *names: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


class Patch:
    """A wrapper over `owner.attribute`, and the very object that was there before.

    `is_on` is asked by every call: a wrapper that somebody else wrapped or kept, and that
    therefore cannot be taken away, passes through to the original when it is off.
    """

    def __init__(
        self,
        owner: Any,
        attribute: str,
        original: Any,
        handler: Handler,
        is_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self.owner = owner
        self.attribute = attribute
        self.original = original
        self._handler = handler
        self._is_on = is_on
        self.wrapper = PatchedFunction(self)

    def apply(self) -> None:
        """Put the wrapper over the name."""
        setattr(self.owner, self.attribute, self.wrapper)

    def undo(self) -> bool:
        """Put the original back where the wrapper is on top; False where it is not any more."""
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
        if not self._is_on():
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
    """Whether a wrapper of somebody else leads to this patch, as far as can be seen."""
    return any(inner is patch.wrapper for inner in _wrapped_by(function, depth=8))


def _wrapped_by(function: Any, depth: int) -> Iterator[Any]:
    """What a wrapper may call: its `__wrapped__`, and the functions it holds in its closure."""
    held = [getattr(function, "__wrapped__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # noqa: PERF203  # not filled yet
            continue
    for inner in held:
        if callable(inner) and depth > 0:  # a chain that leads back to itself must end
            yield inner
            if not isinstance(inner, PatchedFunction):
                yield from _wrapped_by(inner, depth - 1)


def patcher_of(function: Any) -> str:
    """How somebody else changed an installed function; empty where nobody has, as far as seen."""
    if getattr(function, "__wrapped__", None) is not None:
        return "wraps the installed function"
    code = getattr(function, "__code__", None)
    if code is None:
        return "stands in place of the installed function"
    home = getattr(function, "__globals__", {}).get("__file__")
    # Exchanged code comes from another file than the namespace it runs in.
    if home is not None and home.endswith(".py") and home != code.co_filename:
        return f"runs code of {code.co_filename}"
    return ""


def home_of(function: Any) -> str:
    """The module whose code runs: functools.wraps copies `__module__`, but not the globals."""
    for candidate in (
        function,
        getattr(function, "_self_wrapper", None),  # wrapt's wrappers
        getattr(function, "func", None),  # functools.partial
    ):
        variables = getattr(candidate, "__globals__", None)
        if type(candidate).__name__ == "function" and isinstance(variables, dict):
            return str(variables.get("__name__", "?"))
    return type(function).__module__


def describe(function: Any) -> str:
    """Name a function so that a reader can find it: module, qualified name, kind of object."""
    if function is None:
        return "nothing"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module, home = getattr(function, "__module__", "?"), home_of(function)
    notes = [] if type(function).__name__ == "function" else [type(function).__name__]
    notes += [] if home in (module, "builtins") else [f"made in {home}"]
    return f"{module}.{name}" + (f" ({', '.join(notes)})" if notes else "")
