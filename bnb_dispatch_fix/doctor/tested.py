"""How far what is installed is from the combinations of `compat_matrix.yaml` that are tested."""

from __future__ import annotations

import platform
import re
from typing import Any, Iterable, Iterator, List, Mapping, Optional, Tuple

from bnb_dispatch_fix.doctor.findings import PASS, WARN, Finding
from bnb_dispatch_fix.doctor.surroundings import Answer

#: The packages whose releases a row combines.
COMBINED = ("transformers", "accelerate", "bitsandbytes")
#: What a row is told by; the nearest row is the one that is nearest in the first of these, then ...
_COMPARED = ("transformers", "torch", "python", "accelerate", "bitsandbytes")
_NAMES = {"python": "Python"}

Row = Mapping[str, str]


def tested(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Whether this very combination is tested, or else which is nearest and how this one differs.

    Versions outside those of all rows are a warning.
    """
    here = {
        package: str(answers[package].facts["version"])
        for package in (*COMBINED, "torch")
        if package in answers and answers[package].facts.get("version")
    }
    rows = tested_rows()
    if not rows or not set(here) & set(COMBINED):
        return
    here["python"] = ".".join(platform.python_version_tuple()[:2])
    row = nearest(here, rows)
    differing = [key for key in _COMPARED if key in here and not _same(here[key], row[key])]
    if not differing:
        yield Finding(PASS, "tested", "this very combination is tested")
        return
    near = f"nearest tested: {_shown(row)}; here {_shown(here, differing)}"
    outside = False
    for package in sorted(set(COMBINED) & set(here), key=COMBINED.index):
        span = _span_missed(here[package], [each[package] for each in rows])
        if span:
            outside = True
            text = f"{package} {here[package]} is outside the tested versions {span}"
            hint = f"{near}; it is judged by its code, and `bnb-dispatch-fix demo` tries it"
            yield Finding(WARN, "tested", text, hint)
    if not outside:
        yield Finding(PASS, "tested", near)


def tested_rows() -> List[Row]:
    """The rows with all of transformers, accelerate, bitsandbytes and torch, as texts."""
    import yaml  # 30 ms, and it may be what is broken

    from bnb_dispatch_fix.patching.matrix import load_matrix, matrix_path  # needs yaml, see above

    load_matrix()  # says in one line what is wrong with the file
    with matrix_path().open("rb") as stream:
        matrix: Mapping[str, Any] = yaml.safe_load(stream)
    found: List[Row] = []
    for row in matrix.get("tested", ()):
        if set(COMBINED) <= set(row) and row.get("torch", True):
            torch = {"torch": matrix.get("torch", ""), **row}
            found.append({key: str(torch[key]) for key in _COMPARED})
    return found


def nearest(here: Mapping[str, str], rows: List[Row]) -> Row:
    """The row that differs least from what is installed."""

    def distance(row: Row) -> Tuple[int, ...]:
        return tuple(_distance(here[key], row[key]) for key in _COMPARED if key in here)

    return min(rows, key=distance)


def _numbers(version: str) -> Tuple[int, int, int]:
    found = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    major, minor, micro = [*found, 0, 0, 0][:3]
    return major, minor, micro


def _distance(one: str, other: str) -> int:
    """How far two releases are apart: a major more than any minor, a minor more than any micro."""
    weights = (10**6, 10**3, 1)
    pairs = zip(_numbers(one), _numbers(other))
    return sum(weight * abs(a - b) for weight, (a, b) in zip(weights, pairs))


def _same(here: str, row: str) -> bool:
    return here.partition("+")[0] == row


def _shown(versions: Mapping[str, str], keys: Iterable[str] = _COMPARED) -> str:
    return ", ".join(f"{_NAMES.get(key, key)} {versions[key]}" for key in keys)


def _span_missed(version: str, tested: List[str]) -> Optional[str]:
    """The span "4.37.2-5.24.0" of the tested versions if `version` is outside it, else None."""
    from packaging.version import InvalidVersion, Version  # 30 ms

    known = sorted(Version(each) for each in tested)
    try:
        inside = not known or known[0] <= Version(version) <= known[-1]
    except InvalidVersion:
        inside = False
    return None if inside else f"{known[0]}\u2013{known[-1]}"
