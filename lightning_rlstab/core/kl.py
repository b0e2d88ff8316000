"""KL estimators and the exponential that cannot overflow."""

from __future__ import annotations

from torch import Tensor

from lightning_rlstab.core.logprobs import floored_logprobs

__all__ = ["LOG_RATIO_BOUND", "bounded_exp", "kl_k3"]

LOG_RATIO_BOUND = 20.0
"""Largest log-ratio that is exponentiated, nats: e^20 is 4.85e8, whose square still fits an optimizer's state."""


def bounded_exp(log_ratio: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """exp(x) up to ``bound``, its tangent line e^bound (1 + x - bound) above.

    Why it is safe: value and slope are continuous and the slope never exceeds e^bound, so a log-ratio of 100 gives a
    large finite value with a large finite gradient, and a gradient of exactly 0 where a clip cuts it off (0 times inf,
    the NaN of the plain form, cannot arise). Up to the bound it is exp, bit for bit.

    Args:
        log_ratio: Any shape, nats.
        bound: Nats, at most 80 for float32.

    Returns:
        Same shape and dtype; NaN only for NaN.

    Example:
        >>> import torch
        >>> bounded_exp(torch.tensor([0.0, 21.0])).tolist() == [1.0, 2 * torch.tensor(20.0).exp().item()]
        True
    """
    return log_ratio.clamp(max=bound).exp() * (1 + (log_ratio - bound).clamp(min=0))


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) on tokens of the policy: e^q - q - 1, q = reference - policy.

    Why it is safe: both sides are floored at -100 nats first, so -inf on both sides is q = 0 and adds 0; above
    ``LOG_RATIO_BOUND`` the exponential goes on as its tangent, so 100 nats stay finite and still pull the policy back.

    Args:
        logprobs: (batch, time) nats, with gradient.
        reference_logprobs: (batch, time) nats.

    Returns:
        (batch, time) float32, nats, at least 0 (up to rounding).

    Source:
        Schulman, "Approximating KL Divergence" (2020), k3.

    Example:
        >>> import torch
        >>> kl_k3(torch.tensor([-1.0, -torch.inf]), torch.tensor([-1.0, -torch.inf]))
        tensor([0., 0.])
    """
    gap = floored_logprobs(reference_logprobs) - floored_logprobs(logprobs)
    return bounded_exp(gap) - gap - 1
