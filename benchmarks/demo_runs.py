"""Seeded runs of the demo's policy for benchmarks: warm-started once, then trained with any callbacks."""

from __future__ import annotations

import copy
import logging
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.demo.digits import addition_rows, exact_sum
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, greedy_accuracy, warm_start
from lightning_rlstab.report.events import read_events
from lightning_rlstab.strategies import RLStabSingleDevice

__all__ = ["DemoRun", "demo_run", "warm_policy"]

HELD_OUT = 512


@dataclass
class DemoRun:
    """What a finished run left behind."""

    accuracy: float
    seconds: float
    trainer: pl.Trainer
    module: GRPOModule
    step_seconds: list[float]
    entropies: list[float]
    lines: list[dict[str, Any]]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's event lines of one kind."""
        return [event for event in self.lines if event["event"] == kind]


class Clock(pl.Callback):
    """Seconds from batch to batch and the entropy of every step; put it last."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.entropies: list[float] = []
        self._last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Read the clock."""
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self._last = now
        entropy = trainer.callback_metrics.get("entropy")
        self.entropies.append(float("nan") if entropy is None else float(entropy))


def quiet() -> None:
    """Leave the output to the benchmark."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_rlstab"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def warm_policy(seed: int = 0) -> tuple[Any, Any]:
    """A policy that adds without carrying, and its tokenizer."""
    tokenizer = digit_tokenizer()
    policy = digit_policy(tokenizer, seed=seed)
    warm_start(policy, tokenizer, seed=seed)
    return policy, tokenizer


def demo_run(
    policy: Any,
    tokenizer: Any,
    *callbacks: pl.Callback,
    seed: int = 0,
    steps: int = 60,
    batch: int = 64,
    **settings: Any,
) -> DemoRun:
    """Train a copy of the policy.

    Args:
        policy: The warm-started policy; left alone.
        tokenizer: Its tokenizer.
        *callbacks: In the Trainer's order.
        seed: Of prompts and samples.
        steps: Optimizer steps.
        batch: Completions per step.
        **settings: Of the module.
    """
    defaults: dict[str, Any] = {
        "num_generations": 8,
        "per_device_train_batch_size": batch,
        "max_completion_length": 4,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "seed": seed,
    }
    module = GRPOModule(copy.deepcopy(policy), [exact_sum], processing_class=tokenizer, **{**defaults, **settings})
    clock = Clock()
    pl.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            strategy=RLStabSingleDevice(),
            callbacks=[*callbacks, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            inference_mode=False,
            default_root_dir=folder,
            log_every_n_steps=1,
        )
        began = time.perf_counter()
        trainer.fit(module, PromptDataModule(addition_rows(seed=seed), seed=seed))
        seconds = time.perf_counter() - began
        accuracy = greedy_accuracy(module.policy, tokenizer, addition_rows(HELD_OUT, split="held_out"))
        lines = read_events(Path(folder) / "events.jsonl")
        return DemoRun(accuracy, seconds, trainer, module, clock.step_seconds, clock.entropies, lines)
