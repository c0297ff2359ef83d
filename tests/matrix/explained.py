"""Runs an example of docs/explain.md on the installed release: what its user would be told.

Everything is real up to the moment when weights would be copied to a GPU; the GPUs are simulated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

from readme import write_checkpoints

GIB = 2**30
#: What stands before every example.
SETUP = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import bnb_dispatch_fix

nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
int8 = BitsAndBytesConfig(load_in_8bit=True)
load = AutoModelForCausalLM.from_pretrained
"""
#: The text of an error is cut to this many characters, its note never.
WIDTH = 96
_FREE = re.compile(r"GPU 0 has ([\d.]+) GiB free")


def said_about(code: str, setting: str = "") -> str:
    """The log lines of an example, and its error with the note.

    Args:
        code: run after `SETUP`, in a folder with the package's example checkpoints and "tiny".
        setting: "" for GPUs without a known size, "GPU 0 has N GiB free" for a lone one, or
            "loaded" for a model that is loaded to its end, without any GPU.
    """
    import bnb_dispatch_fix
    from bnb_dispatch_fix.planning.simulation import build_checkpoint, outcome_of

    names: Dict[str, Any] = {}
    bnb_dispatch_fix.activate()
    try:
        with _in_new_folder() as folder, _logged() as lines:
            write_checkpoints(folder)
            if setting == "loaded":
                build_checkpoint(folder / "tiny")
            exec(SETUP, names)
            if setting == "loaded":
                return _text(lines, _error_of(lambda: exec(code, names)))
            outcome = outcome_of(lambda: exec(code, names), _free(setting))
            return _text(lines, outcome.error)
    finally:
        bnb_dispatch_fix.deactivate()


def _error_of(call: Callable[[], Any]) -> Optional[Exception]:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it raises is what is shown
        return error
    return None


def _free(setting: str) -> Optional[Dict[Any, int]]:
    match = _FREE.fullmatch(setting)
    assert match or not setting, setting
    return {0: int(float(match.group(1)) * GIB), "cpu": 60 * GIB} if match else None


def _text(lines: List[str], error: Optional[Exception]) -> str:
    """As Python prints it at the end of a traceback, the error's own text cut."""
    found = list(lines)
    if error is not None:
        own = f"{type(error).__name__}: {' '.join(str(error).split())}"
        found.append(own if len(own) <= WIDTH else own[: WIDTH - 1].rstrip() + "…")
        found += getattr(error, "__notes__", ())
    assert found, "nothing was said"
    return "\n".join(found) + "\n"


@contextlib.contextmanager
def _in_new_folder() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _logged() -> Iterator[List[str]]:
    """What the package's logger says, as it is printed where logging is not set up."""
    lines: List[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("bnb_dispatch_fix"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
