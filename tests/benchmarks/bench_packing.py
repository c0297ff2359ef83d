"""How long the placement search takes, and how many of 200 planted placements it finds.

    python tests/benchmarks/bench_packing.py

prints two tables in Markdown. Where torch and accelerate are installed, accelerate's planner
divides the same units in the same run (up to a thousand), and the ratio is shown.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from packing_oracle import planted

from bnb_dispatch_fix.placement.packing import Device, Placement, Unit, check, pack

GIB = 2**30
# accelerate needs minutes for 20,000 modules side by side.
COMPARED = 1000
Budgets = Dict[Device, int]


def best_of(repeats: int, call: Callable[[], Any]) -> float:
    """Return the shortest time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def language_model(count: int, *, tied: bool = False, seed: Optional[int] = None) -> List[Unit]:
    """Return an embedding, blocks, and a head; blocks are of unequal size if there is a seed."""
    rng = random.Random(seed)
    block = 30 * GIB // count
    sizes = [
        block if seed is None else int(block * rng.uniform(0.5, 1.5)) for _ in range(count - 2)
    ]
    tie = "embedding" if tied else None
    blocks = [Unit(f"{n + 1}", size) for n, size in enumerate(sizes)]
    head = Unit(f"{count - 1}", 0 if tied else GIB, tie)
    return [Unit("0", GIB, tie, is_input_embedding=True), *blocks, head]


def shares(units: List[Unit], weights: List[float], slack: float) -> Budgets:
    """Return budgets in proportion to the weights, together `slack` above what is needed."""
    total = sum(unit.size for unit in units) * (1 + slack) / sum(weights)
    return {device: int(weight * total) for device, weight in enumerate(weights)}


def accelerate_planner() -> Optional[Callable[[List[Unit], Budgets], float]]:
    """Return a function that times accelerate's planner on the same units, in milliseconds."""
    try:
        import torch
        from accelerate import infer_auto_device_map
    except ImportError:
        return None
    from bnb_dispatch_fix.planning.simulation import simulated_gpus

    def plan(units: List[Unit], budgets: Budgets) -> float:
        modules = [torch.nn.Module() for _ in units]
        for module, unit in zip(modules, units):
            weight = torch.empty(unit.size, dtype=torch.int8, device="meta")
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        model = torch.nn.Sequential(*modules)
        with simulated_gpus(budgets):
            return best_of(1, lambda: infer_auto_device_map(model, {**budgets, "cpu": 99 * GIB}))

    return plan


def timing() -> None:
    planner = accelerate_planner()
    print("| units | budgets of 8 devices | answer | ms | accelerate, ms | ratio |")
    print("|---|---|---|---|---|---|")
    unequal = [1.3, 0.4, 1, 0.7, 1.6, 0.5, 1.1, 0.9]
    for count in (300, 20_000):
        plain = language_model(count)
        uneven = language_model(count, seed=1)
        tied = language_model(count, tied=True)
        for text, units, budgets in (
            ("equal, 30 % free", plain, shares(plain, [1.0] * 8, 0.3)),
            ("unequal, 30 % free", plain, shares(plain, unequal, 0.3)),
            ("unequal, 1 % free", plain, shares(plain, unequal, 0.01)),
            ("unequal, 3 % free, uneven blocks", uneven, shares(uneven, unequal, 0.03)),
            ("unequal, 3 % free, tied head", tied, shares(tied, unequal, 0.03)),
            (
                "unequal, 1 % free, planted",
                *planted(random.Random(1), "irregular", count, 8, 1, 0.01),
            ),
        ):
            result = pack(units, budgets)
            answer = type(result).__name__
            if isinstance(result, Placement):
                answer = f"{result.kind.name.lower().replace('_', ' ')}, {result.changes} changes"
            ours = best_of(5, lambda u=units, b=budgets: pack(u, b))
            theirs = planner(units, budgets) if planner and count <= COMPARED else None
            compared = f"{theirs:.0f} | {ours / theirs:.3f}" if theirs else "– | –"
            print(f"| {count} | {text} | {answer} | {ours:.1f} | {compared} |")
    blocks = [Unit(str(n), 133 * GIB // 10) for n in range(57)]
    ms = best_of(5, lambda: pack(blocks, dict.fromkeys(range(8), 100 * GIB)))
    print(f"| 57 | 57 × 13.3 on 8 × 100 | Impossible | {ms:.1f} | – | – |")


def loadability() -> None:
    print("\n| planted runs per device | shape | found | kind | median ms | longest ms |")
    print("|---|---|---|---|---|---|")
    all_found = instances = 0
    for runs in (1, 2, 99):
        for shape in ("blocks", "two kinds of blocks", "irregular"):
            number = 24 if runs == 1 and shape == "blocks" else 22
            outcomes: Counter[str] = Counter()
            times = []
            found = 0
            for seed in range(number):
                rng = random.Random(f"{runs} {shape} {seed}")
                count, devices = [(24, 3), (48, 4), (80, 8), (200, 8)][seed % 4]
                units, budgets = planted(rng, shape, count, devices, runs)
                start = time.perf_counter()
                result = pack(units, budgets)
                times.append((time.perf_counter() - start) * 1000)
                good = isinstance(result, Placement) and not check(result, units, budgets)
                found += good
                outcomes[result.kind.name if good else type(result).__name__] += 1
            instances += number
            all_found += found
            kinds = ", ".join(f"{n} {kind.lower()}" for kind, n in sorted(outcomes.items()))
            taken = f"{statistics.median(times):.1f} | {max(times):.0f}"
            print(f"| {runs} | {shape} | {found} of {number} | {kinds} | {taken} |")
    print(f"\nFound {all_found} of {instances} (unequal budgets, 0.2–5 % slack).")


if __name__ == "__main__":
    timing()
    loadability()
