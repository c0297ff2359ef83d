"""How this package says things: sizes, devices, errors and device maps as text, and log lines.

Every number of bytes, every device and every exception that a person reads passes through here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import textwrap
from itertools import groupby
from typing import Any, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

GIB = 2**30
MIB = 2**20
#: Keys of `max_memory`, and values of a device map, that are no accelerator.
HOST = ("cpu", "disk")
#: The values of `device_map` that ask for a plan.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
#: Bytes of each unit, as accelerate reads them: GB is a power of ten, GiB of two.
UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"0|[1-9]\d*", re.ASCII)
_PLAIN = re.compile(r"[\w.-]*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

#: What stands for a character that an encoding does not have.
_ASCII = str.maketrans({"█": "#", "░": ".", "–": "-", "…": "~", "→": ">"})
#: Columns of a terminal that does not say how many it has.
COLUMNS = 80

_LOGGER = logging.getLogger("bnb_dispatch_fix")

#: Every line that is logged, by what it tells; see docs/activation.md.
LINES: Mapping[str, str] = {
    # INFO (DEBUG for further names of the same function)
    "patched": "patched %s.%s: %s",
    # INFO
    "spread": "%s: spread evenly, the fullest device is %s full and was %s: %s",
    "not spread": "%s: not spread, the map stays: %s",
    # WARNING
    "no matrix": "nothing is patched: %s",
    "not patched": "%s.%s is not patched: %s",
    "replacement failed": (
        "the replacement of %s.%s failed, the installed function answered instead: %r"
    ),
    "rescued": (
        "%s gave %s; every module has a place within the budgets: %s "
        "(BNB_DISPATCH_FIX=backport,explain switches this off)"
    ),
    "whole model on the disk": "the whole model was planned on the disk %s: %s",
    "whole model off the accelerators": "the whole model goes to %s: %s",
    "whole model unexplained": "the whole model goes to the CPU or the disk, left unexplained: %r",
    "caught": (
        "it loads at another attempt; an attempt before it failed, and its error was caught "
        "together with this note:\n%s"
    ),
    "overfilled": (
        "%s puts more on a device than its budget, weights and scales counted as they are stored, "
        "and the installed release accepts it: %s"
    ),
    "no exact placement": "no exact placement was looked for: %r",
    "holders": (
        "%s: taken before bnb_dispatch_fix was imported, so that calls through it are not "
        "repaired; import bnb_dispatch_fix first"
    ),
    # WARNING for the first at a seam, then DEBUG
    "request unread": "a planner's call is left alone: %r",
    "plan unread": "a device map is left as it is, unexamined: %r",
    "loads unchecked": "the loads of a device map were not checked: %r",
    "unexplained": "an error is left unexplained: %r",
    "holders unsearched": "nobody looked who else holds the patched functions: %r",
    "left unspread": "a device map is not spread evenly, it stays as it is: %r",
    "budgets unnoted": "budgets are not spread evenly, what was asked is not known: %r",
    "disk unexplained": "a model on the disk is left unexplained: %r",
}


def log(level: int, line: str, *arguments: Any) -> None:
    """Log one of `LINES`; a handler that raises must not break an import, a plan or a load."""
    with contextlib.suppress(Exception):
        shown = (visible(each, "\n") if isinstance(each, str) else each for each in arguments)
        _LOGGER.log(level, LINES[line], *shown)


def log_text(level: int, text: str) -> None:
    """Log a line that is worded elsewhere, as `log` does."""
    with contextlib.suppress(Exception):
        _LOGGER.log(level, "%s", visible(text, "\n"))


def visible(text: object, keep: str = "") -> str:
    """A text that cannot steer a terminal: what is not printable is shown as Python escapes it.

    Names come from files that anybody may have written. `keep` are characters to leave.
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in line)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def say(text: str, stream: Any = None, *, wrap: bool = True) -> None:
    """Print lines of the command, in the encoding of the stream; names in them are `visible`.

    On a terminal they are wrapped at words.
    """
    stream = sys.stdout if stream is None else stream
    width = columns(stream) if wrap else None
    if width is not None:
        text = "\n".join(part for line in text.split("\n") for part in wrapped(line, width))
    print(for_encoding(text, getattr(stream, "encoding", None)), file=stream)


def columns(stream: Any) -> Optional[int]:
    """How wide the terminal is that a stream goes to; None where it goes elsewhere."""
    try:
        if not os.isatty(stream.fileno()):
            return None
        width = os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError, AttributeError):
        return None
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if re.fullmatch("0*[1-9][0-9]{0,4}", asked) else width


def wrapped(line: str, width: int, indent: Optional[int] = None) -> List[str]:
    """A line as several of `width` columns, broken between words; the rest is indented as it is."""
    if len(line) <= width:
        return [line]
    if indent is None:
        indent = len(line) - len(line.lstrip())
    parts = textwrap.wrap(
        line,
        max(width, indent + 10),
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return parts or [line]


def is_plain(stream: Any) -> bool:
    """Whether a stream gets no colours: no terminal, or NO_COLOR is set."""
    return bool(os.environ.get("NO_COLOR")) or not stream.isatty()


def for_encoding(text: str, encoding: Optional[str]) -> str:
    """The text, with ASCII in place of blocks and dashes that the encoding does not have."""
    try:
        text.encode(encoding or "ascii")
        return text
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def gib(size: Optional[int]) -> str:
    """Bytes as GiB with two decimals; "-" for None."""
    return "-" if size is None else f"{size / GIB:.2f}"


def amount(size: int) -> str:
    """Bytes with the unit that shows them: "5.21 GiB", "30.00 MiB", "1.40 KiB", "512 bytes"."""
    for unit, width, least in (("GiB", GIB, GIB // 100), ("MiB", MIB, MIB), ("KiB", 2**10, 2**10)):
        if abs(size) >= least:
            return f"{size / width:.2f} {unit}"
    return "1 byte" if size == 1 else f"{size} bytes"


def cell(size: Optional[int]) -> str:
    """Bytes in a table of GiB: the bare number, with a unit where it is another; "-" for None."""
    if not size:
        return gib(size)
    text = amount(size)
    return text[:-4] if text.endswith(" GiB") else text


def split_size(text: str) -> Optional[Tuple[str, str]]:
    """Number and unit of "22GiB", "1.5 GB" or "4096", as written; None where it is no size."""
    match = _SIZE.fullmatch(text)
    return None if match is None else (match.group(1), match.group(2))


def bytes_in(text: str) -> Optional[int]:
    """Bytes of such a text, rounded down; None where number or unit cannot be read.

    So it is where there are more bytes than a float can hold.
    """
    parts = split_size(text)
    if parts is None or parts[1].lower() not in UNITS:
        return None
    size = float(parts[0]) * UNITS[parts[1].lower()]
    return None if math.isinf(size) else int(size)


def device_name(device: Any) -> str:
    """A device as people call it: "GPU 0", "CPU", "disk", "mps"."""
    if isinstance(device, int):
        return f"GPU {device}"
    return "CPU" if device == "cpu" else visible(device)


def folded(text: object, most: Optional[int] = None, mark: str = "…") -> str:
    """A text on one visible line, cut after `most` characters with a mark."""
    line = visible(" ".join(str(text).split()))
    if most is None or len(line) <= most:
        return line
    return line[:most].rstrip() + mark


def one_line(error: BaseException, most: Optional[int] = None, mark: str = "…") -> str:
    """Type and text of an exception on one line; the text is cut after `most` characters."""
    return f"{type(error).__name__}: {folded(error, most, mark)}"


def last_line(output: str, otherwise: str = "") -> str:
    """The last line of what a process wrote, which names the error; `otherwise` without any."""
    return (output.strip().splitlines() or [otherwise])[-1]


class Run(NamedTuple):
    """Names in a row that count on ("layers.0", "layers.1"); one other name has first = -1."""

    stem: str  # what stands before the number; the whole name where there is none
    first: int
    last: int
    names: int

    def __str__(self) -> str:
        """As people write it: "layers.0–1"."""
        if self.first < 0:
            return self.stem
        return f"{self.stem}.{self.numbers}" if self.stem else self.numbers

    @property
    def numbers(self) -> str:
        """The numbers as a range."""
        return span(self.first, self.last)


def span(first: int, last: int) -> str:
    """Numbers in a row: "0–5"; a single one as it is."""
    return str(first) if first == last else f"{first}–{last}"


def collapsed(names: Iterable[str]) -> List[Run]:
    """Neighbours with consecutive numbers as one run, in the order of the names."""
    runs: List[Run] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        number = int(last) if _NUMBER.fullmatch(last) else -1
        if number > 0 and runs and runs[-1].stem == stem and runs[-1].last == number - 1:
            runs[-1] = runs[-1]._replace(last=number, names=runs[-1].names + 1)
        else:
            runs.append(Run(name if number < 0 else stem, number, number, 1))
    return runs


def kind_of(name: str) -> str:
    """A name with its numbers as "*", so that it is the same for all layers: "layers.*.mlp"."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def pasteable(device_map: Mapping[str, Any]) -> str:
    """A device map as an expression to paste; neighbours on one device as a range."""
    return "\n".join(["{", *(f"    {entry}," for entry in _entries(device_map)), "}"])


def pasted(device_map: Mapping[str, Any]) -> str:
    """A device map as an expression on one line."""
    return f"{{{', '.join(_entries(device_map))}}}"


def _entries(device_map: Mapping[str, Any]) -> Iterator[str]:
    for device, items in groupby(device_map.items(), key=lambda item: item[1]):
        for run in collapsed(name for name, _ in items):
            yield _entry(run, device)


def _entry(run: Run, device: Any) -> str:
    if run.names == 1:
        return f"{_quoted(str(run))}: {_quoted(device)}"
    if _PLAIN.fullmatch(run.stem) is None:  # it cannot stand in an f-string
        names = (f"{run.stem}.{number}" for number in range(run.first, run.last + 1))
        return ", ".join(f"{_quoted(name)}: {_quoted(device)}" for name in names)
    name = _quoted(f"{run.stem}.{{i}}" if run.stem else "{i}")
    return f"**{{f{name}: {_quoted(device)} for i in range({run.first}, {run.last + 1})}}"


def _quoted(value: Any) -> str:
    if not isinstance(value, str):
        return repr(value)
    return visible(json.dumps(value, ensure_ascii=False))  # its escapes are Python's, too
