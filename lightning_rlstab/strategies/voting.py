"""The last callback of the loop: when every other callback has voted, it asks the strategy for the verdict."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

__all__ = ["VerdictCallback"]


class VerdictCallback(pl.Callback):
    """Calls the gate after the last ``on_before_optimizer_step`` and logs its counters after the step.

    Lightning has no hook of the strategy between the callbacks' look at the gradient and clipping; a callback at the
    end of the list is one. The strategy adds it at set-up and takes it away at tear-down; it has no state of its own.
    """

    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self._is_reported = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the strategy merge the votes; it leaves the step by an exception when the step is withheld."""
        self._is_reported = False
        self._gate.decide()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the counters of the optimizer step that ended with this batch."""
        if self._is_reported:
            return
        self._is_reported = True
        counts = {
            "rlstab/strategy/applied_steps": float(self._gate.applied_steps),
            "rlstab/strategy/skipped_steps": float(self._gate.skipped_steps),
        }
        pl_module.log_dict(counts, on_step=True, on_epoch=False, batch_size=1)


def attach(trainer: pl.Trainer, gate: Any) -> None:
    """Put the callback last, once."""
    detach(trainer)
    trainer.callbacks.append(VerdictCallback(gate))  # type: ignore[attr-defined]


def detach(trainer: pl.Trainer) -> None:
    """Take the callback away."""
    trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, VerdictCallback)]  # type: ignore[attr-defined]
