"""Folders of shards written in the background: one copy to the CPU, then training goes on while a thread writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save

from lightning_rlstab.control.snapshots import cloned_to_cpu

__all__ = ["BackgroundShards"]


class BackgroundShards:
    """Begins to write a checkpoint's shards and hands out what waits for them; one at a time, on all ranks.

    The ranks agree on what is written while training goes on, so they do it through a process group of their own, on
    the CPU: collectives of two threads on one group would meet each other.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def begin(self, shards: dict[str, Any], rest: dict[str, Any], folder: Path, rest_file: str | None) -> Finish:
        """Copy shards and the rest to the CPU and begin to write; called on all ranks.

        Args:
            shards: State dicts of sharded tensors.
            rest: Everything else of the checkpoint.
            folder: Where to write; made if missing.
            rest_file: Name in the folder for the rest, on the rank that writes it; None on the others.

        Returns:
            To be called once on every rank, from any thread: returns when this rank's part is on disk, on the rank of
            ``rest_file`` everything. Raises OSError if any rank could not write.
        """
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        copied = None if rest_file is None else cloned_to_cpu(rest)
        writing = async_save(shards, checkpoint_id=folder, process_group=self._group)
        assert isinstance(writing, Future)

        def finish() -> None:
            try:
                writing.result()
            except CheckpointException as error:  # derives from BaseException in torch 2.13
                raise OSError(f"the shards in {folder} could not be written: {error}") from error
            if rest_file is not None:
                torch.save(copied, folder / rest_file)

        return finish


Finish = Callable[[], None]
