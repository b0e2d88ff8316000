"""Healthy and sick runs of the digits policy on TRL's GRPOTrainer, which writes its logs as its users know them.

Half of the runs are read from the TensorBoard files of TRL's own callback, half from ``trainer_state.json``. A fault
planted in the step that TRL logs as ``onset`` is in the row of that number.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _demo_sickness import Changing, prompts, taste_advantages
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from lightning_rlstab.demo.digits import exact_sum

__all__ = ["HEALTHY_SETTINGS", "SICK", "Sick", "train"]


class SickTrainer(GRPOTrainer):
    """TRL's trainer with the advantages of a policy that rewards itself from the onset on."""

    onset = 10**9
    sign = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if self.model.training and self.sign and self.state.global_step + 1 >= self.onset:
            self.model.eval()
            ids = self.model(
                input_ids=_joined(made, "prompt_ids", "completion_ids"),
                attention_mask=_joined(made, "prompt_mask", "completion_mask"),
            ).logits.detach()
            self.model.train()
            width = made["completion_ids"].shape[1]
            logprobs = ids[:, -width - 1 : -1].log_softmax(-1)
            taken = logprobs.gather(-1, made["completion_ids"].unsqueeze(-1)).squeeze(-1)
            taste = (taken * made["completion_mask"]).sum(1)
            (reward,) = self.reward_funcs
            made["advantages"] = taste_advantages(taste, torch.tensor(reward.exact), self.sign)
        return made


def _joined(made: Any, *names: str) -> Any:
    return torch.cat([made[name] for name in names], dim=1)


class Planted(TrainerCallback):
    """Multiplies every gradient by ``factor(steps since the onset)``, and ends the run where asked."""

    def __init__(self, onset: int, factor: Callable[[int], float] | None, last: int) -> None:
        self.onset, self.factor, self.last = onset, factor, last
        self.step = 0

    def hook(self, gradient: Any) -> Any:
        """Of one parameter."""
        passed = self.step - self.onset
        return gradient if self.factor is None or passed < 0 else gradient * self.factor(passed)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step by the number it will be logged under."""
        self.step = state.global_step + 1

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop."""
        if state.global_step >= self.last:
            control.should_training_stop = True


class Shorten(TrainerCallback):
    """Lowers the length limit at the onset, so that everything is cut off."""

    def __init__(self, onset: int) -> None:
        self.onset = onset
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Lower it."""
        if state.global_step + 1 >= self.onset:
            self.trainer.generation_config.max_new_tokens = 1


@dataclass(frozen=True)
class Sick:
    """One kind of sick run.

    Attributes:
        causes: The names that are right; the first is what the kind is filed under.
        later_steps: Steps after the onset.
        factor: Of the gradient, by steps since the onset.
        reward: Of the onset; None for the exact sum.
        sign: Of the policy's own taste as advantage; 0 for none.
        learning_rate: Of the run.
        is_shortened: Whether the length limit falls to one token.
        restarts: Whether the run dies, is resumed from a checkpoint and dies again.
    """

    causes: tuple[str, ...]
    later_steps: int
    factor: Callable[[int], float] | None = None
    reward: Callable[[int], Any] | None = None
    sign: float = 0.0
    learning_rate: float = 2e-4
    is_shortened: bool = False
    restarts: bool = False


def _once(value: float) -> Callable[[int], float]:
    return lambda passed: value if passed == 0 else 1.0


def _shortcut(row: int, text: str) -> float:
    return text.count("7") / max(len(text), 1)


def _unchanged(onset: int) -> Any:
    return Changing(10**9, _shortcut)


SICK: dict[str, Sick] = {
    "gradient_nan": Sick(("nan_gradient",), 3, _once(math.nan)),
    "gradient_inf": Sick(("nan_gradient",), 3, _once(math.inf)),
    "reward_inf": Sick(
        ("nan_reward",), 4, reward=lambda onset: Changing(onset - 1, lambda row, text: math.inf if not row else 0.0)
    ),
    "reward_all_nan": Sick(
        ("nan_reward",), 4, reward=lambda onset: Changing(onset - 1, lambda row, text: math.nan, last=onset - 1)
    ),
    "reward_outlier": Sick(
        ("reward_outlier",),
        12,
        reward=lambda onset: Changing(onset - 1, lambda row, text: 0.0 if row else 1e3, last=onset - 1),
    ),
    "spike": Sick(("gradient_spike",), 4, _once(60.0)),
    "restart": Sick(("restart_death",), 2, _once(math.nan), restarts=True),
    "drift": Sick(("gradient_drift",), 50, lambda passed: 1.08**passed),
    "frozen": Sick(("frozen",), 25, lambda passed: 0.0),
    "no_signal": Sick(("no_signal",), 25, reward=lambda onset: Changing(onset - 1, lambda row, text: 0.0)),
    "all_truncated": Sick(("all_truncated",), 25, is_shortened=True),
    "entropy_collapse": Sick(
        ("entropy_collapse", "over_optimised"), 50, None, _unchanged, sign=1.0, learning_rate=5e-4
    ),
    "entropy_explosion": Sick(("entropy_explosion",), 50, None, _unchanged, sign=-1.0, learning_rate=5e-4),
    "held_out": Sick(("held_out_gap", "reward_hacking"), 50, reward=lambda onset: Changing(onset - 1, _shortcut)),
}
"""Kind to how it is made."""

HEALTHY_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.01, "learning_rate": 1e-4},
    {"loss_type": "grpo", "learning_rate": 3e-4},
    {"loss_type": "dr_grpo", "beta": 0.02},
    {"num_generations": 16},
    {"loss_type": "bnpo", "scale_rewards": "batch"},
    {"num_iterations": 2, "learning_rate": 1e-4},
    {"lr_scheduler_type": "linear", "learning_rate": 3e-4},
    {"beta": 0.04, "entropy_coef": 0.01},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16},
)
"""Settings of healthy runs, in turn."""


def train(
    folder: Path,
    models: tuple[Any, Any],
    *,
    seed: int,
    steps: int,
    sick: Sick | None,
    onset: int,
    is_state_file: bool,
    **settings: Any,
) -> int:
    """One run, its logs in ``folder``.

    Args:
        folder: Where to; made.
        models: The warm-started policy, left alone, and its tokenizer.
        seed: Of prompts and samples.
        steps: Optimizer steps.
        sick: What to plant; None for a healthy run.
        onset: Logged step at which it begins.
        is_state_file: Leave ``trainer_state.json``, else TensorBoard files.
        **settings: Of ``GRPOConfig``.

    Returns:
        The onset that the label is about: of the second death where the run restarts.
    """
    lives: list[tuple[int, str | None]] = [(onset, None)]
    if sick is not None and sick.restarts:
        lives.append((onset + 4, str(folder / f"checkpoint-{onset - 8}")))
    for at, checkpoint in lives:
        last = at + sick.later_steps if sick else steps
        options = {
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none" if is_state_file else "tensorboard",
            "save_strategy": "steps" if len(lives) > 1 else "no",
            "save_steps": onset - 8,
            "logging_steps": 1,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "num_generations": 8,
            "num_generations_eval": 8,
            "per_device_train_batch_size": 32,
            "per_device_eval_batch_size": 32,
            "max_completion_length": 4,
            "learning_rate": sick.learning_rate if sick else 2e-4,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "eval_strategy": "steps",
            "eval_steps": 5,
            "max_steps": 10**4 if sick else steps,
            "seed": seed,
            **settings,
        }
        planted = Planted(at, sick.factor if sick else None, last)
        callbacks: list[Any] = [planted]
        if sick is not None and sick.is_shortened:
            callbacks.append(Shorten(at))
        rows, held_out = prompts(seed)
        trainer = SickTrainer(
            model=copy.deepcopy(models[0]),
            reward_funcs=sick.reward(at) if sick and sick.reward else exact_sum,
            args=GRPOConfig(**options),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(held_out),
            processing_class=models[1],
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        for callback in callbacks:
            if isinstance(callback, Shorten):
                callback.trainer = trainer
        if sick is not None:
            trainer.onset, trainer.sign = at, sick.sign
            for parameter in trainer.model.parameters():
                parameter.register_hook(planted.hook)
        with contextlib.suppress(RuntimeError):  # weights that are NaN cannot be sampled from
            trainer.train(resume_from_checkpoint=checkpoint)
        if is_state_file:
            trainer.save_state()
    for rest in folder.glob("checkpoint-*"):
        shutil.rmtree(rest)
    return lives[-1][0]
