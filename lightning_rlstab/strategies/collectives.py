"""The few collectives the strategies need; with one process each of them is the identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Collectives", "Reduction"]

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Collectives:
    """Reductions and gathers over all processes of a run.

    Attributes:
        world_size: Number of processes; 1 never touches ``torch.distributed``.
        device: Where tensors must lie to be reduced.
    """

    world_size: int
    device: torch.device

    def reduced(self, value: Tensor, op: Reduction) -> Tensor:
        """``value`` reduced elementwise over all ranks; the input is left alone.

        Args:
            value: The same shape and dtype on every rank.
            op: ``"sum"``, ``"max"`` or ``"min"``.

        Returns:
            The same tensor on every rank.
        """
        if self.world_size == 1:
            return value
        result = value.to(self.device, copy=True)
        dist.all_reduce(result, op=_operation(op))
        return result

    def reduce_packed(self, values: Mapping[str, Tensor | float], op: Reduction) -> dict[str, Tensor]:
        """Scalar readings reduced over all ranks in one collective, without waiting for the device.

        Args:
            values: The same names in the same order on every rank; scalars.
            op: ``"sum"``, ``"max"`` or ``"min"``, for all of them.

        Returns:
            float64 scalars on the run's device, views of one tensor.

        Example:
            >>> alone = Collectives(world_size=1, device=torch.device("cpu"))
            >>> alone.reduce_packed({"tokens": 3}, "sum")["tokens"].item()
            3.0
        """
        if not values:
            return {}
        scalars = [
            torch.as_tensor(value, device=self.device).detach().double().reshape(()) for value in values.values()
        ]
        packed = self.reduced(torch.stack(scalars), op)
        return dict(zip(values, packed.unbind(), strict=True))

    def gathered_tensors(self, value: Tensor) -> list[Tensor]:
        """``value`` of every rank in rank order; shapes and dtypes must be equal."""
        if self.world_size == 1:
            return [value]
        value = value.detach().to(self.device).contiguous()
        rows = [torch.empty_like(value) for _ in range(self.world_size)]
        dist.all_gather(rows, value)
        return rows

    def gathered_objects(self, value: Any) -> list[Any]:
        """A picklable object of every rank in rank order; for rare, small things such as words and generator states."""
        if self.world_size == 1:
            return [value]
        rows: list[Any] = [None] * self.world_size
        dist.all_gather_object(rows, value)
        return rows


def _operation(op: Reduction) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
