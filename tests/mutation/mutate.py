"""Changes the code in small ways and sees whether a unit test notices.

    python tests/mutation/mutate.py [MODULE ...] [--jobs N] [--survivors] [--quick]

MODULE is one of the keys of TESTS or a file in one (`placement/search`); without any it is all of
them. Everything runs in a copy of the project. A change that no test notices is a survivor; those
with a reason stand in reasons.yaml, the others are listed at the end, and then it exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from mutants import Mutant, mutants
from trial import ROOT, TIME, Baseline, Copy

PACKAGE = ROOT / "bnb_dispatch_fix"
RESULTS = ROOT / "results" / "mutation"
REASONS = Path(__file__).with_name("reasons.yaml")

#: By module or wing: the unit tests that exercise it.
TESTS = {
    "placement": (
        *("packing_certificates", "packing_proofs", "division", "scattered"),
        *("packing_brute_force", "packing"),
    ),
    "backport": ("backports", "balanced", "rebound"),
    "model/budgets": ("budgets",),
    "patching/verdict": ("verdict",),
    "activation": ("activation", "names", "containment", "threads", "patchers"),
}
#: Their tests run programs of their own, so that no coverage tells which of them is concerned.
IN_CHILDREN = ("activation",)
#: With --quick, tests that take more seconds of CPU time are left out.
QUICK = 2.0


def modules(asked: list[str]) -> dict[str, list[str]]:
    """The modules asked for, with the files of their tests; ends the program where one is none."""
    found: dict[str, list[str]] = {}
    for key, tests in TESTS.items():
        files = [f"tests/unit/test_{name}.py" for name in tests]
        wing = PACKAGE / key
        for path in sorted(wing.glob("*.py")) if wing.is_dir() else [wing.with_suffix(".py")]:
            name = path.relative_to(PACKAGE).with_suffix("").as_posix()
            if not asked or key in asked or name in asked:
                found[name] = files
    unknown = [name for name in asked if name not in TESTS and name not in found]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: not among {', '.join(TESTS)} and what is in these")
    return found


class Round:
    """The mutants of a module, or some of them; the tests that have killed others come first."""

    def __init__(
        self, module: str, files: list[str], wanted: set[str] | None, *, quick: bool
    ) -> None:
        self.module, self.files, self.wanted, self.quick = module, files, wanted, quick
        self.killers: dict[str, list[str]] = {}

    def run(self, part: int, parts: int) -> list[dict[str, Any]]:
        """Every `parts`th mutant from number `part` on; with an outcome where it was wanted."""
        source = (PACKAGE / f"{self.module}.py").read_text("utf-8")
        mine = list(mutants(source))[part::parts]
        if not any(map(self._is_wanted, mine)):
            return [{"change": mutant.change} for mutant in mine]
        with Copy() as copy:
            baseline = copy.baseline(self.module, self.files)
            return [
                {"change": mutant.change}
                | (self._outcome(copy, baseline, mutant) if self._is_wanted(mutant) else {})
                for mutant in mine
            ]

    def _is_wanted(self, mutant: Mutant) -> bool:
        return self.wanted is None or mutant.change in self.wanted

    def _outcome(self, copy: Copy, baseline: Baseline, mutant: Mutant) -> dict[str, Any]:
        covers = self.module not in IN_CHILDREN
        tests = baseline.tests_for(mutant.lines) if covers else list(baseline.seconds)
        copy.write(self.module, mutant.source)
        killer = copy.killer(self.files, self._order(mutant, baseline, tests), baseline.seconds)
        for place in (self.module, mutant.function):
            if killer in baseline.seconds:
                known = self.killers.setdefault(place, [])
                known[:] = [killer, *(test for test in known if test != killer)]
        if killer is None:
            print(f"  survived: {mutant.change}", flush=True)
        return {"killed by": killer}

    def _order(self, mutant: Mutant, baseline: Baseline, tests: list[str]) -> list[str]:
        """Killers of changes in the function first, then of the module, then quick tests."""
        first = [
            *self.killers.get(mutant.function, ())[:5],
            *self.killers.get(self.module, ())[:20],
        ]
        others = sorted(tests, key=lambda test: baseline.seconds[test])
        longest = QUICK if self.quick else float("inf")
        chosen = {test for test in tests if baseline.seconds[test] <= longest}
        return [test for test in dict.fromkeys([*first, *others]) if test in chosen]


def run(whole: Round, jobs: int) -> list[dict[str, Any]]:
    """All mutants of a round, in as many processes."""
    with ProcessPoolExecutor(jobs) as pool:
        runs = [pool.submit(whole.run, part, jobs) for part in range(jobs)]
        return [outcome for run in runs for outcome in run.result()]


def results_of(module: str) -> Path:
    return RESULTS / f"{module.replace('/', '.')}.json"


def last(module: str) -> dict[str, dict[str, Any]]:
    """The outcomes of the last run, by change."""
    path = results_of(module)
    outcomes = json.loads(path.read_text("utf-8")) if path.exists() else []
    return {outcome["change"]: outcome for outcome in outcomes}


def survivors_of(module: str) -> set[str]:
    """What the last run has not killed."""
    return {change for change, outcome in last(module).items() if outcome["killed by"] is None}


def keep(module: str, outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the results of a module; what was not run stays as it was."""
    before = last(module)
    known = [before.get(o["change"], {}) | o for o in outcomes]
    found = [outcome for outcome in known if "killed by" in outcome]
    results_of(module).parent.mkdir(parents=True, exist_ok=True)
    results_of(module).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def reasons() -> dict[str, dict[str, str]]:
    """By module, why a change survives that may."""
    found: dict[str, dict[str, str]] = {}
    for group in yaml.safe_load(REASONS.read_text("utf-8")) or ():
        for change in group["changes"]:
            found.setdefault(group["module"], {})[change] = group["reason"]
    return found


def report(results: dict[str, list[dict[str, Any]]]) -> int:
    """Print the score of each module and the survivors without a reason; how many these are."""
    known, without = reasons(), []
    total: Counter[str] = Counter()
    print(
        f"\n{'module':30} {'mutants':>8} {'killed':>8} {'by time':>8} {'survived':>8} {'score':>7}"
    )
    for module, outcomes in results.items():
        killers = [outcome["killed by"] for outcome in outcomes]
        count = Counter(
            mutants=len(killers),
            killed=sum(killer is not None for killer in killers),
            time=sum(str(killer).startswith(TIME) for killer in killers),
        )
        total += count
        print(_line(module, count))
        survived = [outcome["change"] for outcome in outcomes if outcome["killed by"] is None]
        named = known.get(module, {})
        without += [(module, change) for change in survived if change not in named]
        stale = named.keys() - {outcome["change"] for outcome in outcomes}
        for change in sorted(stale):
            print(f"  reasons.yaml names what is not there: {change}")
        for change in sorted(named.keys() - stale - set(survived)):
            print(f"  reasons.yaml names what is killed: {change}")
    print(_line("all", total))
    print(f"\n{len(without)} survivors without a reason")
    for module, change in without:
        print(f"  {module}: {change}")
    return len(without)


def _line(name: str, count: Counter[str]) -> str:
    survived = count["mutants"] - count["killed"]
    score = f"{100 * count['killed'] / count['mutants']:.1f} %" if count["mutants"] else "-"
    numbers = (count["mutants"], count["killed"], count["time"], survived)
    return f"{name:30} {' '.join(f'{n:8}' for n in numbers)} {score:>7}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Which small changes does no unit test notice?")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--survivors", action="store_true", help="only those of the last run")
    parser.add_argument("--quick", action="store_true", help=f"no test of more than {QUICK:g} s")
    arguments = parser.parse_args()
    results = {}
    for module, files in modules(arguments.modules).items():
        wanted = survivors_of(module) if arguments.survivors else None
        print(module, flush=True)
        outcomes = run(Round(module, files, wanted, quick=arguments.quick), arguments.jobs)
        results[module] = keep(module, outcomes)
    return int(report(results) > 0)


if __name__ == "__main__":
    sys.exit(main())
