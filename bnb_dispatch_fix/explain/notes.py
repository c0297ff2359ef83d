"""Attaches lines to an exception; its type, its traceback and what its text begins with stay."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Type

#: What every note of this package begins with.
TITLE = "bnb-dispatch-fix: "
#: No note is longer.
MOST_LINES = 60
#: Marks an exception whose note was shown elsewhere.
_TAKEN = "_bnb_dispatch_fix_taken"


class _Noted:
    """The key of a KeyError, which shows its key by repr(): with a note, and equal to the key."""

    note = ""

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.note}"


class _Text(_Noted, str):
    """A key that is a text."""


class _Number(_Noted, int):
    """A key that is a number, as those of devices are."""


_KEYS: Dict[type, Type[Any]] = {str: _Text, int: _Number}


def attach(error: BaseException, lines: Sequence[str]) -> None:
    """Add the lines as a note (Python 3.11 and newer), before that to the end of the message.

    A KeyError's key stays what it is and shows the lines. Any other error whose text is not its
    first argument is left as it is where there are no notes.
    """
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"... and {len(lines) - MOST_LINES + 1} more lines"]
    text = TITLE + "\n".join(lines)
    add_note: Any = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(text)
    elif error.args and str(error) == error.args[0]:
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    elif isinstance(error, KeyError) and len(error.args) == 1 and type(error.args[0]) in _KEYS:
        key = _KEYS[type(error.args[0])](error.args[0])
        key.note = text
        error.args = (key,)


def attached(error: BaseException) -> bool:
    """Whether a note of this package is on the exception."""
    return _text(error) is not None


def taken(error: BaseException) -> Optional[str]:
    """The note of this package on the exception, for who shows it elsewhere; the first time only.

    None where there is none, and from then on.
    """
    if getattr(error, _TAKEN, False):
        return None
    setattr(error, _TAKEN, True)
    text = _text(error)
    return None if text is None else text.partition(TITLE)[2]


def _text(error: BaseException) -> Optional[str]:
    own = [getattr(key, "note", key) for key in error.args[:1]]
    texts = [*getattr(error, "__notes__", ()), *own]
    return next((text for text in texts if isinstance(text, str) and TITLE in text), None)
