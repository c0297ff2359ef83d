"""Explains, in a line each, the errors that a misspelt argument of `from_pretrained` leads to."""

from __future__ import annotations

import difflib
import re
from typing import Any, Callable, Iterator, List, Mapping, Optional, Tuple

from bnb_dispatch_fix.model.layout import device_of
from bnb_dispatch_fix.model.load import Load
from bnb_dispatch_fix.wording import STRATEGIES, collapsed, split_size

#: Those that every release of accelerate reads.
_UNITS = ("GiB", "MiB", "KiB", "GB", "MB", "KB")
_DEVICE = re.compile(r"(?:cuda|xpu|npu|gpu|hip)?:?(\d+)$")
_UNCOVERED = (
    "does not give any device for the following parameters",  # accelerate
    "doesn't have any device set",  # transformers 4.x
)
#: What an argument that is no dict leads to where its keys or values are asked for.
_NO_DICT = (TypeError, AttributeError)
_MOST_NAMES = 6

Check = Callable[[BaseException, Load], Iterator[str]]


def lines(error: BaseException, load: Load) -> List[str]:
    """What the error means and the right spelling, a line per argument; empty where unknown."""
    checks: Tuple[Check, ...] = (_max_memory, _strategy, _map_values, _uncovered, _switch)
    return [line for check in checks for line in check(error, load)]


def _max_memory(error: BaseException, load: Load) -> Iterator[str]:
    asked, text = load.max_memory, str(error)
    if isinstance(asked, Mapping):
        yield from _wrong_keys(text, asked)
        yield from _wrong_sizes(text, asked)
        if "disk" in asked and "Expected one of cpu" in text:
            yield 'max_memory: this release cannot read the key "disk"; leave it out'
    elif asked is not None and load.strategy and isinstance(error, _NO_DICT):
        yield (
            f"max_memory={asked!r}: expected a dict with a budget for each device, "
            f"such as {{0: {_spelt(asked) or '20GiB'!r}, 'cpu': '30GiB'}}"
        )


def _wrong_keys(text: str, asked: Mapping[Any, Any]) -> Iterator[str]:
    if "not recognized" not in text:
        return
    for device in asked:
        if isinstance(device, str) and device not in ("cpu", "disk", "mps"):
            yield f"max_memory: the key {device!r} is no device; {_right_key(device)}"


def _wrong_sizes(text: str, asked: Mapping[Any, Any]) -> Iterator[str]:
    for device, size in asked.items():
        if size != size:
            yield f"max_memory[{device!r}]={size!r} is no size; write a number of bytes"
    if "valid format" not in text:
        return
    for device, size in asked.items():
        if isinstance(size, str) and not _is_budget(size):
            yield f"max_memory[{device!r}]={size!r} is no size; {_right_size(size)}"


def _right_key(device: str) -> str:
    number = _DEVICE.match(device)
    if number:
        return f"write the number {number.group(1)}, without quotes"
    return "write the number of a GPU (0, 1, ...), 'cpu', 'disk' or 'mps'"


def _is_budget(size: str) -> bool:
    parts = split_size(size)
    return parts is not None and parts[1].upper() in [unit.upper() for unit in _UNITS]


def _right_size(size: str) -> str:
    spelt = _spelt(size)
    if spelt is None:
        return 'write a number of bytes, or a text such as "20GiB" or "20GB"'
    return f"write {spelt!r}" + (
        f" (× 2**30 bytes) or '{spelt[:-3]}GB' (× 10**9 bytes)" if spelt.endswith("GiB") else ""
    )


def _spelt(size: Any) -> Optional[str]:
    """The size with the unit that was meant; None where that is unclear."""
    parts = split_size(size) if isinstance(size, str) else None
    if parts is None or not parts[1]:
        return None
    number, unit = parts
    for known in _UNITS:
        if unit.upper() == known.upper():
            return f"{number}{known}"
    letter = unit[0].upper()
    return f"{number}{letter}iB" if letter in "GMK" else None


def _strategy(error: BaseException, load: Load) -> Iterator[str]:
    asked, text = load.device_map, str(error)
    if not isinstance(asked, str) or asked in STRATEGIES or asked not in text:
        return
    if "device_map" not in text and "device string" not in text and "Expected one of" not in text:
        return
    close = difflib.get_close_matches(asked.lower().strip(), STRATEGIES, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    yield (
        f"device_map={asked!r} is neither a strategy ({', '.join(map(repr, STRATEGIES))}) "
        f"nor a device (such as 'cuda:0' or 'cpu'){meant}"
    )


def _map_values(error: BaseException, load: Load) -> Iterator[str]:
    text = str(error)
    if not isinstance(load.device_map, Mapping) or "device" not in text:
        return
    wrong = {
        str(device): number.group(1)
        for device in load.device_map.values()
        for number in [_DEVICE.match(device) if isinstance(device, str) else None]
        if number and f"'{device}'" in text and not device.startswith(("cuda", "xpu", "npu"))
    }
    for device, number in wrong.items():
        yield f"device_map: the value {device!r} is no device; write {number} or 'cuda:{number}'"


def _uncovered(error: BaseException, load: Load) -> Iterator[str]:
    """The modules that a dict misses, neighbours as one."""
    if not isinstance(load.device_map, Mapping) or not load.device_map:
        return
    text = str(error)
    if isinstance(error, KeyError):  # transformers 4.x, with modules on the disk
        text = text if _is_uncovered(error, load.device_map) else ""
    elif not any(part in text for part in _UNCOVERED):
        return
    names = re.findall(r"[\w-]+(?:\.[\w-]+)+", text.partition("parameters:")[2] or text)
    modules = dict.fromkeys(_missing_module(name, load.device_map) for name in names)
    if not modules:
        return
    runs = collapsed(modules)
    shown = ", ".join(map(str, runs[:_MOST_NAMES]))
    more = f" and {len(runs) - _MOST_NAMES} more" if len(runs) > _MOST_NAMES else ""
    if len(names) == 1:
        more = ", and perhaps others"
    first = next(iter(load.device_map.values()))
    yield (
        f"device_map has no device for {shown}{more}: add a key for each, "
        f'or "": {first!r} for all that is not named'
    )


def _is_uncovered(error: KeyError, device_map: Mapping[Any, Any]) -> bool:
    name = error.args[0] if error.args else None
    return isinstance(name, str) and "." in name and device_of(name, device_map) is None


def _missing_module(name: str, device_map: Mapping[Any, Any]) -> str:
    """The outermost module around a parameter that no key of the map lies in."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        module = ".".join(parts[:end])
        if not any(str(key) == module or str(key).startswith(f"{module}.") for key in device_map):
            return module
    return name


def _switch(error: BaseException, load: Load) -> Iterator[str]:
    if "load_in_8bit_fp32_cpu_offload" in str(error):
        yield (
            "load_in_8bit_fp32_cpu_offload is no argument of any release; write "
            "quantization_config=BitsAndBytesConfig(..., llm_int8_enable_fp32_cpu_offload=True)"
        )
