"""Each micro-batch's own gradient, looked at before it joins the window's sum.

While one micro-batch runs backward, the sum of the earlier ones lies aside and every ``.grad`` starts from nothing, so
what backward leaves there is this micro-batch's own gradient, reduced over the ranks. Its norms are launched at once
but read only when the next micro-batch is about to run backward (or at the end of the window): by then they have
arrived, so looking costs no wait for the device. At any time there are at most two gradients, the sum and the newest:
one more than without staging.

Adding happens in the order in which plain accumulation adds, so keeping every micro-batch gives the same bits on one
device and under FSDP2. Under DDP it is the mean of each instead of the mean of the sum, equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_rlstab.control.parameters import local
from lightning_rlstab.control.protocols import GradientNorms
from lightning_rlstab.strategies.norms import PendingNorms

__all__ = ["MicroBatchStaging", "Survivors"]

Survivors = Literal["keep", "rescale"]
"""What happens to the other micro-batches when some are dropped; see :class:`MicroBatchStaging`."""

Judge = Callable[[int, GradientNorms], bool]


class MicroBatchStaging:
    """The window's sum of kept micro-batches, and the newest one while it waits for its verdict.

    A window is open from its first micro-batch until the optimizer step that ends it.

    Args:
        survivors: ``"keep"`` leaves the others as they are: a dropped micro-batch contributes nothing, and the step is
            smaller. ``"rescale"`` multiplies their sum by window / survivors, so that the step keeps its size and only
            its noise grows. Keep is the default: the loss has its normaliser folded in, and a guard that drops a
            spike should not make the remaining signal louder.
        has_shared_storage: Whether ``.grad`` lies in a buffer that the next backward overwrites (DDP's
            ``gradient_as_bucket_view``), so that setting it aside must copy.
    """

    def __init__(self, survivors: Survivors = "keep", *, has_shared_storage: bool = False) -> None:
        self.survivors: Survivors = survivors
        self.has_shared_storage = has_shared_storage
        self.is_open = False
        self.is_on = False
        self.micro_batches = 0
        self.dropped: list[int] = []
        self.newest: GradientNorms | None = None
        self.has_non_finite_dropped = False
        self._sum: dict[str, Tensor] = {}
        self._pending: PendingNorms | None = None

    def open_window(self, *, is_on: bool) -> None:
        """Forget the last window; stage the coming one when some guard asked for it."""
        self.is_open = True
        self.is_on = is_on
        self.micro_batches = 0
        self.dropped = []
        self.newest = None
        self.has_non_finite_dropped = False
        self._sum = {}
        self._pending = None

    @property
    def is_all_dropped(self) -> bool:
        """Whether nothing is left of the window."""
        return self.micro_batches > 0 and len(self.dropped) == self.micro_batches

    @property
    def fingerprint(self) -> int:
        """A number under 2**52 that tells which micro-batches were dropped, for a check over the ranks."""
        return sum(1 << bit for bit in {index % 52 for index in self.dropped})

    def before_backward(self, parameters: Mapping[str, nn.Parameter], judge: Judge) -> None:
        """Decide on the newest micro-batch, then make room for the next one's own gradient."""
        self.settle(parameters, judge)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._sum[name] = parameter.grad.clone() if self.has_shared_storage else parameter.grad
                parameter.grad = None

    def after_backward(self, pending: PendingNorms) -> None:
        """Take note of a micro-batch whose norms are under way."""
        self.micro_batches += 1
        self._pending = pending

    def settle(self, parameters: Mapping[str, nn.Parameter], judge: Judge) -> None:
        """Decide on the newest micro-batch: keep adds the sum of the earlier ones to it, drop leaves that sum alone."""
        if self._pending is None:
            return
        norms, self._pending = self._pending.read(), None
        self.newest = norms
        if not judge(self.micro_batches - 1, norms):
            self.dropped.append(self.micro_batches - 1)
            self.has_non_finite_dropped |= not norms.is_finite
            for parameter in parameters.values():
                parameter.grad = None
        self._join(parameters)

    def close_window(self, parameters: Mapping[str, nn.Parameter], judge: Judge) -> None:
        """Leave the window's gradient in ``.grad``, by the rule for survivors."""
        self.settle(parameters, judge)
        kept = self.micro_batches - len(self.dropped)
        if self.survivors == "rescale" and self.dropped and kept:
            pieces = [local(p.grad) for p in parameters.values() if p.grad is not None]
            torch._foreach_mul_(pieces, self.micro_batches / kept)

    @torch.no_grad()
    def _join(self, parameters: Mapping[str, nn.Parameter]) -> None:
        sums, added = [], []
        for name, parameter in parameters.items():
            earlier = self._sum.pop(name, None)
            if earlier is None:
                continue
            if parameter.grad is not None:
                sums.append(local(earlier))
                added.append(local(parameter.grad))
            parameter.grad = earlier
        if sums:
            torch._foreach_add_(sums, added)
