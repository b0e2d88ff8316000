"""Reductions behind a mask: select first, compute afterwards.

``values * mask`` lets a NaN through (NaN * 0 is NaN), so every reduction selects with ``torch.where`` before any
arithmetic, and accumulates in float32 or better.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked_max", "masked_mean", "masked_min", "masked_sum"]


def at_least_float32(values: Tensor) -> Tensor:
    """``values`` in float32, or unchanged when already float32 or float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _open_slots(values: Tensor, mask: Tensor) -> Tensor:
    """The mask as bool in the shape that values and mask broadcast to."""
    return mask.bool() | torch.zeros_like(values, dtype=torch.bool)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values whose mask is open.

    Why it is safe: closed slots are replaced by 0 before the sum, so NaN or inf behind the mask changes neither the
    value nor the gradient.

    Args:
        values: Any shape; any floating or bool dtype.
        mask: Bool or 0/1, broadcastable with ``values``.
        dim: The dimension to reduce; None for all.

    Returns:
        float32 (float64 for float64 input); 0 on an empty mask.

    Example:
        >>> masked_sum(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
        tensor(1.)
    """
    values = at_least_float32(values)
    selected = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values whose mask is open; 0 (never 0/0) where no slot is open.

    Args:
        values: Any shape; any floating or bool dtype.
        mask: Bool or 0/1, broadcastable with ``values``.
        dim: The dimension to reduce; None for all.

    Returns:
        float32 (float64 for float64 input).

    Example:
        >>> masked_mean(torch.tensor([2.0, 4.0, 9.0]), torch.tensor([1, 1, 0]))
        tensor(3.)
    """
    total = masked_sum(values, mask, dim)
    is_open = _open_slots(values, mask)
    count = is_open.sum() if dim is None else is_open.sum(dim)
    return total / count.clamp(min=1)


def masked_max(values: Tensor, mask: Tensor, dim: int | None = None, *, empty: float = 0.0) -> Tensor:
    """Largest value whose mask is open; ``empty`` where no slot is open.

    Args:
        values: Any shape; any floating or bool dtype.
        mask: Bool or 0/1, broadcastable with ``values``.
        dim: The dimension to reduce; None for all.
        empty: What an empty mask gives; ``-inf`` makes the result mergeable by ``maximum``.

    Returns:
        float32 (float64 for float64 input); NaN when an open slot is NaN.

    Example:
        >>> masked_max(torch.tensor([1.0, 5.0]), torch.tensor([True, False]))
        tensor(1.)
    """
    values = at_least_float32(values)
    is_open = _open_slots(values, mask)
    selected = torch.where(is_open, values, torch.full((), -torch.inf, dtype=values.dtype, device=values.device))
    if selected.numel() == 0:
        return selected.sum(dim) + empty if dim is not None else selected.sum() + empty
    largest = selected.amax() if dim is None else selected.amax(dim)
    has_open = is_open.any() if dim is None else is_open.any(dim)
    return torch.where(has_open, largest, torch.full_like(largest, empty))


def masked_min(values: Tensor, mask: Tensor, dim: int | None = None, *, empty: float = 0.0) -> Tensor:
    """Smallest value whose mask is open; ``empty`` where no slot is open.

    Args:
        values: Any shape; any floating or bool dtype.
        mask: Bool or 0/1, broadcastable with ``values``.
        dim: The dimension to reduce; None for all.
        empty: What an empty mask gives; ``inf`` makes the result mergeable by ``minimum``.

    Returns:
        float32 (float64 for float64 input); NaN when an open slot is NaN.

    Example:
        >>> masked_min(torch.tensor([1.0, 0.5]), torch.tensor([True, False]))
        tensor(1.)
    """
    return -masked_max(-at_least_float32(values), mask, dim, empty=-empty)
