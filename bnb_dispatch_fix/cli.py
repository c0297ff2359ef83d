"""The command `bnb-dispatch-fix`: one subcommand, one module that does the work.

Whatever happens, it ends in an answer or in one line: 130 for Ctrl-C, 2 where an answer cannot be
given or written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, Iterator, NoReturn, Optional, Sequence

import bnb_dispatch_fix
from bnb_dispatch_fix.doctor import command as doctor_command
from bnb_dispatch_fix.planning import command as plan_command
from bnb_dispatch_fix.startup import autoload, runner
from bnb_dispatch_fix.states import Status
from bnb_dispatch_fix.wording import columns, say, visible, wrapped

#: Signals that end a process; before this one ends, those it has started must.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class _Ended(BaseException):
    """One of these signals has come."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand and return its exit code."""
    unheard = sys.stdout is None  # it was closed when Python started
    try:
        with _streams(), _ended_by_signals():
            code = _main(argv)
            if not unheard:
                return code
            return _complain("the answer cannot be written: stdout is closed")
    except _Ended as ended:
        number = int(ended.args[0])
        os.kill(os.getpid(), number)  # its handler is the old one again
        return 128 + number


def _main(argv: Optional[Sequence[str]]) -> int:
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        return _complain("the answer cannot be written: nobody reads it any more")
    except OSError as error:
        return _complain(f"the answer cannot be written: {error.strerror or error}")
    finally:
        _flush_or_drop()


def _run(argv: Optional[Sequence[str]]) -> int:
    try:
        arguments = _parser().parse_args(argv)
        try:
            Path.cwd()
        except OSError as error:
            return _complain(f"the current folder cannot be used: {error.strerror or error}")
        code: int = arguments.run(arguments)
        return code
    finally:  # --help ends in an exit, too
        sys.stdout.flush()


def _complain(text: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        say(f"bnb-dispatch-fix: {text}", sys.stderr)
    return 2


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Open the standard streams that were closed, so that no other file gets their numbers."""
    given = sys.stdout, sys.stderr
    if None not in (sys.stdin, *given):
        yield
        return
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203  # three rounds
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    with open(os.devnull, "w", encoding="utf-8") as nobody:  # noqa: PTH123
        sys.stdout, sys.stderr = (stream or nobody for stream in given)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = given


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals that end this process raise meanwhile, unless somebody has a use for them."""

    def end(number: int, frame: Any) -> None:
        raise _Ended(number)

    replaced = []
    try:
        for number in _ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                with contextlib.suppress(ValueError):  # only the main thread may
                    replaced.append((number, signal.signal(number, end)))
        yield
    finally:
        for number, handler in replaced:
            signal.signal(number, handler)


def _flush_or_drop() -> None:
    """Python flushes once more when it ends, and must not fail at that either."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Shows what was typed without what could steer the terminal; a help that is lost is said."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:  # argparse's own passes over errors of writing
            (file or sys.stderr).write(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bnb-dispatch-fix",
        description="Loads 4-bit and 8-bit models that fit, with the transformers you have.",
    )
    parser.add_argument("--version", action="version", version=bnb_dispatch_fix.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True

    status = commands.add_parser("status", help="what is patched here, what is not, and why")
    status.add_argument("--json", action="store_true", help="machine-readable")
    status.set_defaults(run=_status)

    demo = commands.add_parser("demo", help="the error without the shim, and the load with it")
    demo.set_defaults(run=_demo)

    doctor_command.add_arguments(commands)
    plan_command.add_arguments(commands)
    autoload.add_arguments(commands)
    runner.add_arguments(commands)
    return parser


def _status(arguments: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # old bitsandbytes print while imported
        bnb_dispatch_fix.import_targets()
    found = bnb_dispatch_fix.status()
    if arguments.json:
        import json  # for --json only

        say(json.dumps(found.as_dict(), indent=2), wrap=False)
    else:
        say(status_table(found, columns(sys.stdout)))
    return 0 if found.complete else 1


def _demo(arguments: argparse.Namespace) -> int:
    from bnb_dispatch_fix.planning.demo import run_demo  # for this command only

    return run_demo()


def status_table(found: Status, width: Optional[int] = None) -> str:
    """Status as text: a line of versions, then a line per seam; two where `width` is too small."""
    versions = ", ".join(
        f"{package} {version or '-'}" for package, version in found.installed.items()
    )
    lines = [
        f"bnb-dispatch-fix {found.version}: {', '.join(found.features) or 'off'}",
        versions,
    ]
    if found.problem:
        lines.append(f"problem: {found.problem}")
    rows = [
        (f"{patch.module}.{patch.attribute}", patch.state, patch.reason) for patch in found.patches
    ]
    name_width = max((len(row[0]) for row in rows), default=0)
    state_width = max((len(row[1]) for row in rows), default=0)
    table = [f"{name:{name_width}}  {state:{state_width}}  {why}" for name, state, why in rows]
    if width is not None and max(map(len, table), default=0) > width:
        table = [line for name, state, why in rows for line in (name, f"  {state}: {why}")]
    if found.holders:
        table.append(f"imported before the shim, not patched: {', '.join(found.holders)}")
    lines = [visible(line) for line in (*lines, *table)]
    return "\n".join(part for line in lines for part in wrapped(line, width or len(line)))
