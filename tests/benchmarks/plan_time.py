"""What `plan` takes beside the bare import and build of the same model, as ratios of CPU time.

    python tests/benchmarks/plan_time.py [--rounds N] [--examples NAME ...]

The bare one imports torch, transformers, accelerate and bitsandbytes and builds the model on the
meta device. Each number is the least of several interleaved rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import sys
sys.path.append({release!r})
import accelerate, bitsandbytes, torch, transformers
from meta import on_meta
config = dict({config!r})
config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
with on_meta():
    transformers.AutoModelForCausalLM.from_config(config)
"""
BUDGETS = "8x30GiB,cpu=600GiB"
OPTIONS = {"one precision": ["--bits", "4"], "all compared": []}
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def seconds(*arguments: str) -> float:
    """CPU seconds of a Python and of the processes it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if finished.returncode not in (0, 1):
        sys.exit(finished.stderr.decode(errors="replace"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bare(example: str) -> str:
    from bnb_dispatch_fix.planning.examples import configuration

    config = configuration(example)
    return BARE.format(release=str(ROOT / "tests" / "release"), config=config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", nargs="+", default=["llama-3-8b", "mixtral-8x7b"])
    arguments = parser.parse_args()
    for example in arguments.examples:
        calls = {"bare": ["-c", bare(example)]}
        for name, options in OPTIONS.items():
            command = ["-m", "bnb_dispatch_fix", "plan", "--example", example]
            calls[name] = [*command, "--max-memory", BUDGETS, *options]
        least = dict.fromkeys(calls, float("inf"))
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                least[name] = min(least[name], seconds(*call))
        ratios = ", ".join(f"{name} {least[name] / least['bare']:.2f}" for name in OPTIONS)
        print(f"{example}: bare {least['bare']:.1f} s; {ratios}", flush=True)


if __name__ == "__main__":
    main()
