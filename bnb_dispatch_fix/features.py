"""The features and the environment variable that switches them."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import FrozenSet, Iterable, Iterator, NamedTuple, Optional

from bnb_dispatch_fix import OFF

#: The environment variable; it also bounds what `activate(features)` can ask for.
SWITCH = "BNB_DISPATCH_FIX"
FEATURES = ("backport", "rescue", "explain")
_ON = ("", "on", "1", "true", "yes", "all")


class Switch(NamedTuple):
    """What the environment allows; `complaint` names a typo and the valid values."""

    text: str
    allowed: FrozenSet[str]
    complaint: Optional[str]


def read_switch() -> Switch:
    """Read BNB_DISPATCH_FIX. A name that is no feature is left out; if none is left, it is on."""
    text = os.environ.get(SWITCH, "")
    value = text.strip().lower()
    if value in OFF:
        return Switch(text, frozenset(), None)
    if value in _ON:
        return Switch(text, frozenset(FEATURES), None)
    names = frozenset(name.strip() for name in value.split(",") if name.strip())
    unknown = sorted(names.difference(FEATURES))
    known = names.intersection(FEATURES) or frozenset(FEATURES)
    if not unknown:
        return Switch(text, known, None)
    return Switch(
        text,
        known,
        f"{SWITCH}={text!r}: {', '.join(unknown)} is no feature; expected off, on, or a "
        f"comma-separated list of {', '.join(FEATURES)}; going on with {', '.join(sorted(known))}",
    )


def checked(features: Iterable[str]) -> FrozenSet[str]:
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


_on: FrozenSet[str] = frozenset()
_thread = threading.local()


def on() -> FrozenSet[str]:
    """The features that are on for this thread now; every wrapper asks at every call."""
    return _on.difference(getattr(_thread, "off", ()))


@contextmanager
def without(feature: str) -> Iterator[None]:
    """Switch one feature off for this thread, while the block runs."""
    before = getattr(_thread, "off", ())
    _thread.off = (*before, feature)
    try:
        yield
    finally:
        _thread.off = before


def switch_on(features: FrozenSet[str]) -> None:
    """Make these the features that are on; all others are off."""
    global _on
    _on = features
