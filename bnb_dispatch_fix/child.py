"""Asks a process of its own: plain data in, plain data out, whatever becomes of that process.

Used where GPUs are pretended, where an import may crash or hang, and where two states of this
package are compared. The answer is marked, because libraries print to stdout, too; it goes
through files, because a pipe can fill up while nobody reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, List, Mapping, NamedTuple, Optional

_MARK = "bnb-dispatch-fix answer: "
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bnb_dispatch_fix.child import carry_out; carry_out(sys.argv[2])"
)
#: Seconds between two calls of `on_wait`.
_TICK = 0.1


class Ending(NamedTuple):
    """What a process answered before it ended: its answers in order, and how it ended.

    `code` is its exit code, None where it was stopped after the time limit; `last_line` is the
    last line of its stderr, which names the error.
    """

    answers: List[Any]
    code: Optional[int]
    last_line: str


def ask(
    task: str,
    question: Any = None,
    *,
    environment: Optional[Mapping[str, Optional[str]]] = None,
    timeout: Optional[float] = None,
    on_wait: Optional[Callable[[], None]] = None,
) -> Ending:
    """Have a process of its own carry out a task; it ends before this returns or raises.

    Args:
        task: "module:function"; the function takes the question and calls `answer`.
        question: plain data.
        environment: variables that differ from this process's; None takes one away.
        timeout: seconds after which the process is stopped.
        on_wait: called ten times a second meanwhile.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), task],
            env=_changed(environment or {}),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode())
            process.stdin.close()
            code = _wait(process, timeout, on_wait)
        finally:
            process.kill()
            process.wait()
        return Ending(_answers(_text(output)), code, _last_line(_text(errors)))


def _changed(environment: Mapping[str, Optional[str]]) -> Mapping[str, str]:
    whole = {**os.environ, **environment}
    return {name: value for name, value in whole.items() if value is not None}


def _wait(
    process: subprocess.Popen[bytes],
    timeout: Optional[float],
    on_wait: Optional[Callable[[], None]],
) -> Optional[int]:
    """The exit code; None where the time is over."""
    started = time.monotonic()
    while True:
        try:
            return process.wait(_TICK)
        except subprocess.TimeoutExpired:
            if timeout is not None and time.monotonic() - started > timeout:
                return None
            if on_wait is not None:
                on_wait()


def _text(stream: Any) -> str:
    stream.seek(0)
    text: str = stream.read().decode("utf-8", errors="replace")
    return text


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _answers(output: str) -> List[Any]:
    """What stands after the marks; a line that was cut short by a crash is none."""
    found = []
    for line in output.splitlines():
        before, mark, text = line.partition(_MARK)
        if mark and not before:
            try:
                found.append(json.loads(text))
            except ValueError:
                break
    return found


def answer(data: Any) -> None:
    """In the child: give an answer, at once."""
    print(f"\n{_MARK}{json.dumps(data)}", flush=True)


def carry_out(task: str) -> None:
    """In the child: call what was asked for."""
    import importlib  # in the child only

    module, _, function = task.partition(":")
    getattr(importlib.import_module(module), function)(json.load(sys.stdin))
