"""What to write instead: arguments that were planned, and found to work, before they are shown."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from packaging.version import Version

from bnb_dispatch_fix import features
from bnb_dispatch_fix.backport.shapes import Module, Tensor
from bnb_dispatch_fix.explain import trial
from bnb_dispatch_fix.explain.offloading import EFFORT, Recipe, offloaded, offloaded_head
from bnb_dispatch_fix.model.budgets import Budgets
from bnb_dispatch_fix.model.machine import accelerators_seen, memory_of
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome, search
from bnb_dispatch_fix.model.sizers import Storage
from bnb_dispatch_fix.placement.packing import pack
from bnb_dispatch_fix.placement.records import Device, Placement, Unit, device_order
from bnb_dispatch_fix.wording import GIB, HOST, MIB, amount, bytes_in, device_name, pasted

#: Where torch does not tell what a device has, budgets are not raised to more than this many times.
_RAISED_AT_MOST = 4
#: How many devices more than there are may be suggested.
_MORE_DEVICES = 16
#: Since this release `from_pretrained` calls it `dtype`, before `torch_dtype`.
_DTYPE_SINCE = Version("4.56.0")
#: Since this release accelerate reads fractions in a budget's text.
_FRACTIONS_SINCE = Version("0.22.0.dev0")
#: No further change is tried after this many seconds: who waits, waits for an error.
_SECONDS = 4.0


class Found(NamedTuple):
    """The changes that work, best first, and whether all were tried."""

    recipes: List[Recipe]
    complete: bool


def recipes(request: Request, outcome: Outcome) -> Found:
    """Every change that makes the model load; each was fed back to the installed release.

    Of a very large model some changes stay untried: planning it takes seconds each time.
    """
    if outcome.device_map is not None and "rescue" not in features.on():
        return Found(list(_as_rescue_would(request, outcome)), True)
    found: List[Recipe] = []
    until = time.thread_time() + _SECONDS
    for look in _CHANGES:
        if time.thread_time() > until:
            return Found(found, False)
        with contextlib.suppress(Exception):  # one that cannot be tried is no recipe
            recipe = look(request, outcome)
            if recipe is not None:
                found.append(recipe)
    return Found(_distinct(found), True)


def _distinct(found: List[Recipe]) -> List[Recipe]:
    """Without those that ask for what one before them asks for."""
    return list({recipe.arguments or recipe.what: recipe for recipe in reversed(found)}.values())[
        ::-1
    ]


def on_accelerators(request: Request) -> List[Recipe]:
    """The changes of budgets with which the model goes to accelerators."""
    looks = (_without_max_memory, _all_accelerators)
    return [recipe for look in looks for recipe in [look(request, None)] if recipe is not None]


def in_16_bits(request: Request) -> List[Recipe]:
    """What is loaded in float32 by choice in half of that, where the model goes to them then."""
    found = _lower_dtype(request, search(request))
    return [] if found is None else [found]


def _as_rescue_would(request: Request, outcome: Outcome) -> Iterator[Recipe]:
    if outcome.device_map is not None and trial.accepts(request, outcome.device_map):
        yield Recipe(
            "this placement, which rescue would make (BNB_DISPATCH_FIX=backport,rescue,explain)",
            f"device_map={pasted(outcome.device_map)}",
        )


def _without_max_memory(request: Request, _: Optional[Outcome]) -> Optional[Recipe]:
    """What is free, where budgets were set."""
    if request.max_memory is None or trial.loads(request, None) is None:
        return None
    return Recipe("without max_memory", "max_memory=None")


def _all_accelerators(request: Request, _: Optional[Outcome]) -> Optional[Recipe]:
    """A budget for every accelerator there is: what is free on it, rounded down."""
    if request.max_memory is None:
        return None
    free = request.get_max_memory(None)
    named = {device for device, size in request.max_memory.items() if size}
    cards = {device: size for device, size in free.items() if device not in HOST and size >= MIB}
    if not cards or named >= set(cards):
        return None
    max_memory: Dict[Device, Any] = {d: typeable(size, up=False) for d, size in cards.items()}
    if trial.loads(request, max_memory) is None:
        return None
    what = f"with {'every GPU' if len(cards) > 1 else device_name(next(iter(cards)))} named"
    return Recipe(what, f"max_memory={written_budgets(max_memory)}")


def _room_on_the_cpu(request: Request, outcome: Outcome) -> Optional[Recipe]:
    """Without any accelerator: a budget of the CPU that holds the model."""
    if outcome.budgets.accelerators or accelerators_seen():
        return None
    whole = outcome.units.total * 1.01 / _usable_share(request)
    max_memory: Dict[Device, Any] = {"cpu": typeable(whole)}
    if trial.loads(request, max_memory, on_host=True) is None:
        return None
    return Recipe("all of it on the CPU", f"max_memory={written_budgets(max_memory)}")


def _higher_budgets(request: Request, outcome: Outcome) -> Optional[Recipe]:
    """The smallest budgets, all raised alike, within what the devices have."""
    units, usable = outcome.units.units, outcome.budgets.accelerators
    if not usable:
        return None
    given = outcome.budgets.given
    known = {device: memory_of(device) for device in usable}
    most = min(
        [size / given[device] for device, size in known.items() if size] or [_RAISED_AT_MOST]
    )
    if request.max_memory is None:
        most = min(most, 1.0)  # what is free now is all there is
        usable = {device: int(_usable_share(request) * given[device]) for device in usable}
    factor = _smallest_factor(units, usable, most)
    if factor is None:
        return None
    max_memory: Dict[Device, Any] = dict(request.max_memory or {})
    raised = {device: typeable(given[device] * factor) for device in usable}
    max_memory = {**raised, **{d: size for d, size in max_memory.items() if d not in raised}}
    if any(size and (bytes_in(raised[device]) or 0) > size for device, size in known.items()):
        return None
    if trial.loads(request, max_memory) is None:
        return None
    sure = request.max_memory is None or all(known.values())
    unsure = "" if sure else ", if the devices have that much"
    return Recipe(f"higher budgets{unsure}", f"max_memory={written_budgets(max_memory)}")


def _usable_share(request: Request) -> float:
    """What the quantizer leaves of a budget that the caller sets."""
    whole: Dict[Device, Any] = {0: 2**40}
    left = whole if request.adjust is None else request.adjust(dict(whole))
    return float(left[0] / whole[0])


def _smallest_factor(
    units: List[Unit], usable: Mapping[Device, int], most: float
) -> Optional[float]:
    """The smallest factor up to `most` with which the units have a place, to a thousandth."""

    def fits(factor: float) -> bool:
        budgets = {device: int(size * factor) for device, size in usable.items()}
        return isinstance(pack(units, budgets, effort=EFFORT), Placement)

    low, high = 0.0, most
    if not fits(high):
        return None
    while high - low > 0.001 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def typeable(size: float, up: bool = True) -> str:
    """A budget as a user types it, rounded up or down: "13.4GiB", "950MiB".

    accelerate 0.20 and 0.21 read whole numbers only: "6861MiB".
    """
    rounded = math.ceil if up else math.floor
    for unit, width in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if size >= width:
            tenths = rounded(size * 10 / width)
            if tenths % 10 == 0:
                return f"{tenths // 10}{unit}"
            if not reads_whole_numbers_only():
                return f"{tenths / 10}{unit}"
            if unit == "KiB" or size >= 1000 * width:
                return f"{rounded(size / width)}{unit}"
    return "1KiB"


def reads_whole_numbers_only() -> bool:
    """Whether the installed accelerate takes "6.7GiB" for no number."""
    version = getattr(sys.modules.get("accelerate"), "__version__", "1")
    return Version(version) < _FRACTIONS_SINCE


def _lower_dtype(request: Request, outcome: Outcome) -> Optional[Recipe]:
    """Half of what is loaded in float32 by choice, not because the model keeps it so.

    Buffers are made by the model as it is built: their dtype is not the caller's.
    """
    if not _stored(outcome, "float32"):
        return None

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        storage = request.sizer(name, tensor, owner)
        chosen = str(tensor.dtype) == "torch.float32" and not storage.quantized
        if name.rpartition(".")[2] not in owner._parameters or not chosen or storage.bytes != 4:
            return storage
        found.append(name)
        return Storage(2, "bfloat16", False)

    found: List[str] = []
    torch: Any = sys.modules["torch"]
    stored = trial.Stored(
        size,
        lambda element, tensor: 2 if element == 4 and tensor.dtype == torch.float32 else element,
        dtype=torch.bfloat16,
    )
    if not _places(request, outcome.budgets, stored) or not found:
        return None
    return Recipe("16 bits for what is not quantized", f"{_dtype_argument(request)}=torch.bfloat16")


def _dtype_argument(request: Request) -> str:
    """The name that the installed `from_pretrained` has for the dtype."""
    if request.is_diffusers:
        return "torch_dtype"
    version = getattr(sys.modules.get("transformers"), "__version__", "0")
    return "dtype" if Version(version) >= _DTYPE_SINCE else "torch_dtype"


def _stored(outcome: Outcome, label: str) -> bool:
    """Whether any tensor is stored so once it is loaded."""
    return any(label in facts.sizes for facts in outcome.units.facts.values())


def _four_bit(request: Request, outcome: Outcome) -> Optional[Recipe]:
    if not request.is_bitsandbytes or not _stored(outcome, "8-bit"):
        return None

    def size(name: str, tensor: Tensor, owner: Module) -> Storage:
        storage = request.sizer(name, tensor, owner)
        eight = storage.quantized and storage.bytes == 1
        return Storage(0.5, "4-bit", True) if eight else storage

    own = not hasattr(request.quantizer, "quantization_config")  # accelerate's own loader
    before = request.quantizer if own else request.quantizer.quantization_config
    stored = trial.Stored(
        size,
        lambda element, _: 0.5 if element == 1 else element,
        config=type(before)(load_in_4bit=True),
    )
    if not _places(request, outcome.budgets, stored):
        return None
    name = "bnb_quantization_config" if own else "quantization_config"
    config = "BnbQuantizationConfig" if own else "BitsAndBytesConfig"
    return Recipe("4-bit instead of 8-bit", f"{name}={config}(load_in_4bit=True)")


def _places(request: Request, budgets: Budgets, stored: trial.Stored) -> bool:
    """Whether the model loads when its tensors are stored so: quickly by size, then for certain."""
    units = request._replace(sizer=stored.sizer).units().units
    fits = isinstance(pack(units, budgets.accelerators, effort=EFFORT), Placement)
    return fits and trial.loads(request, request.max_memory, stored) is not None


def _more_devices(_: Request, outcome: Outcome) -> Optional[Recipe]:
    """How many devices like the largest one are missing."""
    usable = outcome.budgets.accelerators
    if not usable:
        return None
    largest = max(device_order(usable), key=lambda device: usable[device])
    for count in range(1, _MORE_DEVICES + 1):
        more: Dict[Device, int] = {f"another {index}": usable[largest] for index in range(count)}
        more.update(usable)
        if isinstance(pack(outcome.units.units, more, effort=EFFORT), Placement):
            budget = amount(outcome.budgets.given[largest])
            devices = "device" if count == 1 else "devices"
            return Recipe(f"{count} more {devices} of {budget}")
    return None


def written_budgets(max_memory: Mapping[Device, Any]) -> str:
    """`max_memory` as an expression."""
    pairs = (f"{json.dumps(device)}: {_budget(size)}" for device, size in max_memory.items())
    return "{" + ", ".join(pairs) + "}"


def _budget(size: Any) -> str:
    """As the caller wrote it; numbers of another kind (numpy's) as plain ones."""
    return json.dumps(size if isinstance(size, (str, int)) else int(size))


#: What is tried, in this order.
_CHANGES: Tuple[Callable[[Request, Outcome], Optional[Recipe]], ...] = (
    _without_max_memory,
    _all_accelerators,
    _higher_budgets,
    _lower_dtype,
    _four_bit,
    _room_on_the_cpu,
    offloaded_head,
    offloaded,
    _more_devices,
)
