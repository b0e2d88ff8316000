"""What the module asks of the strategy about its weights: whole for generating, whole for exporting."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_rlstab.control.protocols import GenerationHost, WeightHost

__all__ = ["full_state_dict", "generation_ready"]


def generation_ready(strategy: Any, policy: nn.Module) -> AbstractContextManager[None]:
    """The strategy's context for generating, or an empty one where weights are whole anyway.

    Args:
        strategy: The Trainer's strategy.
        policy: The policy about to generate.
    """
    return strategy.generation_ready(policy) if isinstance(strategy, GenerationHost) else nullcontext()


def full_state_dict(strategy: Any | None, policy: nn.Module) -> Mapping[str, Tensor]:
    """The policy's whole weights by their own names; collective where the strategy shards, empty on other ranks then.

    Args:
        strategy: The Trainer's strategy, or None outside of a run.
        policy: The policy.
    """
    if isinstance(strategy, WeightHost):
        return strategy.full_state_dict(policy)
    return policy.state_dict()
