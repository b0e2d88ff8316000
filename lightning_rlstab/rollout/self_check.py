"""Does the policy that sampled agree with the policy that is trained? Asked once, before the first update.

A gap that sits on every token cannot be any token's fault; it comes from how the two were set up. The check measures it
and tries the usual reasons one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlstab.core.checks import number

__all__ = ["SelfCheck", "mismatch_report"]

_EXPLAINED = 0.2  # a reason holds when at most this share of the gap is left under it
_ONE_SIDED = 0.99  # share of tokens that must lie on one side for renormalised probabilities
_NOISE_NATS = 0.2  # largest mean gap that rounding can make
_LARGEST_EXPONENT = 30.0  # keeps the mean ratio finite

_ADVICE = {
    "non-finite": "Some log-probs are NaN or infinite; look at the model's logits first",
    "shift": "Log-probs of one side belong to the neighbouring token: check how logits and tokens are aligned",
    "padding": "The gap grows with the padding of a row: check the attention mask and the position ids",
    "truncated sampling": (
        "The sampler's probabilities are renormalised over the tokens that top-p, top-k or min-p left: "
        "record them over the whole vocabulary"
    ),
    "dtype": (
        "Both agree on average and differ by rounding: compute the logits in float32 on both sides, "
        "or correct with the train/inference importance ratio"
    ),
    "unknown": "Check dropout (train mode while sampling), stale weights and different kernels on the two sides",
}


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """What the comparison found.

    Attributes:
        is_ok: Whether the mean absolute difference is within the tolerance.
        mean_abs_diff: Mean of |training - behavior| over the masked tokens, nats; over finite values only.
        max_abs_diff: Largest of them, nats.
        ratio_mean: Mean of exp(training - behavior); 1 when both agree.
        cause: Likely reason: ``"none"``, ``"non-finite"``, ``"shift"``, ``"padding"``, ``"truncated sampling"``,
            ``"dtype"``, ``"unknown"``, or the name of the alternative that fits.
        message: One line for the log.
    """

    is_ok: bool
    mean_abs_diff: float
    max_abs_diff: float
    ratio_mean: float
    cause: str
    message: str


def mismatch_report(
    behavior: Tensor,
    training: Tensor,
    mask: Tensor,
    *,
    alternatives: Mapping[str, Tensor] | None = None,
    pad_counts: Tensor | None = None,
    tolerance: float = 1e-4,
) -> SelfCheck:
    """Compare the log-probs of the same tokens under the sampling and the training policy, same weights.

    Reasons are tried in this order; the first that leaves at most a fifth of the gap (or the tolerance) wins: values
    that are not finite; an alternative or a shift by one token, whichever fits best; probabilities renormalised over a
    part of the vocabulary (the sampler's are higher on all tokens); padding (rows without padding agree, or the gap
    grows with it); rounding (small and without a sign).

    Args:
        behavior: (B, T) nats, as recorded while sampling.
        training: (B, T) nats, from the training forward before any update.
        mask: (B, T) bool, tokens to compare.
        alternatives: Training log-probs under other settings, (B, T) each, by words that name the difference, such as
            ``"temperature 1.0"``; these words become the cause.
        pad_counts: (B,) padding tokens of each row, to find faults of masks and positions.
        tolerance: Largest mean absolute difference that is fine, nats. In bfloat16 expect about 1e-2.

    Returns:
        ``SelfCheck``; an empty mask is ok.

    Raises:
        ValueError: If ``tolerance`` is no number above 0.

    Example:
        >>> behavior = torch.tensor([[-1.0, -2.0, -0.5]])
        >>> mask = torch.ones(1, 3, dtype=torch.bool)
        >>> mismatch_report(behavior, behavior * 1.6, mask, alternatives={"temperature 1.0": behavior}).cause
        'temperature 1.0'
    """
    number("tolerance", tolerance, above=0)
    old, new = behavior.detach().double(), training.detach().double()
    is_finite = old.isfinite() & new.isfinite()
    broken = int((mask & ~is_finite).sum())
    kept = mask & is_finite
    gap = torch.where(kept, new - old, 0.0)
    tokens = max(int(kept.sum()), 1)
    mean_abs = float(gap.abs().sum()) / tokens
    max_abs = float(gap.abs().max()) if gap.numel() else 0.0
    ratio = float(torch.where(kept, gap.clamp(max=_LARGEST_EXPONENT).exp(), 0.0).sum()) / tokens if kept.any() else 1.0
    if broken:
        cause = "non-finite"
    elif mean_abs <= tolerance:
        cause = "none"
    else:
        cause = _cause(old, new, kept, gap, alternatives or {}, pad_counts, max(tolerance, _EXPLAINED * mean_abs))
    return SelfCheck(
        is_ok=cause == "none",
        mean_abs_diff=mean_abs,
        max_abs_diff=max_abs,
        ratio_mean=ratio,
        cause=cause,
        message=_message(cause, mean_abs, max_abs, ratio, broken, tolerance),
    )


def _cause(
    old: Tensor,
    new: Tensor,
    mask: Tensor,
    gap: Tensor,
    alternatives: Mapping[str, Tensor],
    pad_counts: Tensor | None,
    allowed: float,
) -> str:
    left = {name: _mean_abs(other.detach().double() - old, mask) for name, other in alternatives.items()}
    if mask.shape[1] > 1:
        both = mask[:, 1:] & mask[:, :-1]
        left["shift"] = min(_mean_abs(new[:, 1:] - old[:, :-1], both), _mean_abs(new[:, :-1] - old[:, 1:], both))
    if left and min(left.values()) <= allowed:
        return min(left, key=lambda name: left[name])
    seen = gap[mask]
    if float(seen.mean()) < 0 and float((seen <= allowed * _EXPLAINED).double().mean()) >= _ONE_SIDED:
        return "truncated sampling"
    if pad_counts is not None and _grows_with_padding(gap, mask, pad_counts, allowed):
        return "padding"
    mean_abs = float(seen.abs().mean())
    is_noise = abs(float(seen.mean())) <= _EXPLAINED * mean_abs and mean_abs <= _NOISE_NATS
    return "dtype" if is_noise else "unknown"


def _mean_abs(gap: Tensor, mask: Tensor) -> float:
    if not mask.any():
        return float("inf")
    return float(torch.where(mask, gap.abs(), 0.0).sum() / mask.sum())


def _grows_with_padding(gap: Tensor, mask: Tensor, pad_counts: Tensor, allowed: float) -> bool:
    has_tokens = mask.any(dim=1)
    per_row = (torch.where(mask, gap.abs(), 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1))[has_tokens]
    pads = pad_counts.double().to(per_row.device)[has_tokens]
    is_padded = pads > 0
    if is_padded.any() and not is_padded.all():
        return float(per_row[~is_padded].mean()) <= allowed
    if per_row.numel() < 3 or float(pads.std()) == 0 or float(per_row.std()) == 0:
        return False
    return float(torch.corrcoef(torch.stack([pads, per_row]))[0, 1]) > 0.8


def _message(cause: str, mean_abs: float, max_abs: float, ratio: float, broken: int, tolerance: float) -> str:
    figures = f"mean |difference| {mean_abs:.3g} nats, max {max_abs:.3g}, mean ratio {ratio:.3g}"
    if cause == "none":
        return f"Sampling and training log-probs agree ({figures})."
    advice = _ADVICE.get(cause, f"The sampler's log-probs fit {cause}: use the same setting on both sides")
    values = f"{broken} values are not finite; " if broken else ""
    return (
        f"Sampling and training log-probs differ before any update: {values}{figures}, allowed {tolerance:.3g}. "
        f"Likely cause: {cause}. {advice}."
    )
