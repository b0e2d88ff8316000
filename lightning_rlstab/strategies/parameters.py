"""Gradients of whatever is sharded: their local pieces, and how often each entry counts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_rlstab.control.parameters import local

__all__ = ["copies_over_ranks", "local_gradients"]


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Local pieces of all gradients that exist, dense, sharing their memory."""
    return [local(p.grad) for p in parameters if p.grad is not None]


def copies_over_ranks(tensor: Tensor, world_size: int) -> float:
    """On how many of the ranks each entry of ``tensor`` lies.

    A sum over all ranks counts every entry that often. A plain tensor is taken as replicated on every rank.

    Args:
        tensor: Plain, or sharded over any mesh.
        world_size: Number of ranks in the sum.
    """
    if not isinstance(tensor, DTensor):
        return float(world_size)
    assert not any(isinstance(placement, Partial) for placement in tensor.placements)
    mesh = tensor.device_mesh
    copies = world_size // mesh.size()
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return float(copies)
