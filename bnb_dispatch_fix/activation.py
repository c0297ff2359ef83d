"""The switchboard: wanted features and loaded modules in, patches and their states out.

One rule keeps it free of deadlocks, because hooks run while Python holds import locks: nothing
is imported, judged or hooked while its lock is held.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
from typing import Any, Dict, Iterable, Optional, Set, Tuple

from bnb_dispatch_fix import features as feature_switch
from bnb_dispatch_fix.features import VERSION
from bnb_dispatch_fix.patching.bystanders import unpatched_references
from bnb_dispatch_fix.patching.matrix import (
    Matrix,
    MatrixError,
    Seam,
    in_range,
    installed_version,
    installed_versions,
    load_matrix,
    missing_by_version,
    too_old,
)
from bnb_dispatch_fix.patching.patches import (
    Patch,
    PatchedFunction,
    describe,
    found_at,
    is_module,
    leads_to_ours,
    locate,
    original_of,
    patcher_of,
    put_back,
    wrapper_at,
)
from bnb_dispatch_fix.patching.replacements import handler
from bnb_dispatch_fix.patching.verdict import Verdict, judge
from bnb_dispatch_fix.states import PatchStatus, Status, contained, last_fault
from bnb_dispatch_fix.tripwire import WIRE, is_importing
from bnb_dispatch_fix.wording import log, log_text, one_line

_NO_MATRIX = Matrix((), (), {})


class ActivationError(RuntimeError):
    """Raised by `activate(strict=True)` where a missing fix could not be applied."""


class Switchboard:
    """Which features are on, and one patch per seam that was applied."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._off_because = "not activated"
        self._patches: Dict[str, Patch] = {}
        self._undone: Dict[str, Patch] = {}
        self._failures: Dict[str, str] = {}
        self._announced: Set[Tuple[str, str]] = set()
        self._warned: Set[Tuple[str, str]] = set()
        self._made = 0
        self._holders: Tuple[str, ...] = ()
        self._matrix: Optional[Matrix] = None
        self._problem: Optional[str] = None
        self._complaint: Optional[str] = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """A lock that another thread held at the fork would never be released in the child."""
        self._lock = threading.RLock()

    def activate(self, features: Optional[Iterable[str]], strict: bool) -> None:
        """Switch features on, patch what is loaded and wait for the rest."""
        switch = feature_switch.read_switch()
        wanted = (
            switch.allowed
            if features is None
            else switch.askable & feature_switch.checked(features)
        )
        if switch.complaint and switch.complaint != self._complaint:
            log_text(logging.WARNING, switch.complaint)
        self._complaint = switch.complaint
        matrix = self._load()
        WIRE.stand_alone()
        made = self._made
        with self._lock:
            feature_switch.switch_on(wanted)
            self._off_because = (
                "not asked for"
                if switch.allowed
                else f"{feature_switch.SWITCH}={switch.text.strip()}"
            )
            for seam in matrix.seams:
                if not wanted.intersection(seam.features):
                    self._take_away(seam)
        for module in dict.fromkeys(
            s.module for s in matrix.seams if wanted.intersection(s.features)
        ):
            WIRE.watch(module, self._patch_module)
        if self._made != made:  # what was loaded already may be held by others, too
            self._name_holders()
        if strict:
            self._raise_if_incomplete()

    def deactivate(self) -> None:
        """Switch everything off and put back every original that is still under our wrapper.

        A wrapper of another copy of this package is ours, too.
        """
        matrix = self._load()
        WIRE.stand_alone()
        with self._lock:
            feature_switch.switch_on(frozenset())
            self._off_because = "deactivate() was called"
            for seam in matrix.seams:
                self._take_away(seam)

    def status(self) -> Status:
        """Look at every seam now; imports nothing."""
        matrix = self._load()
        excluded = too_old(matrix)
        return Status(
            version=VERSION,
            features=tuple(name for name in feature_switch.FEATURES if name in feature_switch.on()),
            installed=installed_versions(),
            patches=tuple(
                self._look_safely_at(seam, matrix, excluded) for seam in matrix.expected()
            ),
            problem=self._problem,
            holders=_held(matrix.seams),
        )

    def import_targets(self) -> None:
        """Import every module that has a seam here; one that cannot be imported is `failed`."""
        matrix = self._load()
        for seam in () if too_old(matrix) else matrix.expected():
            version = installed_version(seam.package)
            if version is None or not in_range(version, seam.versions):
                continue
            try:
                importlib.import_module(seam.module)
            except Exception as error:  # noqa: BLE001  # told by status()
                self._failures[seam.id] = f"importing {seam.module} failed: {one_line(error)}"
        WIRE.look_around()  # accelerate 0.20 searches nothing more once its own import has ended

    def _load(self) -> Matrix:
        """The matrix, read once; an empty one, and `_problem`, where it cannot be read."""
        if self._matrix is None:
            try:
                self._matrix, self._problem = load_matrix(), None
            except Exception as error:  # noqa: BLE001  # told by status()
                problem = str(error) if isinstance(error, MatrixError) else one_line(error)
                if self._problem is None:
                    log(logging.WARNING, "no matrix", problem)
                self._problem = problem
        return self._matrix or _NO_MATRIX

    def _patch_module(self, name: str, module: Any) -> None:
        """Patch every wanted seam of a module that is loaded; no exception leaves it."""
        matrix = self._load()
        if too_old(matrix) or not is_module(module):
            return
        for seam in matrix.seams:
            if seam.module != name or not _on(seam):
                continue
            self._failures.pop(seam.id, None)
            try:
                if in_range(installed_version(seam.package), seam.versions):
                    self._patch(seam, module)
            except Exception as error:  # noqa: BLE001  # one patch that fails leaves the others
                self._failures[seam.id] = one_line(error)
                self._warn(seam, self._failures[seam.id])

    def _patch(self, seam: Seam, module: Any) -> None:
        owner, attribute = locate(module, seam.attribute)
        found = found_at(owner, attribute)
        patch = self._patches.get(seam.id)
        if patch is not None and patch.owner is owner and patch.on_top():
            return
        if leads_to_ours(found, attribute):
            return
        original = original_of(found)
        verdict = judge(seam, self._load(), original)
        if verdict.state != "applied":
            wrapped = original is not None and verdict.state == "skipped" and patcher_of(original)
            unserved = verdict.lacks or wrapped
            if unserved and patch is None and not _is_stand_in(module, found):
                self._warn(seam, verdict.reason)
            return
        with self._lock:
            if not _on(seam):
                return
            changed = found_at(owner, attribute) is not found
            if not changed:
                patch = Patch(owner, attribute, self._wrapper_of(seam, original, verdict.lacks))
                self._patches[seam.id] = patch
                patch.apply()
        if changed:  # by another thread, while this one judged
            self._patch(seam, module)
        else:
            self._announce(seam, verdict.reason)

    def _wrapper_of(self, seam: Seam, original: Any, lacks: Tuple[int, ...]) -> PatchedFunction:
        """The one that stands under other names of the function, or did before it was undone."""
        for patch in (*self._patches.values(), *self._undone.values()):
            if patch.original is original:
                return patch.wrapper
        self._made += 1
        features = frozenset(
            feature
            for other in self._load().seams
            if other.implementation == seam.implementation
            for feature in other.features
        )
        report = functools.partial(_report_failure, original)
        return PatchedFunction(
            original,
            handler(seam.implementation, report, lacks),
            is_on=lambda: not feature_switch.on().isdisjoint(features),
        )

    def _take_away(self, seam: Seam) -> None:
        """Undo a patch; one that is not on top any more stays, passing through."""
        patch = self._patches.get(seam.id)
        if patch is not None:
            if patch.undo():
                self._undone[seam.id] = self._patches.pop(seam.id)
            return
        module = sys.modules.get(seam.module)
        if is_module(module):
            with contextlib.suppress(Exception):  # anything may stand under the name
                put_back(*locate(module, seam.attribute))

    def _name_holders(self) -> None:
        """One line for the modules that took a function before it was patched."""
        holders = _held(self._load().seams)
        if holders and holders != self._holders:
            log(logging.WARNING, "holders", ", ".join(holders))
        self._holders = holders

    def _announce(self, seam: Seam, reason: str) -> None:
        """One INFO line per function of a package; its other names are worth a DEBUG line."""
        key = (seam.package, seam.implementation)
        level = logging.DEBUG if key in self._announced else logging.INFO
        self._announced.add(key)
        log(level, "patched", *_names(seam), reason)

    def _warn(self, seam: Seam, reason: str) -> None:
        """One WARNING for each reason why a seam is not patched."""
        level = logging.DEBUG if (seam.id, reason) in self._warned else logging.WARNING
        self._warned.add((seam.id, reason))
        log(level, "not patched", *_names(seam), reason)

    def _raise_if_incomplete(self) -> None:
        found = self.status()
        if found.problem:
            raise ActivationError(found.problem)
        for patch in found.patches:
            waits = patch.state == "pending" and patch.module not in sys.modules
            if patch.missing and not waits:
                raise ActivationError(
                    f"{patch.module}.{patch.attribute} is {patch.state}: {patch.reason}"
                )

    def _look_safely_at(self, seam: Seam, matrix: Matrix, excluded: Optional[str]) -> PatchStatus:
        try:
            if excluded:
                return self._excluded(seam, matrix, excluded)
            found = self._look_at(seam, matrix)
        except Exception as error:  # noqa: BLE001  # status() answers whatever it finds
            return _found(seam, "failed", one_line(error), missing=seam.fixes)
        fault = last_fault(seam.implementation)
        if fault is None or found.state in ("pending", "disabled"):
            return found
        return found._replace(reason=f"{found.reason}; last went wrong: {fault}")

    def _excluded(self, seam: Seam, matrix: Matrix, reason: str) -> PatchStatus:
        version = installed_version(seam.package)
        if version is None and seam.package not in sys.modules:
            return _found(seam, "skipped", f"{seam.package} is not installed")
        missing = missing_by_version(matrix, seam, version)
        return _found(seam, "skipped", f"{reason}; nothing is patched", missing=missing)

    def _look_at(self, seam: Seam, matrix: Matrix) -> PatchStatus:
        """The state of one seam, judged by what stands under its name now."""
        module = sys.modules.get(seam.module)
        if module is None or is_importing(module) or not is_module(module):
            version = installed_version(seam.package)
            missing = missing_by_version(matrix, seam, version)
            return self._not_loaded(seam, version, missing)
        owner, attribute = locate(module, seam.attribute)
        top = found_at(owner, attribute)
        verdict = judge(seam, matrix, original_of(top))
        lacks = verdict.lacks
        patch = self._patches.get(seam.id)
        if not _on(seam):
            return _found(seam, "disabled", self._off_because, missing=lacks)
        if patch is not None:
            return _look_at_patch(seam, patch, owner, verdict)
        if leads_to_ours(top, attribute):
            return _found(seam, "replaced", f"{describe(top)} wraps our wrapper, which still works")
        if seam.id in self._failures:
            return _found(seam, "failed", self._failures[seam.id], missing=lacks)
        reason = seam.not_covered(installed_version(seam.package))
        if reason is not None:
            return _found(seam, "skipped", reason, missing=lacks)
        if verdict.state == "applied":
            return _found(seam, "pending", "call activate() to patch it", missing=lacks)
        return _found(seam, verdict.state, verdict.reason, missing=lacks)

    def _not_loaded(
        self, seam: Seam, version: Optional[str], missing: Tuple[int, ...]
    ) -> PatchStatus:
        """The state of a seam whose module is not imported, or not completely."""
        if version is None and seam.package not in sys.modules:
            return _found(seam, "skipped", f"{seam.package} is not installed")
        reason = seam.not_covered(version)
        if reason is not None:
            return _found(seam, "skipped", reason, missing=missing)
        if not _on(seam):
            return _found(seam, "disabled", self._off_because, missing=missing)
        if seam.id in self._failures:
            return _found(seam, "failed", self._failures[seam.id], missing=missing)
        if sys.modules.get(seam.module) is not None and not is_importing(sys.modules[seam.module]):
            reason = f"what stands as {seam.module} in sys.modules is no module"
            return _found(seam, "skipped", reason, missing=missing)
        package = sys.modules.get(seam.package)
        if package is not None and getattr(package, "__file__", None) is None:
            reason = f"{seam.package} here is a folder without __init__.py, not the library"
            return _found(seam, "skipped", f"{reason}: {list(package.__path__)}", missing=missing)
        if package is not None and not hasattr(package, "__path__"):
            reason = f"{seam.package} here is the single file {package.__file__}, not the library"
            return _found(seam, "skipped", reason, missing=missing)
        return _found(seam, "pending", f"{seam.module} is not imported yet", missing=missing)


def _found(
    seam: Seam,
    state: str,
    reason: str,
    *,
    fixes: Tuple[int, ...] = (),
    missing: Tuple[int, ...] = (),
) -> PatchStatus:
    return PatchStatus(seam.id, seam.module, seam.attribute, state, fixes, reason, missing)


def _look_at_patch(seam: Seam, patch: Patch, owner: Any, verdict: Verdict) -> PatchStatus:
    """The state of a seam that was patched: is our wrapper still the one that is called?"""
    top = found_at(owner, patch.attribute)
    # Where a package was reloaded its names may lead to the wrapper of the function that is new.
    if type(wrapper_at(top)) is type(patch.wrapper):
        if verdict.lacks and "backport" not in feature_switch.on():
            reason = f"{verdict.reason}; only noted for even, backport is off"
            return _found(seam, "applied", reason, missing=verdict.lacks)
        return _found(seam, "applied", verdict.reason, fixes=verdict.lacks)
    if leads_to_ours(top, patch.attribute):
        return _found(seam, "replaced", f"{describe(top)} wraps our wrapper, which still works")
    reason = f"{describe(top)} stands in place of our wrapper; call activate() to patch it"
    return _found(seam, "replaced", reason, missing=verdict.lacks)


def _on(seam: Seam) -> bool:
    return not feature_switch.on().isdisjoint(seam.features)


def _names(seam: Seam) -> Tuple[str, str]:
    return seam.module, seam.attribute


def _report_failure(original: Any, error: BaseException) -> None:
    level = contained("replacement failed", error)
    log(level, "replacement failed", original.__module__, original.__qualname__, error)


def _is_stand_in(module: Any, found: Any) -> bool:
    """Whether a function is not there because somebody put an empty module in place of it."""
    return found is None and getattr(module, "__spec__", None) is None


def _held(seams: Tuple[Seam, ...]) -> Tuple[str, ...]:
    """The names of `Status.holders`."""
    try:
        return unpatched_references(seams)
    except Exception as error:  # noqa: BLE001  # whatever stands in sys.modules
        log(contained("holders unsearched", error), "holders unsearched", error)
        return ()


# A reload of this module must keep what is patched.
_board: Switchboard = globals().get("_board") or Switchboard()
activate = _board.activate
deactivate = _board.deactivate
status = _board.status
import_targets = _board.import_targets
