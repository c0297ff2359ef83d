"""A checkpoint's config.json, looked at before anything else opens it.

Anybody may have written it: a pipe is not waited for, what has no end is not read, and a tree that
is too deep is refused. Whether transformers understands it is transformers' affair.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from bnb_dispatch_fix.planning.records import PlanError

#: The largest file that is read (MiB); those of released models have up to 2.
LARGEST = 16


def settings(model: str) -> Optional[Dict[str, Any]]:
    """What a checkpoint folder's config.json says, or a config.json; None where it has no such.

    Raises:
        PlanError: it is no regular file, too large, or nested too deeply; one line.
    """
    path = Path(model)
    found = _read(path / "config.json" if path.is_dir() else path)
    for name in _more_files(found):
        _read(path / name)
    return found


def _more_files(found: Optional[Dict[str, Any]]) -> Iterator[str]:
    """Configurations for other releases, which transformers may read instead."""
    names = (found or {}).get("configuration_files")
    if isinstance(names, list):
        yield from (name for name in names if isinstance(name, str) and "\0" not in name)


def _read(path: Path) -> Optional[Dict[str, Any]]:
    try:
        raw = _raw(path)
        found = None if raw is None else json.loads(raw.decode("utf-8"))
    except PlanError:
        raise
    except (OSError, ValueError):
        return None  # it is told later, by the release that cannot read it
    except RecursionError:
        raise PlanError(f"{path}: nested too deeply for a configuration") from None
    return found if isinstance(found, dict) else None


def _raw(path: Path) -> Optional[bytes]:
    """The file's bytes; None for a folder."""
    handle = os.open(str(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            return None
        if not stat.S_ISREG(mode):
            raise PlanError(
                f"{path}: is no regular file; expected a config.json of at most {LARGEST} MiB"
            )
        with os.fdopen(handle, "rb", closefd=False) as stream:
            raw = stream.read(LARGEST * 2**20 + 1)
    finally:
        os.close(handle)
    if len(raw) > LARGEST * 2**20:
        raise PlanError(f"{path}: larger than {LARGEST} MiB; expected a config.json")
    return raw


def is_quantized(found: Optional[Dict[str, Any]]) -> bool:
    """Whether a checkpoint brings a quantization of its own."""
    return (found or {}).get("quantization_config") is not None


def own_code(found: Any) -> Optional[str]:
    """The file with the configuration's own class, such as "configuration_x.py"; None without."""
    classes = found.get("auto_map") if isinstance(found, dict) else None
    reference = classes.get("AutoConfig") if isinstance(classes, dict) else None
    if isinstance(reference, (list, tuple)):  # several, the slow one first
        reference = next(iter(reference), None)
    if not isinstance(reference, str):
        return None
    repository, _, name = reference.rpartition("--")
    module = f"{name.rpartition('.')[0]}.py"
    return f"{repository}: {module}" if repository else module
