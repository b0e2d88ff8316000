"""Data parallel with whole weights on every rank, with the step gate."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_rlstab.strategies.gate import StepGateMixin

__all__ = ["RLStabDDP"]


class RLStabDDP(StepGateMixin, DDPStrategy):
    """``Trainer(strategy="rlstab_ddp")``: Lightning's DDP strategy with the step gate, staging and probes.

    Without a guard that asks for staging, micro-batches that do not step are not reduced, as in Lightning. With one,
    each micro-batch is reduced on its own, because its global gradient does not exist otherwise: that costs one
    all-reduce of the gradient per micro-batch, overlapped with backward as usual.

    Takes :class:`~lightning.pytorch.strategies.DDPStrategy`'s options and those of
    :class:`~lightning_rlstab.strategies.gate.StepGateMixin`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staging.has_shared_storage = bool(kwargs.get("gradient_as_bucket_view", False))

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave a micro-batch that does not step unreduced, unless its own gradient was asked for."""
        self.open_window()
        if self._staging.is_on:
            yield
            return
        with super().block_backward_sync():
            yield

    def backward_of(self, loss: Tensor) -> None:
        """Backward past DDP's hooks, then one mean over the ranks of what it added; see the base class."""
        parameters = self.trainable_parameters()
        with self.stashed_gradients():
            # DDP reduces only after a forward through its own wrapper; a probe's forward does not take that way.
            loss.backward()  # type: ignore[no-untyped-call]
            own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        for kind in sorted({gradient.dtype for gradient in own.values()}, key=str):
            rows = {name: gradient for name, gradient in own.items() if gradient.dtype == kind}
            packed = torch.cat([gradient.flatten() for gradient in rows.values()])
            mean = self.collectives.reduced(packed, "sum") / self.collectives.world_size
            pieces = torch.split(mean, [gradient.numel() for gradient in rows.values()])
            for name, piece in zip(rows, pieces, strict=True):
                grad = parameters[name].grad
                added = piece.view_as(parameters[name])
                parameters[name].grad = added if grad is None else grad.add_(added)
