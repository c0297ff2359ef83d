"""Calls the loads of a library in this process and prints what came of them, as JSON.

`python asking.py NAME ORDER`: NAME is that of loads_NAME.py; ORDER says when the shim comes:
"without" it, "before" the library or "after" it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import pathlib
import re
import sys
import tempfile
import warnings
from typing import Any, Iterator

#: Functions of accelerate that are patched, and one beside them that libraries hold, too.
HELD = (
    *("get_balanced_memory", "infer_auto_device_map", "dispatch_model"),
    *("get_max_memory", "load_checkpoint_and_dispatch", "_get_device_map"),
    "_determine_device_map",
)
SHIM = "bnb_dispatch_fix"


def main(name: str, order: str) -> None:
    os.chdir(tempfile.mkdtemp())  # some write where they are started
    if order == "before":
        importlib.import_module(SHIM)
    else:
        os.environ["BNB_DISPATCH_FIX"] = "off"
    library = importlib.import_module(f"loads_{name}")
    held = [each for each, _ in signatures(library.PACKAGE)]  # what comes later has the shim's
    with listening() as heard:
        if order == "after":
            del os.environ["BNB_DISPATCH_FIX"]
            importlib.import_module(SHIM).activate()
    with tempfile.TemporaryDirectory() as folder:
        from tiny import write_checkpoint

        write_checkpoint(folder)
        answers = {load.name: answer(load, folder) for load in library.loads(folder)}
    status = importlib.import_module(SHIM).status()
    found = {
        "package": library.PACKAGE,
        "answers": answers,
        # What a library does that others do not; see the modules of those that do.
        "refuses": getattr(library, "REFUSES", True),
        "holds": list(getattr(library, "HOLDS", ())),
        "wraps": list(getattr(library, "WRAPS", ())),
        "held": held,
        "signatures": dict(signatures(library.PACKAGE)),
        "states": {f"{p.module}.{p.attribute}": p.state for p in status.patches},
        "holders": list(status.holders),
        "on activation": [line for own, line in heard if own],
    }
    print(json.dumps(found))


def answer(load: Any, folder: str) -> dict[str, Any]:
    """The device map or the error, and what was said beside it."""
    from bnb_dispatch_fix.planning.simulation import Planned

    device_map, error, notes, parts = None, None, [], load.parts
    with listening() as heard:
        try:
            load.call()
        except Planned as planned:
            device_map, parts = planned.device_map, getattr(planned, "parts", parts)
        except Exception as raised:  # noqa: BLE001  # any error is the outcome
            error, notes = raised, list(getattr(raised, "__notes__", ()))
        else:
            raise AssertionError(f"{load.name}: nothing was planned")
    return {
        "map": None if device_map is None else list(device_map.items()),
        "error": None if error is None else [type(error).__name__, plain(str(error), folder)],
        "notes": notes,
        "parts": dict(parts),
        "rooms": list(load.rooms.items()),
        "theirs": sorted({plain(line, folder) for own, line in heard if not own}),
        "ours": [line for own, line in heard if own],
    }


def plain(text: str, folder: str) -> str:
    """Without what differs from run to run: folders, addresses."""
    text = text.replace(folder, "FOLDER").replace(tempfile.gettempdir(), "TMP")
    return re.sub(r"0x[0-9a-f]+|TMP/\w+", "X", text)


@contextlib.contextmanager
def listening() -> Iterator[list[tuple[bool, str]]]:
    """Warnings of Python and of every logger: whether they are the shim's, and the text."""
    heard: list[tuple[bool, str]] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            own = record.name.partition(".")[0] == SHIM
            heard.append((own, f"{record.levelname} {record.name}: {record.getMessage()}"))

    ear = Ear(logging.WARNING)
    loggers = [logging.getLogger()]
    loggers += [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addHandler(ear)
        try:
            yield heard
        finally:
            for logger in loggers:
                logger.removeHandler(ear)
            heard += [(SHIM in w.filename, f"{w.category.__name__}: {w.message}") for w in caught]


def signatures(package: str) -> Iterator[tuple[str, str]]:
    """Under every name that the library, accelerate and transformers have for these functions."""
    roots = (package, "accelerate", "transformers")
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in roots:
            continue
        for attribute in HELD:
            function = vars(module).get(attribute)
            if callable(function):
                where = f"{function.__module__}.{function.__qualname__}"
                yield f"{name}.{attribute}", f"{where}{inspect.signature(function)}"


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "release"))
    main(*sys.argv[1:])
