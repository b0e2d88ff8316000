"""Formulas of the clips: weights for tokens and sequences off the sampler, scales for layers above their usual norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_rlstab.core.masked import masked_mean

__all__ = ["head_norm_weights", "layer_scales", "quantile_of", "ratio_weights", "sequence_log_ratios"]


def ratio_weights(log_ratios: Tensor, *, low: float, high: float, is_masking: bool) -> Tensor:
    """Weight of what has an importance ratio r = exp(log_ratio): 1 inside [low, high].

    Outside, 0 when masking; when clipping, the factor that brings a loss proportional to r back to the bound: high/r
    above, r/low below. Both are at most 1, so a clip only ever takes away.

    Args:
        log_ratios: Nats, any shape; NaN where the sampler's log-prob is unknown, which counts as inside.
        low: Lower bound of the ratio, >= 0.
        high: Upper bound of the ratio.
        is_masking: Whether to take the whole weight away.

    Returns:
        Float32 weights in [0, 1] of the same shape; no gradient.

    Example:
        >>> ratio_weights(torch.tensor([0.0, 10.0]).log1p(), low=0.5, high=5.5, is_masking=False)
        tensor([1.0000, 0.5000])
    """
    known = torch.where(log_ratios.isnan(), 0.0, log_ratios.detach().float())
    log_low = math.log(low) if low > 0 else -math.inf
    excess = (known - math.log(high)).clamp(min=0)
    deficit = (log_low - known).clamp(min=0) if low > 0 else torch.zeros_like(known)
    if is_masking:
        return ((excess == 0) & (deficit == 0)).float()
    return torch.exp(-(excess + deficit))


def sequence_log_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Log of the geometric mean of a sequence's ratios over its known loss tokens.

    Args:
        log_ratios: (batch, time) nats; NaN where the sampler's log-prob is unknown.
        mask: (batch, time) bool, tokens that count.

    Returns:
        (batch,) float32 nats; 0 for a sequence without known tokens.

    Example:
        >>> sequence_log_ratios(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([2.])
    """
    return masked_mean(log_ratios.detach(), mask & ~log_ratios.isnan(), -1)


def head_norm_weights(head_norms: Tensor, limit: float) -> Tensor:
    """Weight that brings each token's closed-form head norm down to ``limit``: min(1, limit / norm).

    A per-token gradient clip that is known before any backward. Non-finite norms get weight 0.

    Args:
        head_norms: Any shape, >= 0.
        limit: Largest norm left alone, > 0; inf for no limit.

    Returns:
        Float32 weights in [0, 1] of the same shape.

    Example:
        >>> head_norm_weights(torch.tensor([0.5, 4.0, float("nan")]), 1.0)
        tensor([1.0000, 0.2500, 0.0000])
    """
    norms = head_norms.detach().float()
    weights = (limit / norms.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    return torch.where(norms.isfinite(), weights, 0.0)


def quantile_of(values: Tensor, mask: Tensor, level: float) -> Tensor:
    """A quantile of the open, finite, positive values: the one at rank ceil(level * count), without interpolation.

    Args:
        values: Any shape.
        mask: Bool of the same shape.
        level: In (0, 1].

    Returns:
        0-d float32; NaN when nothing is open.

    Example:
        >>> quantile_of(torch.arange(1.0, 11.0), torch.ones(10, dtype=torch.bool), 0.9)
        tensor(9.)
    """
    is_open = mask & values.isfinite() & (values > 0)
    count = is_open.sum()
    # Closed values go to the end of the order, so that no shape depends on how many there are.
    ordered = torch.where(is_open, values.float(), math.inf).flatten().sort().values
    index = (torch.ceil(level * count).long() - 1).clamp(min=0)
    return torch.where(count > 0, ordered[index], math.nan)


def layer_scales(norms: Mapping[str, float], usual: Mapping[str, float], *, ratio: float) -> dict[str, float]:
    """Factor on each layer's gradient: min(1, ratio * usual_l / norm_l).

    A spike in one layer does not shrink the others, as a global clip would.

    Args:
        norms: Norm of each layer's gradient.
        usual: Its usual norm; a layer without one is left alone.
        ratio: How many times the usual norm a layer may have, > 0.

    Returns:
        A factor in (0, 1] per layer. A non-finite norm cannot be scaled away: its layer keeps 1, for the guards to see.

    Example:
        >>> layer_scales({"a": 8.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, ratio=2.0)
        {'a': 0.25, 'b': 1.0}
    """
    scales = {}
    for name, norm in norms.items():
        limit = ratio * usual.get(name, 0.0)
        scales[name] = limit / norm if math.isfinite(norm) and 0 < limit < norm else 1.0
    return scales
