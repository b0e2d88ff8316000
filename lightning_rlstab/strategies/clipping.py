"""Clipping that works on shards: by the global norm already measured, or by value."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_rlstab.strategies.parameters import local_gradients

__all__ = ["clip_by_norm", "clip_by_value", "scale_gradients"]

_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient; 1 leaves the bits alone."""
    pieces = local_gradients(parameters)
    if pieces and factor != 1.0:
        torch._foreach_mul_(pieces, factor)


def clip_by_norm(parameters: Iterable[nn.Parameter], limit: float, *, total: float) -> float:
    """Scale the gradient to ``limit * total / (total + 1e-6)`` when its norm is above the limit.

    Args:
        parameters: Whose gradients are scaled.
        limit: Largest norm.
        total: Their global norm, the same on all ranks. A rank's own shard would give about 1 / sqrt(ranks) of it.

    Returns:
        The factor, 1 when nothing was clipped.
    """
    factor = min(1.0, limit / (total + _EPSILON))
    scale_gradients(parameters, factor)
    return factor


@torch.no_grad()
def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Bring every entry into [-limit, limit]."""
    pieces = local_gradients(parameters)
    if pieces:
        torch._foreach_clamp_min_(pieces, -limit)
        torch._foreach_clamp_max_(pieces, limit)
