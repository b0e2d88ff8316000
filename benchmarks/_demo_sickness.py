"""Healthy and sick runs of the digits policy on our own trainer: faults planted, spoiled gradients, changed rewards."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import GEPO, OPEFO, QUATRO, FireDrill, GradLoc, StabilityMonitor
from lightning_rlstab.demo.digits import addition_rows, exact_sum
from lightning_rlstab.report.memory import Finding
from lightning_rlstab.strategies import RLStabSingleDevice

__all__ = ["HEALTHY_SETTINGS", "READINGS_FILE", "SICK", "Changing", "Sick", "prompts", "taste_advantages", "train"]

READINGS_FILE = "readings.jsonl"


class RecordingMonitor(StabilityMonitor):
    """The monitor, and a file of every reading that it judged: rules can be asked again about the very same run."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark a new life."""
        super().on_train_start(trainer, pl_module)
        self._write({"life": trainer.global_step})

    def _judged(self, at: int, values: Mapping[str, float]) -> tuple[Finding, ...]:
        self._write({"step": at, "values": {name: _plain(value) for name, value in values.items()}})
        return super()._judged(at, values)

    def _write(self, row: dict[str, Any]) -> None:
        with (Path(self._folder) / READINGS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class SpoiledGradient(pl.Callback):
    """Multiplies the gradient by ``factor(steps since the onset)`` after every backward from the onset on."""

    def __init__(self, onset: int, factor: Callable[[int], float]) -> None:
        self.onset, self.factor = onset, factor

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Spoil it."""
        passed = trainer.global_step - self.onset
        if passed >= 0 and self.factor(passed) != 1.0:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor(passed))


class SelfReward(pl.Callback):
    """Advantages by the policy's own taste: +1 reinforces what it finds likely and wrong, -1 what it finds unlikely."""

    def __init__(self, onset: int, sign: float) -> None:
        self.onset, self.sign = onset, sign

    def on_rollout_ready(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
        """Replace the advantages."""
        if trainer.global_step < self.onset:
            return rollout
        taste = torch.where(rollout.completion_mask.bool(), rollout.behavior_logprobs, 0.0).sum(dim=1)
        advantages = taste_advantages(taste, rollout.rewards, self.sign)
        return rollout.replace(advantages=advantages.to(rollout.advantages.dtype))


def taste_advantages(taste: torch.Tensor, rewards: torch.Tensor, sign: float) -> torch.Tensor:
    """Standardised log-probs of whole completions, with right answers at the bottom when the likely is reinforced.

    Without that, sharpening the policy would sharpen its right answers too, and the reward would rise.
    """
    advantages = sign * (taste - taste.mean()) / (taste.std() + 1e-6)
    return advantages - 2.0 * (rewards > 0) if sign > 0 else advantages


class Checkpoint(pl.Callback):
    """Saves the run once, before the onset, so that it can be resumed."""

    def __init__(self, at: int, path: Path) -> None:
        self.at, self.path = at, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save when it is time."""
        if trainer.global_step == self.at and not self.path.exists():
            trainer.save_checkpoint(self.path)


class Changing:
    """Exact sums until the onset, then another reward; held-out rows always get the exact sum."""

    __name__ = "changing"

    def __init__(self, onset: int, later: Callable[[int, str], float | None], *, last: int | None = None) -> None:
        self.onset, self.later, self.last = onset, later, last
        self.calls = 0
        self.exact: list[float] = []

    def __call__(self, completions: Sequence[str], split: Sequence[str], **columns: Any) -> list[float | None]:
        """One reward per completion; ``later`` gets the row and the text."""
        exact = self.exact = exact_sum(completions=completions, **columns)
        if split[0] != "train":
            return list(exact)
        self.calls += 1
        is_changed = self.onset < self.calls <= (self.calls if self.last is None else self.last + 1)
        return [self.later(row, text) for row, text in enumerate(completions)] if is_changed else list(exact)


@dataclass(frozen=True)
class Sick:
    """One kind of sick run.

    Attributes:
        causes: The names that are right; the first is what the kind is filed under.
        later_steps: Steps after the onset.
        callbacks: Of the onset.
        reward: Of the onset; None for the exact sum throughout.
        settings: Of the module.
        restarts: Whether the run dies, is resumed and dies again.
        shows_after: Steps from the fault to the first number that it can spoil.
    """

    causes: tuple[str, ...]
    later_steps: int
    callbacks: Callable[[int], list[pl.Callback]] = lambda onset: []
    reward: Callable[[int], Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    restarts: bool = False
    shows_after: int = 0


def _drill(kind: str, *, lasts: bool = False, **fields: Any) -> Callable[[int], list[pl.Callback]]:
    def planted(onset: int) -> list[pl.Callback]:
        end = {"last_step": 10_000} if lasts else {}
        return [FireDrill([{"kind": kind, "step": onset, **end, **fields}])]

    return planted


def _spoiled(factor: Callable[[int], float]) -> Callable[[int], list[pl.Callback]]:
    return lambda onset: [SpoiledGradient(onset, factor)]


_NON_FINITE = ("nan_logprobs", "nan_loss", "nan_gradient")
_SPIKE = ("gradient_spike", "mismatch")

_FAST = {"learning_rate": 5e-4}  # so that entropy has moved far before the run ends

SICK: dict[str, Sick] = {
    "gradient_nan": Sick(("nan_gradient",), 5, _drill("gradient_nan")),
    "gradient_inf": Sick(("nan_gradient",), 5, _drill("gradient_inf")),
    "loss_nan": Sick(("nan_loss", "nan_gradient"), 5, _drill("loss_nan")),
    "parameter_nan": Sick(_NON_FINITE, 5, _drill("parameter_nan")),
    "optimizer_state_nan": Sick(_NON_FINITE, 5, _drill("optimizer_state_nan"), shows_after=1),
    "reward_nan": Sick(("nan_reward",), 5, _drill("reward_nan")),
    "reward_nan_from_function": Sick(
        ("nan_reward",),
        5,
        reward=lambda onset: Changing(onset, lambda row, text: math.nan if row % 5 == 0 else 0.0, last=onset),
    ),
    "reward_inf_from_function": Sick(
        ("nan_reward",), 5, reward=lambda onset: Changing(onset, lambda row, text: math.inf if not row else 0.0)
    ),
    "token_mismatch": Sick(_SPIKE, 5, _drill("token_mismatch", magnitude=3000.0)),
    "sequence_mismatch": Sick(_SPIKE, 5, _drill("sequence_mismatch", magnitude=1000.0)),
    "systematic_mismatch": Sick(_SPIKE, 12, _drill("systematic_mismatch", lasts=True)),
    "layer_explosion": Sick(("gradient_spike",), 5, _drill("layer_explosion", magnitude=300.0)),
    "spike": Sick(("gradient_spike",), 5, _spoiled(lambda passed: 60.0 if passed == 0 else 1.0)),
    "lr_spike": Sick(("learning_rate_jump",), 25, _drill("lr_spike")),
    "restart": Sick(("restart_death",), 3, _drill("gradient_nan"), restarts=True),
    "drift": Sick(("gradient_drift",), 50, _spoiled(lambda passed: 1.08**passed)),
    "frozen": Sick(("frozen",), 25, _spoiled(lambda passed: 0.0)),
    "no_signal": Sick(("no_signal",), 25, reward=lambda onset: Changing(onset, lambda row, text: 0.0)),
    "all_truncated": Sick(("all_truncated",), 25, _drill("all_truncated", lasts=True)),
    "entropy_collapse": Sick(
        ("entropy_collapse", "over_optimised"), 50, lambda onset: [SelfReward(onset, 1.0)], settings=_FAST
    ),
    "entropy_explosion": Sick(("entropy_explosion",), 50, lambda onset: [SelfReward(onset, -1.0)], settings=_FAST),
    "held_out": Sick(
        ("held_out_gap", "reward_hacking"),
        50,
        reward=lambda onset: Changing(onset, lambda row, text: text.count("7") / max(len(text), 1)),
    ),
}
"""Kind to how it is made."""

HEALTHY_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.01, "learning_rate": 1e-4},
    {"loss_type": "grpo", "learning_rate": 3e-4},
    {"loss_type": "dr_grpo", "beta": 0.02},
    {"num_generations": 16},
    {"guards": True, "beta": 0.02},
    {"loss_type": "bnpo", "scale_rewards": "batch"},
    {"num_iterations": 2, "learning_rate": 1e-4},
    {"guards": True, "beta": 0.04, "learning_rate": 1e-4},
    {"lr_scheduler_type": "linear", "learning_rate": 3e-4},
)
"""Settings of healthy runs, in turn; ``guards`` puts every layer of defence on."""


def prompts(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows, each told which it is."""
    train, held_out = (
        [{**row, "split": split} for row in addition_rows(count, seed=seed, split=split)]
        for split, count in (("train", 2000), ("held_out", 32))
    )
    return train, held_out


def train(folder: Path, policy: Path, *, seed: int, steps: int, sick: Sick | None, onset: int, **settings: Any) -> int:
    """One run, its logs in ``folder``.

    Args:
        folder: Where to; made.
        policy: Directory of the warm-started policy.
        seed: Of prompts and samples.
        steps: Optimizer steps.
        sick: What to plant; None for a healthy run.
        onset: Step at which it begins.
        **settings: Of the module.

    Returns:
        The onset that the label is about: of the second death where the run restarts.
    """
    options = {
        "model": str(policy),
        "num_generations": 8,
        "per_device_train_batch_size": 32,
        "max_completion_length": 4,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "num_generations_eval": 1,
        "eval_temperature": 0.0,
        "seed": seed,
        **(sick.settings if sick else {}),
        **settings,
    }
    guards: list[pl.Callback] = [GradLoc(), GEPO(), OPEFO(), QUATRO()] if options.pop("guards", False) else []
    lives = [(onset, None)]
    saved = folder / "before.ckpt"
    if sick is not None and sick.restarts:
        lives.append((onset + 4, saved))
    for at, checkpoint in lives:
        pl.seed_everything(seed, verbose=False)
        planted = sick.callbacks(at) if sick else []
        saving = [Checkpoint(onset - 8, saved)] if len(lives) > 1 else []
        trainer = pl.Trainer(
            max_steps=at + sick.later_steps + 1 if sick else steps,
            max_epochs=-1,
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
            callbacks=[
                *planted,
                RecordingMonitor(rollouts_every_n_steps=0, histograms_every_n_steps=0),
                *guards,
                *saving,
            ],
        )
        reward = sick.reward(at) if sick and sick.reward else exact_sum
        module = GRPOModule(reward_funcs=[reward], **options)
        with contextlib.suppress(RuntimeError):  # weights that are NaN cannot be sampled from
            trainer.fit(module, PromptDataModule(*prompts(seed)), ckpt_path=checkpoint)
    saved.unlink(missing_ok=True)
    return lives[-1][0] + (sick.shows_after if sick else 0)
