"""The command `bnb-dispatch-fix`, which is `python -m bnb_dispatch_fix`, too.

It is used inside folders that somebody else has filled, such as a checkpoint that was just
downloaded. So nothing is imported here before the current folder is off `sys.path`; see
docs/plan.md for what Python itself has imported by then.
"""

import os
import sys


def main() -> int:
    """Run the command with the arguments of this process; its exit code."""
    leave_out_current_folder()
    try:
        from bnb_dispatch_fix import cli  # only now: it loads modules
    except KeyboardInterrupt:
        return 130
    return cli.main()


def leave_out_current_folder() -> None:
    """Take the current folder off `sys.path`, where it may hide the standard library.

    `python -m` puts it there, and so do some values of PYTHONPATH. What stands behind the standard
    library is the environment's own: its site-packages, and folders that its `.pth` files name.
    """
    standard = os.path.dirname(os.__file__)  # noqa: PTH120  # pathlib is not to be loaded yet
    before = sys.path.index(standard) if standard in sys.path else len(sys.path)
    sys.path[:before] = [entry for entry in sys.path[:before] if not _is_current_folder(entry)]


def _is_current_folder(entry: object) -> bool:
    if not isinstance(entry, (str, bytes)):
        return False  # importing ignores it
    try:
        return not entry or os.path.samefile(entry, os.curdir)  # noqa: PTH121
    except (OSError, ValueError):
        return False  # one of them is not there


if __name__ == "__main__":
    sys.exit(main())
