"""Importance ratio between the training forward and the engine that sampled, with its bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlstab.core.checks import choice
from lightning_rlstab.core.kl import bounded_exp
from lightning_rlstab.core.logprobs import floored_logprobs

__all__ = ["RATIO_MODES", "correction_ratio"]

RATIO_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def correction_ratio(
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Rho = exp(old - behavior) per token, or exp of the masked sum per sequence, held inside [clip_min, clip_max].

    "*_truncate" clamps to the bounds, "*_mask" sets what lies outside to 0 (those tokens teach nothing).

    Why it is safe: tokens the sampler could not score (NaN) count as no difference; closed slots are selected away
    before the subtraction; the exponential cannot overflow.

    Args:
        old_logprobs: (batch, time) nats, training forward at the start of the update.
        behavior_logprobs: (batch, time) nats, of the policy that sampled.
        mask: (batch, time) bool.
        mode: One of ``RATIO_MODES``.
        clip_max: Upper bound or None.
        clip_min: Lower bound or None.

    Returns:
        (batch, time) for token modes, (batch, 1) for sequence modes; float32, no gradient; 1 on closed token slots.

    Raises:
        ValueError: If ``mode`` is unknown.

    Source:
        Truncated and masked importance sampling as in TRL (arXiv 2510.26788 for the token forms).

    Example:
        >>> old, behavior = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
        >>> correction_ratio(old, behavior, torch.tensor([[True, True]]), mode="token_truncate")
        tensor([[1., 3.]])
    """
    choice("mode", mode, RATIO_MODES)
    granularity, constraint = mode.split("_")
    with torch.no_grad():
        is_scored = mask.bool() & ~behavior_logprobs.isnan()
        log_ratio = torch.where(is_scored, floored_logprobs(old_logprobs) - floored_logprobs(behavior_logprobs), 0.0)
        if granularity == "sequence":
            log_ratio = log_ratio.sum(-1, keepdim=True)
        ratio = bounded_exp(log_ratio)
        low = 0.0 if clip_min is None else clip_min
        high = torch.inf if clip_max is None else clip_max
        if constraint == "truncate":
            bounded = ratio.clamp(min=low, max=high)
        else:
            bounded = torch.where((ratio < low) | (ratio > high), 0.0, ratio)
        return torch.where(mask.bool(), bounded, 1.0) if granularity == "token" else bounded
