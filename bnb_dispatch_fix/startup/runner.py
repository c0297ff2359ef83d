"""`bnb-dispatch-fix run SCRIPT|-m MODULE [ARGS]`: a program with the shim, unedited.

The program gets a Python of its own, so that `sys.argv`, `__main__`, `sys.path[0]`, tracebacks,
signals and the exit code are those of `python SCRIPT` and `python -m MODULE`. The shim comes in
by a start-up file on PYTHONPATH, which child processes inherit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn

#: Holds the start-up file.
_FOLDER = Path(__file__).parent / "on_path"


def add_arguments(commands: Any) -> None:
    """Add the subcommand to the command line's subparsers."""
    run = commands.add_parser(
        "run",
        help="run a program with the shim active, in it and in its child processes",
        usage="bnb-dispatch-fix run (SCRIPT | -m MODULE) [ARGS ...]",
        prefix_chars="\0",  # whatever looks like an option is the program's
        add_help=False,
    )
    run.add_argument("program", nargs=argparse.REMAINDER, help="as after python")
    run.set_defaults(run=lambda arguments: _run(run, arguments.program))


def _run(parser: argparse.ArgumentParser, program: List[str]) -> int:
    if program in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    is_module = program[:1] == ["-m"] and len(program) > 1
    if not is_module and (not program or program[0].startswith("-")):
        parser.error("expected a script, or -m and a module")
    return run_program(program)


def run_program(program: List[str]) -> int:
    """Become `python PROGRAM`; where a process cannot be replaced, run it and return its code.

    Args:
        program: the script, or "-m" and the module, and the arguments.
    """
    command = [sys.executable, *program]
    environment = environment_with_shim(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # exec there starts a second process and does not wait for it
        return _run_and_wait(command, environment)
    return _become(command, environment)


def environment_with_shim(environment: Mapping[str, str]) -> Dict[str, str]:
    """A copy of `environment` in which every Python starts with the shim."""
    entries = [str(_FOLDER)]
    if environment.get("PYTHONPATH"):
        entries.append(environment["PYTHONPATH"])
    return {**environment, "PYTHONPATH": os.pathsep.join(entries)}


def _become(command: List[str], environment: Dict[str, str]) -> NoReturn:
    os.execve(command[0], command, environment)  # noqa: S606  # the user's own program


def _run_and_wait(command: List[str], environment: Dict[str, str]) -> int:
    import subprocess  # for Windows only

    with subprocess.Popen(command, env=environment) as process:  # noqa: S603  # the user's own
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # noqa: PERF203  # once per Ctrl-C
                continue  # it has got the same; its answer decides
