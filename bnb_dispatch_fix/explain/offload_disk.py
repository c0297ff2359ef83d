"""Explains a model that was planned on the disk as a whole: which budgets were read, and why."""

from __future__ import annotations

import json
import logging
import sys
from typing import Iterator, List, Mapping

from packaging.version import Version

from bnb_dispatch_fix import features
from bnb_dispatch_fix.explain import reading
from bnb_dispatch_fix.model.load import Load
from bnb_dispatch_fix.wording import log

#: How the errors are worded: accelerate 0.21-1.14; transformers 4.x and accelerate where there
#: is no folder for what is not safetensors.
_TEXTS = (
    "offload the whole model to the disk",
    "Please provide an `offload_folder`",
    "We need an `offload_dir`",
)

#: accelerate #4083.
_DISPATCHED_SINCE = Version("1.15.0")
_BACKPORT = "switch the backport of accelerate #4083 on or use accelerate 1.15.0"


def lines(error: BaseException, load: Load) -> List[str]:
    """The explanation, line by line; empty where the error is about something else."""
    text = str(error)
    if not any(part in text for part in _TEXTS) and not _root_as_device(error, load):
        return []
    found = list(_budgets(load))
    found += [f"- {cause}" for cause in _causes(load)]
    found.append(_remedy(error, load))
    return found


def warn(load: Load) -> None:
    """Say why a planner left the whole model to the disk, where no error is raised about it."""
    version = Version(sys.modules["transformers"].__version__)
    fate = (
        "and transformers 5.0-5.12 attach no hooks to it, so that it cannot run; use 5.13 or newer"
        if Version("5.0.0.dev0") <= version < Version("5.13.0")
        else "and will run slowly from there"
    )
    why = "; ".join([*_budgets(load), *_causes(load)])
    log(logging.WARNING, "whole model on the disk", fate, why)


def _root_as_device(error: BaseException, load: Load) -> bool:
    """Whether a release stumbled over the "disk" under the key "".

    transformers 4.50-4.57 take it for a device of torch, earlier ones miss a key for each tensor.
    """
    text = str(error)
    wanted = load.planned if load.strategy else load.device_map
    taken = "device disk is invalid" in text or "Expected one of cpu" in text
    taken = taken or (isinstance(error, KeyError) and "." in text)
    return taken and isinstance(wanted, Mapping) and wanted.get("") == "disk"


def _budgets(load: Load) -> Iterator[str]:
    if load.request is None:
        yield f"device_map={load.device_map!r} puts the whole model, or a part of it, on the disk"
    else:
        yield reading.read_as(load.request)


def _causes(load: Load) -> Iterator[str]:
    """What is implausible about the budgets, and about this machine."""
    if load.request is not None:
        yield from reading.oddities(load.request)
    yield from reading.no_accelerator()


def _remedy(error: BaseException, load: Load) -> str:
    text = str(error)
    if "offload_folder" in text or "offload_dir" in text:
        return 'to keep parts on the disk, add offload_folder="offload"'
    if _root_as_device(error, load):
        found = (
            f"this release reads only a map with several keys from the disk: device_map="
            f'{_children_on_disk(load)}, offload_folder="offload" (slow), or larger budgets'
        )
        return found if _dispatches_disk() else f"{found}; the former needs {_BACKPORT}"
    return f"larger budgets keep it off the disk; to run it from there, slowly, {_BACKPORT}"


def _dispatches_disk() -> bool:
    """Whether a map that is all "disk" is dispatched: by accelerate, or by our backport."""
    version = getattr(sys.modules.get("accelerate"), "__version__", "0")
    return "backport" in features.on() or Version(version) >= _DISPATCHED_SINCE


def _children_on_disk(load: Load) -> str:
    names = ["model", "lm_head"]
    if load.request is not None:
        tensors = (name for name, _ in load.request.model.named_parameters())
        names = list(dict.fromkeys(name.partition(".")[0] for name in tensors))
    return json.dumps(dict.fromkeys(names, "disk"))
