"""What a context takes beside the weights, device by device, and the largest that runs.

Pure arithmetic over what a forward pass was seen to take (forward.py), or what the configuration
says that it takes (config_law.py).
"""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST

#: The largest context and batch that are looked at.
MOST_TOKENS, MOST_BATCH = 2**27, 2**16
#: Bytes of an element of the cache.
KV_DTYPES: Mapping[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2,
    "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip


class Event(NamedTuple):
    """Something that happens to memory while a model computes.

    `kind` is "take" or "free" (of the storage of that number, `size` bytes of it), "enter" or
    "leave" (of a module; `storages` are those that its arguments lie in).
    """

    kind: str
    module: str = ""
    storage: int = -1
    size: int = 0
    storages: Tuple[int, ...] = ()


class Pass(NamedTuple):
    """What one forward pass takes: what happens to memory in order, and what stays.

    `cache` are pairs of the module that keeps something and its bytes.
    """

    events: Tuple[Event, ...]
    cache: Tuple[Tuple[str, int], ...]


class Need(NamedTuple):
    """Bytes that a device needs beside the weights: what stays, and the most that is there besides.

    Together they are the most that is taken at one moment, or more.
    """

    cache: int
    working: int


def needs(
    passed: Pass, place: Callable[[str], Optional[Device]], first: Device
) -> Dict[Device, Need]:
    """What a forward pass takes on each device of a device map.

    A storage lies where the module computes that made it; what is computed between modules stays
    where the last of them was, at first on `first`. A module's arguments are on its device, too,
    while it computes. `place` tells where a module is; None for one that is divided.
    """
    walk = _Walk(place, first)
    for event in passed.events:
        getattr(walk, event.kind)(event)
    cache: Dict[Device, int] = {}
    for module, size in passed.cache:
        device = walk.device(module) or first
        cache[device] = cache.get(device, 0) + size
    return {
        device: Need(cache.get(device, 0), max(0, walk.peak.get(device, 0) - cache.get(device, 0)))
        for device in {**walk.peak, **cache}
    }


class _Walk:
    """The events of a pass, one after the other, and what lies where meanwhile."""

    def __init__(self, place: Callable[[str], Optional[Device]], first: Device) -> None:
        self._place = place
        self._places: Dict[str, Optional[Device]] = {}
        self._here = first
        self._live: Dict[Device, int] = {}
        self._lies: Dict[int, Tuple[Device, int]] = {}
        self._visits: List[Tuple[Device, int]] = []
        self.peak: Dict[Device, int] = {}

    def device(self, module: str) -> Optional[Device]:
        if module not in self._places:
            self._places[module] = self._place(module) if module else None
        return self._places[module]

    def take(self, event: Event) -> None:
        self._lies[event.storage] = (self._here, event.size)
        self._add(self._here, event.size)

    def free(self, event: Event) -> None:
        if event.storage in self._lies:
            device, size = self._lies.pop(event.storage)
            self._add(device, -size)

    def enter(self, event: Event) -> None:
        before = self._here
        device = self.device(event.module)
        moved = 0
        if device is not None and device != before:
            self._here = device
            inputs = (self._lies[each] for each in event.storages if each in self._lies)
            moved = sum(size for lies, size in inputs if lies != device)
            self._add(device, moved)
        self._visits.append((self._here, moved))

    def leave(self, event: Event) -> None:
        device, moved = self._visits.pop()
        self._add(device, -moved)

    def _add(self, device: Device, size: int) -> None:
        live = self._live[device] = self._live.get(device, 0) + size
        if live > self.peak.get(device, -1):
            self.peak[device] = live


def short_of(needed: Mapping[Device, Need], room: Mapping[Device, int]) -> Dict[Device, int]:
    """By how many bytes each accelerator has too little room; negative where some is left."""
    return {
        device: need.cache + need.working - room[device]
        for device, need in needed.items()
        if device in room and device not in HOST
    }


def most_tokens(short: Callable[[int], int], asked: int) -> int:
    """The largest number of tokens below `asked` that there is room for; 0 where there is none.

    `short` tells how many bytes are missing for a number of tokens (0 or less: none), and grows
    with it. The answer is exact: `short` was asked for it and for one token more. It is found
    quickly where it grows along few straight lines.
    """
    low, high = 0, asked
    values = {high: short(high)}
    if asked > 1:
        values[1] = short(1)
        if values[1] > 0:
            return 0
        low = 1
    straight = True
    while high - low > 1:
        guess = _between(low, high, values) if straight else (low + high) // 2
        for tokens in (guess, guess + 1) if straight else (guess,):
            if not low < tokens < high:
                continue
            values[tokens] = short(tokens)
            if values[tokens] > 0:
                high = tokens
                break
            low = tokens
        straight = not straight
    return low


def _between(low: int, high: int, values: Mapping[int, int]) -> int:
    """Where a straight line between two numbers of tokens reaches zero, rounded down."""
    rise = values[high] - values[low]
    step = 0 if rise <= 0 else -values[low] * (high - low) // rise
    return min(max(low + step, low + 1), high - 1)
