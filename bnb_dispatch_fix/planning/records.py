"""The answers of `plan`: the model, the budgets, and what each planner makes of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

from bnb_dispatch_fix.model.layout import Part
from bnb_dispatch_fix.placement.records import Device
from bnb_dispatch_fix.wording import HOST, one_line, visible

#: The planners that are asked, in this order: what each is called, and the features it has on.
RUNS: Mapping[str, Tuple[str, ...]] = {
    "release": (),
    "backport": ("backport",),
    "rescue": ("backport", "rescue"),
    "even": ("backport", "rescue", "even"),
}


def runs_of(even: bool) -> Mapping[str, Tuple[str, ...]]:
    """Those that are asked; "even" only where somebody wants to see it."""
    return {name: features for name, features in RUNS.items() if even or name != "even"}


#: Of `Plan.as_dict()`, see docs/plan-schema.json; it changes when a key changes or goes.
SCHEMA = 1


class PlanError(ValueError):
    """No plan can be made of these arguments; one line that says which, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(visible(text))  # it may name what somebody else has written


#: Longer texts of errors end with the last sentence before.
_LONGEST = 400


def told(error: BaseException) -> str:
    """An exception as plans tell it, on one line; of a long text its first sentences, or words."""
    text = one_line(error)
    if len(text) <= _LONGEST:
        return text
    end = text.rfind(". ", 0, _LONGEST) + 1 or text.rfind(" ", 0, _LONGEST)
    return f"{text[: end if end > 0 else _LONGEST]} …"


@dataclass(frozen=True)
class DeviceLoad:
    """What lies on one device, in bytes.

    `given` is the caller's budget, or what is free there; `usable` is what the quantizer leaves
    of it; `placed` counts true bytes, whatever the planner counted. The disk has no budget.
    Where a context was asked for and everything is on accelerators, `scales` is what bitsandbytes
    stores beside the weights, `cache` what the context leaves there, `working` the most that
    computing takes besides, and `reserve` what the caller wants free.
    """

    device: Device
    given: Optional[int]
    usable: Optional[int]
    placed: int
    parts: Tuple[Part, ...]
    scales: int = 0
    cache: Optional[int] = None
    working: Optional[int] = None
    reserve: int = 0

    @property
    def left(self) -> Optional[int]:
        """Bytes of what was given that nothing takes; negative where they do not do."""
        if self.given is None or self.cache is None or self.working is None:
            return None
        return self.given - self.placed - self.scales - self.cache - self.working - self.reserve

    @property
    def free(self) -> Optional[int]:
        """Usable bytes that stay free; negative where more is placed than the budget holds."""
        return None if self.usable is None else self.usable - self.placed


@dataclass(frozen=True)
class Run:
    """What one planner does.

    `outcome` is "loads" (everything on accelerators), "offloads" (accepted, with modules on the
    CPU or the disk), "overfull" (accepted, with more bytes on a device than the caller gave it),
    "refused" (a map was made, and an error raised) or "fails" (an error, no map).

    `evenness` is the largest part of a usable budget in use, divided by the smallest that the
    largest can be in device order: 1.0 is as even as can be. None where it was not asked for,
    something is on the CPU or the disk, or no placement is in device order.
    """

    name: str
    outcome: str
    error: Optional[str]
    device_map: Optional[Dict[str, Device]]
    devices: Tuple[DeviceLoad, ...]
    evenness: Optional[float] = None

    @property
    def offloaded(self) -> int:
        """Bytes on the CPU and the disk."""
        return sum(load.placed for load in self.devices if load.device in HOST)


@dataclass(frozen=True)
class Room:
    """What a context takes, and whether there is room for it; sizes in bytes.

    `context` is the number of tokens of each of `batch` sequences, None where none was asked for;
    `kv_dtype` is that of keys and values. `source` says where the numbers are from. `most` is the
    largest context that runs: exact where a context was asked for and is too large (None where it
    is not), else an estimate. `limit` is what the model was made for, where it says so. `shown` is
    the run whose device map is the plan's, None where it is none's; `devices` is what that map
    puts where.
    """

    context: Optional[int]
    batch: int
    kv_dtype: str
    reserve: int
    source: Optional[str]
    limit: Optional[int]
    most: Optional[int]
    enough: Optional[bool]
    shown: Optional[str]
    devices: Tuple[DeviceLoad, ...] = ()


@dataclass(frozen=True)
class Precision:
    """One of the precisions that were compared; sizes in bytes.

    `name` is "16", "8", "4" or "4dq", as for --bits, or "stored" and "dequantized" of a checkpoint
    that is stored quantized and that the release may load unquantized. It fits where every module
    has a place on the accelerators; `over` is what bitsandbytes' scales then take beyond the
    budgets. `devices` are the fewest that hold it; `reason` says why it does not fit.
    """

    name: str
    title: str
    total: int
    scales: int
    fits: bool
    over: int
    devices: Tuple[Device, ...]
    reason: Optional[str]


@dataclass(frozen=True)
class Change:
    """What to change in a few words, and Python to paste into the call, or ""."""

    what: str
    arguments: str


@dataclass(frozen=True)
class Fewer:
    """Accelerators that are enough, and the argument that keeps the model there."""

    devices: Tuple[Device, ...]
    arguments: str


@dataclass(frozen=True)
class Plan:
    """The model, the budgets, and what each planner makes of them; all sizes in bytes.

    `fits` says that everything has a place on the accelerators, `verdict` why or why not;
    `device_map` is the map to paste (None where it does not fit). `largest` are the largest kinds
    of modules, their numbers replaced by "*"; `notes` say what could not be patched. `scales` are
    beside `total`: what bitsandbytes stores to read its weights, which no release counts. `room`
    says whether there is room for a context; None where that is not known and nobody asked.
    `precisions` are those that were compared, the largest first; the plan is of one of them.
    `recipes` are changes with which it fits, where it does not; `fewer` the fewest devices that
    hold it, where the map uses more. All of these were planned.
    """

    model: str
    versions: Dict[str, str]
    strategy: str
    precision: str
    total: int
    quantized: int
    largest: Tuple[Part, ...]
    runs: Tuple[Run, ...]
    fits: bool
    verdict: str
    device_map: Optional[Dict[str, Device]]
    notes: Tuple[str, ...] = ()
    scales: int = 0
    room: Optional[Room] = None
    precisions: Tuple[Precision, ...] = ()
    recipes: Tuple[Change, ...] = ()
    fewer: Optional[Fewer] = None

    @property
    def runnable(self) -> bool:
        """Whether it fits, and runs with the context that was asked for, if any."""
        return self.fits and (self.room is None or self.room.enough is not False)

    @property
    def unquantized(self) -> int:
        """Bytes that no quantizer will touch."""
        return self.total - self.quantized

    @property
    def release(self) -> str:
        """Whose planner was asked: "transformers 5.12.1"."""
        name = "diffusers" if "diffusers" in self.versions else "transformers"
        return f"{name} {self.versions.get(name, '')}".strip()

    def as_dict(self) -> Dict[str, Any]:
        """Plain data, as `bnb-dispatch-fix plan --json` prints it."""
        found = asdict(self)
        tables = [(run.devices, told["devices"]) for run, told in zip(self.runs, found["runs"])]
        if self.room is not None:
            tables.append((self.room.devices, found["room"]["devices"]))
        for loads, entries in tables:
            for load, entry in zip(loads, entries):
                entry.update(free=load.free, left=load.left)
        return {"schema": SCHEMA, **found, "unquantized": self.unquantized}
