"""Make labelled real runs of the digits policy, healthy and sick, for ``diagnosis.py --runs``.

Each run trains a warm-started policy (``python -m lightning_rlstab.demo`` makes one) with the monitor attached and
leaves a ``label.json`` beside its logs. Sick runs are made sick at a known step: a gradient spoiled, a reward function
that changes its mind, advantages that ignore it.

Run: ``python benchmarks/diagnosis_runs.py --policy DIR --out DIR [--steps 90] [--healthy 12] [--seeds 1]``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import FireDrill, StabilityMonitor
from lightning_rlstab.demo.digits import addition_rows, exact_sum
from lightning_rlstab.strategies import RLStabSingleDevice

ONSET = 45


class Sickness(pl.Callback):
    """Calls ``spoil(trainer, module)`` after every backward from the onset on."""

    def __init__(self, spoil: Callable[[pl.Trainer, Any], None]) -> None:
        self.spoil = spoil

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Spoil the gradient or the settings."""
        if trainer.global_step >= ONSET:
            self.spoil(trainer, pl_module)


def scaled(factor: Callable[[int], float]) -> Sickness:
    """Gradients times ``factor(steps since the onset)``."""

    def spoil(trainer: pl.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor(trainer.global_step - ONSET))

    return Sickness(spoil)


class SelfReward(pl.Callback):
    """Advantages by the policy's own taste: +1 reinforces what it finds likely, -1 what it finds unlikely."""

    def __init__(self, sign: float) -> None:
        self.sign = sign

    def on_rollout_ready(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
        """Replace the advantages."""
        if trainer.global_step < ONSET:
            return rollout
        taste = torch.where(rollout.completion_mask, rollout.behavior_logprobs, 0.0).sum(dim=1)
        advantages = self.sign * (taste - taste.mean()) / (taste.std() + 1e-6)
        return rollout.replace(advantages=advantages.to(rollout.advantages.dtype))


def drill(kind: str, **fields: Any) -> FireDrill:
    """One planted fault at the onset."""
    return FireDrill([{"kind": kind, "step": ONSET, **fields}])


class Changing:
    """Exact sums until the onset, then another reward; held-out rows always get the exact sum."""

    __name__ = "changing"

    def __init__(self, later: Callable[[str], float | None]) -> None:
        self.later = later
        self.calls = 0

    def __call__(self, completions: Sequence[str], split: Sequence[str], **columns: Any) -> list[float | None]:
        """One reward per completion."""
        exact = exact_sum(completions=completions, **columns)
        if split[0] != "train":
            return list(exact)
        self.calls += 1
        return list(exact) if self.calls <= ONSET else [self.later(text) for text in completions]


def sick_runs() -> dict[str, tuple[tuple[str, ...], list[pl.Callback], Any]]:
    """Name to accepted causes, callbacks and reward function."""
    return {
        "gradient_nan": (("nan_gradient",), [drill("gradient_nan")], exact_sum),
        "gradient_inf": (("nan_gradient",), [drill("gradient_inf")], exact_sum),
        "loss_nan": (("nan_loss", "nan_gradient"), [drill("loss_nan")], exact_sum),
        "reward_nan": (("nan_reward",), [], Changing(lambda text: math.nan if text.startswith("1") else 0.0)),
        "token_mismatch": (("gradient_spike", "mismatch"), [drill("token_mismatch", magnitude=3000)], exact_sum),
        "sequence_mismatch": (("gradient_spike", "mismatch"), [drill("sequence_mismatch", magnitude=1000)], exact_sum),
        "spike": (("gradient_spike",), [scaled(lambda passed: 60.0 if passed == 0 else 1.0)], exact_sum),
        "drift": (("gradient_drift",), [scaled(lambda passed: 1.08**passed)], exact_sum),
        "frozen": (("frozen",), [scaled(lambda passed: 0.0)], exact_sum),
        "no_signal": (("no_signal",), [], Changing(lambda text: 0.0)),
        "entropy_collapse": (("entropy_collapse", "over_optimised"), [SelfReward(1.0)], exact_sum),
        "entropy_explosion": (("entropy_explosion",), [SelfReward(-1.0)], exact_sum),
        "held_out": (("held_out_gap",), [], Changing(lambda text: text.count("7") / max(len(text), 1))),
    }


def train(
    folder: Path, policy: Path, *, seed: int, steps: int, callbacks: list[pl.Callback], reward: Any, **settings: Any
) -> None:
    """One run, its logs in ``folder``."""
    pl.seed_everything(seed, verbose=False)
    rows = {
        split: [{**row, "split": split} for row in addition_rows(count, seed=seed, split=split)]
        for split, count in (("train", 2000), ("held_out", 64))
    }
    options = {
        "model": str(policy),
        "reward_funcs": [reward],
        "num_generations": 8,
        "per_device_train_batch_size": 64,
        "max_completion_length": 4,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "num_generations_eval": 1,
        "eval_temperature": 0.0,
        "beta": 0.01,
        "seed": seed,
        **settings,
    }
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        strategy=RLStabSingleDevice(),
        logger=TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=1,
        val_check_interval=5,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[*callbacks, StabilityMonitor(rollouts_every_n_steps=0, histograms_every_n_steps=0)],
    )
    trainer.fit(GRPOModule(**options), PromptDataModule(rows["train"], rows["held_out"]))


def main() -> None:
    """Make the runs that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--healthy", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1, help="sick runs per kind")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    planned: list[tuple[str, int, tuple[str, ...], dict[str, Any]]] = []
    for seed in range(options.healthy):
        rate, loss = (5e-5, 1e-4, 2e-4, 3e-4)[seed % 4], ("dapo", "grpo", "dr_grpo")[seed % 3]
        planned.append((f"healthy-{seed}", seed, (), {"learning_rate": rate, "loss_type": loss}))
    for seed in range(options.seeds):
        planned += [(f"{name}-{seed}", 100 + seed, causes, {}) for name, (causes, _, _) in sick_runs().items()]
    for name, seed, causes, settings in planned:
        folder = options.out / name
        if (folder / "label.json").exists():
            continue
        _, callbacks, reward = sick_runs()[name.rpartition("-")[0]] if causes else ((), [], exact_sum)
        began = time.perf_counter()
        train(folder, options.policy, seed=seed, steps=options.steps, callbacks=callbacks, reward=reward, **settings)
        label = {"causes": list(causes), "onset": ONSET if causes else -1}
        (folder / "label.json").write_text(json.dumps(label))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
