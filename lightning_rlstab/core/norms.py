"""L2 norms of many tensors that neither overflow nor lose digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Norms", "tensor_norms"]

# Elements per chunk: on a CPU the widened chunk stays in a core's cache, on an accelerator it fills the device.
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ACCELERATOR = 1 << 24

# The one backend without float64; there entries above 1e19 overflow to inf as in any float32 norm.
_WIDE = {"mps": torch.float32}


class Norms(NamedTuple):
    """Norms of a list of tensors.

    Attributes:
        total: 0-d float32, over all entries of all tensors; NaN when an entry is NaN, inf when one is infinite or the
            norm exceeds float32.
        per_tensor: (tensors,) float32, likewise for each tensor; 0 for an empty one.
        is_finite: 0-d bool, whether every entry is finite.
    """

    total: Tensor
    per_tensor: Tensor
    is_finite: Tensor


def tensor_norms(tensors: Sequence[Tensor], *, reduce: Callable[[Tensor], Tensor] | None = None) -> Norms:
    """sqrt(sum x^2) for each tensor and for all of them, in one pass over memory.

    Why it is safe: squares are formed and summed in float64, where the largest float32 squared (1e77) and the smallest
    are both ordinary numbers, so 1e20 gives its right norm instead of inf, and hundreds of millions of entries add up
    without the 0.1 % that a running float32 sum loses. NaN and inf arrive in the sum by themselves.

    Args:
        tensors: Any shapes and floating dtypes, on one device; each rank passes its own pieces, in the same order.
        reduce: Sums a (tensors,) float64 tensor over the ranks that hold pieces; called once. None where every rank
            holds whole tensors.

    Returns:
        ``Norms``; no gradient, no synchronisation with the device.

    Example:
        >>> tensor_norms([torch.tensor([3e20, 4e20]), torch.tensor([0.0])]).total
        tensor(5.0000e+20)
    """
    with torch.no_grad():
        squares = torch.stack([_square(tensor) for tensor in tensors]) if tensors else torch.zeros(0)
        if reduce is not None:
            squares = reduce(squares)
        total = squares.sum()
        return Norms(total.sqrt().float(), squares.sqrt().float(), total.isfinite())


def _square(tensor: Tensor) -> Tensor:
    """Sum of squares, 0-d float64."""
    flat = tensor.detach().reshape(-1)
    wide = _WIDE.get(flat.device.type, torch.float64)
    size = _CHUNK.get(flat.device.type, _CHUNK_ACCELERATOR)
    total = torch.zeros((), dtype=wide, device=flat.device)
    for start in range(0, flat.numel(), size):
        piece = flat[start : start + size].to(wide)
        total += torch.dot(piece, piece)
    return total
