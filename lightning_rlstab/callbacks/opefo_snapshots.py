"""OPEFO's way back: snapshots of a healthy run, and putting one back into a run that has gone bad."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from lightning_rlstab.callbacks.run_context import RunContext, parameters_of
from lightning_rlstab.control.interventions import BackgroundSaver, Rewindable
from lightning_rlstab.control.opefo import SnapshotConfig
from lightning_rlstab.control.parameters import local
from lightning_rlstab.control.snapshots import (
    SNAPSHOTS,
    SnapshotWriter,
    cloned_to_cpu,
    publish,
    snapshot_name,
    snapshots_in,
)

__all__ = ["SnapshotKeeper", "are_finite", "optimizer_tensors", "weight_versions", "weights_are_finite"]

_log = logging.getLogger(__name__)

_UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError)


class _CapturingIO(CheckpointIO):
    """Takes a checkpoint over instead of writing it: one copy on the CPU, so that training can go on."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Copy the checkpoint."""
        self.taken = cloned_to_cpu(checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """Not what this is for."""
        raise AssertionError("only saves")

    def remove_checkpoint(self, path: Any) -> None:
        """Not what this is for."""
        raise AssertionError("only saves")


class SnapshotKeeper:
    """Takes snapshots and restores the newest readable one that this run has taken.

    A snapshot is an ordinary checkpoint of the Trainer, so ``fit(ckpt_path=...)`` resumes from it. The state is copied
    and written in the background: as one file where one process holds it whole; under ``rlstab_fsdp`` as every rank's
    shards, in a folder that gets its name when all are on disk. Another sharded strategy writes in the foreground.

    Args:
        config: The settings.
        trainer: The Trainer.
        run: The run.
    """

    def __init__(self, config: SnapshotConfig, trainer: pl.Trainer, run: RunContext) -> None:
        self._trainer = trainer
        self._run = run
        self._config = config
        self.folder = Path(config.folder) if config.folder is not None else run.folder / SNAPSHOTS
        self._writer = SnapshotWriter(self.folder, keep=config.keep)
        self._own: list[Path] = []

    def set_later_aside(self) -> None:
        """Rename snapshots of a later step than the run's own: another run left them, and they would look newest."""
        if not self._trainer.is_global_zero:
            return
        for path in snapshots_in(self.folder):
            if path.name > snapshot_name(self._trainer.global_step):
                path.rename(path.with_name(path.name + ".superseded"))
                _log.warning("OPEFO: %s is of a later step than this run and was renamed *.superseded.", path)

    def take(self) -> Path:
        """Take a snapshot now; called on all ranks. Waits for one copy of the state, and for the one before."""
        trainer = self._trainer
        target = self.folder / snapshot_name(trainer.global_step)
        partial = target.with_name(target.name + ".partial")
        strategy, taken = trainer.strategy, _CapturingIO()
        self._writer.wait()
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
        usual = strategy.checkpoint_io
        strategy.checkpoint_io = taken
        save = functools.partial(trainer.save_checkpoint, partial, weights_only=False)
        finish: Callable[[], None] | None = None
        try:
            if isinstance(strategy, BackgroundSaver):
                finish = strategy.saved_in_background(save)
            else:
                save()
        finally:
            strategy.checkpoint_io = usual
        if finish is not None:
            self._writer.write_shards(finish, trainer.global_step, is_publishing=trainer.is_global_zero)
        elif trainer.is_global_zero:
            if taken.taken is not None:
                self._writer.write(taken.taken, trainer.global_step)
            else:
                publish(partial, target)
                self._writer.discard_old()
        earlier = [path for path in self._own if path != target]
        self._own = [*earlier, target][-self._config.keep :]
        return target

    def finish(self) -> None:
        """Wait for the snapshot that is being written."""
        self._writer.wait()

    def restore(self, pl_module: pl.LightningModule, *, besides: pl.Callback) -> Path | None:
        """Put weights, optimizers, schedules and memories of callbacks back; called on all ranks.

        Lightning's own progress (``global_step``, the place in the data) goes on: the batches of the lost steps are not
        read again.

        Args:
            pl_module: The module.
            besides: A callback whose memory stays as it is.

        Returns:
            The snapshot, or None when there is no readable one.
        """
        self._writer.wait()
        self._trainer.strategy.barrier("rlstab.rollback")
        for path in reversed(self._own):
            checkpoint = self._loaded(path)
            if checkpoint is None:
                _log.warning("OPEFO: the snapshot %s cannot be read and is passed over.", path)
                continue
            self._put_back(checkpoint, pl_module, besides)
            return path
        return None

    def _loaded(self, path: Path) -> dict[str, Any] | None:
        checkpoint: dict[str, Any] | None
        try:
            checkpoint = self._trainer.strategy.load_checkpoint(path)
        except _UNREADABLE as error:
            _log.warning("OPEFO: %s: %s", path, error)
            checkpoint = None
        return checkpoint if self._run.agreed(checkpoint is not None) else None

    def _put_back(self, checkpoint: Mapping[str, Any], pl_module: pl.LightningModule, besides: pl.Callback) -> None:
        trainer = self._trainer
        trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
        if "optimizer_states" in checkpoint:  # else they were shards, and reading them has put them back
            trainer.strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = checkpoint["callbacks"].get(callback.state_key)
            if callback is not besides and state and isinstance(callback, Rewindable):
                callback.rewind(trainer, pl_module, state)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry of every tensor is finite; one pass and one wait for the device.

    A sum carries NaN and infinities on; it is formed in float32 or better, where finite weights cannot overflow it.
    """
    with torch.no_grad():
        sums = [local(t).sum(dtype=torch.float32) for t in tensors if t.is_floating_point()]
        if not sums:
            return True
        devices = {total.device for total in sums}
        if len(devices) > 1:  # "step" counts lie on the CPU beside moments on a GPU
            sums = [total.to(max(devices, key=lambda device: device.type == "cuda")) for total in sums]
        return bool(torch.stack(sums).isfinite().all())


def optimizer_tensors(trainer: pl.Trainer) -> list[Tensor]:
    """Every tensor in the states of the optimizers."""
    states = (state for optimizer in trainer.optimizers for state in optimizer.state.values())
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def weight_versions(trainer: pl.Trainer) -> int:
    """A number that changes whenever something writes to a trainable weight in place; no look at the values."""
    # Of the local pieces: a sharded tensor does not count what is written to its piece.
    return sum(local(parameter)._version for parameter in parameters_of(trainer))


def weights_are_finite(trainer: pl.Trainer) -> bool:
    """Whether this rank's pieces of the trainable weights are finite."""
    return are_finite(parameters_of(trainer))
