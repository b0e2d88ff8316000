"""OPEFO's formulas: the floor under Adam's second moments, and the rescaled feedback of a skipped gradient.

The name is this package's working name for one layer of a field recipe (Optimizer-state Protection with Error Feedback
Optimization).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_rlstab.core.histogram import LogHistogram

__all__ = [
    "adam_step_bound",
    "add_feedback_",
    "feedback_factor",
    "lift_",
    "lifted_count",
    "second_moment_floor",
    "tiny_frac",
]

_CHUNK = 1 << 20  # entries; bounds the extra memory at a few MB


def adam_step_bound(step: int, beta1: float, beta2: float) -> float:
    """Longest movement of a coordinate that Adam can make in one step, in units of the learning rate.

    |m_hat| / sqrt(v_hat) <= (1 - beta1) / (1 - beta1^t) * sqrt((1 - beta2^t) / (1 - beta2)) * sqrt(sum_k r^k), k < t,
    with r = beta1^2 / beta2, by Cauchy and Schwarz: m and v are weighted sums of the same gradients. It is reached by
    gradients that grow by beta1 / beta2 from step to step. 1 at the first step, 7.27 in the long run for 0.9 and 0.999.
    A longer step means that the state is not what these gradients made of it, or that the rate was another one.

    Args:
        step: Adam's own count t after the step, at least 1.
        beta1: Memory of the first moment.
        beta2: Memory of the second moment.

    Returns:
        The bound, without weight decay; inf where there is none (``beta1`` squared above ``beta2``).

    Source:
        Own; the bound in Kingma and Ba, arXiv 1412.6980, section 2.1, is of a single gradient among zeros.

    Example:
        >>> round(adam_step_bound(1, 0.9, 0.999), 6), round(adam_step_bound(100_000, 0.9, 0.999), 3)
        (1.0, 7.27)
    """
    if beta1 * beta1 >= beta2:
        return math.inf
    ratio = beta1 * beta1 / beta2
    series = (1 - ratio**step) / (1 - ratio)
    return (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2) * series)


def tiny_frac(histogram: LogHistogram, eps: float) -> Tensor:
    """Share of second moments that Adam can no longer tell from nothing: 0 < v, sqrt(v) <= eps.

    Args:
        histogram: Of ``exp_avg_sq``; zeros (coordinates that never received gradient) do not count.
        eps: Adam's, above 0.

    Returns:
        0-d float32 in [0, 1].
    """
    return histogram.frac_at_most(eps * eps)


def second_moment_floor(histogram: LogHistogram, *, eps: float, percentile: float) -> Tensor:
    """The value that smaller second moments are lifted to.

    The given percentile of the positive values; where so many are tiny that this is tiny itself, the same percentile of
    those that are not: lifting a tiny value to a tiny value would help nobody.

    Args:
        histogram: Of the whole parameter group on all ranks.
        eps: Adam's, above 0.
        percentile: In [0, 100].

    Returns:
        0-d float32; NaN, which lifts nothing, when no positive value is there or all of them are tiny.
    """
    tiny = tiny_frac(histogram, eps)
    plain = histogram.percentile(percentile)
    if not bool(plain <= eps * eps):
        return plain
    if bool(tiny >= 1):
        return torch.full_like(plain, torch.nan)
    return histogram.percentile(100.0 * float(tiny + (1 - tiny) * percentile / 100.0))


@torch.no_grad()
def lift_(second_moments: Iterable[Tensor], floor: float) -> None:
    """Raise every positive value under ``floor`` to it, in place.

    Why it is safe: v only grows, so Adam's step |m| / (sqrt(v) + eps) only shortens. Zeros stay zero: they are LoRA
    matrices and embeddings that no gradient has reached yet. NaN stays NaN. Why it is cheap: on the CPU a piece's
    minimum tells whether anything is to be done, and where nothing is zero, a clamp does it; on other devices, where a
    look at the minimum would wait, a mask does.

    Args:
        second_moments: ``exp_avg_sq`` tensors, contiguous.
        floor: Above 0; NaN lifts nothing.

    Example:
        >>> v = torch.tensor([0.0, 1e-16, 1e-8])
        >>> lift_([v], 1e-10)
        >>> v
        tensor([0.0000e+00, 1.0000e-10, 1.0000e-08])
    """
    if not floor > 0:
        return
    for moment in second_moments:
        for piece in torch.split(moment.view(-1), _CHUNK):
            if piece.is_cpu and piece.numel():
                smallest = float(piece.amin())
                if smallest >= floor:
                    continue
                if smallest > 0:
                    piece.clamp_(min=floor)
                    continue
            piece.masked_fill_((piece > 0) & (piece < floor), floor)


def lifted_count(histogram: LogHistogram, floor: float) -> int:
    """How many values lie under ``floor``, from the histogram: exact but for the values of one bin, which spans 1.6 %.

    Args:
        histogram: Of the whole group.
        floor: From ``second_moment_floor``.
    """
    return round(float(histogram.frac_at_most(floor)) * int(histogram.positive_count)) if floor > 0 else 0


def feedback_factor(weight: float, gradient_norm: float, residual_norm: float) -> float:
    """Factor on a stored residual so that ``weight`` times the current gradient's norm is fed back.

    factor = weight * ||g|| / ||residual||

    Args:
        weight: Share of the residual due in this step.
        gradient_norm: Norm of the gradient it is added to.
        residual_norm: Norm of the residual as stored.

    Returns:
        At least 0; 0 where a norm is 0 or not finite.

    Example:
        >>> feedback_factor(0.3, 2.0, 600.0)
        0.001
    """
    if not (math.isfinite(gradient_norm) and math.isfinite(residual_norm)) or residual_norm <= 0:
        return 0.0
    return weight * gradient_norm / residual_norm


@torch.no_grad()
def add_feedback_(gradients: Sequence[Tensor | None], residual: Sequence[Tensor | None], factor: float) -> None:
    """Gradient += factor * residual, in place, wherever both exist.

    Args:
        gradients: Local pieces of the current gradient.
        residual: Local pieces of the skipped one, in the same order; any floating dtype, any device.
        factor: From ``feedback_factor``.
    """
    if factor == 0.0:
        return
    for gradient, piece in zip(gradients, residual, strict=True):
        if gradient is not None and piece is not None:
            gradient.add_(piece.to(device=gradient.device, dtype=gradient.dtype), alpha=factor)
