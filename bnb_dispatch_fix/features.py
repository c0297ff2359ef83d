"""The features, the environment variable that switches them, and the version.

Read at every start of a Python that imports the package: it imports nothing that is not loaded
by then (see tripwire.py).
"""

import os
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import FrozenSet, Iterable, List, Optional, Tuple

VERSION = "0.1.0"
#: The environment variable; it also bounds what `activate(features)` can ask for.
SWITCH = "BNB_DISPATCH_FIX"
FEATURES = ("backport", "rescue", "explain", "even")
#: Those that are on where nothing is asked for: `even` changes maps that are accepted.
DEFAULTS = FEATURES[:3]
#: Words of BNB_DISPATCH_FIX that switch everything off, whatever stands beside them.
OFF = ("off", "0", "false", "no", "none", "n", "f", "disable", "disabled", "never", "nothing")
_ON = ("on", "1", "true", "yes", "all")


class Switch(tuple):  # type: ignore[type-arg]  # a NamedTuple would load typing
    """What the environment says, allows, and the complaint about a typo or None."""

    def __new__(
        cls, text: str, allowed: "FrozenSet[str]", complaint: "Optional[str]" = None
    ) -> "Switch":
        return tuple.__new__(cls, (text, allowed, complaint))

    @property
    def text(self) -> str:
        """The value of the variable."""
        return str(self[0])

    @property
    def allowed(self) -> "FrozenSet[str]":
        """The features that are on unless the code asks for others."""
        return frozenset(self[1])

    @property
    def askable(self) -> "FrozenSet[str]":
        """The features that the code can ask for: all, where the environment chooses none."""
        chosen = any(word not in _ON for word in _words(self.text.lower()))
        return self.allowed if chosen else frozenset(FEATURES)

    @property
    def complaint(self) -> "Optional[str]":
        """What is wrong with the value, and the valid ones."""
        return None if self[2] is None else str(self[2])


def is_off() -> bool:
    """Whether BNB_DISPATCH_FIX switches everything off; in doubt it does.

    An "off" anywhere in it is enough, and so is one of the words of `OFF`, in quotes or not.
    """
    value = os.environ.get(SWITCH, "").lower()
    return bool(value) and ("off" in value or any(word in OFF for word in _words(value)))


def _words(value: str) -> "List[str]":
    return "".join(c if c.isalnum() else " " for c in value).split()


def read_switch() -> Switch:
    """Read BNB_DISPATCH_FIX. A name that is no feature is left out; if none is left, it is on.

    The complaint says what a value that cannot be read as it stands was taken for.
    """
    text = os.environ.get(SWITCH, "")
    value = text.lower()
    words = _words(value)
    if is_off():
        clear = all(word in OFF for word in words)
        return Switch(text, frozenset(), None if clear else _complaint(text, "", "off"))
    if all(word in _ON for word in words):
        return Switch(text, frozenset(DEFAULTS))
    parts = [part.strip(" \t\r\n\"'") for part in value.replace(";", ",").split(",")]
    names = frozenset(part for part in parts if part)
    unknown = sorted(names.difference(FEATURES))
    known = names.intersection(FEATURES) or frozenset(DEFAULTS)
    if not unknown and ";" not in value:
        return Switch(text, known)
    wrong = f" {', '.join(unknown)} is no feature;" if unknown else ""
    return Switch(text, known, _complaint(text, wrong, ", ".join(sorted(known))))


def _complaint(text: str, wrong: str, taken_for: str) -> str:
    return (
        f"{SWITCH}={text!r}:{wrong} expected off, on, or a comma-separated list of "
        f"{', '.join(FEATURES)}; taken for {taken_for}"
    )


def checked(features: "Iterable[str]") -> "FrozenSet[str]":
    """The names as a set.

    Raises:
        ValueError: one of them is no feature.
    """
    names = frozenset([features] if isinstance(features, str) else features)
    unknown = sorted(str(name) for name in names.difference(FEATURES))
    if unknown:
        raise ValueError(
            f"features: {', '.join(unknown)} is unknown; expected names out of "
            f"{', '.join(FEATURES)}"
        )
    return names


# A reload must not switch off what is on: the wrappers would stay, and do nothing.
_on: "FrozenSet[str]" = globals().get("_on", frozenset())
_thread: "_local" = globals().get("_thread") or _local()


def on() -> "FrozenSet[str]":
    """The features that are on for this thread now; every wrapper asks at every call."""
    return _on.difference(getattr(_thread, "off", ()))


class without:  # reads as a statement: `with without("backport"):`
    """Switch one feature off for this thread, while the block runs."""

    def __init__(self, feature: str) -> None:
        self._feature = feature
        self._before: Tuple[str, ...] = ()

    def __enter__(self) -> None:
        self._before = getattr(_thread, "off", ())
        _thread.off = (*self._before, self._feature)

    def __exit__(self, *_: object) -> None:
        _thread.off = self._before


def switch_on(features: "FrozenSet[str]") -> None:
    """Make these the features that are on; all others are off."""
    global _on
    _on = features
