"""`bnb-dispatch-fix doctor`: what here keeps a quantized model from its GPUs, with a hint each.

It is for broken surroundings, so no check may end it: what a check raises is a finding.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import bnb_dispatch_fix
from bnb_dispatch_fix.doctor import surroundings, tested, wrecks
from bnb_dispatch_fix.doctor.findings import ERROR, PASS, WARN, Checkup, Finding
from bnb_dispatch_fix.doctor.surroundings import Answer
from bnb_dispatch_fix.features import SWITCH, read_switch
from bnb_dispatch_fix.model.machine import nvidia_driver
from bnb_dispatch_fix.startup import autoload
from bnb_dispatch_fix.states import PatchStatus
from bnb_dispatch_fix.tripwire import WIRE
from bnb_dispatch_fix.wording import gib, one_line

_HIDES_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: A GPU with less than this share of its memory free is worth a word.
_SCARCE = 0.5


def examine(timeout: float = surroundings.TIMEOUT) -> Checkup:
    """Run every check in this process and this environment; never raises.

    Imports the modules that have seams, if that worked in a process of its own before.

    Args:
        timeout: seconds after which an import counts as one that hangs.
    """
    answers: Dict[str, Answer] = {}
    findings = list(_guarded("python", _python))
    try:
        answers = surroundings.look(timeout=timeout)
    except Exception as error:  # noqa: BLE001  # one check that fails is a finding
        findings.append(_failed_check("imports", error))
    checks: Tuple[Tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("torch", lambda: _torch(answers.get("torch"))),
        ("bitsandbytes", lambda: _bitsandbytes(answers)),
        ("accelerate", lambda: _planner_package("accelerate", answers)),
        ("transformers", lambda: _planner_package("transformers", answers)),
        ("wrecks", lambda: wrecks.behind(answers)),
        ("tested", lambda: tested.tested(answers)),
        ("seams", lambda: _seams(answers)),
        ("references", _references),
        ("patchers", _patchers),
        ("autoload", _autoload),
        ("environment", _environment),
    )
    for topic, check in checks:
        findings += _guarded(topic, check)
    return Checkup(tuple(findings))


def _guarded(topic: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # one check that fails is a finding
        yield _failed_check(topic, error)


def _failed_check(topic: str, error: BaseException) -> Finding:
    hint = _REINSTALL if isinstance(error, (ImportError, ValueError)) else _REPORT
    return Finding(ERROR, topic, f"this check failed: {one_line(error)}", hint)


_REINSTALL = "reinstall bnb-dispatch-fix with its dependencies"
_REPORT = "please report it with the output of `bnb-dispatch-fix doctor --json`"


def _python() -> Iterator[Finding]:
    text = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.maxsize < 2**32:
        yield Finding(ERROR, "python", f"{text}, 32 bits", "torch needs a 64-bit Python")
    else:
        yield Finding(PASS, "python", text)


def _torch(answer: Optional[Answer]) -> Iterator[Finding]:
    if answer is None:
        return
    driver = nvidia_driver()
    if answer.state != "ok":
        yield _not_importable("torch", answer, ERROR, {})
        if driver:
            yield Finding(PASS, "driver", f"NVIDIA driver: {driver}")
        return
    version, build = answer.facts.get("version"), str(answer.facts.get("build", "unknown"))
    text = f"{version}, build: {build}"
    devices = answer.facts.get("devices", [])
    if build == "cpu" and driver and not devices:
        hint = "install a CUDA build of the same version (the selector on pytorch.org prints how)"
        yield Finding(
            ERROR, "torch", f"{text}, on a machine with an NVIDIA driver ({driver})", hint
        )
    else:
        yield Finding(PASS, "torch", text)
    if answer.error:
        hint = "see whether `nvidia-smi` works, and whether the driver is new enough for this build"
        yield Finding(ERROR, "devices", f"torch cannot list its devices: {answer.error}", hint)
    elif not devices:
        yield _no_device(build, driver)
    for device in devices:
        yield _device(device)


def _no_device(build: str, driver: Optional[str]) -> Finding:
    if build.startswith("cuda") and driver:
        return Finding(
            ERROR,
            "devices",
            f"torch sees no GPU, although there is an NVIDIA driver ({driver})",
            "look at CUDA_VISIBLE_DEVICES; in a container, start it with the GPUs (--gpus all)",
        )
    why = "this build of torch has no GPU support" if build == "cpu" else "there is no driver"
    return Finding(
        WARN,
        "devices",
        f"no GPU is seen: {why}",
        'device_map="auto" puts the whole model on the CPU here',
    )


def _device(device: Mapping[str, Any]) -> Finding:
    label = f"{device.get('id')}: {device.get('name')}"
    free, total = device.get("free"), device.get("total")
    if device.get("error"):
        hint = "another process may hold the device in exclusive mode; see `nvidia-smi`"
        return Finding(ERROR, "devices", f"{label}, memory unknown: {device['error']}", hint)
    if free is None or not total:
        return Finding(PASS, "devices", label)
    text = f"{label}, {gib(free)} of {gib(total)} GiB free"
    if free < _SCARCE * total:
        hint = "another process holds memory there (`nvidia-smi`): plans are made for what is free"
        return Finding(WARN, "devices", text, hint)
    return Finding(PASS, "devices", text)


def _bitsandbytes(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    answer = answers.get("bitsandbytes")
    if answer is None:
        return
    if answer.state == "missing":
        hint = "install it to load in 4-bit or 8-bit: pip install bitsandbytes"
        yield Finding(WARN, "bitsandbytes", "is not installed", hint)
    elif answer.state != "ok":
        yield _not_importable("bitsandbytes", answer, ERROR, answers)
    else:
        yield _bitsandbytes_library(answer, answers.get("torch"))


def _bitsandbytes_library(answer: Answer, torch: Optional[Answer]) -> Finding:
    version = answer.facts.get("version")
    if answer.facts.get("gpu"):
        return Finding(PASS, "bitsandbytes", f"{version}, with its GPU library")
    if answer.error:
        return Finding(WARN, "bitsandbytes", f"{version}, library unknown: {answer.error}")
    text = f"{version}, without its GPU library"
    gpus = [d for d in torch.facts.get("devices", []) if d["id"] != "mps"] if torch else []
    if gpus:
        hint = wrecks.library_hint(answer.facts, _build(torch))
        return Finding(ERROR, "bitsandbytes", text, hint)
    return Finding(WARN, "bitsandbytes", text, "as expected where torch sees no GPU")


def _build(torch: Optional[Answer]) -> str:
    return str(torch.facts.get("build")) if torch else ""


def _planner_package(package: str, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    answer = answers.get(package)
    if answer is None:
        return
    if answer.state == "ok":
        yield Finding(PASS, package, str(answer.facts.get("version")))
        return
    others = [answers[name].state for name in ("accelerate", "transformers") if name != package]
    alone = answer.state == "missing" and "ok" in others
    yield _not_importable(package, answer, WARN if alone else ERROR, answers)


def _not_importable(
    package: str, answer: Answer, level: str, answers: Mapping[str, Answer]
) -> Finding:
    if answer.state == "missing":
        return Finding(level, package, "is not installed", f"pip install {package}")
    version = answer.facts.get("version")
    text = f"{version or 'unknown version'} cannot be imported: {answer.error}"
    hint = f"run `python -c 'import {package}'` for the whole traceback; reinstalling may help"
    mended = wrecks.hint_of(answer)
    before = [name for name in ("torch", "bitsandbytes") if name != package]
    causes = [name for name in before if wrecks.breaks(answers.get(name), answer)]
    if "No module named 'torch'" in answer.error:
        hint = "install torch first"
    elif causes:
        hint = f"{causes[0]} is what breaks it, see above"
    elif package == "bitsandbytes" and wrecks.NO_LIBRARY in answer.error:
        hint = wrecks.library_hint(answer.facts, _build(answers.get("torch")))
    elif mended is not None:
        hint = mended
    return Finding(level, package, text, hint)


def _seams(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Each seam's state; its module is imported first where its package could be elsewhere."""
    usable = {package for package, answer in answers.items() if answer.state == "ok"}
    for module in dict.fromkeys(patch.module for patch in bnb_dispatch_fix.status().patches):
        if module.partition(".")[0] in usable:
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # the wreck has been told already
                    importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  # a library may fail in any way
                text = f"{module} cannot be imported: {one_line(error)}"
                yield Finding(ERROR, "seams", text, _REPORT)
    WIRE.look_around()  # a package may have been imported before its names could be patched
    status = bnb_dispatch_fix.status()
    if status.problem:
        yield Finding(ERROR, "seams", status.problem, "reinstall bnb-dispatch-fix")
    for patch in status.patches:
        if patch.module.partition(".")[0] in usable:  # of the others it was said why
            yield _seam(patch)


_SEAM_HINTS = {
    "disabled": "call `bnb_dispatch_fix.activate()`, and look at BNB_DISPATCH_FIX",
    "replaced": "import bnb_dispatch_fix after it, or call `bnb_dispatch_fix.activate()` again",
    "pending": "call `bnb_dispatch_fix.activate()`",
}


def _seam(patch: PatchStatus) -> Finding:
    level = PASS
    if patch.missing or patch.state == "failed":
        level = WARN if patch.state in ("disabled", "pending") else ERROR
    elif patch.state in ("disabled", "replaced", "pending", "skipped"):
        level = WARN
    text = f"{patch.state}: {patch.module}.{patch.attribute} ({patch.reason})"
    hint = "" if level == PASS else _SEAM_HINTS.get(patch.state, _REPORT)
    return Finding(level, "seams", text, hint)


def _references() -> Iterator[Finding]:
    found = bnb_dispatch_fix.status().holders
    for name in found:
        hint = "import bnb_dispatch_fix before the module that holds it"
        yield Finding(WARN, "references", f"{name} holds the unpatched function", hint)
    if not found:
        yield Finding(PASS, "references", "no loaded module holds an unpatched function")


def _patchers() -> Iterator[Finding]:
    from bnb_dispatch_fix.patching import bystanders  # needs wrapt, which may be what is broken

    found = bystanders.other_patchers(bnb_dispatch_fix.status())
    for name, patcher in found:
        hint = "if a plan looks wrong, try without it; whoever comes last is asked first"
        yield Finding(WARN, "patchers", f"{name} is also wrapped by {patcher}", hint)
    if not found:
        yield Finding(PASS, "patchers", "nobody else wraps these functions")


def _autoload() -> Iterator[Finding]:
    """Whether the start-up files are there, and whether they work."""
    folders = [sysconfig.get_paths()["purelib"]]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    states = {folder: autoload.state(Path(folder)) for folder in folders}
    starts = autoload.starts_with_shim()
    for folder, state in states.items():
        if state in ("incomplete", "foreign"):
            hint = "`bnb-dispatch-fix autoload enable` writes the files, and says if it may not"
            yield Finding(WARN, "autoload", f"{state} start-up files in {folder}", hint)
    if starts:
        yield Finding(PASS, "autoload", "a new Python starts with the shim")
    elif "enabled" in states.values():
        hint = "`bnb-dispatch-fix autoload status` says more"
        yield Finding(WARN, "autoload", "enabled, but a new Python starts without the shim", hint)
    else:
        yield Finding(PASS, "autoload", "not enabled")


def _environment() -> Iterator[Finding]:
    switch = read_switch()
    if switch.complaint:
        yield Finding(WARN, "environment", switch.complaint)
    elif not switch.allowed:
        yield Finding(WARN, "environment", f"{SWITCH}={switch.text}: nothing is patched")
    else:
        on = ", ".join(sorted(switch.allowed))
        yield Finding(PASS, "environment", f"{SWITCH} {switch.text or 'is not set'}: allows {on}")
    for name in _HIDES_DEVICES:
        value = os.environ.get(name)
        if value is None:
            continue
        hidden = value.strip() in ("", "-1")
        hint = "no GPU can be seen with it: unset it" if hidden else ""
        yield Finding(WARN if hidden else PASS, "environment", f"{name}={value!r}", hint)
    version = os.environ.get("BNB_CUDA_VERSION")
    if version is not None:
        hint = "unset it, unless bitsandbytes finds the wrong library without it"
        yield Finding(WARN, "environment", f"BNB_CUDA_VERSION={version!r} picks the library", hint)
