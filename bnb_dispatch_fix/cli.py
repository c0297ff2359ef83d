"""The command `bnb-dispatch-fix`: one subcommand, one module that does the work."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Optional, Sequence

import bnb_dispatch_fix
from bnb_dispatch_fix.doctor import command as doctor_command
from bnb_dispatch_fix.planning import command as plan_command
from bnb_dispatch_fix.startup import autoload, runner
from bnb_dispatch_fix.states import Status


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand and return its exit code."""
    try:
        return _run(argv)
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        # Python flushes once more when it ends, and must not fail at that either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Optional[Sequence[str]]) -> int:
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    finally:  # --help ends in an exit, too
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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

        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(status_table(found))
    return 0 if found.complete else 1


def _demo(arguments: argparse.Namespace) -> int:
    from bnb_dispatch_fix.planning.demo import run_demo  # for this command only

    return run_demo()


def status_table(found: Status) -> str:
    """Status as text: a line of versions, then a line per seam."""
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
    lines += [f"{name:{name_width}}  {state:{state_width}}  {why}" for name, state, why in rows]
    return "\n".join(lines)
