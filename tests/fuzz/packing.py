"""Random small instances against brute force: what the placement search says, and its parts.

    python tests/fuzz/packing.py --instances 12000 --seed 1

runs so many instances of each part and prints what became of them; the exit code is 1 if a
placement is called best that is not, or an answer is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from packing_oracle import FAMILIES, verdict
from packing_searches import SEARCHES

MERITS = ("fewest_changes", "even")
BAD = ("WRONG", "FALSE CLAIM")


def packs(rng: random.Random, family: str) -> Tuple[str, object]:
    """Return what `pack` is worth on an instance of the family, and the instance."""
    units, budgets, fill_last = FAMILIES[family](rng)
    merit = rng.choice(MERITS)
    return verdict(units, budgets, fill_last, merit), (units, budgets, fill_last, merit)


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    parts: Dict[str, Callable[[random.Random], Tuple[str, object]]] = {
        **{f"pack: {name}": lambda rng, name=name: packs(rng, name) for name in FAMILIES},
        **SEARCHES,
    }
    bad = 0
    for name, part in parts.items():
        rng = random.Random(f"{name} {options.seed}")
        outcomes: Counter[str] = Counter()
        for _ in range(options.instances):
            outcome, instance = part(rng)
            outcomes[outcome] += 1
            if outcome.startswith(BAD):
                bad += 1
                print(f"{outcome}: {instance}")
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{name}: {options.instances} instances: {counts}", flush=True)
    print(f"{bad} wrong answers and false claims")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
