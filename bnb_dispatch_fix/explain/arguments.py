"""Explains, in a line each, the errors that a misspelt argument of `from_pretrained` leads to."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from typing import Any, Callable, FrozenSet, Iterator, List, Mapping, Optional, Tuple

from bnb_dispatch_fix.explain import reading
from bnb_dispatch_fix.explain.recipes import on_accelerators
from bnb_dispatch_fix.model.layout import device_of
from bnb_dispatch_fix.model.load import Load, measured
from bnb_dispatch_fix.model.machine import accelerators_seen
from bnb_dispatch_fix.wording import MIB, STRATEGIES, bytes_in, collapsed, split_size

#: Those that every release of accelerate reads.
_UNITS = ("GiB", "MiB", "KiB", "GB", "MB", "KB")
_DEVICE = re.compile(r"(?:cuda|xpu|npu|gpu|hip)?:?(\d+)$")
_UNCOVERED = (
    "does not give any device for the following parameters",  # accelerate
    "doesn't have any device set",  # transformers 4.x
)
#: What a key of max_memory that is no device leads to: accelerate 0.22 and newer; 0.20 and 0.21.
_UNREAD_KEYS = ("not recognized", "Invalid device string", "max() arg is an empty sequence")
#: What torch says of devices that it does not have.
_NO_DEVICE = (
    *("invalid device ordinal", "not compiled with CUDA", "Cannot access accelerator"),
    *("No GPU found", "No CUDA GPUs", "No HIP GPUs", "NVIDIA driver on your system"),
)
#: The switch as texts of transformers 4.x call it, and as it is called.
_OLD_SWITCH = "load_in_8bit_fp32_cpu_offload"
_SWITCH = "llm_int8_enable_fp32_cpu_offload"
#: What an argument that is no dict leads to where its keys or values are asked for.
_NO_DICT = (TypeError, AttributeError)
_MOST_NAMES = 6

Check = Callable[[BaseException, Load], Iterator[str]]


def lines(error: BaseException, load: Load) -> List[str]:
    """What the error means and the right spelling, a line per argument; empty where unknown."""
    if swapped(load):  # whatever the error is: there is no load with such a map
        return swapped(load)
    checks: Tuple[Check, ...] = (
        *(_max_memory, _whole_numbers, _no_device, _strategy, _map_values, _not_there),
        *(_uncovered, _switches, _config_keys),
    )
    return [line for check in checks for line in check(error, load)]


def swapped(load: Load) -> List[str]:
    """What to say of a device map whose keys are devices and whose values are sizes."""
    asked = load.device_map
    if not isinstance(asked, Mapping) or not asked or not all(map(_is_device, asked)):
        return []
    if not all(_is_size(value) for value in asked.values()):
        return []
    budgets = {_as_key(device): size for device, size in asked.items()}
    return [f"device_map got budgets: write device_map='auto', max_memory={budgets!r}"]


def _is_device(key: Any) -> bool:
    if isinstance(key, int):
        return True
    return isinstance(key, str) and (key in ("cpu", "disk", "mps") or bool(_DEVICE.match(key)))


def _as_key(device: Any) -> Any:
    number = _DEVICE.match(device) if isinstance(device, str) else None
    return int(number.group(1)) if number else device


def _is_size(value: Any) -> bool:
    if isinstance(value, str):
        return bool((split_size(value) or ("", ""))[1])
    return isinstance(value, (int, float)) and value >= MIB


def _no_device(error: BaseException, load: Load) -> Iterator[str]:
    """Budgets for nothing but the disk: accelerate 0.20 and 0.21 compute with a None then."""
    asked = load.max_memory
    if not isinstance(asked, Mapping) or not set(asked) <= {"disk"} or not load.strategy:
        return
    if isinstance(error, (TypeError, ValueError, KeyError)):
        yield "max_memory names no GPU and no CPU: leave it out, or add 0: ..., the GPU's number"
        request = measured(load)
        if request is not None:
            for recipe in on_accelerators(request._replace(max_memory=asked)):
                yield f"{recipe.what} it loads (planned): {recipe.arguments}"


def _whole_numbers(error: BaseException, load: Load) -> Iterator[str]:
    """accelerate 0.20 and 0.21 take the number of a budget's text for an int."""
    if "invalid literal for int()" not in str(error) or not isinstance(load.max_memory, Mapping):
        return
    for device, size in load.max_memory.items():
        parts = split_size(size) if isinstance(size, str) else None
        if parts is not None and "." in parts[0] and f"'{parts[0]}'" in str(error):
            yield (
                f"max_memory[{device!r}]={size!r}: this accelerate reads whole numbers only; "
                f"write {_whole(size)!r}"
            )


def _whole(size: str) -> str:
    """The same budget in the next smaller unit, rounded: "6.7GiB" is "6861MiB"."""
    number, unit = split_size(size) or ("", "")
    smaller = {"G": "M", "M": "K"}.get(unit[:1].upper())
    if smaller is None:
        return str(bytes_in(size))
    factor = 1024 if unit.lower().endswith("ib") else 1000
    return f"{round(float(number) * factor)}{smaller}{unit[1:]}"


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
    if not any(part in text for part in _UNREAD_KEYS):
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


def _not_there(error: BaseException, load: Load) -> Iterator[str]:
    """A GPU that torch does not see, where that may be what the error is about."""
    seen, text = accelerators_seen(), str(error)
    if not any(part in text for part in _NO_DEVICE):
        return
    wanted = load.device_map
    values = list(wanted.values()) if isinstance(wanted, Mapping) else [wanted]
    asked = {"device_map": values, "max_memory": list(load.max_memory or {})}
    for argument, devices in asked.items():
        for device in dict.fromkeys(map(str, devices)):
            number = _DEVICE.match(device)
            if number and int(number.group(1)) >= seen:
                there = f"torch sees {seen} (numbers from 0)" if seen else "torch sees none"
                yield f"{argument} names GPU {number.group(1)}, which is not there: {there}"
    if not seen:
        yield from reading.no_accelerator()


def _switches(error: BaseException, load: Load) -> Iterator[str]:
    """Switches that no release, or not this one, takes where they are written."""
    text = str(error)
    if _OLD_SWITCH in text or _OLD_SWITCH in load.arguments:
        yield (
            f"{_OLD_SWITCH} is no argument of any release; write "
            f"quantization_config=BitsAndBytesConfig(..., {_SWITCH}=True)"
        )
    for name in ("load_in_8bit", "load_in_4bit"):
        if f"unexpected keyword argument '{name}'" in text:
            yield f"{name}: write quantization_config=BitsAndBytesConfig({name}=True)"


def _config_keys(_: BaseException, load: Load) -> Iterator[str]:
    yield from wrong_keys(load)


def wrong_keys(load: Load) -> Iterator[str]:
    """Keys of a quantization_config that bitsandbytes' class ignores without a word."""
    config = load.arguments.get("quantization_config")
    known = _known_keys()
    if not isinstance(config, Mapping) or not known:
        return
    if config.get("quant_method", "bitsandbytes") != "bitsandbytes":
        return
    for key in map(str, config):
        if key not in known and not key.startswith("_"):
            close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
            meant = _SWITCH if "cpu_offload" in key else close[0] if close else ""
            called = f"; it is called {meant}" if meant else ""
            yield f"quantization_config: {key!r} is no key of BitsAndBytesConfig{called}"


def _known_keys() -> FrozenSet[str]:
    config: Any = getattr(sys.modules.get("transformers"), "BitsAndBytesConfig", None)
    if config is None:
        return frozenset()
    return frozenset(inspect.signature(config.__init__).parameters) | {"quant_method"}
