"""`bnb-dispatch-fix doctor`: the command line of `doctor.examine`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from typing import Any

from bnb_dispatch_fix.doctor import surroundings
from bnb_dispatch_fix.doctor.checks import examine
from bnb_dispatch_fix.doctor.findings import as_text
from bnb_dispatch_fix.wording import columns, is_plain, say


def add_arguments(subparsers: Any) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser("doctor", help="what keeps a quantized model from its GPUs here")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--timeout",
        type=float,
        default=surroundings.TIMEOUT,
        metavar="SECONDS",
        help="when an import counts as one that hangs (default: %(default)g)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the checkup; 1 where it has an ERROR, 2 for a time limit that is none, else 0."""
    if not 0 < arguments.timeout < math.inf:
        found = f"{arguments.timeout:g}"
        text = f"--timeout: expected a number of seconds larger than 0, found {found}"
        say(f"bnb-dispatch-fix doctor: {text}", sys.stderr)
        return 2
    with contextlib.redirect_stdout(sys.stderr):  # old bitsandbytes print while imported
        checkup = examine(arguments.timeout)
    if arguments.json:
        say(json.dumps(checkup.as_dict(), indent=2), wrap=False)
    else:
        text = as_text(checkup, colour=not is_plain(sys.stdout), width=columns(sys.stdout))
        say(text, wrap=False)
    return 0 if checkup.healthy else 1
