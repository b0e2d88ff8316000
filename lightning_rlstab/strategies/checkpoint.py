"""What the strategies add to a checkpoint, and reading a folder of shards where nothing is sharded."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_rlstab.control.generators import generator_states, restore_generators
from lightning_rlstab.strategies.collectives import Collectives
from lightning_rlstab.strategies.optimizer_state import by_position, parameter_order

__all__ = ["METADATA", "CheckpointMixin", "is_sharded", "joined_shards"]

_log = logging.getLogger(__name__)

_KEY = "rlstab_step_gate"
METADATA = "meta.pt"
"""Where Lightning's ``ModelParallelStrategy`` keeps everything that is no shard."""


class CheckpointMixin(Strategy):
    """Saves the gate's counters and every rank's generators; needs the gate's and the probe's attributes."""

    reads_shards = False
    """Whether the strategy reads each rank's own part of a folder of shards."""

    applied_steps: int
    skipped_steps: int
    _saved_generators: Mapping[str, Any] | None = None
    _is_within_epoch = False
    _is_under_way = False

    @property
    def collectives(self) -> Collectives:
        """Reductions and gathers over all processes of the run."""
        raise AssertionError("the gate provides it")

    def captured_rng(self) -> dict[str, Tensor]:
        """States of torch's generators."""
        raise AssertionError("the probe provides it")

    def restore_rng(self, states: Mapping[str, Tensor]) -> None:
        """Put torch's generators back."""
        raise AssertionError("the probe provides it")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save with the gate's counters and the generator states of every rank; called on all ranks."""
        assert self.lightning_module is not None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        checkpoint[_KEY] = {
            "is_within_epoch": progress.current.ready > 0 and not progress.is_last_batch,
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "generators": self.collectives.gathered_objects(generator_states(self.captured_rng())),
        }
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load, and at the start of a fit take over the gate's counters and this rank's generator states.

        A rollback within a run leaves both alone: the counters tell what this run did, and the same random numbers
        after the same weights would lead to the same end.

        With another number of processes than at the save, the streams of random numbers have no owner any more; the run
        goes on with the generators it has.
        """
        path = Path(str(checkpoint_path))
        if is_sharded(path) and not self.reads_shards:
            checkpoint = joined_shards(path, weights_only=weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        record = checkpoint.get(_KEY)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if record is None or trainer.state.fn != TrainerFn.FITTING or self._is_under_way:
            return checkpoint
        self.applied_steps, self.skipped_steps = record["applied_steps"], record["skipped_steps"]
        self._is_within_epoch = record["is_within_epoch"]
        saved, world_size = record["generators"], self.collectives.world_size
        if len(saved) == world_size:
            self._saved_generators = saved[getattr(self, "global_rank", 0)]
        else:
            _log.info("Saved by %d processes, resumed by %d: random generators start afresh.", len(saved), world_size)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state that names its parameters (from shards) or counts them."""
        assert self.lightning_module is not None
        states = [
            by_position(state, parameter_order(self.lightning_module, optimizer))
            for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def process_dataloader(self, dataloader: object) -> object:
        """Continue the streams of a run saved between two epochs: the next thing to draw is the new data iterator."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training and not self._is_within_epoch:
            self._continue_streams()
        return super().process_dataloader(dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Continue the streams of a run saved within an epoch: making the data iterator anew has drawn from them."""
        super().on_train_batch_start(batch, batch_idx)
        self._is_under_way = True
        self._continue_streams()

    def on_train_end(self) -> None:
        """A later fit may resume again."""
        super().on_train_end()
        self._is_under_way = False

    def _continue_streams(self) -> None:
        saved, self._saved_generators = self._saved_generators, None
        if saved is not None:
            self.restore_rng(saved["torch"])
            restore_generators(saved)


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint is a folder of shards."""
    return path.is_dir() and (path / METADATA).is_file()


def joined_shards(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """A folder of shards as the one-file checkpoint that Lightning expects, whole tensors on the CPU.

    Reads every shard on this process, whatever the number of processes that wrote them; needs as much free space in the
    temporary folder as the checkpoint takes.

    Args:
        path: The folder.
        weights_only: For ``torch.load``.

    Returns:
        The checkpoint; its optimizer states name their parameters.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoint: dict[str, Any] = torch.load(path / METADATA, map_location="cpu", weights_only=weights_only)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(path, whole)
        shards = torch.load(whole, map_location="cpu", weights_only=True)
    optimizers = sorted(name for name in shards if name.startswith("optimizer_"))
    return {
        **checkpoint,
        "state_dict": shards["state_dict"],
        "optimizer_states": [shards[name] for name in optimizers],
    }
