"""What the shim costs a Python that starts: instructions, CPU time and modules, as ratios.

    python tests/benchmarks/startup.py [--rounds N] [--planning-rounds N]

Needs the shim installed in this environment, not as a checkout. Instructions come from
`perf stat`, or from valgrind where the machine has no counters, and repeat to the last digit;
CPU time is the least of several interleaved rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import bnb_dispatch_fix
from bnb_dispatch_fix.startup import autoload

PURELIB = Path(sysconfig.get_paths()["purelib"])
#: What start-up files may cost, as a factor of the instructions of `python -c pass`.
AUTOLOAD_LIMIT = 1.05
PASS = "pass"  # noqa: S105  # the statement
SHIM = "import bnb_dispatch_fix"
#: The real `from_pretrained` on simulated GPUs, see bnb_dispatch_fix/planning/simulation.py.
PLANNING = """
import sys
sys.path.append({release!r})
if "bnb_dispatch_fix" in sys.modules:
    from bnb_dispatch_fix.planning import simulation
else:
    import apart
    simulation = apart.module("planning.simulation")
outcome = simulation.plan_checkpoint({folder!r}, {budgets!r})
assert outcome.device_map, outcome
"""
#: Where what the release tests share is.
RELEASE = str(Path(__file__).resolve().parents[1] / "release")
#: Room for everything, so that both plans are of the same length and none is refused.
BUDGETS = {0: 2**21, 1: 2**21, 2: 2**21, 3: 2**21}
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
}


def run(code: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-W", "ignore", "-c", code],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
    )


def by_perf(code: str) -> int | None:
    """Instructions in user space; None where the machine does not count them."""
    report = run(code, "perf", "stat", "-x,", "-e", "instructions:u").stderr
    count = report.split(",")[0].strip()
    return int(count) if count.isdigit() else None


def by_valgrind(code: str) -> int | None:
    tool = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}")
    report = run(code, *tool).stderr
    return int(report.rpartition("Collected :")[2].split()[0])


def counter():
    for name, count in (("perf", by_perf), ("valgrind", by_valgrind)):
        if shutil.which(name):
            try:
                if count(PASS):
                    return name, count
            except (subprocess.CalledProcessError, ValueError):
                continue
    return "none (perf and valgrind are missing)", lambda code: None


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def importtime(code: str, module: str) -> tuple[int, int]:
    """Microseconds of a module with all it imports, and how many modules those are."""
    lines = run_importtime(code)
    bare = {name for name, _ in run_importtime(PASS)}
    new = [(name, cumulative) for name, cumulative in lines if name not in bare]
    return dict(new)[module], len(new)


def run_importtime(code: str) -> list[tuple[str, int]]:
    command = [sys.executable, "-X", "importtime", "-c", code]
    report = subprocess.run(
        command,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
    ).stderr
    rows = [line.split("|") for line in report.splitlines() if line.count("|") == 2]
    return [(name.strip(), int(cumulative)) for _, cumulative, name in rows if "import" not in name]


class Autoload:
    """The start-up files, for as long as they are measured."""

    def __enter__(self):
        if autoload.state(PURELIB) != "disabled":
            sys.exit(f"autoload is {autoload.state(PURELIB)} in {PURELIB}; disable it first")
        autoload.enable(PURELIB)
        run(PASS)  # writes the byte code

    def __exit__(self, *_):
        autoload.disable(PURELIB)


def least(measure, rounds: int) -> tuple[float, float, float]:
    """Least of: nothing, autoload, import; interleaved, so that all see the same machine."""
    bare, started, imported = [], [], []
    for _ in range(rounds):
        bare.append(measure(""))
        imported.append(measure(SHIM))
        with Autoload():
            started.append(measure(""))
    return min(bare), min(started), min(imported)


def row(name: str, bare: float | None, started: float | None, imported: float | None, unit: str):
    def cell(value):
        return "–" if value is None else f"{value / bare:.3f}"

    if bare is None:
        return f"| {name} | not counted | – | – |"
    amount = f"{bare / 1e6:.1f} million" if unit == "instructions" else f"{1000 * bare:.0f} ms"
    return f"| {name} | {amount} | {cell(started)} | {cell(imported)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--planning-rounds", type=int, default=5)
    arguments = parser.parse_args()
    package = Path(bnb_dispatch_fix.__file__).parent
    if package.parent != PURELIB:
        sys.exit(f"install the shim into {PURELIB} first; this is {package}")

    run(SHIM)  # writes the byte code
    tool, count = counter()
    with Autoload():
        started = count(PASS)
    print(f"Python {sys.version.split()[0]}; instructions by {tool}; CPU time: least of")
    print(f"{arguments.rounds} rounds, {arguments.planning_rounds} where a model is planned\n")
    print("| | bare | with autoload | with `import bnb_dispatch_fix` |")
    print("|---|---|---|---|")
    bare = count(PASS)
    print(row("`python -c pass`, instructions", bare, started, count(SHIM), "instructions"))
    seconds = least(lambda before: cpu_seconds(before or PASS), arguments.rounds)
    print(row("`python -c pass`, CPU time", *seconds, "seconds"))
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("bitsandbytes"):
        with tempfile.TemporaryDirectory() as folder:
            from bnb_dispatch_fix.planning import simulation

            simulation.build_checkpoint(folder)
            planning = PLANNING.format(folder=folder, budgets=BUDGETS, release=RELEASE)
            seconds = least(
                lambda before: cpu_seconds(f"{before}\n{planning}"), arguments.planning_rounds
            )
            print(row("`from_pretrained` up to the device map, CPU time", *seconds, "seconds"))
    shim, modules = importtime(SHIM, "bnb_dispatch_fix")
    json, _ = importtime("import json", "json")
    print(f"\n-X importtime: bnb_dispatch_fix {shim} us in {modules} modules; json {json} us")
    if bare and started > AUTOLOAD_LIMIT * bare:
        sys.exit(f"autoload: more than {AUTOLOAD_LIMIT} times the instructions of a bare start")


if __name__ == "__main__":
    main()
