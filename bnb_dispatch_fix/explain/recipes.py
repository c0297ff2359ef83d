"""What to write instead: arguments that were planned, and found to work, before they are shown."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Dict, Iterator, List, Mapping, Optional

from packaging.version import Version

from bnb_dispatch_fix import features
from bnb_dispatch_fix.explain.offloading import EFFORT, Recipe, offloaded
from bnb_dispatch_fix.model.budgets import Budgets
from bnb_dispatch_fix.model.machine import memory_of
from bnb_dispatch_fix.model.requests import Request
from bnb_dispatch_fix.model.search import Outcome, search
from bnb_dispatch_fix.model.sizers import Sizer, Storage
from bnb_dispatch_fix.placement.packing import pack
from bnb_dispatch_fix.placement.records import Device, Placement, Unit, device_order
from bnb_dispatch_fix.wording import GIB, MIB, bytes_in, gib, pasted

#: Where torch does not tell what a device has, budgets are not raised to more than this many times.
_RAISED_AT_MOST = 4
#: How many devices more than there are may be suggested.
_MORE_DEVICES = 16
#: Since this release `from_pretrained` calls it `dtype`, before `torch_dtype`.
_DTYPE_SINCE = Version("4.56.0")


def recipes(request: Request, outcome: Outcome) -> List[Recipe]:
    """Every change that makes the model load, planned with the exact search, best first."""
    return list(_found(request, outcome))


def _found(request: Request, outcome: Outcome) -> Iterator[Recipe]:
    if outcome.device_map is not None and "rescue" not in features.on():
        yield Recipe(
            "this placement, which rescue would make (BNB_DISPATCH_FIX=backport,rescue,explain)",
            f"device_map={pasted(outcome.device_map)}",
        )
        return
    for look in (_higher_budgets, _lower_dtype, _four_bit, offloaded, _more_devices):
        recipe = look(request, outcome)
        if recipe is not None:
            yield recipe


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
    if search(request._replace(max_memory=max_memory)).device_map is None:
        return None
    sure = request.max_memory is None or all(known.values())
    unsure = "" if sure else ", if the devices have that much"
    return Recipe(f"higher budgets{unsure}", f"max_memory={_written(max_memory)}")


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


def typeable(size: float) -> str:
    """A budget as a user types it, rounded up: "13.4GiB", "950MiB"."""
    for unit, width in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if size >= width:
            tenths = math.ceil(size * 10 / width)
            return f"{tenths // 10}{unit}" if tenths % 10 == 0 else f"{tenths / 10}{unit}"
    return "1KiB"


def _lower_dtype(request: Request, outcome: Outcome) -> Optional[Recipe]:
    """Half of what is loaded in float32 by choice, not because the model keeps it so."""
    if not _stored(outcome, "float32"):
        return None

    def size(name: str, tensor: Any, owner: Any) -> Storage:
        storage = request.sizer(name, tensor, owner)
        chosen = str(tensor.dtype) == "torch.float32" and not storage.quantized
        return Storage(2, "bfloat16", False) if chosen and storage.bytes == 4 else storage

    if not _places(request, outcome.budgets, size):
        return None
    return Recipe("16 bits for what is not quantized", f"{dtype_argument()}=torch.bfloat16")


def dtype_argument() -> str:
    """The name that the installed `from_pretrained` has for the dtype."""
    version = getattr(sys.modules.get("transformers"), "__version__", "0")
    return "dtype" if Version(version) >= _DTYPE_SINCE else "torch_dtype"


def _stored(outcome: Outcome, label: str) -> bool:
    """Whether any tensor is stored so once it is loaded."""
    return any(label in facts.sizes for facts in outcome.units.facts.values())


def _four_bit(request: Request, outcome: Outcome) -> Optional[Recipe]:
    if not request.is_bitsandbytes or not _stored(outcome, "8-bit"):
        return None

    def size(name: str, tensor: Any, owner: Any) -> Storage:
        storage = request.sizer(name, tensor, owner)
        eight = storage.quantized and storage.bytes == 1
        return Storage(0.5, "4-bit", True) if eight else storage

    if not _places(request, outcome.budgets, size):
        return None
    own = not hasattr(request.quantizer, "quantization_config")  # accelerate's own loader
    name = "bnb_quantization_config" if own else "quantization_config"
    config = "BnbQuantizationConfig" if own else "BitsAndBytesConfig"
    return Recipe("4-bit instead of 8-bit", f"{name}={config}(load_in_4bit=True)")


def _places(request: Request, budgets: Budgets, sizer: Sizer) -> bool:
    """Whether the model has a place when its tensors are stored as `sizer` says."""
    units = request._replace(sizer=sizer).units().units
    return isinstance(pack(units, budgets.accelerators, effort=EFFORT), Placement)


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
            budget = f"{gib(outcome.budgets.given[largest])} GiB"
            devices = "device" if count == 1 else "devices"
            return Recipe(f"{count} more {devices} of {budget}")
    return None


def _written(max_memory: Mapping[Device, Any]) -> str:
    pairs = (f"{json.dumps(device)}: {_budget(size)}" for device, size in max_memory.items())
    return "{" + ", ".join(pairs) + "}"


def _budget(size: Any) -> str:
    """As the caller wrote it; numbers of another kind (numpy's) as plain ones."""
    return json.dumps(size if isinstance(size, (str, int)) else int(size))
