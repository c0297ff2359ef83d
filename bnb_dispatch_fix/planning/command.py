"""`bnb-dispatch-fix plan`: the command line of `bnb_dispatch_fix.plan`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from bnb_dispatch_fix.planning import checkpoint, examples
from bnb_dispatch_fix.planning.budgets import MOST_DEVICES, parse_budgets, parse_size
from bnb_dispatch_fix.planning.precisions import QUANTIZATION
from bnb_dispatch_fix.planning.question import free_memory, rehearse
from bnb_dispatch_fix.planning.records import Plan, PlanError
from bnb_dispatch_fix.planning.room import KV_DTYPES
from bnb_dispatch_fix.planning.run_arguments import asked_room
from bnb_dispatch_fix.wording import STRATEGIES, folded, say

__all__ = ["Spinner", "add_arguments", "job", "parse_budgets", "parse_size", "run"]

_DTYPES = ("float16", "bfloat16", "float32")
#: Seconds before a spinner appears.
_PATIENCE = 1.0
#: Longer names are cut there: its line must not be wider than a terminal.
_LONGEST = 32


def add_arguments(subparsers: Any) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="where a model would go, without its weights and without a GPU",
        usage="%(prog)s (MODEL | --example NAME) [--max-memory BUDGETS] [options]",
        description="Exit code 0: it fits on the accelerators, and the context with it; "
        "1: it does not; 2: bad arguments.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="checkpoint folder or config.json"
    )
    parser.add_argument(
        "--example",
        type=_example,
        metavar=f"{{{','.join(examples.SINCE)}}}",
        help="a well-known model instead",
    )
    parser.add_argument(
        "--bits",
        choices=sorted(QUANTIZATION),
        help="4 (nf4), 4dq (with double quantization) or 8 with bitsandbytes, or 16; default: all "
        "of them compared, and the largest that fits",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of what is not quantized")
    parser.add_argument(
        "--max-memory",
        metavar="BUDGETS",
        help=f"such as 8x3GiB,cpu=60GiB or 2x24GiB,1x12GiB or 0=22GiB,1=2GiB; at most "
        f"{MOST_DEVICES} devices; default: what is free here",
    )
    parser.add_argument("--device-map", choices=STRATEGIES, default="auto", help="the strategy")
    parser.add_argument("--context", metavar="TOKENS", help="whether so many tokens run, too")
    parser.add_argument("--batch", metavar="N", help="that many sequences at once; default: 1")
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help=f"of keys and values: {', '.join(KV_DTYPES)}"
    )
    parser.add_argument("--reserve", metavar="SIZE", help="to be left on each device, as 1GiB")
    parser.add_argument(
        "--even", action="store_true", help="with the feature even, too, and how even each is"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a picture to FILE")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that the checkpoint brings"
    )
    parser.set_defaults(run=run)


def _example(name: str) -> str:
    if name in examples.SINCE:
        return name
    raise argparse.ArgumentTypeError(f"invalid choice: {name!r} ({examples.hint(name)})")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; 0 where it fits, 1 where it does not, 2 for bad arguments (one line)."""
    spinner = Spinner(arguments.example or arguments.model, sys.stderr)
    try:
        try:
            plan = rehearse(job(arguments), spinner.turn)
        finally:
            spinner.clear()
        if arguments.html is not None:
            _write_picture(plan, arguments.html)
    except PlanError as error:
        say(f"bnb-dispatch-fix plan: {error}", sys.stderr)
        return 2
    if arguments.json:
        say(json.dumps(plan.as_dict(), indent=2), wrap=False)
    else:
        from bnb_dispatch_fix.planning.terminal import print_plan  # not for --json

        print_plan(plan, sys.stdout)
    return 0 if plan.runnable else 1


def _write_picture(plan: Plan, path: Path) -> None:
    from bnb_dispatch_fix.planning.picture import as_html  # for --html only

    try:
        path.write_text(as_html(plan), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise PlanError(f"--html {path}: cannot be written ({reason})") from error


def job(arguments: argparse.Namespace) -> Dict[str, Any]:
    """The job for `planning.rehearse`.

    Raises:
        PlanError: arguments that cannot be used; one line.
    """
    found = _model(arguments.model, arguments.example)
    own = found.pop("quantized", False)
    found.update(
        strategy=arguments.device_map,
        dtype=arguments.dtype,
        quantization=QUANTIZATION[arguments.bits or "16"],
        max_memory=None,
    )
    asked = (arguments.context, arguments.batch, arguments.kv_dtype, arguments.reserve)
    found.update(asked_room(*asked, options=True))
    if arguments.bits is None and not own:
        found["compare"] = True
    if arguments.even:
        found["even"] = True
    if arguments.trust_remote_code:
        found["trust_remote_code"] = True
    if arguments.max_memory is None:
        found["free"] = free_memory()
    else:
        found["max_memory"] = parse_budgets(arguments.max_memory)
    return found


def _model(model: Optional[str], example: Optional[str]) -> Dict[str, Any]:
    if (model is None) == (example is None):
        raise PlanError(
            "expected one of MODEL (a checkpoint folder or a config.json) and --example NAME"
        )
    if example is not None:
        config = examples.configuration(example)
        return {
            "config": config,
            "quantized": checkpoint.is_quantized(config),
            "since": examples.SINCE[example],
            "label": example,
        }
    assert model is not None  # noqa: S101  # the parser has seen to it
    found = checkpoint.settings(model)
    return {"path": model, "quantized": checkpoint.is_quantized(found)}


class Spinner:
    """A line on a terminal that says that work goes on, once it takes longer than a second."""

    def __init__(
        self, what: Optional[str], stream: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = folded(what or "the model", _LONGEST)
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._shown = False

    def turn(self) -> None:
        """Draw the next picture of it; nothing where nobody watches."""
        passed = self._clock() - self._started
        if passed < _PATIENCE or not self._stream.isatty():
            return
        sign = "|/-\\"[int(passed * 10) % 4]
        self._stream.write(f"\r{sign} planning {self._what} without its weights, {passed:.0f} s ")
        self._stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
