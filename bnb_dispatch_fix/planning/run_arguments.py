"""What `plan` is asked about a context, read or refused in one line."""

from __future__ import annotations

import operator
from typing import Any, Dict, Optional

from bnb_dispatch_fix.planning.budgets import parse_size
from bnb_dispatch_fix.planning.records import PlanError
from bnb_dispatch_fix.planning.room import KV_DTYPES, MOST_BATCH, MOST_TOKENS
from bnb_dispatch_fix.wording import folded

_ARGUMENTS = ("context", "batch", "kv_dtype", "reserve")
_OPTIONS = ("--context", "--batch", "--kv-dtype", "--reserve")
#: Longer texts are cut where they are shown.
_LONGEST = 40


def asked_room(
    context: Any, batch: Any, kv_dtype: Any, reserve: Any, *, options: bool = False
) -> Dict[str, Any]:
    """The part of a job that says what is to run; nothing where nothing was asked for.

    `options` says that they come from a command line, and are texts.

    Raises:
        PlanError: one cannot be used; it is named as the caller knows it.
    """
    names = _OPTIONS if options else _ARGUMENTS
    found: Dict[str, Any] = {}
    if context is not None:
        found["context"] = _count(context, names[0], "tokens", MOST_TOKENS)
    sequences = 1 if batch is None else _count(batch, names[1], "sequences", MOST_BATCH)
    if sequences != 1:
        found["batch"] = sequences
    if kv_dtype is not None:
        found["kv_dtype"] = _dtype(kv_dtype, names[2])
    kept = _bytes(reserve, names[3])
    if kept:
        found["reserve"] = kept
    return found


def _count(value: Any, name: str, what: str, most: int) -> int:
    """A whole number from 1 on."""
    number: Optional[int] = None
    if isinstance(value, str):
        text = value.strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
    elif not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            number = None
    if number is None or number < 1:
        shown = folded(repr(value), _LONGEST)
        raise PlanError(f"{name}: expected a whole number of {what} from 1 on, found {shown}")
    if number > most:
        raise PlanError(f"{name}: {folded(number, _LONGEST)} is too large; at most {most} {what}")
    return number


def _dtype(value: Any, name: str) -> str:
    found = str(value).replace("torch.", "")
    if found not in KV_DTYPES:
        shown = folded(repr(found), _LONGEST)
        raise PlanError(f"{name}: expected one of {', '.join(KV_DTYPES)}, found {shown}")
    return found


def _bytes(value: Any, name: str) -> int:
    if value is None:
        return 0
    if isinstance(value, str):
        return parse_size(value, name)
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        shown = folded(repr(value), _LONGEST)
        raise PlanError(f"{name}: expected bytes, or a text such as '1GiB', found {shown}")
    return parse_size(str(number), name)
