"""Judges the function behind a seam: what it lacks, and whether it may be replaced."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Optional, Tuple

from bnb_dispatch_fix import features
from bnb_dispatch_fix.patching.matrix import Matrix, Seam, installed_version, is_readable
from bnb_dispatch_fix.patching.patches import describe, home_of, patcher_of
from bnb_dispatch_fix.patching.recognition import source_fingerprint
from bnb_dispatch_fix.patching.replacements import REPLACEMENTS


class Verdict(NamedTuple):
    """What should become of a seam: `applied`, `already-fixed` or `skipped`.

    `lacks` are the PRs the code there does not have.
    """

    state: str
    lacks: Tuple[int, ...]
    reason: str


def judge(seam: Seam, matrix: Matrix, function: Any) -> Verdict:
    """Judge the function that stands behind `seam` now.

    A known fingerprint decides by the matrix. Unknown code is run on a toy model: it is
    patched where it shows the fault and offers what the replacement needs.
    """
    home = seam.implementation.partition(".")[0]  # whose code it is, under whatever name
    version = installed_version(home)
    if function is None:
        absent = f"{seam.module} has no {seam.attribute}"
        if version is None and home not in sys.modules:
            return Verdict("skipped", (), f"{absent}: {home} is not installed")
        return Verdict("skipped", seam.fixes, absent)
    function = getattr(function, "__func__", function)  # a class method is judged by its function
    label = f"{home} {version}"
    if not is_readable(version):
        label = f"{home} of {'unknown version' if version is None else f'version {version!r}'}"
    misfit = _misfit(seam, function)
    known = matrix.known(seam.implementation, source_fingerprint(function))
    if known is None:
        patcher = patcher_of(function)
        if patcher and REPLACEMENTS[seam.implementation].exact:
            return Verdict("skipped", seam.fixes, _spared(function, patcher))
        if patcher and misfit:
            return Verdict("skipped", seam.fixes, _in_the_way(function, patcher))
        if misfit:
            return Verdict(
                "skipped", seam.fixes, f"unknown source in {describe(function)}: {misfit}"
            )
        return _judge_by_behaviour(seam, function, label)
    lacks = tuple(pr for pr in known.lacks if pr in seam.fixes)
    if seam.fixes and not lacks:
        return Verdict("already-fixed", (), f"{label} has {_numbers(seam.fixes)}")
    if misfit:
        return Verdict("skipped", lacks, misfit)
    reason = f"{label} lacks {_numbers(lacks)}" if lacks else _looked_after(seam, label)
    return Verdict("applied", lacks, reason)


def _judge_by_behaviour(seam: Seam, function: Any, label: str) -> Verdict:
    if not seam.fixes:
        return Verdict("applied", (), _looked_after(seam, label))
    probe = REPLACEMENTS[seam.implementation].probe(function)
    confirmed = tuple(pr for pr in seam.fixes if pr in probe.confirmed)
    if confirmed:
        return Verdict("applied", confirmed, f"{label}: unknown source, fault confirmed")
    if all(pr in probe.ruled_out for pr in seam.fixes):
        return Verdict("already-fixed", (), f"{label}: not in the matrix; checked by behaviour")
    return Verdict(
        "skipped",
        tuple(pr for pr in seam.fixes if pr not in probe.ruled_out),
        f"unknown source in {describe(function)}, and a toy model could not tell: {probe.reason}",
    )


def _misfit(seam: Seam, function: Any) -> Optional[str]:
    """Why the replacement cannot stand for `function`; None where it can."""
    needs = REPLACEMENTS[seam.implementation]
    mismatch = needs.mismatch(function)
    if mismatch:
        return mismatch
    helpers = getattr(function, "__globals__", {})
    missing = [name for name in needs.helpers if not callable(helpers.get(name))]
    if missing:
        return f"its module has no {', '.join(missing)}"
    return None


def _spared(function: Any, patcher: str) -> str:
    """Somebody else's patch would be lost under a replacement; over ours it works."""
    return (
        f"{describe(function)} {patcher} and would be lost; import bnb_dispatch_fix before it, "
        f"then both work"
    )


def _in_the_way(function: Any, patcher: str) -> str:
    """What a planner is asked for cannot be read through somebody else's wrapper."""
    return (
        f"{describe(function)} {patcher} and stands in the way; import bnb_dispatch_fix before "
        f"{home_of(function).partition('.')[0]}, then both work"
    )


def _looked_after(seam: Seam, label: str) -> str:
    on = features.on()
    names = [name for name in seam.features if name in on] or list(seam.features)
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{label}: called as it is, with {listed}"


def _numbers(prs: Tuple[int, ...]) -> str:
    return ", ".join(f"#{pr}" for pr in prs)
