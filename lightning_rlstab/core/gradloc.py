"""Formulas of the gradient anomaly localizer: closed-form head norms, shares of a spike, thresholds.

Notation: the loss of one optimizer step is a sum over tokens, L = sum_t l_t with every normaliser folded in, g_t is the
gradient of l_t, g = sum_t g_t. ``slope`` of a token is c_t = dL/dlogprob_t, so that g_t = c_t * dlogprob_t/dtheta.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "effective_tokens",
    "head_gradient_norms",
    "probe_shift",
    "segment_threshold",
    "token_shares",
]


def head_gradient_norms(
    slope: Tensor,  # "*shape"
    logprobs: Tensor,  # "*shape"
    sum_squared_probs: Tensor,  # "*shape"
    hidden_norms: Tensor,  # "*shape"
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Norm of each token's gradient with respect to the output projection, from forward quantities alone.

    |c| / temperature * sqrt((1 - p)^2 + (sum_v p_v^2 - p^2)) * ||h||, because dlogprob_y/dlogits = (onehot_y - p) /
    temperature and the gradient of the projection is the outer product of that with the hidden state.

    1 - p is taken as -expm1(logprob), and the rest of the square is kept within [0, (1 - p)^2], where it must lie:
    so a certain token (p near 1) has a norm near 0 instead of the square root of a rounding error.

    Args:
        slope: dL/dlogprob of each token; the sign does not matter.
        logprobs: Log-probability of each token, nats.
        sum_squared_probs: Sum over the vocabulary of squared probabilities, in (0, 1].
        hidden_norms: L2 norm of the hidden state that enters the projection.
        temperature: Divisor of the logits before the softmax.

    Returns:
        Float32 norms of the same shape, >= 0; NaN or inf where an input is not finite.

    Source:
        Closed form of the cross-entropy gradient; exact for a projection without bias, not tied to the embedding.

    Example:
        >>> two_equal = torch.tensor(0.5)
        >>> head_gradient_norms(torch.tensor(-2.0), two_equal.log(), two_equal, torch.tensor(3.0)).item()
        4.242640495300293
    """
    probs = logprobs.float().exp()
    missing_square = torch.expm1(logprobs.float()).square()
    others_square = (sum_squared_probs.float() - probs.square()).clamp(min=0).minimum(missing_square)
    return slope.float().abs() / temperature * (missing_square + others_square).sqrt() * hidden_norms.float()


def token_shares(
    losses_above: Tensor,  # "*shape"
    losses_below: Tensor,  # "*shape"
    *,
    distance: float,
    grad_norm: float,
) -> Tensor:
    """Each token's share of the gradient, s_t = <g_t, g> / ||g||^2, from token losses at two points along g.

    (l_t(theta + a g/||g||) - l_t(theta - b g/||g||)) / ((a + b) ||g||). The losses are the linearised ones,
    c_t * logprob_t with the slope c_t held fixed, so clipping kinks and stop-gradients cannot bend the answer.

    Args:
        losses_above: Linearised token losses at theta + a * g/||g||.
        losses_below: The same at theta - b * g/||g||.
        distance: a + b, > 0.
        grad_norm: ||g||, > 0.

    Returns:
        Float64 shares; over all tokens of the step (mean over ranks) they sum to 1.

    Example:
        >>> token_shares(torch.tensor([0.6]), torch.tensor([0.2]), distance=0.1, grad_norm=4.0)
        tensor([1.0000], dtype=torch.float64)
    """
    return (losses_above.double() - losses_below.double()) / (distance * grad_norm)


def probe_shift(grad_norm: float, steepest_slope: float, *, logprob_change: float = 0.01) -> float:
    """How far to move along g/||g|| so that the steepest token's log-prob moves by about ``logprob_change``.

    If one token makes the gradient, ||dlogprob/dtheta|| = ||g||/|c| and a shift of eps changes its log-prob by
    eps ||g||/|c|. Smaller changes drown in the rounding of float32 log-probs (1e-6), larger ones meet curvature.

    Args:
        grad_norm: ||g||, > 0.
        steepest_slope: |c| of the token with the largest head norm, > 0.
        logprob_change: Wanted change, nats.

    Returns:
        The shift eps, in units of parameter distance.

    Example:
        >>> round(probe_shift(60.0, 2.0), 7)
        0.0003333
    """
    return logprob_change * steepest_slope / grad_norm


def segment_threshold(tau_token: float, *, segment_tokens: int, window_tokens: int) -> float:
    """Norm under which a segment's gradient counts as usual: tau_token * sqrt(L) / N.

    Under g_t ~ N(0, s^2 I) a mean over L tokens has a norm in proportion to 1/sqrt(L). Here every loss is a sum over a
    segment divided by the N tokens of the whole step, which is L/N times its mean: tau_token/sqrt(L) * L/N. For the
    whole step this is tau_token/sqrt(N); one rule serves micro-batches, groups of ranks and token runs.

    Args:
        tau_token: Threshold for the gradient of one token's loss, without a normaliser.
        segment_tokens: Loss tokens in the segment, L >= 1.
        window_tokens: Loss tokens of the whole optimizer step over all ranks, N >= L.

    Returns:
        The threshold, in units of the step's gradient norm.

    Example:
        >>> segment_threshold(8.0, segment_tokens=64, window_tokens=64)
        1.0
        >>> segment_threshold(8.0, segment_tokens=1, window_tokens=64)
        0.125
    """
    return tau_token * math.sqrt(segment_tokens) / window_tokens


def effective_tokens(shares: Tensor) -> float:
    """How many tokens carry the gradient: (sum s)^2 / sum s^2; 1 when one token is the whole of it.

    Args:
        shares: Shares of all tokens, any shape.

    Returns:
        The participation number, >= 0; 0 when every share is 0.

    Example:
        >>> effective_tokens(torch.tensor([0.25, 0.25, 0.25, 0.25]))
        4.0
    """
    squares = float(shares.double().square().sum())
    return float(shares.double().sum()) ** 2 / squares if squares > 0 else 0.0
