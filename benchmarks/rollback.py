"""Poisoned runs of the demo: do they recover within the run, and end where clean runs end?

    python benchmarks/rollback.py [--quick] [--runs 20]

Every run has GEPO's guard and OPEFO. At a random step one thing is spoiled, in turn: an entry of the weights (NaN), of
the optimizer's second moments (NaN), or the loss of the step (NaN). The bar: every run answers at the poisoned step and
ends with finite weights and a held-out accuracy within three standard deviations of the mean of clean runs (of twenty
healthy runs every third set has one below two), the paired difference from the clean runs does not lie below 0 by more
than twice its standard error, and the same poison at every step stops the run with an explanation after
``max_rollbacks``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
from typing import Any

import lightning.pytorch as pl
import torch
from demo_runs import demo_run, quiet, warm_policy

from lightning_rlstab.callbacks.gepo import GEPO
from lightning_rlstab.callbacks.opefo import OPEFO, SnapshotConfig

KINDS = ("weights", "optimizer state", "loss")
STEPS = 60


class Poison(pl.Callback):
    """Spoils one thing at the given steps, once each; before OPEFO in the list of callbacks."""

    def __init__(self, kind: str, steps: set[int]) -> None:
        self.kind, self.steps = kind, set(steps)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Spoil weights or optimizer state."""
        if trainer.global_step not in self.steps or self.kind == "loss":
            return
        self.steps.discard(trainer.global_step)
        parameter = next(pl_module.policy.parameters())
        target = parameter if self.kind == "weights" else trainer.optimizers[0].state[parameter]["exp_avg_sq"]
        with torch.no_grad():
            target.view(-1)[7] = math.nan

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: Any, inputs: Any) -> Any:
        """Spoil the loss."""
        if trainer.global_step not in self.steps or self.kind != "loss":
            return inputs
        self.steps.discard(trainer.global_step)
        return dataclasses.replace(inputs, advantages=inputs.advantages * math.nan)


def guards(**snapshots: Any) -> tuple[pl.Callback, ...]:
    """GEPO's guard and OPEFO, with snapshots and recovery scaled to a run of 60 steps."""
    settings = {"every_steps": 5, "recovery_steps": 5, **snapshots}
    return GEPO(advantages=False), OPEFO(snapshots=SnapshotConfig(**settings))


def explained_stop(policy: Any, tokenizer: Any) -> str:
    """What a run says that is poisoned at every step."""
    try:
        demo_run(policy, tokenizer, Poison("weights", set(range(3, STEPS))), *guards(max_rollbacks=3), steps=STEPS)
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 runs")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    quiet()
    policy, tokenizer = warm_policy()
    count = 3 if options.quick else options.runs
    clean, poisoned, recovered = [], [], 0
    for seed in range(count):
        clean.append(demo_run(policy, tokenizer, *guards(), seed=seed, steps=STEPS).accuracy)
        kind, step = KINDS[seed % 3], random.Random(seed).randrange(5, STEPS - 10)
        run = demo_run(policy, tokenizer, Poison(kind, {step}), *guards(), seed=seed, steps=STEPS)
        is_finite = all(bool(p.isfinite().all()) for p in run.module.parameters())
        acted = [event["step"] for event in run.events("rollback" if kind != "loss" else "skip")]
        # The answer must come at the poisoned step itself; further skips are the guard's own, as clean runs have them.
        is_recovered = is_finite and (step in acted or step + 1 in acted) and not run.events("stop")
        recovered += is_recovered
        poisoned.append(run.accuracy)
        print(
            f"seed {seed}: {kind} at step {step}: accuracy {run.accuracy:.3f}, clean {clean[-1]:.3f}, "
            f"answered at {acted}, {'recovered' if is_recovered else 'NOT recovered'}",
            flush=True,
        )
    mean, deviation = statistics.mean(clean), statistics.stdev(clean)
    within = sum(accuracy >= mean - 3 * deviation for accuracy in poisoned)
    below_two = [sum(accuracy < mean - 2 * deviation for accuracy in runs) for runs in (poisoned, clean)]
    gaps = [one - other for one, other in zip(poisoned, clean, strict=True)]
    gap, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(count)
    stop = explained_stop(policy, tokenizer)
    figures = {
        "name": "rollback",
        "value": recovered,
        "bar": count,
        "ok": recovered == count and within == count and gap + 2 * error >= 0 and "max_rollbacks" in stop,
        "what": "poisoned runs that recovered within the run, of so many",
        "runs": count,
        "within_three_deviations_of_clean": within,
        "below_two_deviations": {"poisoned": below_two[0], "clean": below_two[1]},
        "clean_accuracy": round(mean, 4),
        "clean_deviation": round(deviation, 4),
        "poisoned_accuracy": round(statistics.mean(poisoned), 4),
        "paired_gap": round(gap, 4),
        "paired_gap_error": round(error, 4),
        "steps": STEPS,
        "stop_says": stop[:160],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
