"""Attaches lines to an exception; its type, its traceback and what its text begins with stay."""

from __future__ import annotations

from typing import Any, Sequence

#: What every note of this package begins with.
TITLE = "bnb-dispatch-fix: "
#: No note is longer.
MOST_LINES = 60


def attach(error: BaseException, lines: Sequence[str]) -> None:
    """Add the lines as a note (Python 3.11 and newer), before that to the end of the message.

    An error whose text is not its first argument is left as it is where there are no notes.
    """
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"... and {len(lines) - MOST_LINES + 1} more lines"]
    text = TITLE + "\n".join(lines)
    add_note: Any = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(text)
    elif error.args and str(error) == error.args[0]:
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def attached(error: BaseException) -> bool:
    """Whether a note of this package is on the exception."""
    texts = [*getattr(error, "__notes__", ()), *error.args[:1]]
    return any(isinstance(text, str) and TITLE in text for text in texts)
