"""Waits, almost free, on `sys.meta_path` for modules that are not imported yet.

Imports nothing but `sys`: it runs at the start of programs that never use transformers.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable


class Tripwire:
    """A finder that finds nothing: it calls `on_trip` once, when a watched import begins.

    It takes itself off `sys.meta_path` before it calls, so what is called may import at will.
    """

    def __init__(self, names: Iterable[str], on_trip: Callable[[], object]) -> None:
        self.names = frozenset(names)
        self.on_trip = on_trip

    def arm(self) -> None:
        """Stand first in line; does nothing where it stands already."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def disarm(self) -> bool:
        """Leave the line; False where somebody else has taken it out already."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        return True

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find nothing; trip when `fullname` is watched."""
        if fullname in self.names and self.disarm():
            self.on_trip()


class Latecomer:
    """A finder that finds nothing: it waits for a module whose import had begun before.

    Nothing tells when such an import ends, but other imports follow it; at the first of them
    `on_loaded` is called with the module.
    """

    def __init__(self, name: str, on_loaded: Callable[[Any], object]) -> None:
        self.name = name
        self.on_loaded = on_loaded

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find nothing; look whether the awaited module is complete."""
        module = sys.modules.get(self.name)
        if module is not None and is_importing(module):
            return
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return
        if module is not None:
            self.on_loaded(module)


def is_importing(module: object) -> bool:
    """Whether the import of a module in `sys.modules` has begun and not ended."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
