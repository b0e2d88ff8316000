"""Do the guards cost accuracy when nothing is wrong? Clean runs with guards against plain GRPO, seed by seed.

    python benchmarks/clean_runs.py [--quick] [--seeds 10] [--setups all] [--beta 0.0] [--jobs 2] [--out DIR]

Runs, set-ups and accuracy are those of ``crash_test.py`` (40 steps of the digits policy, 1,024 held-out additions), and
clean cells that it has finished are used again. Both runs of a pair have the same policy, prompts and seeds. The bar:
the 95 % interval (Student's t) of the mean difference, guards less plain, does not lie below 0. ``--setups`` compares
other set-ups too, one guard each; the last line is about ``all``. With ``--beta`` above 0 both sides have a KL term and
QUATRO its KL anchor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crash_test import CLEAN, SETUPS, Cells, run_cells

# Student's t, 97.5 %, by degrees of freedom; beyond the list the last value is a little wide.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T += (2.120, 2.110, 2.101, 2.093)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean; unbounded for fewer than two values.

    Example:
        >>> [round(end, 3) for end in interval([0.01, -0.01, 0.02, 0.0])]
        [-0.016, 0.026]
    """
    count = len(differences)
    if count < 2:
        return -math.inf, math.inf
    mean = statistics.mean(differences)
    reach = _T[min(count - 1, len(_T)) - 1] * statistics.stdev(differences) / math.sqrt(count)
    return mean - reach, mean + reach


def compared(cells: Cells, setup: str, seeds: int) -> dict[str, Any]:
    """A set-up against plain GRPO; a run that raised counts as accuracy 0."""
    guarded, plain = ([cells[s, CLEAN, seed]["accuracy"] or 0.0 for seed in range(seeds)] for s in (setup, "bare"))
    differences = [ours - bare for ours, bare in zip(guarded, plain, strict=True)]
    low, high = interval(differences)
    return {
        "difference": round(statistics.mean(differences), 4),
        "interval": [round(low, 4), round(high, 4)],
        "accuracy": round(statistics.mean(guarded), 4),
        "accuracy_plain": round(statistics.mean(plain), 4),
        "differences": [round(value, 4) for value in differences],
        "steps_skipped": [len(cells[setup, CLEAN, seed]["lost_steps"]) for seed in range(seeds)],
    }


def main() -> None:
    """Run what is missing, compare, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 seeds")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--setups", default="all", help="comma-separated")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient of all runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/crash_test"), help="policies and finished cells")
    options = parser.parse_args()
    setups = tuple(options.setups.split(","))
    if not set(setups) <= set(SETUPS):
        raise SystemExit(f"`--setups` must be among {', '.join(SETUPS)}, got {options.setups}.")
    from _twins import versions

    seeds = 2 if options.quick else options.seeds
    wanted = [(setup, CLEAN, seed) for seed in range(seeds) for setup in dict.fromkeys(("bare", *setups))]
    fields = {"beta": options.beta} if options.beta else {}
    cells = run_cells(wanted, out=options.out, jobs=options.jobs, **fields)
    results = {setup: compared(cells, setup, seeds) for setup in setups}
    for setup, result in results.items():
        print(setup, result)
    chief = results[setups[0] if "all" not in results else "all"]
    figures = {
        "name": "clean_runs",
        "value": chief["difference"],
        "bar": "95 % interval not below 0",
        "ok": chief["interval"][1] >= 0,
        "what": "mean difference of final held-out accuracy, guards less plain GRPO, paired by seed",
        "seeds": seeds,
        "beta": options.beta,
        "setups": results,
        **versions(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
