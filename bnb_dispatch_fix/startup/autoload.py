"""`bnb-dispatch-fix autoload enable|disable|status`: every Python of an environment has the shim.

Three files are written into a site-packages folder, in plain sight: a small module that waits
for transformers or accelerate and then loads the shim, a `.pth` file that imports it in Python up
to 3.17, and PEP 829's `.start` file, which Python 3.15 and newer prefer. The module is a file of
its own because an uninstalled package must leave start-up files that do nothing and print
nothing (a `.start` line cannot be guarded), and because reading one small file is all that a
program without transformers pays.
"""

from __future__ import annotations

import argparse
import os
import shlex
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from bnb_dispatch_fix.wording import say, visible

MARK = "# Written by `bnb-dispatch-fix autoload enable`, removed by `... autoload disable`."
MODULE = "_bnb_dispatch_fix_start"

#: Uses nothing of the package but a name that stays: the file may be older than the package.
_WAITING = '''
"""Loads bnb_dispatch_fix, if it is installed, when transformers or accelerate is imported."""

import sys


class Waiting:
    done = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if cls.done or not name.startswith(("transformers.", "accelerate.")):
            return None
        cls.done = True
        try:
            from bnb_dispatch_fix.tripwire import WIRE
        except Exception:
            return None
        return WIRE.find_spec(name, path, target)


sys.meta_path.insert(0, Waiting)


def start():
    """For bnb_dispatch_fix.start; the import was all."""
'''

#: Name -> content, in the order of writing: the module before those that name it.
FILES: Dict[str, str] = {
    f"{MODULE}.py": MARK + _WAITING,
    "bnb_dispatch_fix.start": f"{MARK}\n{MODULE}:start\n",
    "bnb_dispatch_fix.pth": f"{MARK}\nimport {MODULE}\n",
}

_ANSWER = "bnb-dispatch-fix is there: "
_CHECK = f"""
import importlib.util, sys
found = {MODULE!r} in sys.modules and importlib.util.find_spec("bnb_dispatch_fix") is not None
print("\\n{_ANSWER}" + str(found))
"""


class AutoloadError(RuntimeError):
    """Start-up files cannot be written or removed; the message says which, why, what to do."""


class _NoFolder(AutoloadError):
    """The arguments name no folder."""


def enable(folder: Path) -> List[Path]:
    """Write the start-up files into `folder`, each in one step, and return their paths.

    Raises:
        AutoloadError: a file there is not ours (nothing is written then), or writing failed.
    """
    paths = [folder / name for name in FILES]
    _refuse_foreign(paths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            _write_in_one_step(path, FILES[path.name])
    except OSError as error:
        raise AutoloadError(
            f"{folder}: cannot be written ({error.strerror or error}); "
            f"choose another folder with --user or --path"
        ) from error
    return paths


def disable(folder: Path) -> List[Path]:
    """Remove the start-up files from `folder` and return the paths of those that were there.

    Raises:
        AutoloadError: a file there is not ours (nothing is removed then), or removing failed.
    """
    paths = [path for path in (folder / name for name in reversed(list(FILES))) if _exists(path)]
    _refuse_foreign(paths)
    try:
        for path in paths:
            path.unlink()
        for compiled in (folder / "__pycache__").glob(f"{MODULE}.*.pyc"):
            compiled.unlink()
    except OSError as error:
        raise AutoloadError(
            f"{folder}: cannot be changed ({error.strerror or error}); "
            f"remove {', '.join(FILES)} there by hand"
        ) from error
    return paths


def state(folder: Path) -> str:
    """ "enabled", "disabled", "incomplete", or "foreign" (a file there is not ours)."""
    there = [folder / name for name in FILES if _exists(folder / name)]
    if any(not _is_ours(path) for path in there):
        return "foreign"
    if not there:
        return "disabled"
    return "enabled" if len(there) == len(FILES) else "incomplete"


def starts_with_shim() -> Optional[bool]:
    """Whether a new Python of this environment has the shim at its start; None if unknown.

    It is started as anybody would start it, but in an empty folder: `python -c` looks for modules
    in the current one.
    """
    if not sys.executable:
        return None
    try:
        with tempfile.TemporaryDirectory() as empty:
            finished = subprocess.run(  # noqa: S603  # our own Python and our own text
                [sys.executable, "-c", _CHECK],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=60,
                check=True,
                cwd=empty,
            )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = finished.stdout.decode("ascii", "replace").splitlines()  # others may print, too
    answers = [line[len(_ANSWER) :] for line in lines if line.startswith(_ANSWER)]
    return answers == ["True"]


def _write_in_one_step(path: Path, content: str) -> None:
    """Write beside the target and move: a Python that starts meanwhile sees all or nothing."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(dir=str(path.parent), prefix=".bnb_dispatch_fix-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _is_ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return stream.readline().rstrip("\r\n") == MARK
    except OSError:
        return False


def _refuse_foreign(paths: List[Path]) -> None:
    for path in paths:
        if _exists(path) and not _is_ours(path):
            raise AutoloadError(
                f"{path}: not written by bnb-dispatch-fix, left as it is; look at it and move it "
                f"away, or choose another folder with --user or --path"
            )


def add_arguments(commands: Any) -> None:
    """Add the subcommand to the command line's subparsers."""
    autoload = commands.add_parser("autoload", help="start every Python here with the shim")
    actions = autoload.add_subparsers(dest="action", metavar="ACTION")
    actions.required = True
    for action, run, text in (
        ("enable", _enable, "write the start-up files"),
        ("disable", _disable, "remove the start-up files"),
        ("status", _status, "which folders have them; exit code 0 if a new Python has the shim"),
    ):
        parser = actions.add_parser(action, help=text)
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--user", action="store_true", help="your own site-packages folder")
        where.add_argument("--path", metavar="FOLDER", help="a site-packages folder")
        parser.set_defaults(run=run)


def _folder(arguments: argparse.Namespace) -> Path:
    """The folder that was chosen: this environment's site-packages if none was.

    Raises:
        AutoloadError: --user where this Python does not look at the user's folder, or an empty
            --path.
    """
    if arguments.path == "":
        raise _NoFolder("--path: expected a folder, found an empty text")
    if arguments.path is not None:
        return Path(arguments.path).absolute()
    if not arguments.user:
        return Path(sysconfig.get_paths()["purelib"])
    if not site.ENABLE_USER_SITE:
        raise AutoloadError(
            "--user: this Python does not look at the user's site-packages (a virtual "
            "environment, python -s or PYTHONNOUSERSITE); leave --user out"
        )
    return Path(site.getusersitepackages())


def _enable(arguments: argparse.Namespace) -> int:
    try:
        paths = enable(_folder(arguments))
    except AutoloadError as error:
        return _refuse(error)
    for path in paths:
        say(f"wrote {visible(path)}")
    say(f"undo: bnb-dispatch-fix autoload disable{_where(arguments)}")
    say("off for one program: BNB_DISPATCH_FIX=off")
    return _say_whether_it_works(enabled=True)


def _disable(arguments: argparse.Namespace) -> int:
    try:
        folder = _folder(arguments)
        paths = disable(folder)
    except AutoloadError as error:
        return _refuse(error)
    for path in paths:
        say(f"removed {visible(path)}")
    if not paths:
        say(f"{visible(folder)}: no start-up files there")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    try:
        folders = [_folder(arguments)]
    except AutoloadError as error:
        return _refuse(error)
    if not arguments.user and arguments.path is None and site.ENABLE_USER_SITE:
        folders.append(Path(site.getusersitepackages()))
    for folder in folders:
        say(f"{visible(folder)}: {state(folder)}")
    return _say_whether_it_works(any(state(folder) == "enabled" for folder in folders))


def _refuse(error: AutoloadError) -> int:
    say(f"bnb-dispatch-fix: {visible(error)}", sys.stderr)
    return 2 if isinstance(error, _NoFolder) else 1


def _say_whether_it_works(enabled: bool) -> int:
    works = starts_with_shim()
    python = visible(sys.executable)
    if works is None:
        say("a new Python could not be started to check it")
    elif works:
        say(f"checked: a new {python} has the shim at its start")
    else:
        why = ": it does not look at that folder, or does not find the package" if enabled else ""
        say(f"checked: a new {python} does not have the shim at its start{why}")
    return 0 if works else 1


def _where(arguments: argparse.Namespace) -> str:
    """The options that name the same folder, to be pasted into a shell."""
    if arguments.path is not None:
        return f" --path {_quoted(str(_folder(arguments)))}"
    return " --user" if arguments.user else ""


def _quoted(text: str) -> str:
    if os.name == "nt":
        return subprocess.list2cmdline([visible(text)])
    if text.isprintable():
        return shlex.quote(text)
    escapes = (c if c.isprintable() and c not in "\\'" else _bytes(c) for c in text)
    return f"$'{''.join(escapes)}'"


def _bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
