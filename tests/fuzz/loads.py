"""Nobody loses: plans random loads with and without the shim, and exits 1 where one got worse.

    python tests/fuzz/loads.py --plans 25000 --seed 1

Run by `nox -s fuzz` in a cell of each way to plan. Prints how many were accepted and refused, and
every loss with what is needed to plan it again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "release"))

#: Loads that are planned at a time: with the shim and without it, it is switched twice for each.
BATCH = 400


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plans", type=int, default=10_000, help="how many loads")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # old releases', about themselves
    logging.disable(logging.WARNING)  # a line per plan that is rescued

    # Quantizers ask for a dozen of them each, and nothing is installed meanwhile.
    version = importlib.metadata.version = functools.lru_cache(None)(importlib.metadata.version)
    import random_loads

    draw = random.Random(arguments.seed)
    counts, losses, start = Counter(), [], time.monotonic()
    for first in range(0, arguments.plans, BATCH):
        loads = list(random_loads.random_loads(draw, min(BATCH, arguments.plans - first)))
        without = random_loads.planned(loads, active=False)
        found = random_loads.planned(loads, active=True)
        counts.update(random_loads.kinds(loads, without, found))
        for load, *pair in zip(loads, without, found):
            worse = random_loads.loss(load, *pair)
            if worse:
                losses.append(worse)
                print(f"LOSS {worse}: {load}\n  without {pair[0]}\n  with {pair[1]}", flush=True)
    releases = ", ".join(f"{name} {version(name)}" for name in ("transformers", "accelerate"))
    print(f"{releases}, seed {arguments.seed}: {arguments.plans} plans, {len(losses)} losses")
    print(f"  {dict(counts)}, {time.monotonic() - start:.0f} s")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
