"""What the package asks of a strategy's weights: generate with them, export them, copy them, put them back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_rlstab.strategies.scaler import gradient_scaler
from lightning_rlstab.strategies.snapshot import copied_state, put_back

__all__ = ["WeightsMixin"]


class WeightsMixin(Strategy):
    """The ``GenerationHost`` and ``WeightHost`` protocols where weights are whole, and copies of a run's state."""

    def reshard(self) -> None:
        """Give up whole weights where the strategy shards."""
        raise AssertionError("the probe provides it")

    @property
    def is_generation_synced(self) -> bool:
        """Whether all ranks must take the same number of tokens (``generate(synced_gpus=...)``)."""
        return False

    @contextmanager
    def generation_ready(self, module: nn.Module) -> Generator[None, None, None]:
        """Make a module ready for many forwards without gradient; nothing to do where weights are whole.

        Args:
            module: The model that generates.
        """
        yield

    def full_state_dict(self, policy: nn.Module) -> Mapping[str, Tensor]:
        """Whole weights under the names of ``policy.state_dict()``; they share memory with the policy's."""
        return policy.state_dict()

    def copied_state(self) -> dict[str, Any]:
        """This rank's weights, buffers, optimizer state and gradient scale on the CPU; see :mod:`.snapshot`."""
        assert self.lightning_module is not None
        self.reshard()
        scaler = gradient_scaler(self.precision_plugin)
        copied = copied_state(self.lightning_module, self.optimizers)
        return {**copied, "scaler": None if scaler is None else scaler.state_dict()}

    def put_back(self, copied: Mapping[str, Any]) -> None:
        """Return to a state of :meth:`copied_state`, bit for bit; schedules and counters are the caller's."""
        assert self.lightning_module is not None
        self.reshard()
        put_back(copied, self.lightning_module, self.optimizers)
        scaler = gradient_scaler(self.precision_plugin)
        if scaler is not None and copied["scaler"] is not None:
            scaler.load_state_dict(copied["scaler"])
