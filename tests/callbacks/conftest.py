"""A small GRPO run on a real Trainer, with its curves, its event lines and its per-step metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.report.events import read_events
from lightning_rlstab.strategies import RLStabSingleDevice

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(24)]


def distinct_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


class Watch(pl.Callback):
    """Remembers the weights and the loss after every batch."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in pl_module.policy.parameters()]))
        self.losses.append(float(outputs["loss"]) if outputs else float("nan"))


@dataclass
class Run:
    """What a finished run left behind."""

    trainer: pl.Trainer
    module: GRPOModule
    watch: Watch
    folder: Path
    _curves: dict[str, list[tuple[int, float]]] | None = field(default=None, repr=False)

    @property
    def weights(self) -> torch.Tensor:
        return self.watch.weights[-1]

    def events(self, kind: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        found = read_events(self.folder / "events.jsonl")
        return [
            event
            for event in found
            if (kind is None or event["event"] == kind) and all(event.get(k) == v for k, v in fields.items())
        ]

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if self._curves is None:
            reader = EventAccumulator(str(self.folder))
            reader.Reload()
            self._curves = {t: [(e.step, e.value) for e in reader.Scalars(t)] for t in reader.Tags()["scalars"]}
        return self._curves


@pytest.fixture
def grpo_module(tiny_policy: Callable[..., Any], byte_tokenizer: Any) -> Callable[..., GRPOModule]:
    def build(**changes: Any) -> GRPOModule:
        settings = {
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "reward_funcs": [distinct_letters],
            "processing_class": byte_tokenizer,
            "model": tiny_policy(),
        }
        return GRPOModule(**{**settings, **changes})

    return build


@pytest.fixture
def grpo_run(grpo_module: Callable[..., GRPOModule], tmp_path: Path) -> Callable[..., Run]:
    """``grpo_run(*callbacks, max_steps=4, settings={...}, **trainer_flags)``."""

    def run(*callbacks: pl.Callback, settings: dict[str, Any] | None = None, **flags: Any) -> Run:
        ckpt_path, rows = flags.pop("ckpt_path", None), flags.pop("rows", ROWS)
        watch, module = Watch(), flags.pop("module", None) or grpo_module(**(settings or {}))
        options: dict[str, Any] = {
            "max_steps": 4,
            "accelerator": "cpu",
            "strategy": RLStabSingleDevice(),
            "log_every_n_steps": 1,
            "logger": TensorBoardLogger(tmp_path, name=None),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "inference_mode": False,
            "callbacks": [*callbacks, watch],
        }
        trainer = pl.Trainer(**{**options, **flags})
        trainer.fit(module, PromptDataModule(rows), ckpt_path=ckpt_path)
        return Run(trainer, module, watch, Path(trainer.log_dir or trainer.default_root_dir))

    return run
