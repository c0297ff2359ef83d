"""Asks a process of its own: plain data in, plain data out, whatever becomes of that process.

Used where GPUs are pretended, where an import may crash or hang, and where two states of this
package are compared. The answer is marked, because libraries print to stdout, too; it goes
through files, because a pipe can fill up while nobody reads.

The process starts isolated (-I), so that nothing of the current folder is imported before it has
this process's `sys.path`, and it ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

_MARK = "bnb-dispatch-fix answer: "
#: The folder, or the archive, that holds this very package; it need not be on `sys.path`.
_HOME = str(Path(__file__).absolute().parent.parent)
#: Reads its orders from stdin, a command line has too little room for a long `sys.path`.
_CHILD = """\
import sys
sys.path = [entry for entry in sys.path if entry]
import json
from importlib import machinery, util
orders = json.loads(sys.stdin.buffer.readline())
if orders["user_site"]:
    import site  # not there with python -S
    site.addsitedir(orders["user_site"])
spec = machinery.PathFinder.find_spec("bnb_dispatch_fix", [orders["home"]])
if hasattr(spec.loader, "exec_module"):
    package = sys.modules[spec.name] = util.module_from_spec(spec)
    spec.loader.exec_module(package)
else:  # an archive's until Python 3.9
    spec.loader.load_module(spec.name)
from bnb_dispatch_fix.child import carry_out
carry_out(orders)
"""
#: Seconds between two calls of `on_wait`.
_TICK = 0.1


class CannotAsk(RuntimeError):
    """No other process can be started here; one line that says why."""


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

    Raises:
        CannotAsk: there is no Python to start, or the system starts none.
    """
    message = json.dumps({**_orders(), "task": task, "question": question}).encode() + b"\n"
    whole = {**os.environ, **(environment or {})}
    variables = {name: value for name, value in whole.items() if value is not None}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = _start(variables, output, errors)
        ended = _awaited(process)
        try:
            _send(process, message)
            code = _wait(process, ended, timeout, on_wait)
        finally:
            process.kill()
            while process.returncode is None:
                ended.acquire(timeout=_TICK)
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]  # open until now: see _watch
        return Ending(_answers(_text(output)), code, _last_line(_text(errors)))


def _orders() -> Dict[str, Any]:
    """What the process must know of this one: where modules are, as this program has it.

    Entries that are neither text nor bytes are left out: importing ignores them, too.
    """
    import site  # not there with python -S

    entries = [os.fsdecode(entry) for entry in sys.path if isinstance(entry, (str, bytes))]
    user_site = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    return {"home": _HOME, "path": entries, "user_site": user_site}


def _start(variables: Mapping[str, str], output: Any, errors: Any) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise CannotAsk("no Python can be started from here: sys.executable is not set")
    try:
        return subprocess.Popen(  # noqa: S603  # our own Python and our own text
            [sys.executable, *_options(variables), "-c", _CHILD],
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotAsk(f"{sys.executable} cannot be started: {reason}") from error


def _options(variables: Mapping[str, str]) -> List[str]:
    """Isolated, and otherwise as this process is; -I leaves out what variables would have said."""
    options = ["-I", "-X", f"utf8={sys.flags.utf8_mode}"]
    if variables.get("PYTHONHOME") and not sys.flags.ignore_environment:
        options[0] = "-s"  # its standard library is found by that variable alone
    if sys.flags.no_site:
        options.append("-S")
    if sys.dont_write_bytecode:
        options.append("-B")
    if sys.pycache_prefix:
        options += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    for warning in filter(None, variables.get("PYTHONWARNINGS", "").split(",")):
        options += ["-W", warning]
    return options


def _awaited(process: subprocess.Popen[bytes]) -> threading.Lock:
    """A lock that is free once the process has ended and its code is known.

    A thread waits for it: `Popen.wait` with a timeout can keep a lock of its own for ever where a
    signal's handler raises, and the next wait would never return. No handler runs in a thread.
    """
    ended = threading.Lock()
    ended.acquire()

    def wait() -> None:
        process.wait()
        ended.release()

    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError as error:
        process.kill()
        process.communicate()
        raise CannotAsk(f"no thread can be started: {error}") from error
    return ended


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    """Write without waiting for a process that hangs before it reads, or has ended."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            assert process.stdin is not None  # noqa: S101  # it is a pipe, see _start
            process.stdin.write(message)
            process.stdin.flush()

    threading.Thread(target=write, daemon=True).start()


def _wait(
    process: subprocess.Popen[bytes],
    ended: threading.Lock,
    timeout: Optional[float],
    on_wait: Optional[Callable[[], None]],
) -> Optional[int]:
    """The exit code; None where the time is over."""
    started = time.monotonic()
    while not ended.acquire(timeout=_TICK):
        if timeout is not None and not time.monotonic() - started <= timeout:
            return None
        if on_wait is not None:
            on_wait()
    return process.returncode


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


def carry_out(orders: Mapping[str, Any]) -> None:
    """In the child: call what was asked for."""
    import importlib  # in the child only

    _watch()
    sys.path[:] = orders["path"]
    module, _, function = orders["task"].partition(":")
    getattr(importlib.import_module(module), function)(orders["question"])


def _watch() -> None:
    """In the child: end as soon as the other end of stdin is closed, which its own end does.

    Whoever reads stdin from now on, a library or another process, gets its end.
    """
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(parent, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
