"""A small module with dropout, a Trainer without files, and guards that do as they are told."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_rlstab.control.protocols import Vote

LIGHTNING_WARNINGS = (
    "ignore:.*LeafSpec.*:FutureWarning",  # lightning 2.6 with torch 2.13
    "ignore:.*does not have many workers.*",
    "ignore:.*The number of training batches.*",
)


def pytest_configure(config):
    for line in LIGHTNING_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


class SmallModule(pl.LightningModule):
    """Next-token-like regression whose loss is undone by Lightning's division, as in ``GRPOModule``."""

    def __init__(self, *, lr=0.1, optimizer="adamw", dropout=0.0, step_size=None):

        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
        self.lr, self.kind, self.step_size = lr, optimizer, step_size
        self.losses: list[float] = []
        self.poison: dict[int, float] = {}
        self.seen = 0

    def micro_loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.micro_loss(batch[0])
        self.losses.append(float(loss.detach()))
        if self.seen in self.poison:
            loss = loss * self.poison[self.seen]
        self.seen += 1
        return loss * self.trainer.accumulate_grad_batches

    def configure_optimizers(self):
        if self.kind == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if self.step_size is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Voter(pl.Callback):
    """Votes by attempt number and remembers what it saw."""

    def __init__(self, plan: dict[int, Vote] | None = None):
        self.plan = plan or {}
        self.attempt = 0
        self.norms = []
        self.verdicts = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(trainer.strategy.gradient_norms())
        if self.attempt in self.plan:
            trainer.strategy.vote(self.plan[self.attempt])
        self.attempt += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.verdicts.append(trainer.strategy.last_verdict)


class Dropper(pl.Callback):
    """Asks for staging and drops the micro-batches of the given running numbers."""

    def __init__(self, drop: set[int] = frozenset(), *, is_needed: bool = True):
        self.drop, self.is_needed = set(drop), is_needed
        self.norms = []

    def is_staging_needed(self, trainer):
        return self.is_needed

    def on_micro_batch_gradient(self, trainer, pl_module, norms):
        self.norms.append(norms)
        return len(self.norms) - 1 not in self.drop


def batches(count: int, rows: int = 6, seed: int = 0) -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(count * rows, 4, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=rows)


@pytest.fixture
def small():
    """Builds a seeded module."""

    def build(**options):
        torch.manual_seed(7)
        return SmallModule(**options)

    return build


@pytest.fixture
def voter():
    return Voter


@pytest.fixture
def dropper():
    return Dropper


@pytest.fixture
def fit(tmp_path):
    """Fits and returns the Trainer."""

    def run(module, *, strategy, micro_batches=4, callbacks=(), ckpt_path=None, loader=None, **flags):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            callbacks=list(callbacks),
            max_epochs=flags.pop("max_epochs", 1),
            logger=flags.pop("logger", False),
            enable_checkpointing=flags.pop("enable_checkpointing", False),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **flags,
        )
        trainer.fit(module, loader or batches(micro_batches), ckpt_path=ckpt_path)
        return trainer

    return run
