"""Waits, almost free, on `sys.meta_path` for modules that are not imported yet.

It runs at the start of programs that never use transformers: no import that has to read a file,
`from __future__ import annotations` included.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple


class Tripwire:
    """A finder that finds nothing of its own and calls when something was, or is, imported.

    It never leaves `sys.meta_path` again: whoever takes a finder out makes a search that is
    just walking along the line, in this thread or another, skip the next finder.

    It calls only while a module inside one of its packages is searched. Who is called imports
    modules, never any of these; one that is being searched at that moment would come out double.
    """

    def __init__(self) -> None:
        self._inside: Tuple[str, ...] = ()
        self._on_trip: Optional[Callable[[], object]] = None
        self._watched: Dict[str, Callable[[str, Any], object]] = {}
        self._awaited: Dict[str, None] = {}
        self._asking: Set[Tuple[object, str]] = set()

    @property
    def armed(self) -> bool:
        """Whether `on_trip` is still to be called."""
        return self._on_trip is not None

    def arm(self, packages: "Iterable[str]", on_trip: "Callable[[], object]") -> None:
        """Call `on_trip` once, as soon as one of `packages` is being imported.

        It trips at the first search for a submodule. So a probe (`importlib.util.find_spec`)
        does not trip it, nor does a single file that happens to have the package's name.
        """
        for package in packages:
            self._listen_inside(package)
        self._on_trip = on_trip
        self._stand_in_line()

    def disarm(self) -> None:
        """Do not call `on_trip` any more."""
        self._on_trip = None

    def stand_alone(self) -> None:
        """Retire the finders of other copies of this package, such as one imported before."""
        for finder in list(sys.meta_path):
            kind = type(finder)
            if finder is not self and kind.__name__ == "Tripwire" and hasattr(kind, "retire"):
                finder.retire()  # type: ignore[attr-defined]

    def retire(self) -> None:
        """Look for nothing any more, until asked again; it stays in the line, see above."""
        self._on_trip = None
        self._inside = ()
        self._awaited.clear()
        self._watched.clear()

    def watch(self, name: str, on_loaded: "Callable[[str, Any], object]") -> None:
        """Call `on_loaded` with `name` and the module each time it has been imported.

        It is called at once where that has happened, by the thread that imports it where that
        is still to come, and at the next search inside the package where the end of the import
        cannot be seen: it had begun already, or another finder loads it. After a reload, too, it
        is called at the next search inside the package.
        An exception of `on_loaded` would break the import of the module.
        """
        self._listen_inside(name.partition(".")[0])
        self._watched[name] = on_loaded
        self._awaited[name] = None
        self._stand_in_line()
        self.look_around()

    def find_spec(self, fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Find nothing, or what the finders behind this one find for a watched module."""
        if not fullname.startswith(self._inside):
            return None
        if self._on_trip is not None:
            self._trip()
        self.look_around()
        if fullname not in self._watched:
            return None
        if fullname not in sys.modules:
            return self._telling_spec(fullname, path, target, self._tell)
        if target is not None:  # a reload
            return self._telling_spec(fullname, path, target, self._await_again)
        return None

    def _listen_inside(self, package: str) -> None:
        inside = package + "."
        if inside not in self._inside:
            self._inside = (*self._inside, inside)

    def _stand_in_line(self) -> None:
        if not any(finder is self for finder in sys.meta_path):
            sys.meta_path.insert(0, self)

    def _trip(self) -> None:
        on_trip, self._on_trip = self._on_trip, None
        if on_trip is None:  # another thread has been here first
            return
        try:
            on_trip()
        except BaseException:  # Ctrl-C in a notebook: the cell will be run again
            self._on_trip = on_trip
            raise

    def look_around(self) -> None:
        """Tell of the awaited modules that are complete; each search inside a package does so."""
        for name in list(self._awaited):
            module = sys.modules.get(name)
            if module is not None and not is_importing(module):
                self._tell(name, module)

    def _tell(self, name: str, module: "Any") -> None:
        self._awaited.pop(name, None)
        on_loaded = self._watched.get(name)
        if on_loaded is None:  # retired in the meantime
            return
        try:
            on_loaded(name, module)
        except BaseException:  # an interrupt, as above
            self._awaited[name] = None
            raise

    def _await_again(self, name: str, module: "Any") -> None:
        self._awaited[name] = None

    def _telling_spec(
        self, fullname: str, path: "Any", target: "Any", tell: "Callable[[str, Any], None]"
    ) -> "Any":
        """What the finders behind this one find, with a loader that tells when it is done."""
        key = (get_ident(), fullname)
        if key in self._asking:  # one of those that are asked asks everybody, as wrapt's does
            return None
        self._asking.add(key)
        try:
            spec = self._ask_behind(fullname, path, target)
        finally:
            self._asking.discard(key)
        if target is None:
            self._awaited[fullname] = None
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = TellingLoader(spec.loader, lambda module: tell(fullname, module))
        return spec

    def _ask_behind(self, fullname: str, path: "Any", target: "Any") -> "Any":
        """Those in front have been asked by the search that came here."""
        line: List[Any] = list(sys.meta_path)
        while line and line.pop(0) is not self:
            pass
        for finder in line:
            find_spec = getattr(finder, "find_spec", None)
            if find_spec is None:  # a finder of old (until Python 3.11), left to the search itself
                return None
            spec = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class TellingLoader:
    """Stands in for a loader until the module is to be executed; then nothing of it is left."""

    def __init__(self, loader: "Any", tell: "Callable[[Any], object]") -> None:
        self._loader = loader
        self._tell = tell

    def __getattr__(self, name: str) -> "Any":
        if name == "_loader":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: "Any") -> None:
        """Step aside, execute the module, tell."""
        try:  # noqa: SIM105  # contextlib is not to be imported here
            module.__loader__ = module.__spec__.loader = self._loader
        except AttributeError:
            pass  # a loader may make modules of any kind
        self._loader.exec_module(module)
        self._tell(module)


def is_importing(module: object) -> bool:
    """Whether the import of a module in `sys.modules` has begun and not ended."""
    if type(module).__module__ == "importlib.util":
        return True  # LazyLoader will execute it as soon as anybody asks for an attribute
    try:
        return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
    except Exception:  # noqa: BLE001  # anything may stand in sys.modules
        return False  # anything may stand in sys.modules


#: The one of this process; a reload keeps it, as it is in the line.
WIRE: Tripwire = globals().get("WIRE") or Tripwire()
