"""Gathering over ranks through the Trainer's strategy, so that only strategies touch ``torch.distributed``."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Ranks"]


class Ranks:
    """What one rank may ask of all ranks; without a Trainer there is one rank.

    Args:
        trainer: The Trainer, or None outside of a run.
    """

    def __init__(self, trainer: Any | None) -> None:
        self._strategy = None if trainer is None else trainer.strategy
        self._world_size = 1 if trainer is None else int(trainer.world_size)
        sampling = getattr(self._strategy, "distributed_sampler_kwargs", None)
        self._replicas = int(sampling["num_replicas"]) if sampling else 1
        self._replica = int(sampling["rank"]) if sampling else 0

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas: ranks of one tensor-parallel group count once."""
        return self._replicas

    @property
    def replica(self) -> int:
        """Index of this rank's data-parallel replica."""
        return self._replica

    def gathered(self, value: Tensor) -> Tensor:
        """``value`` of every rank, stacked in a new first dimension; shapes must be equal on all ranks."""
        if self._world_size == 1 or self._strategy is None:
            return value.unsqueeze(0)
        gathered: Tensor = self._strategy.all_gather(value)
        return gathered.reshape(self._world_size, *value.shape)

    def over_replicas(self, value: Tensor) -> Tensor:
        """``value`` of every replica, stacked in a new first dimension; shapes must be equal on all ranks."""
        return self.gathered(value)[:: self._world_size // self._replicas]

    def gathered_rows(self, value: Tensor) -> Tensor:
        """Rows of every replica concatenated in replica order; row counts must be equal on all ranks."""
        return self.over_replicas(value).flatten(0, 1)

    def summed(self, value: Tensor) -> Tensor:
        """Sum over replicas."""
        return self.over_replicas(value).sum(0)

    def merged(self, readings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Readings of all replicas merged by the last word of their names, in one collective.

        ``*_min`` and ``*_max`` take the extreme, everything else adds up.

        Args:
            readings: Scalar tensors; the same names in the same order on every rank.

        Returns:
            float64 scalars on the CPU, so that one transfer serves all of them.
        """
        names = list(readings)
        if not names:
            return {}
        packed = torch.stack([readings[name].detach().double().reshape(()) for name in names])
        table = self.over_replicas(packed).cpu()
        return {name: _merge(name, table[:, column]) for column, name in enumerate(names)}

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run a block that may fail on some ranks only, such as a reward call, and make every rank fail with it.

        A rank that raised alone would leave the others waiting in their next collective until it times out.

        Raises:
            RuntimeError: On the ranks where the block itself did not fail, naming those where it did.
        """
        if self._world_size == 1 or self._strategy is None:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:  # every kind: it is raised again below, after the others have been told
            failure = error
        has_failed = self.gathered(torch.tensor(failure is not None, device=self._strategy.root_device))
        if failure is not None:
            raise failure
        if bool(has_failed.any()):
            failed = has_failed.nonzero().flatten().tolist()
            raise RuntimeError(f"Stopped together with rank {', '.join(map(str, failed))}; the cause is in its output.")

    def gathered_objects(self, value: Any) -> list[Any]:
        """A picklable object of every rank, as bytes through two tensor gathers; plain types and tensors only.

        Raises:
            pickle.UnpicklingError: If an object holds anything but plain types and tensors.
        """
        if self._world_size == 1 or self._strategy is None:
            return [value]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        device = self._strategy.root_device
        payload = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)
        sizes = self.gathered(torch.tensor(payload.numel(), device=device)).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: payload.numel()] = payload
        rows = self.gathered(padded).cpu()
        return [
            torch.load(io.BytesIO(row[:size].numpy().tobytes()), weights_only=True)
            for row, size in zip(rows, sizes, strict=True)
        ]


def _merge(name: str, column: Tensor) -> Tensor:
    if name.endswith("_min"):
        return column.min()
    if name.endswith("_max"):
        return column.max()
    return column.sum()
