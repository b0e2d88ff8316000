"""How well the monitor's rules read labelled runs: right cause first, false alarms, delay.

Synthetic curves of healthy runs and of twelve kinds of sick ones with known onset, and with ``--runs DIR`` real runs
made by ``diagnosis_runs.py``: ours with their monitor's own readings, and TRL's with TRL's own logs. Even seeds
("tune") were looked at when the thresholds were set; odd seeds ("held out") give the figures.

Run: ``python benchmarks/diagnosis.py [--quick] [--half tune] [--runs DIR] [--verbose]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_rlstab.report.diagnosis import HARD_CAUSES, ranked
from lightning_rlstab.report.memory import MonitorConfig, MonitorState
from lightning_rlstab.report.monitor import is_watched, restarted, step
from lightning_rlstab.report.run import Reading, Run, canonical_series
from lightning_rlstab.report.sources import read_run

Curves = dict[str, np.ndarray]
READINGS_FILE = "readings.jsonl"
NON_FINITE = {"nan_gradient", "nan_reward", "nan_loss", "nan_logprobs", "restart_death"}
"""Causes that are named in the step in which they show, or not at all."""


@dataclass
class LabelledRun:
    """A run with what is true about it; of several right names, ``causes`` holds all and the first files it."""

    name: str
    causes: tuple[str, ...]
    onset: int
    lives: list[list[Reading]] = field(default_factory=list)
    source: str = "synthetic"

    @property
    def kind(self) -> str:
        """What it is filed under."""
        return self.causes[0] if self.causes else "healthy"


# ---- healthy curves ----------------------------------------------------------------------------------------------


def wander(rng: np.random.Generator, steps: int, size: float) -> np.ndarray:
    """A slow random walk that is pulled back to 0; ``size`` is its usual distance."""
    walk = np.zeros(steps)
    for at in range(1, steps):
        walk[at] = 0.97 * walk[at - 1] + rng.normal(0, 0.24 * size)
    return walk


def healthy(rng: np.random.Generator, steps: int) -> Curves:
    """One run that learns, in one of many shapes: fast, slow, solved, plateau, noisy, with dips and bursts."""
    time = np.arange(steps)
    start, end = rng.uniform(0.02, 0.45), rng.uniform(0.35, 1.0)
    end = max(end, start + rng.uniform(0.05, 0.4))
    end = min(end, 1.0)
    middle, width = rng.uniform(0.05, 0.7) * steps, rng.uniform(0.05, 0.25) * steps
    progress = 1 / (1 + np.exp(-(time - middle) / width))
    progress = (progress - progress[0]) / (progress[-1] - progress[0])
    truth = start + (end - start) * progress + wander(rng, steps, rng.uniform(0.0, 0.03))
    if rng.random() < 0.3:  # a dip that heals
        at, depth = rng.integers(30, steps), rng.uniform(0.03, 0.12)
        truth -= depth * truth * np.exp(-(((time - at) / rng.uniform(5, 20)) ** 2))
    truth = np.clip(truth, 0.0, 1.0)
    group_spread = np.sqrt(np.clip(truth * (1 - truth), 0, None))
    noise = rng.uniform(0.015, 0.08)
    reward = np.clip(truth + noise * rng.normal(size=steps) * (0.3 + 1.4 * group_spread), 0, 1)
    entropy_start = rng.uniform(0.15, 2.5)
    entropy_end = entropy_start * rng.uniform(0.25, 1.3)
    entropy = entropy_start + (entropy_end - entropy_start) * progress ** rng.uniform(0.6, 1.4)
    entropy *= np.exp(wander(rng, steps, 0.06) + rng.uniform(0.01, 0.06) * rng.normal(size=steps))
    kl = rng.uniform(0.005, 0.25) * (1 - np.exp(-time / (rng.uniform(0.2, 1.0) * steps))) + 1e-4
    kl *= np.exp(rng.uniform(0.05, 0.25) * rng.normal(size=steps) + wander(rng, steps, 0.1))
    norm = rng.uniform(0.05, 2.0) * np.exp(wander(rng, steps, rng.uniform(0.05, 0.3)))
    norm *= np.exp(rng.uniform(0.1, 0.45) * rng.normal(size=steps))
    norm[rng.random(steps) < 0.01] *= rng.uniform(1.5, 3.0)
    zero_std = np.clip(truth**8 + (1 - truth) ** 8 + 0.05 * rng.normal(size=steps), 0, 1)
    is_solved = rng.random() < 0.15
    if is_solved:
        done = 1 / (1 + np.exp(-(time - (middle + 2 * width)) / (0.5 * width)))
        reward = np.clip(reward + (1 - reward) * done, 0, 1)
        late = done > 0.97
        reward[late], zero_std[late] = 1.0, 1.0
        norm[late] *= 0.05
        entropy *= 1 - 0.9 * done
    length = rng.uniform(20, 400) * (1 + rng.uniform(-0.5, 1.2) * progress) * np.exp(0.05 * rng.normal(size=steps))
    clipped = np.clip(rng.uniform(0.0, 0.25) * np.exp(wander(rng, steps, 0.3)) + 0.02 * rng.normal(size=steps), 0, 1)
    mixing = rng.uniform(0.1, 0.5)
    form = np.clip(0.5 + 0.5 * progress + 0.03 * rng.normal(size=steps), 0, 1)
    schedule = rng.choice(["constant", "linear", "warm-up"])
    rate = np.full(steps, 1e-6)
    if schedule == "linear":
        rate = 1e-6 * (1 - time / (steps - 1))
    elif schedule == "warm-up":
        rate = 1e-6 * np.minimum(1.0, time / 10)
    return {
        "reward": reward,
        "rewards/format/mean": form,
        "rewards/answer/mean": np.clip((reward - mixing * form * 0.2) / (1 - 0.2 * mixing), 0, 1),
        "reward_std": np.where(zero_std >= 1, 0.0, group_spread * np.clip(1 - zero_std, 0, 1)),
        "frac_reward_zero_std": zero_std,
        "entropy": entropy,
        "kl": kl,
        "loss": 0.01 * rng.normal(size=steps),
        "grad_norm": norm,
        "learning_rate": rate,
        "completions/mean_length": length,
        "completions/min_length": np.floor(length * 0.3),
        "completions/max_length": np.ceil(length * 2.2),
        "completions/clipped_ratio": clipped,
        "val/reward": np.clip(truth * rng.uniform(0.85, 1.0) + rng.uniform(0.01, 0.05) * rng.normal(size=steps), 0, 1),
    }


# ---- sick curves: each changes a healthy run in place from its onset on -------------------------------------------


def since(curves: Curves, onset: int) -> np.ndarray:
    """Steps since the onset, 0 before."""
    return np.maximum(0, np.arange(len(curves["reward"])) - onset)


def nan_gradient(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """The gradient is NaN once; every later number is ruined, while the loss may be logged as 0."""
    curves["grad_norm"][onset:] = np.nan if rng.random() < 0.8 else np.inf
    curves["loss"][onset + 1 :] = 0.0 if rng.random() < 0.5 else np.nan
    curves["entropy"][onset + 1 :] = np.nan
    curves["reward"][onset + 1 :] = 0.0


def nan_reward(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """A reward function returns NaN; the trainer either poisons the step or counts it."""
    if rng.random() < 0.5:
        curves["rlstab/grpo/rewards_nan"] = np.zeros(len(curves["reward"]))
        curves["rlstab/grpo/rewards_nan"][onset] = rng.integers(1, 4)
        return
    curves["reward"][onset:] = np.nan if rng.random() < 0.7 else np.inf
    curves["loss"][onset:] = np.nan
    curves["grad_norm"][onset:] = np.nan


def gradient_spike(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """One step's norm is far above the usual, some more follow, and the run may derail."""
    norm = curves["grad_norm"]
    usual = float(np.median(norm[max(0, onset - 20) : onset]))
    for at in range(onset, len(norm)):
        if at == onset or rng.random() < 0.06:
            norm[at] = max(8.0, usual * rng.uniform(10, 800))
    if rng.random() < 0.5:
        curves["reward"][onset + 3 :] *= rng.uniform(0.1, 0.6)


def gradient_drift(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """The norm grows by some percent per step and ends high."""
    growth = np.exp(np.log(rng.uniform(1.03, 1.09)) * since(curves, onset))
    norm = np.maximum(curves["grad_norm"], 0.2)
    curves["grad_norm"] = np.minimum(norm * growth, norm * 300)


def _fade(curves: Curves, onset: int, half_life: float) -> np.ndarray:
    return 0.5 ** (since(curves, onset) / half_life)


def entropy_collapse(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """Entropy halves again and again, outputs become one, the reward stays where it was."""
    fade = _fade(curves, onset, rng.uniform(5, 18))
    stuck = curves["reward"][max(0, onset - 15) : onset].mean()
    later = since(curves, onset) > 0
    curves["entropy"] = np.maximum(curves["entropy"] * fade, 0.004)
    noise = 0.03 * rng.normal(size=len(fade))
    curves["reward"] = np.where(
        later, np.clip(min(stuck, 0.8) * rng.uniform(0.85, 1.0) + noise, 0, 1), curves["reward"]
    )
    curves["frac_reward_zero_std"] = np.where(
        later, np.clip(1 - fade * (1 - curves["frac_reward_zero_std"]), 0, 0.97), curves["frac_reward_zero_std"]
    )
    curves["val/reward"] = np.where(later, np.clip(stuck * 0.95 + noise, 0, 1), curves["val/reward"])


def _kl_burst(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    passed = since(curves, onset)
    factor = np.exp(np.log(10) * passed / rng.uniform(15, 35))
    before = max(0.01, float(np.median(curves["kl"][max(0, onset - 10) : onset])))
    rising = np.minimum(before * factor, rng.uniform(1.0, 8.0)) * np.exp(0.1 * rng.normal(size=len(passed)))
    curves["kl"] = np.where(passed > 0, rising, curves["kl"])


def over_optimised(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """KL rises, reward falls, entropy falls."""
    _kl_burst(rng, curves, onset)
    fade = _fade(curves, onset, rng.uniform(12, 25))
    floor = rng.uniform(0.1, 0.5)
    curves["reward"] = curves["reward"] * (floor + (1 - floor) * fade)
    curves["val/reward"] = curves["val/reward"] * (floor + (1 - floor) * fade)
    curves["entropy"] = np.maximum(curves["entropy"] * _fade(curves, onset, rng.uniform(10, 25)), 0.01)


def reward_hacking(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """KL rises, the format reward rises, the answer falls; the total falls or stands; entropy holds."""
    _kl_burst(rng, curves, onset)
    fade = _fade(curves, onset, rng.uniform(10, 25))
    floor = rng.uniform(0.05, 0.4)
    curves["rewards/answer/mean"] = curves["rewards/answer/mean"] * (floor + (1 - floor) * fade)
    curves["rewards/format/mean"] = 1 - (1 - curves["rewards/format/mean"] * 0.7) * fade
    if rng.random() < 0.7:
        curves["reward"] = curves["reward"] * (floor + (1 - floor) * fade)
    curves["val/reward"] = curves["val/reward"] * (floor + (1 - floor) * fade)


def held_out_gap(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """The training reward goes on rising, the held-out score falls."""
    passed = since(curves, onset)
    for name in ("reward", "val/reward"):  # leave room above
        curves[name] *= 0.7
    best = float(curves["reward"][max(0, onset - 15) : onset].mean())
    gain = (min(1.0, best + rng.uniform(0.15, 0.35)) - best) * (1 - np.exp(-passed / rng.uniform(10, 40)))
    noise = 0.02 * rng.normal(size=len(passed))
    curves["reward"] = np.where(passed > 0, np.clip(best + gain + noise, 0, 1), curves["reward"])
    fade = _fade(curves, onset, rng.uniform(10, 40))
    floor = rng.uniform(0.2, 0.6)
    curves["val/reward"] = np.where(
        passed > 0, best * 0.95 * (floor + (1 - floor) * fade) + noise, curves["val/reward"]
    )


def no_signal(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """No group has any spread; the gradient is 0, or only what a KL term leaves."""
    later = since(curves, onset) > 0
    level = 0.0 if rng.random() < 0.8 else 0.5
    curves["reward"] = np.where(later, level, curves["reward"])
    curves["reward_std"] = np.where(later, 0.0, curves["reward_std"])
    curves["frac_reward_zero_std"] = np.where(later, 1.0, curves["frac_reward_zero_std"])
    curves["grad_norm"] = np.where(
        later, 0.0 if rng.random() < 0.5 else curves["grad_norm"] * 0.02, curves["grad_norm"]
    )


def frozen(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """The gradient is exactly 0 although rewards have spread."""
    del rng
    curves["grad_norm"][onset:] = 0.0
    for name in ("reward", "entropy", "kl"):
        mean = float(np.mean(curves[name][max(0, onset - 10) : onset]))
        curves[name][onset:] = mean * (1 + 0.03 * np.sin(np.arange(len(curves[name]) - onset)))


def all_truncated(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """Completions run into the limit, all of them, and score nothing."""
    passed = since(curves, onset)
    share = np.clip(passed / rng.uniform(1, 10), 0, 1)
    curves["completions/clipped_ratio"] = np.maximum(curves["completions/clipped_ratio"] * (1 - share), share)
    longest = curves["completions/max_length"].max()
    curves["completions/mean_length"] = curves["completions/mean_length"] * (1 - share) + longest * share
    curves["reward"] = curves["reward"] * (1 - share * rng.uniform(0.7, 1.0))
    flat = np.where(share >= 1, rng.choice([1.0, 0.9]), 0.0)
    curves["frac_reward_zero_std"] = np.maximum(curves["frac_reward_zero_std"], flat)


def restart_death(rng: np.random.Generator, curves: Curves, onset: int) -> None:
    """Dies of a NaN or a spike; the restart happens in ``readings_of``, and the second life dies the same way."""
    nan_gradient(rng, curves, onset)


SICK: dict[str, Callable[[np.random.Generator, Curves, int], None]] = {
    one.__name__: one
    for one in (
        nan_gradient,
        nan_reward,
        gradient_spike,
        gradient_drift,
        entropy_collapse,
        over_optimised,
        reward_hacking,
        held_out_gap,
        no_signal,
        frozen,
        all_truncated,
        restart_death,
    )
}


# ---- runs --------------------------------------------------------------------------------------------------------


def readings_of(
    curves: Curves, *, every: int, evaluate_every: int, first: int = 0, end: int | None = None
) -> list[Reading]:
    """The curves as a trainer would log them."""
    found = []
    for at in range(first, end or len(curves["reward"]), every):
        values = {name: float(curve[at]) for name, curve in curves.items() if name != "val/reward"}
        if at % evaluate_every == 0:
            values["val/reward"] = float(curves["val/reward"][at])
        found.append(Reading(at, values))
    return found


def synthetic_run(cause: str | None, seed: int) -> LabelledRun:
    """One labelled run; equal seeds give equal runs."""
    kinds = [None, *SICK]
    rng = np.random.default_rng([kinds.index(cause), seed])
    steps = int(rng.integers(200, 400))
    curves = healthy(rng, steps)
    evaluate_every = int(rng.choice([5, 10, 10, 20]))
    dropped = [name for name in ("kl", "val/reward", "frac_reward_zero_std") if rng.random() < 0.15]
    onset = int(rng.integers(40, steps - 120)) if cause else -1
    run = LabelledRun(f"{cause or 'healthy'}-{seed}", (cause,) if cause else (), onset)
    before = {name: curve.copy() for name, curve in curves.items()}
    if cause:
        SICK[cause](rng, curves, onset)
        needed = {
            "over_optimised": ("kl",),
            "reward_hacking": ("kl",),
            "held_out_gap": ("val/reward",),
        }.get(cause, ())
        dropped = [name for name in dropped if name not in needed]
    for name in dropped:
        if name != "val/reward":
            del curves[name]
    evaluations = 10**9 if "val/reward" in dropped else evaluate_every
    if cause != "restart_death":
        run.lives = [readings_of(curves, every=1, evaluate_every=evaluations)]
        return run
    back = max(0, onset - int(rng.integers(5, 30)))
    run.lives = [readings_of(curves, every=1, evaluate_every=evaluations, end=onset + 3)]
    again = {name: curve for name, curve in before.items() if name in curves}
    second = onset + int(rng.integers(-3, 15))
    nan_gradient(rng, again, second)
    run.lives.append(readings_of(again, every=1, evaluate_every=10**9, first=back, end=second + 3))
    run.onset = second  # the label is about the second death
    return run


@dataclass
class Outcome:
    """What the monitor said about one run."""

    run: LabelledRun
    first_cause: str | None
    alarms: list[tuple[str, int]]

    @property
    def is_right(self) -> bool:
        """Whether a sick run's first cause is one of the right ones, or a healthy run is silent."""
        return self.first_cause in self.run.causes if self.run.causes else not self.alarms

    @property
    def delay(self) -> int | None:
        """Steps from the onset to the first alarm at or after it."""
        later = [at for _, at in self.alarms if at >= self.run.onset]
        return min(later) - self.run.onset if later else None


def watch(run: LabelledRun) -> Outcome:
    """Feed one run to the live monitor, reading by reading."""
    config, state = MonitorConfig(), MonitorState()
    alarms: list[tuple[str, int]] = []
    for number, life in enumerate(run.lives):
        if number:
            has_died = any(cause in state.findings for cause in HARD_CAUSES)
            state = restarted(state, at_step=life[0].step, has_died=has_died)
            alarms.clear()
        for reading in life:
            state, fresh = step(config, state, reading)
            alarms += [(finding.cause, reading.step) for finding in fresh if finding.is_alarm]
    order = [finding for finding in ranked(state.findings.values()) if finding.is_alarm]
    return Outcome(run, order[0].cause if order else None, alarms)


def real_runs(folder: Path, half: str) -> Iterator[LabelledRun]:
    """Runs on disk (see ``diagnosis_runs.py``): what our monitor took in, or what TRL wrote."""
    for label_file in sorted(folder.glob("*/label.json")):
        label = json.loads(label_file.read_text())
        if (label["seed"] % 2 == 0) != (half == "tune"):
            continue
        recorded = label_file.parent / READINGS_FILE
        lives = recorded_lives(recorded) if recorded.exists() else logged_lives(label_file.parent)
        yield LabelledRun(label_file.parent.name, tuple(label["causes"]), label["onset"], lives, label["source"])


def recorded_lives(file: Path) -> list[list[Reading]]:
    """Every reading that a live monitor judged, from start to start."""
    lives: list[list[Reading]] = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if "life" in row:
            lives.append([])
        else:
            lives[-1].append(Reading(row["step"], {name: float(value) for name, value in row["values"].items()}))
    return lives


def logged_lives(folder: Path) -> list[list[Reading]]:
    """A run's own logs, step by step, as the report reads them."""
    run = read_run(folder)
    parts = [Run(run.path, canonical_series(life.series)) for life in run.lives]
    return [list(part.readings(filter(is_watched, part.series))) for part in parts]


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """The bars' figures."""
    well = [one for one in outcomes if not one.run.causes]
    sick = [one for one in outcomes if one.run.causes]
    delays = [one.delay for one in sick if one.delay is not None]
    at_once = [one for one in sick if set(one.run.causes) <= NON_FINITE]
    return {
        "healthy_runs": len(well),
        "sick_runs": len(sick),
        "right_cause_first": sum(one.is_right for one in sick) / max(1, len(sick)),
        "false_alarm_runs": sum(bool(one.alarms) for one in well) / max(1, len(well)),
        "alarms_before_onset": sum(any(at < one.run.onset for _, at in one.alarms) for one in sick),
        "median_delay_steps": statistics.median(delays) if delays else float("nan"),
        "missed": sum(not one.alarms for one in sick),
        "non_finite_runs": len(at_once),
        "non_finite_named_in_the_step": sum(one.is_right and one.delay == 0 for one in at_once),
    }


def main() -> None:
    """Print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    parser.add_argument("--half", choices=["tune", "held_out"], default="held_out")
    parser.add_argument(
        "--per-kind", type=int, default=20, help="sick runs per kind; twelve times as many healthy ones"
    )
    parser.add_argument("--runs", type=Path, help="folder of labelled real runs")
    parser.add_argument("--verbose", action="store_true", help="print every wrong run")
    options = parser.parse_args()
    per_kind = 2 if options.quick else options.per_kind
    well = len(SICK) * per_kind
    offset = 0 if options.half == "tune" else 1
    runs = [synthetic_run(None, 2 * seed + offset) for seed in range(well)]
    runs += [synthetic_run(cause, 2 * seed + offset) for cause in SICK for seed in range(per_kind)]
    outcomes = [watch(run) for run in runs]
    if options.runs:
        outcomes += [watch(run) for run in real_runs(options.runs, options.half)]
    wrong: Counter[str] = Counter()
    for one in outcomes:
        is_right = one.is_right and all(at >= one.run.onset for _, at in one.alarms)
        wrong[f"{one.run.source} {one.run.kind}"] += not is_right
        if options.verbose and not is_right:
            print(f"{one.run.name} onset {one.run.onset}: first {one.first_cause}, alarms {one.alarms}")
    print("wrong runs per kind:", {kind: count for kind, count in wrong.items() if count})
    by_source = {
        source: figures([one for one in outcomes if one.run.source == source])
        for source in dict.fromkeys(one.run.source for one in outcomes)
    }
    for source, part in by_source.items():
        print(f"{source}: {json.dumps(part)}")
    measured = figures(outcomes)
    is_ok = (
        measured["right_cause_first"] >= 0.95
        and measured["false_alarm_runs"] <= 0.03
        and measured["alarms_before_onset"] == 0
        and measured["median_delay_steps"] <= 25
        and measured["non_finite_named_in_the_step"] == measured["non_finite_runs"]
    )
    bar = "right cause first >= 0.95, false alarms <= 0.03, none before the onset, median delay <= 25, NaN at once"
    result = {"name": "diagnosis", "value": measured["right_cause_first"], "bar": bar, "ok": bool(is_ok), **measured}
    print(json.dumps({**result, "half": options.half, "sources": by_source}))


if __name__ == "__main__":
    main()
