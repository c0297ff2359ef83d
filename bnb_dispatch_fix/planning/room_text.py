"""What a context takes, as lines for a terminal: a row per device, and where it is known from."""

from __future__ import annotations

import textwrap
from typing import List, Mapping, Sequence

from bnb_dispatch_fix.planning.records import DeviceLoad, Plan
from bnb_dispatch_fix.wording import device_name, gib, visible

_COLUMNS = ("given", "weights", "cache", "working", "reserve", "left")
_WIDTH = 96


def room_lines(plan: Plan, names: Mapping[str, str]) -> List[str]:
    """The table of a context; nothing where none was asked for, or nothing loads."""
    room = plan.room
    if room is None or not room.devices:
        return []
    whose = names.get(room.shown or "", "with the device_map below")
    head = f"With {room.context} tokens × {room.batch}, {room.kv_dtype}, {whose}:"
    rows = [_row(device_name(load.device), _numbers(load)) for load in room.devices]
    source = textwrap.wrap(f"cache: {visible(room.source)}", _WIDTH, subsequent_indent="  ")
    return [head, _row("GiB", _COLUMNS), *rows, *source, ""]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:6}" + "".join(f"{cell:>9}" for cell in cells)


def _numbers(load: DeviceLoad) -> Sequence[str]:
    sizes = (load.given, load.placed + load.scales, load.cache, load.working, load.reserve)
    return tuple(map(gib, (*sizes, load.left)))


def estimate(plan: Plan) -> List[str]:
    """Without a context, the line that says how many tokens there is room for."""
    room = plan.room
    if room is None or room.context is not None or room.most is None:
        return []
    if not room.most:
        return ["   no room for a context; --context N tells exactly"]
    about = f"room for about {_rounded(room.most)} tokens × {room.batch}"
    more = room.limit is not None and room.most > room.limit
    of = "more than the" if more else "of"
    limit = f", {of} {room.limit} that the model was made for" if room.limit else ""
    return [f"   {about}{limit}; --context N tells exactly"]


def _rounded(tokens: int) -> int:
    """Two digits that count: an estimate has no more."""
    step = int(10 ** max(0, len(str(tokens)) - 2))
    return tokens // step * step
