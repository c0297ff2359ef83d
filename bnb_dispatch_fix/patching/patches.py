"""One wrapper per function, one patch per name: put it over, take it away, say what is on top."""

from __future__ import annotations

import importlib
from types import FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import wrapt

#: Answers a call of the patched name: (installed function, args, kwargs) -> its result.
Handler = Callable[[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]


class PatchedFunction(wrapt.FunctionWrapper):  # type: ignore[type-arg,misc,unused-ignore]
    """What stands under every name of one installed function: its signature, name and docstring.

    One function has one wrapper, so that names which were equal stay equal. `original` is what
    was stored under the name: the function, or the class method made of it. `is_on` is asked by
    every call: a wrapper that somebody else wrapped or kept, and that therefore cannot be taken
    away, passes through when it is off.

    It pickles as the function's own name, so that what was pickled with the shim loads without.
    """

    #: Tells a wrapper of ours by its type, of a second copy of this package too.
    is_of_bnb_dispatch_fix = True

    def __init__(
        self, original: Any, handler: Handler, is_on: Callable[[], bool] = lambda: True
    ) -> None:
        kind = type(original)
        in_class = kind in (classmethod, staticmethod)
        super().__init__(original.__func__ if in_class else original, self._answer)
        self._self_original = original
        self._self_handler = handler
        self._self_is_on = is_on
        # A class method of the wrapper, not the reverse: what `__func__` gives must be ours too.
        self._self_stored = kind(self) if in_class else self

    def _answer(
        self, wrapped: Callable[..., Any], _instance: Any, args: Tuple[Any, ...], kwargs: Any
    ) -> Any:
        if not self._self_is_on():
            return wrapped(*args, **kwargs)
        return self._self_handler(wrapped, args, kwargs)

    def __get__(self, instance: Any, owner: Optional[type] = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __copy__(self) -> PatchedFunction:
        return self

    def __deepcopy__(self, memo: Any) -> PatchedFunction:
        return self

    def __reduce_ex__(self, protocol: Any) -> Tuple[Callable[..., Any], Tuple[str, ...]]:
        return _named, (self.__module__, *self.__qualname__.split("."))


def _named(module: str, *names: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


class Patch:
    """The wrapper of a function over one of its names, `owner.attribute`."""

    def __init__(self, owner: Any, attribute: str, wrapper: PatchedFunction) -> None:
        self.owner = owner
        self.attribute = attribute
        self.wrapper = wrapper
        self.original = wrapper._self_original

    def apply(self) -> None:
        """Put the wrapper over the name; one of another copy of the shim is taken out of use."""
        there = wrapper_at(found_at(self.owner, self.attribute))
        if there is not None and there is not self.wrapper:
            there._self_is_on = _never
        setattr(self.owner, self.attribute, self.wrapper._self_stored)

    def undo(self) -> bool:
        """Put the original back where a wrapper of ours is on top; False where there is none."""
        return put_back(self.owner, self.attribute)

    def on_top(self) -> bool:
        """Whether the name still leads to this wrapper."""
        return wrapper_at(found_at(self.owner, self.attribute)) is self.wrapper


def _never() -> bool:
    return False


def put_back(owner: Any, attribute: str) -> bool:
    """Put the original back under a name that leads to a wrapper of any copy of the shim."""
    found = found_at(owner, attribute)
    if wrapper_at(found) is None:
        return False
    setattr(owner, attribute, original_of(found))
    return True


def is_module(thing: Any) -> bool:
    """Whether this is a module at all: anything may stand in `sys.modules`."""
    return issubclass(type(thing), ModuleType)


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


def wrapper_at(stored: Any) -> Optional[Any]:
    """The wrapper of ours that a name leads to, None where something else stands there."""
    # type(), not isinstance(): a wrapt proxy claims the class of what it wraps.
    function = stored.__func__ if type(stored) in (classmethod, staticmethod) else stored
    return function if _is_ours(function) else None


def _is_ours(function: Any) -> bool:
    return getattr(type(function), "is_of_bnb_dispatch_fix", False) is True


def original_of(function: Any) -> Any:
    """The installed function behind wrappers of ours (another copy's included), else itself."""
    wrapper = wrapper_at(function)
    while wrapper is not None:
        function = wrapper._self_original
        wrapper = wrapper_at(function)
    return function


def wraps_ours(function: Any, patch: Patch) -> bool:
    """Whether a wrapper of somebody else leads to this patch, as far as can be seen."""
    return any(inner is patch.wrapper for inner in _wrapped_by(function, depth=8))


def leads_to_ours(function: Any, attribute: str) -> bool:
    """Whether somebody else's wrapper leads to one of ours for a function of this name."""
    if wrapper_at(function) is not None:
        return False
    inside = _wrapped_by(function, depth=8)
    return any(_is_ours(inner) and inner.__name__ == attribute for inner in inside)


def _wrapped_by(function: Any, depth: int) -> Iterator[Any]:
    """What a wrapper may call: what it names as wrapped, and the functions in its closure."""
    held = [getattr(function, name, None) for name in ("__wrapped__", "__func__", "func")]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # noqa: PERF203  # not filled yet
            continue
    for inner in held:
        if callable(inner) and depth > 0:  # a chain that leads back to itself must end
            yield inner
            if not _is_ours(inner):
                yield from _wrapped_by(inner, depth - 1)


def patcher_of(function: Any) -> str:
    """How somebody else changed an installed function; empty where nobody has, as far as seen."""
    if getattr(function, "__wrapped__", None) is not None:
        return "wraps the installed function"
    code = getattr(function, "__code__", None)
    if code is None:
        return "stands in place of the installed function"
    variables = getattr(function, "__globals__", {})
    home = variables.get("__file__")
    # Exchanged code comes from another file than the namespace it runs in.
    if home is None or not home.endswith(".py") or home == code.co_filename:
        return ""
    files = _files_beside(function, variables)
    # A loader (zip, frozen, network) may have its own name for the file, of all functions there.
    if files and files.count(code.co_filename) * 2 > len(files):
        return ""
    return f"runs code of {code.co_filename}"


def _files_beside(function: Any, variables: Dict[str, Any]) -> List[str]:
    """The file that each of the other functions of a module says it was compiled from."""
    name = variables.get("__name__")
    return [
        other.__code__.co_filename
        for other in list(variables.values())
        if type(other) is FunctionType and other is not function and other.__module__ == name
    ]


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
    if type(function) in (classmethod, staticmethod):
        function = function.__func__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module, home = getattr(function, "__module__", "?"), home_of(function)
    notes = [] if type(function).__name__ == "function" else [type(function).__name__]
    notes += [] if home in (module, "builtins") else [f"made in {home}"]
    return f"{module}.{name}" + (f" ({', '.join(notes)})" if notes else "")
