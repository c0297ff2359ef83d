"""Judges the function behind a seam: what it lacks, and whether it may be replaced."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Optional, Tuple

from bnb_dispatch_fix.backport import ADAPTERS
from bnb_dispatch_fix.compat import Matrix, Seam
from bnb_dispatch_fix.patches import describe
from bnb_dispatch_fix.probe import probe_balanced_fault
from bnb_dispatch_fix.recognition import source_fingerprint


class Verdict(NamedTuple):
    """`patchable` only where the fault is known or confirmed and the replacement fits."""

    patchable: bool
    lacks: Tuple[int, ...]
    reason: str


def judge(seam: Seam, matrix: Matrix, function: Any, version: Optional[str]) -> Verdict:
    """Judge the function that stands behind `seam` now.

    A known fingerprint decides by the matrix. Unknown code is run on a toy model: it is
    patchable where it shows the fault and offers what the replacement needs.
    """
    if function is None:
        return Verdict(False, seam.fixes, f"{seam.module} has no {seam.attribute}")
    label = f"{seam.package} {version or 'of unknown version'}"
    fingerprint = source_fingerprint(function)
    known = matrix.known(seam.implementation, fingerprint)
    if known is not None:
        lacks = tuple(pr for pr in known.lacks if pr in seam.fixes)
        if not lacks:
            return Verdict(False, (), f"{label} has {_numbers(seam.fixes)}")
        misfit = _misfit(seam, function)
        if misfit:
            return Verdict(False, lacks, misfit)
        return Verdict(True, lacks, f"{label} lacks {_numbers(lacks)}")
    return _judge_by_behaviour(seam, matrix, function, label, version)


def _judge_by_behaviour(
    seam: Seam, matrix: Matrix, function: Any, label: str, version: Optional[str]
) -> Verdict:
    misfit = _misfit(seam, function)
    if misfit:
        return Verdict(False, seam.fixes, f"unknown source in {describe(function)}: {misfit}")
    probe = probe_balanced_fault(function)
    confirmed = tuple(pr for pr in seam.fixes if pr in probe.confirmed)
    if confirmed:
        return Verdict(True, confirmed, f"{label}: unknown source, fault confirmed by behaviour")
    if all(pr in probe.ruled_out for pr in seam.fixes):
        return Verdict(False, (), f"{label} is not in the matrix; checked by behaviour")
    return Verdict(
        False,
        seam.fixes,
        f"unknown source in {describe(function)}, and a toy model could not tell: {probe.reason}",
    )


def _misfit(seam: Seam, function: Any) -> Optional[str]:
    """Why the replacement cannot stand for `function`; None where it can."""
    adapter = ADAPTERS[seam.implementation]
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        return f"its signature cannot be read ({error})"
    if parameters != adapter.parameters:
        return (
            f"expected the parameters {', '.join(adapter.parameters)}, "
            f"found {', '.join(parameters) or 'none'}"
        )
    helpers = getattr(function, "__globals__", {})
    missing = [name for name in adapter.helpers if not callable(helpers.get(name))]
    if missing:
        return f"its module has no {', '.join(missing)}"
    return None


def _numbers(prs: Tuple[int, ...]) -> str:
    return ", ".join(f"#{pr}" for pr in prs)
