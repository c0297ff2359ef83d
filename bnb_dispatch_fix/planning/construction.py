"""Builds a model once for several `from_pretrained`, which each convert a copy of their own.

What takes long is to make the modules; a copy is new modules around the same tensors. They are on
the meta device, so that nothing of them is ever written.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Dict, Iterator, Optional


class Construction:
    """What a model is changed by once its modules are there; None leaves it as it is."""

    change: Optional[Callable[[Any], None]] = None


@contextmanager
def built_once(model_class: Any) -> Iterator[Construction]:
    """While the block runs, `model_class(...)` makes its modules at the first call only."""
    own = "__init__" in vars(model_class)
    installed = model_class.__init__
    construction = Construction()
    model_class.__init__ = _remembering(installed, model_class, construction)
    try:
        yield construction
    finally:
        if own:
            model_class.__init__ = installed
        else:
            del model_class.__init__


def _remembering(
    installed: Callable[..., None], model_class: Any, construction: Construction
) -> Callable[..., None]:
    """An `__init__` that does its work once, and afterwards copies what came of it."""
    built: Optional[Any] = None

    @wraps(installed)  # releases look at its signature
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal built
        if type(self) is not model_class:
            installed(self, *args, **kwargs)
            return
        if built is None:
            installed(self, *args, **kwargs)
            built = _copied(self, {})
        else:
            self.__dict__.update(_copied(built, {}).__dict__)
            if args and hasattr(self, "config"):
                self.config = args[0]
        if construction.change is not None:
            construction.change(self)

    return initialise


def _copied(module: Any, copies: Dict[int, Any]) -> Any:
    """The same modules anew, around the same tensors; what is shared stays shared."""
    if id(module) in copies:
        return copies[id(module)]
    copy = copies[id(module)] = object.__new__(type(module))
    state = copy.__dict__
    state.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        state[name] = state[name].copy()
    for name, child in state["_modules"].items():
        if child is not None:
            state["_modules"][name] = _copied(child, copies)
    return copy
