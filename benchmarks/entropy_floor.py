"""The entropy floor on runs of the demo whose entropy collapses: with the floor and without, several seeds each way.

    python benchmarks/entropy_floor.py [--quick] [--seeds 5] [--first-seed 0]

The collapse is provoked by a high learning rate. The bar: in every run, the mean entropy of the last 20 steps is below
0.8 of its start without the floor, and above it with the floor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

from demo_runs import DemoRun, demo_run, quiet, warm_policy

from lightning_rlstab.callbacks.gepo import GEPO
from lightning_rlstab.callbacks.quatro import QUATRO, EntropyFloorConfig

STEPS = 60
BASELINE = 5
CONFIG = EntropyFloorConfig(baseline_steps=BASELINE)


def over_floor(run: DemoRun) -> tuple[float, float]:
    """Mean entropy of the last 20 steps, and the lowest rolling mean after step 25, both over the floor."""
    entropies = [entropy for entropy in run.entropies if math.isfinite(entropy)]
    floor = CONFIG.floor_frac * statistics.mean(entropies[:BASELINE])
    window = CONFIG.window_steps
    rolling = [statistics.mean(entropies[at - window : at]) for at in range(window, len(entropies) + 1)]
    return statistics.mean(entropies[-20:]) / floor, min(rolling[25:]) / floor


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    quiet()
    policy, tokenizer = warm_policy()
    seeds = 1 if options.quick else options.seeds
    without, held = [], []
    accuracies: dict[str, list[float]] = {"without": [], "with": []}
    for seed in range(options.first_seed, options.first_seed + seeds):
        for name, results in (("without", without), ("with", held)):
            quatro = QUATRO(replay=False, kl=False, filter=False, entropy=CONFIG if name == "with" else False)
            run = demo_run(policy, tokenizer, GEPO(), quatro, seed=seed, steps=STEPS, batch=64, learning_rate=5e-4)
            results.append(over_floor(run))
            accuracies[name].append(run.accuracy)
            last, lowest = results[-1]
            print(
                f"seed {seed} {name}: end {last:.2f} of the floor, lowest {lowest:.2f}, {run.accuracy:.3f}", flush=True
            )
    collapsed = sum(last < 1 for last, _ in without)
    kept = sum(last >= 1 for last, _ in held)
    figures = {
        "name": "entropy_floor",
        "value": kept,
        "bar": seeds,
        "ok": kept == seeds and collapsed == seeds,
        "what": "runs with the floor that end above it, of so many that end below it without",
        "collapsed_without": collapsed,
        "lowest_with": round(min(lowest for _, lowest in held), 3),
        "lowest_without": round(min(lowest for _, lowest in without), 3),
        "accuracy_with": round(statistics.mean(accuracies["with"]), 4),
        "accuracy_without": round(statistics.mean(accuracies["without"]), 4),
        "steps": STEPS,
        "first_seed": options.first_seed,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
