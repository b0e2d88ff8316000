"""What GEPO, OPEFO and QUATRO ask of a run: events, scalars, sums over ranks, per-rank memories, local pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_rlstab.control.interventions import DroppedGradientHook
from lightning_rlstab.control.protocols import GradientNorms
from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.report.events import EventLog

__all__ = ["RunContext", "parameters_of", "switched", "tell_dropped"]

Settings = TypeVar("Settings")

_MOST_MICRO_BATCHES_UNLOGGED = 50


def switched(name: str, value: Any, kind: type[Settings]) -> Settings | None:
    """The settings of a mechanism, or None for off.

    Args:
        name: The argument as the user wrote it.
        value: A record of ``kind``, True for its defaults, False or None for off.
        kind: The record's class.

    Raises:
        ValueError: For anything else.

    Example:
        >>> switched("replay", False, dict) is None
        True
    """
    if value is None or value is False:
        return None
    if value is True:
        return kind()
    if not isinstance(value, kind):
        raise refusal(name, f"be a {kind.__name__}, true or false", value)
    return value


class RunContext:
    """One run as seen from a callback; make it in ``on_train_start``, on every rank.

    Args:
        trainer: The Trainer of the run.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.folder = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: on every rank
        self._events = EventLog(self.folder / "events.jsonl")
        self._ranks = Ranks(trainer)
        self.replicas, self.replica = self._ranks.replicas, self._ranks.replica

    def event(self, kind: str, *, at: int | None = None, **fields: Any) -> None:
        """Write an event line, on rank 0 only.

        Args:
            kind: One of ``EVENT_KINDS``.
            at: The step it belongs to; None for the Trainer's own count.
            **fields: Plain data.
        """
        if self._trainer.is_global_zero:
            self._events.write(kind, step=self._trainer.global_step if at is None else at, **fields)

    @property
    def is_log_due(self) -> bool:
        """Whether scalars are written after this step: by the Trainer's interval, at least every 50 micro-batches."""
        accumulation = self._trainer.accumulate_grad_batches
        asked = int(self._trainer.log_every_n_steps)  # type: ignore[attr-defined]
        interval = min(asked, max(_MOST_MICRO_BATCHES_UNLOGGED // accumulation, 1))
        return interval > 0 and self._trainer.global_step % interval == 0

    def log(self, values: Mapping[str, float]) -> None:
        """Write scalars now; for ``on_train_batch_end``, where ``global_step`` has already moved on."""
        for logger in self._trainer.loggers:
            logger.log_metrics(dict(values), step=max(self._trainer.global_step - 1, 0))

    def gathered(self, value: Tensor) -> Tensor:
        """``value`` of every replica, stacked in a new first dimension; shapes must be equal on all ranks."""
        if self._trainer.world_size > 1:
            value = value.to(self._trainer.strategy.root_device)
        return self._ranks.over_replicas(value)

    def summed(self, value: Tensor) -> Tensor:
        """Sum over replicas, in one collective."""
        return self.gathered(value).sum(0)

    def reduced(self, value: Tensor) -> Tensor:
        """Elementwise sum over all ranks, in one collective."""
        if self._trainer.world_size == 1:
            return value
        total = self._trainer.strategy.reduce(value, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total

    def agreed(self, is_fine: bool) -> bool:
        """Whether something holds on all ranks."""
        if self._trainer.world_size == 1:
            return is_fine
        return bool(self._trainer.strategy.reduce_boolean_decision(is_fine, all=True))

    def per_rank(self, state: Any) -> list[Any]:
        """A memory of plain types and tensors of every rank, in rank order, the same list on all ranks."""
        return self._ranks.gathered_objects(state)


def parameters_of(trainer: pl.Trainer) -> list[torch.nn.Parameter]:
    """The optimizers' trainable parameters in a fixed order; sharded ones where the strategy shards."""
    groups: Iterable[Any] = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]


def tell_dropped(trainer: pl.Trainer, pl_module: pl.LightningModule, norms: GradientNorms) -> None:
    """Tell whoever keeps skipped gradients that ``.grad`` holds one right now; on all ranks.

    Args:
        trainer: The Trainer.
        pl_module: The module.
        norms: Norms of that gradient.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, DroppedGradientHook):
            callback.on_gradient_dropped(trainer, pl_module, norms)
