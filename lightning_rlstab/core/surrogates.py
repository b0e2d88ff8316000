"""The loss families: one short pure function each, and the table that names them.

A *surrogate* gives the token loss before any normaliser; an *aggregation* gives the weight of every token loss, so that
the weighted sum is the loss. ``LOSS_FAMILIES`` joins them; nothing else in the package knows the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rlstab.core.kl import bounded_exp
from lightning_rlstab.core.masked import masked_max, masked_mean, masked_min, masked_sum

if TYPE_CHECKING:
    from lightning_rlstab.core.policy_loss import LossSettings

__all__ = ["LOSS_FAMILIES", "BatchScope", "LossFamily", "SurrogateTerms"]

_LOWEST_LOG_WEIGHT = math.log(1e-8)
_HIGHEST_LOG_WEIGHT = 20.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SurrogateTerms:
    """What a surrogate may look at; every tensor float32 and finite wherever its inputs were.

    Attributes:
        logprobs: (batch, time) policy, floored, with gradient.
        log_ratio: (batch, time) logprobs - old_logprobs; 0 on closed slots.
        ratio: (batch, time), or (batch, 1) at sequence level; exp of the log importance weight, with gradient.
        advantages: (batch, time) or (batch, 1).
        correction: (batch, time) or (batch, 1) train/inference ratio, or None.
        mask: (batch, time) bool.
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    correction: Tensor | None
    mask: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchScope:
    """What an aggregation may look at.

    Attributes:
        mask: (batch, time) bool.
        num_items: 0-d tensor or float, masked tokens of the whole generation batch on all ranks; None if not known.
        accumulation: Micro-batches in this optimizer step; 1 outside training.
        slices: Micro-batches (per rank) that the generation batch is cut into; 1 outside training.
        world_size: Ranks.
        max_completion_length: Tokens.
    """

    mask: Tensor
    num_items: Tensor | float | None
    accumulation: int
    slices: int
    world_size: int
    max_completion_length: int


def clipped_ratio(terms: SurrogateTerms, settings: LossSettings) -> Tensor:
    """PPO's pessimistic clip: -min(r A, clamp(r, 1 - eps, 1 + eps_high) A).

    A ratio that has moved past the clip range in the direction its advantage asks for stops teaching. ``delta`` also
    bounds the other side: r is replaced by min(r, delta) in the first term (two-sided clip, INTELLECT-2).
    """
    ratio = terms.ratio
    inside = ratio.clamp(1 - settings.epsilon, 1 + settings.clip_epsilon_high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    return -torch.min(ratio * terms.advantages, inside * terms.advantages)


def clipped_weight(terms: SurrogateTerms, settings: LossSettings) -> Tensor:
    """CISPO (MiniMax-M1): -sg[min(r, eps_high)] A log pi.

    The importance weight is capped instead of the objective, so every token keeps a gradient. eps_high is the cap
    itself, not an offset to 1.
    """
    return -terms.ratio.clamp(max=settings.clip_epsilon_high).detach() * terms.advantages * terms.logprobs


def soft_gate(terms: SurrogateTerms, settings: LossSettings) -> Tensor:
    """SAPO: -sigmoid(tau (r - 1)) (4 / tau) A.

    A smooth gate replaces the clip: weight 1 at r = 1, fading to 0 on both sides. tau is ``sapo_temperature_pos`` for
    positive advantages, ``sapo_temperature_neg`` otherwise (fades faster by default).
    """
    tau = torch.where(terms.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau * terms.advantages


def gamma_weight(terms: SurrogateTerms, settings: LossSettings) -> Tensor:
    """phi(w) = e^(lambda + k ln w - lambda w), VESPO's weight of a sequence; (batch, 1) or (batch, time), no gradient.

    w is the product of the sequence's ratios (with the train/inference ratio in it); ln w is held inside
    [ln 1e-8, 20]. phi(1) = 1, and phi fades towards w = 0 (k) and large w (lambda).
    """
    with torch.no_grad():
        log_weight = masked_sum(terms.log_ratio.clamp(-20.0, 20.0), terms.mask, -1).unsqueeze(-1)
        if terms.correction is not None:
            log_correction = terms.correction.log().clamp(_LOWEST_LOG_WEIGHT, 20.0)
            log_weight = log_weight + log_correction.sum(-1, keepdim=True)
        log_weight = log_weight.clamp(_LOWEST_LOG_WEIGHT, _HIGHEST_LOG_WEIGHT)
        is_gain = terms.advantages >= 0
        k = torch.where(is_gain, settings.vespo_k_pos, settings.vespo_k_neg)
        decay = torch.where(is_gain, settings.vespo_lambda_pos, settings.vespo_lambda_neg).clamp(min=1e-4)
        return (decay + k * log_weight - decay * log_weight.exp()).exp()


def soft_sequence_weight(terms: SurrogateTerms, settings: LossSettings) -> Tensor:
    """VESPO: -sg[phi(w)] A log pi.

    A smooth, asymmetric weight of the whole sequence replaces clipping; see ``gamma_weight``. The train/inference
    ratio is part of w and is not applied again.
    """
    return -gamma_weight(terms, settings) * terms.advantages * terms.logprobs


def sequence_mean(scope: BatchScope) -> Tensor:
    """Mean over sequences of each sequence's token mean (GRPO): short answers weigh as much as long ones."""
    lengths = scope.mask.sum(-1, keepdim=True).clamp(min=1)
    return 1.0 / (lengths * scope.mask.shape[0] * scope.accumulation)


def micro_batch_mean(scope: BatchScope) -> Tensor:
    """Mean over the tokens of the micro-batch (BNPO): depends on how rows are cut into micro-batches."""
    return 1.0 / (scope.mask.sum().clamp(min=1) * scope.accumulation)


def constant_length(scope: BatchScope) -> Tensor:
    """Sum over tokens / (rows * max_completion_length) (Dr. GRPO): no length bias, a constant scale."""
    denominator = scope.mask.shape[0] * scope.max_completion_length * scope.accumulation
    return torch.full((), 1.0 / max(denominator, 1), device=scope.mask.device)


def generation_mean(scope: BatchScope) -> Tensor:
    """Mean over the tokens of the whole generation batch (DAPO), scaled to one optimizer step of its slices."""
    if scope.num_items is None:
        raise ValueError(
            "`num_items` must be the number of completion tokens of the generation batch on all ranks for this "
            "loss type, got None. Pass it with the inputs."
        )
    items = torch.as_tensor(scope.num_items, dtype=torch.float32, device=scope.mask.device).clamp(min=1.0)
    return 1.0 / (items / scope.world_size * scope.accumulation / scope.slices)


def sequence_sum(scope: BatchScope) -> Tensor:
    """Mean over sequences of each sequence's token sum (LUSPO): a sequence weighs by its length."""
    return torch.full((), 1.0 / max(scope.mask.shape[0] * scope.accumulation, 1), device=scope.mask.device)


def clip_readings(terms: SurrogateTerms, settings: LossSettings) -> dict[str, Tensor]:
    """How many ratios lie outside the clip range on the side where the clip acts; per sequence at sequence level."""
    ratio = terms.ratio if settings.delta is None else terms.ratio.clamp(max=settings.delta)
    advantages = terms.advantages
    is_low = (ratio < 1 - settings.epsilon) & (advantages < 0)
    is_high = (ratio > 1 + settings.clip_epsilon_high) & (advantages > 0)
    is_counted = terms.mask if is_low.shape[1] == terms.mask.shape[1] else torch.ones_like(is_low)
    has_tokens = is_counted.any(-1)
    return {
        "clip_low_sum": masked_sum(is_low, is_counted),
        "clip_high_sum": masked_sum(is_high, is_counted),
        "clip_count": is_counted.sum().float(),
        "clip_low_min": masked_min(masked_mean(is_low, is_counted, -1), has_tokens, empty=torch.inf),
        "clip_high_max": masked_max(masked_mean(is_high, is_counted, -1), has_tokens, empty=-torch.inf),
    }


def cap_readings(terms: SurrogateTerms, settings: LossSettings) -> dict[str, Tensor]:
    """How many importance weights are capped with a positive advantage."""
    is_capped = (terms.ratio > settings.clip_epsilon_high) & (terms.advantages > 0)
    is_counted = terms.mask if is_capped.shape[1] == terms.mask.shape[1] else torch.ones_like(is_capped)
    return {"cispo_clip_sum": masked_sum(is_capped, is_counted), "cispo_clip_count": is_counted.sum().float()}


def phi_readings(terms: SurrogateTerms, settings: LossSettings) -> dict[str, Tensor]:
    """Sum and number of the sequence weights phi."""
    phi = gamma_weight(terms, settings)
    is_counted = terms.mask if phi.shape[1] == terms.mask.shape[1] else torch.ones_like(phi, dtype=torch.bool)
    return {"vespo_phi_sum": masked_sum(phi, is_counted), "vespo_phi_count": is_counted.sum().float()}


def no_readings(terms: SurrogateTerms, settings: LossSettings) -> dict[str, Tensor]:
    """Nothing of its own to report."""
    return {}


@dataclass(frozen=True, kw_only=True)
class LossFamily:
    """One row of ``LOSS_FAMILIES``.

    Attributes:
        surrogate: Token loss before normalisers, (batch, time) or (batch, 1).
        aggregation: Weight of the token losses, broadcastable to (batch, time).
        readings: Sums and counts of the family's own.
        has_correction_inside: Whether the surrogate already holds the train/inference ratio.
    """

    surrogate: Callable[[SurrogateTerms, LossSettings], Tensor]
    aggregation: Callable[[BatchScope], Tensor]
    readings: Callable[[SurrogateTerms, LossSettings], dict[str, Tensor]]
    has_correction_inside: bool = False


def _clipped(aggregation: Callable[[BatchScope], Tensor]) -> LossFamily:
    return LossFamily(surrogate=clipped_ratio, aggregation=aggregation, readings=clip_readings)


LOSS_FAMILIES: Mapping[str, LossFamily] = MappingProxyType(
    {
        "grpo": _clipped(sequence_mean),
        "bnpo": _clipped(micro_batch_mean),
        "dr_grpo": _clipped(constant_length),
        "dapo": _clipped(generation_mean),
        "luspo": _clipped(sequence_sum),
        "cispo": LossFamily(surrogate=clipped_weight, aggregation=generation_mean, readings=cap_readings),
        "sapo": LossFamily(surrogate=soft_gate, aggregation=sequence_mean, readings=no_readings),
        "vespo": LossFamily(
            surrogate=soft_sequence_weight,
            aggregation=generation_mean,
            readings=phi_readings,
            has_correction_inside=True,
        ),
    }
)
"""Every loss type by TRL's name."""


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Importance weight: exp of the token log-ratios, or of their masked mean per sequence.

    Args:
        log_ratio: (batch, time) nats, 0 on closed slots.
        mask: (batch, time) bool.
        level: A key of ``IMPORTANCE_LEVELS``.

    Returns:
        (batch, time) for "token", (batch, 1) for "sequence"; never overflows.

    Source:
        Sequence level: GSPO (arXiv 2507.18071).
    """
    return bounded_exp(IMPORTANCE_LEVELS[level](log_ratio, mask))


def _sequence_mean_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(log_ratio, mask, -1).unsqueeze(-1)


IMPORTANCE_LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"token": lambda log_ratio, mask: log_ratio, "sequence": _sequence_mean_log_ratio}
)
"""How token log-ratios become log importance weights."""
