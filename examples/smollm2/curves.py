"""Read the curves of a run back from its TensorBoard event file.

    python examples/smollm2/curves.py runs/smollm2/version_0

Prints the named curves at some of their steps, and the pace of the run in optimizer steps per minute.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SHOWN = (
    "reward",
    "val/reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "grad_norm",
    "completions/mean_length",
)

Curves = dict[str, list[tuple[int, float]]]


def read(run: Path) -> tuple[Curves, float]:
    """Every scalar of a run as (step, value) pairs, and the median pace in optimizer steps per minute."""
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    events = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    curves = {tag: [(event.step, event.value) for event in series] for tag, series in events.items()}
    clock = [event.wall_time for event in events.get("reward", [])]
    # The median leaves out the steps that a held-out evaluation lies between.
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(clock))
    return curves, 60.0 / gaps[len(gaps) // 2] if gaps else 0.0


def mean_of_ends(curve: list[tuple[int, float]], count: int = 10) -> tuple[float, float]:
    """Means of the first and of the last ``count`` values."""
    values = [value for _, value in curve]
    first, last = values[:count], values[-count:]
    return sum(first) / len(first), sum(last) / len(last)


def main() -> None:
    """Print the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--every", type=int, default=5, help="show every n-th value")
    arguments = parser.parse_args()
    curves, pace = read(arguments.run)
    if not curves:
        raise SystemExit(f"`run` must hold a TensorBoard event file with scalars, got {str(arguments.run)!r}.")
    for tag in SHOWN:
        if tag in curves:
            shown = "  ".join(f"{step}: {value:.3f}" for step, value in curves[tag][:: arguments.every])
            first, last = mean_of_ends(curves[tag])
            print(f"{tag}\n  {shown}\n  mean of the first ten {first:.3f}, of the last ten {last:.3f}")
    print(f"{pace:.2f} optimizer steps per minute")


if __name__ == "__main__":
    main()
