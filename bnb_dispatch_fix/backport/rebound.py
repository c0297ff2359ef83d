"""Runs an installed function with stand-ins for what it calls; nothing installed is changed."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

_MAX_WRAPPERS = 32


def rebound(function: Any, stand_ins: dict[str, Any], depth: int = 0) -> Any:
    """Returns a copy of *function* whose globals, where they have these names, are *stand_ins*.

    Functions it holds in its closure, as a wrapper holds what it wraps, are copied with it, and
    a wrapt wrapper's decorator is given a copy. Anything else is returned as it is.
    """
    if depth > _MAX_WRAPPERS:
        return function
    decorator = getattr(function, "_self_wrapper", None)
    if decorator is not None:
        inner = rebound(function.__wrapped__, stand_ins, depth + 1)
        return lambda *args, **kwargs: decorator(inner, None, args, kwargs)
    if type(function) is not FunctionType:
        return function
    known = {name: value for name, value in stand_ins.items() if name in function.__globals__}
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **known},
        function.__name__,
        function.__defaults__,
        tuple(_rebound_cell(cell, stand_ins, depth + 1) for cell in function.__closure__ or ()),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _rebound_cell(cell: CellType, stand_ins: dict[str, Any], depth: int) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # still empty
        return cell
    copy = rebound(content, stand_ins, depth)
    return cell if copy is content else CellType(copy)
