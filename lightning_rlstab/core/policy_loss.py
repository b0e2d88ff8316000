"""The GRPO loss: settings, inputs, and token losses with every normaliser folded in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlstab.core.checks import choice, flag, integer, number, refusal
from lightning_rlstab.core.kl import LOG_RATIO_BOUND, kl_k3
from lightning_rlstab.core.logprobs import LOGPROB_FLOOR, floored_logprobs
from lightning_rlstab.core.masked import at_least_float32, masked_max, masked_mean, masked_min, masked_sum
from lightning_rlstab.core.ratio_correction import RATIO_MODES, correction_ratio
from lightning_rlstab.core.surrogates import (
    IMPORTANCE_LEVELS,
    LOSS_FAMILIES,
    BatchScope,
    SurrogateTerms,
    importance_ratio,
)

__all__ = [
    "LossInputs",
    "LossSettings",
    "PolicyLoss",
    "adaptive_entropy_coef",
    "applied_entropy_coef",
    "entropy_threshold",
    "merged_readings",
    "policy_loss",
]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss is; field names, meanings and defaults are TRL's ``GRPOConfig``.

    One default differs: ``vllm_importance_sampling_correction`` is False, because here the correction acts whenever
    ``behavior_logprobs`` (or a ready ratio) are given, while TRL's True only acts together with ``use_vllm``.

    Attributes:
        loss_type: A key of ``LOSS_FAMILIES``.
        importance_sampling_level: "token" or "sequence".
        epsilon: Lower clip range, above 0.
        epsilon_high: Upper clip range (the cap itself for "cispo"); None for ``epsilon``.
        delta: Upper bound of the ratio in the unclipped term; None for no bound.
        beta: KL coefficient, at least 0; 0 needs no reference.
        use_bias_correction_kl: Whether the KL term is multiplied by the importance ratio.
        entropy_coef: Coefficient of the entropy bonus, at least 0.
        sapo_temperature_neg: Gate temperature for advantages up to 0.
        sapo_temperature_pos: Gate temperature for advantages above 0.
        vespo_k_pos: Power of the sequence weight, advantages from 0 up.
        vespo_lambda_pos: Decay of the sequence weight, advantages from 0 up.
        vespo_k_neg: Power of the sequence weight, advantages under 0.
        vespo_lambda_neg: Decay of the sequence weight, advantages under 0.
        off_policy_mask_threshold: Mean log-ratio in nats above which sequences of negative advantage are dropped.
        top_entropy_quantile: Share of tokens, highest entropy first, that keep their policy loss; in [0, 1].
        vllm_importance_sampling_correction: Whether the train/inference ratio weighs the policy loss.
        vllm_importance_sampling_mode: One of ``RATIO_MODES``.
        vllm_importance_sampling_clip_max: Upper bound of that ratio or None.
        vllm_importance_sampling_clip_min: Lower bound of that ratio or None.
        max_completion_length: Tokens; the constant of "dr_grpo".
        steps_per_generation: Micro-batches per rank that one generation batch is cut into.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    entropy_coef: float = 0.0
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    vllm_importance_sampling_correction: bool = False
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    max_completion_length: int = 512
    steps_per_generation: int = 1

    def __post_init__(self) -> None:
        """Refuse values that TRL would accept and then misread.

        Raises:
            ValueError: Naming the field, the rule and the value.
        """
        choice("loss_type", self.loss_type, LOSS_FAMILIES)
        choice("importance_sampling_level", self.importance_sampling_level, IMPORTANCE_LEVELS)
        choice("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, RATIO_MODES)
        for name in ("use_bias_correction_kl", "vllm_importance_sampling_correction"):
            flag(name, getattr(self, name))
        for name in _ABOVE_ZERO:
            number(name, getattr(self, name), above=0)
        for name in _ABOVE_ZERO_OR_NONE:
            if getattr(self, name) is not None:
                number(name, getattr(self, name), above=0)
        for name in ("beta", "entropy_coef"):
            number(name, getattr(self, name), at_least=0)
        number("top_entropy_quantile", self.top_entropy_quantile, at_least=0, at_most=1)
        for name in ("max_completion_length", "steps_per_generation"):
            integer(name, getattr(self, name), at_least=1)
        self._check_correction()

    def _check_correction(self) -> None:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise refusal("vllm_importance_sampling_clip_min", f"be below the clip_max of {high}", low)
        if not self.vllm_importance_sampling_correction:
            return
        mode = self.vllm_importance_sampling_mode
        if mode.endswith("_truncate") and low is None and high is None:
            raise refusal("vllm_importance_sampling_clip_max", f"be given (or clip_min) for mode {mode!r}", high)
        if LOSS_FAMILIES[self.loss_type].has_correction_inside and mode.startswith("sequence"):
            raise refusal(
                "vllm_importance_sampling_mode", f"be 'token_truncate' or 'token_mask' for {self.loss_type!r}", mode
            )

    @property
    def clip_epsilon_high(self) -> float:
        """``epsilon_high``, or ``epsilon`` where that is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


_ABOVE_ZERO = (
    "epsilon",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
_ABOVE_ZERO_OR_NONE = (
    "epsilon_high",
    "delta",
    "off_policy_mask_threshold",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch, ready for the loss.

    Attributes:
        logprobs: (batch, time) nats, with gradient.
        entropy: (batch, time) nats; with gradient where an entropy bonus is wanted.
        completion_mask: (batch, time) bool or 0/1, the tokens that count.
        advantages: (batch,) or (batch, time).
        old_logprobs: (batch, time) training forward at the start of the update; None for ``logprobs.detach()``.
        behavior_logprobs: (batch, time) of the policy that sampled, NaN where not known; None if not kept.
        reference_logprobs: (batch, time) of the frozen model; needed when beta is not 0.
        correction_ratio: (batch, time) or (batch, 1) ready-made train/inference ratio; None to form it from
            ``behavior_logprobs``. Only read with ``vllm_importance_sampling_correction``.
        entropy_threshold: 0-d or float, nats; tokens at or above keep their policy loss. None: formed from this
            micro-batch alone.
        num_items: Masked tokens of the whole generation batch on all ranks; needed by "dapo", "cispo", "vespo".
        token_weights: (batch, time) factors on the finished token losses, normalisers untouched; 0 closes the token.
    """

    logprobs: Tensor
    entropy: Tensor
    completion_mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    correction_ratio: Tensor | None = None
    entropy_threshold: Tensor | float | None = None
    num_items: Tensor | float | None = None
    token_weights: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss:
    """The loss of one micro-batch, token by token.

    Attributes:
        token_loss: (batch, time) float32 with gradient, normalisers folded in; 0 on closed tokens.
        readings: Detached 0-d float32 tensors; names end in ``_sum``, ``_count``, ``_min`` or ``_max`` and merge so
            (see ``merged_readings``).
    """

    token_loss: Tensor
    readings: dict[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """0-d: the sum of the token losses, what TRL's ``compute_loss`` returns for this micro-batch."""
        return self.token_loss.sum()


def policy_loss(
    inputs: LossInputs, settings: LossSettings, *, accumulation: int, world_size: int = 1, is_training: bool = True
) -> PolicyLoss:
    """Token losses of one micro-batch: (surrogate + beta KL) / normaliser - entropy bonus.

    Order, as in TRL: surrogate, off-policy mask, top-entropy mask, train/inference ratio, then KL; masks never touch
    the KL. Outside training the normalisers know neither accumulation nor slices of the generation batch.

    Why it is safe: closed slots are selected away before the first subtraction; log-probabilities are floored at -100
    nats and exponentials go on as tangents above a log-ratio of 20, so no finite, -inf or +100 input gives NaN or inf
    in value or gradient, clipped or masked or not. Inside that range the value is TRL's to rounding. A NaN on an open
    token is an error of the run, not of the loss: it stays visible in the loss and in ``non_finite_tokens_count``.
    With everything masked the loss is 0, its gradient 0.

    Args:
        inputs: The micro-batch.
        settings: What the loss is.
        accumulation: Micro-batches in this optimizer step, at least 1.
        world_size: Ranks that share the generation batch.
        is_training: False for evaluation.

    Returns:
        ``PolicyLoss``.

    Raises:
        ValueError: If ``reference_logprobs`` or ``num_items`` is needed and missing.

    Source:
        TRL 1.16, ``GRPOTrainer._compute_loss``; differs outside the range above only.

    Example:
        >>> logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> inputs = LossInputs(logprobs=logprobs, entropy=torch.ones(1, 2), completion_mask=torch.ones(1, 2),
        ...                     advantages=torch.tensor([1.0]), num_items=2)
        >>> policy_loss(inputs, LossSettings(), accumulation=1).loss
        tensor(-1., grad_fn=<SumBackward0>)
    """
    is_counted = inputs.completion_mask.bool()
    mask = is_counted if inputs.token_weights is None else is_counted & (inputs.token_weights != 0)
    family = LOSS_FAMILIES[settings.loss_type]
    terms = _surrogate_terms(inputs, settings, mask)
    scope = BatchScope(
        mask=is_counted,
        num_items=inputs.num_items,
        accumulation=accumulation if is_training else 1,
        slices=settings.steps_per_generation if is_training else 1,
        world_size=world_size,
        max_completion_length=settings.max_completion_length,
    )
    token_loss = family.surrogate(terms, settings).expand(mask.shape)
    kept = _kept_tokens(inputs, settings, terms)
    if kept is not None:
        token_loss = torch.where(kept, token_loss, 0.0)
    if terms.correction is not None and not family.has_correction_inside:
        token_loss = token_loss * terms.correction
    readings = _readings(inputs, terms)
    if settings.beta != 0.0:
        kl = _kl(inputs, settings, terms)
        token_loss = token_loss + settings.beta * kl
        readings |= {"kl_sum": masked_sum(kl, mask), "kl_max": masked_max(kl, mask, empty=-torch.inf)}
    token_loss = torch.where(mask, token_loss * family.aggregation(scope), 0.0)
    readings["policy_loss_sum"] = token_loss.sum()
    bonus_mask = is_counted & _top_entropy_tokens(inputs, settings, is_counted)
    entropy = torch.where(mask, at_least_float32(inputs.entropy), 0.0)
    readings["bonus_entropy_sum"] = masked_sum(entropy, bonus_mask)
    readings["bonus_entropy_count"] = bonus_mask.sum()
    if settings.entropy_coef != 0.0:
        weight = settings.entropy_coef / (bonus_mask.sum().clamp(min=1) * scope.accumulation)
        token_loss = token_loss - torch.where(bonus_mask, entropy * weight, 0.0)
    if inputs.token_weights is not None:
        token_loss = token_loss * torch.where(mask, at_least_float32(inputs.token_weights), 0.0)
    readings["non_finite_tokens_count"] = (mask & ~token_loss.isfinite()).sum()
    readings |= family.readings(terms, settings)
    return PolicyLoss(
        token_loss=token_loss, readings={name: value.detach().float() for name, value in readings.items()}
    )


def _selected(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Floored log-probabilities, 0 on closed slots; the gradient there is exactly 0."""
    return torch.where(mask, floored_logprobs(logprobs), 0.0)


def _surrogate_terms(inputs: LossInputs, settings: LossSettings, mask: Tensor) -> SurrogateTerms:
    logprobs = _selected(inputs.logprobs, mask)
    old = logprobs.detach() if inputs.old_logprobs is None else _selected(inputs.old_logprobs.detach(), mask)
    advantages = at_least_float32(inputs.advantages)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    log_ratio = logprobs - old
    return SurrogateTerms(
        logprobs=logprobs,
        log_ratio=log_ratio,
        ratio=importance_ratio(log_ratio, mask, settings.importance_sampling_level),
        advantages=_closed_to_zero(advantages, mask),
        correction=_correction(inputs, settings, mask),
        mask=mask,
    )


def _closed_to_zero(values: Tensor, mask: Tensor) -> Tensor:
    """Per-token values are selected by the mask, per-row values by whether the row has an open token."""
    return torch.where(mask if values.shape[1] == mask.shape[1] else mask.any(1, keepdim=True), values, 0.0)


def _correction(inputs: LossInputs, settings: LossSettings, mask: Tensor) -> Tensor | None:
    if not settings.vllm_importance_sampling_correction:
        return None
    if inputs.correction_ratio is not None:
        ratio = at_least_float32(inputs.correction_ratio).detach()
        is_open = mask if ratio.shape[1] == mask.shape[1] else mask.any(1, keepdim=True)
        return torch.where(is_open, ratio, 1.0)
    if inputs.behavior_logprobs is None:
        return None
    old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return correction_ratio(
        old,
        inputs.behavior_logprobs,
        mask,
        mode=settings.vllm_importance_sampling_mode,
        clip_max=settings.vllm_importance_sampling_clip_max,
        clip_min=settings.vllm_importance_sampling_clip_min,
    )


def _kept_tokens(inputs: LossInputs, settings: LossSettings, terms: SurrogateTerms) -> Tensor | None:
    """Tokens whose policy loss stays; written so that a NaN keeps its token (and stays visible)."""
    kept: Tensor | None = None
    if settings.off_policy_mask_threshold is not None:
        sampler = inputs.old_logprobs if inputs.behavior_logprobs is None else inputs.behavior_logprobs
        policy = terms.logprobs.detach()
        drift = torch.zeros_like(policy) if sampler is None else _selected(sampler, terms.mask) - policy
        if inputs.behavior_logprobs is not None:
            drift = torch.where(inputs.behavior_logprobs.isnan(), 0.0, drift)
        mean_drift = masked_mean(drift, terms.mask, -1).unsqueeze(-1)
        kept = ~((terms.advantages < 0) & (mean_drift > settings.off_policy_mask_threshold))
    if settings.top_entropy_quantile < 1.0:
        is_top = _top_entropy_tokens(inputs, settings, terms.mask)
        kept = is_top if kept is None else kept & is_top
    return kept


def _top_entropy_tokens(inputs: LossInputs, settings: LossSettings, mask: Tensor) -> Tensor:
    if settings.top_entropy_quantile >= 1.0:
        return torch.ones_like(mask)
    threshold = inputs.entropy_threshold
    if threshold is None:
        threshold = entropy_threshold(inputs.entropy, mask, settings.top_entropy_quantile)
    return ~(at_least_float32(inputs.entropy.detach()) < threshold)


def _kl(inputs: LossInputs, settings: LossSettings, terms: SurrogateTerms) -> Tensor:
    if inputs.reference_logprobs is None:
        raise ValueError(
            f"`reference_logprobs` must be given while beta is {settings.beta}, got None. "
            "Add a reference model or set beta to 0."
        )
    kl = kl_k3(terms.logprobs, _selected(inputs.reference_logprobs.detach(), terms.mask))
    return kl * terms.ratio if settings.use_bias_correction_kl else kl


def _readings(inputs: LossInputs, terms: SurrogateTerms) -> dict[str, Tensor]:
    mask = terms.mask
    readings = {
        "token_count": mask.sum(),
        "entropy_sum": masked_sum(inputs.entropy.detach(), mask),
        "floored_tokens_count": (mask & (inputs.logprobs.detach() < LOGPROB_FLOOR)).sum(),
        "saturated_tokens_count": (mask & (terms.log_ratio.detach().abs() > LOG_RATIO_BOUND)).sum(),
    }
    if inputs.behavior_logprobs is not None:
        behavior = inputs.behavior_logprobs
        old = terms.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        is_scored = mask & ~behavior.isnan()
        gap = (floored_logprobs(old) - floored_logprobs(behavior)).abs()
        readings |= {
            "sampling_logp_difference_sum": masked_sum(gap, is_scored),
            "sampling_logp_difference_count": is_scored.sum(),
            "sampling_logp_difference_max": masked_max(gap, is_scored, empty=-torch.inf),
            "unscored_tokens_count": (mask & behavior.isnan()).sum(),
        }
    if terms.correction is not None:
        ratio = terms.correction
        is_counted = mask if ratio.shape[1] == mask.shape[1] else torch.ones_like(ratio, dtype=torch.bool)
        readings |= {
            "importance_sampling_ratio_sum": masked_sum(ratio, is_counted),
            "importance_sampling_ratio_count": is_counted.sum(),
            "importance_sampling_ratio_min": masked_min(ratio, is_counted, empty=torch.inf),
            "importance_sampling_ratio_max": masked_max(ratio, is_counted, empty=-torch.inf),
        }
    return readings


_MERGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "count": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def merged_readings(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Readings of two micro-batches (or ranks) as if they had been one; any order gives the same.

    Args:
        first: Names ending in ``_sum``, ``_count``, ``_min`` or ``_max``.
        second: Likewise; names may be missing on either side.

    Returns:
        All names of both.

    Example:
        >>> a, b = {"kl_sum": torch.tensor(1.0)}, {"kl_sum": torch.tensor(2.0), "kl_max": torch.tensor(2.0)}
        >>> merged_readings(a, b)
        {'kl_sum': tensor(3.), 'kl_max': tensor(2.)}
    """
    merged = dict(first)
    for name, value in second.items():
        merge = _MERGES[name.rsplit("_", 1)[-1]]
        merged[name] = merge(merged[name], value) if name in merged else value
    return merged


def entropy_threshold(entropy: Tensor, mask: Tensor, top_entropy_quantile: float) -> Tensor:
    """The (1 - rho) quantile of the masked entropies, linearly interpolated; +inf when the mask is empty.

    Args:
        entropy: Any shape, nats.
        mask: Same shape, bool or 0/1.
        top_entropy_quantile: rho, the share of tokens to keep, in [0, 1].

    Returns:
        0-d float32, no gradient; the same figure as ``torch.quantile``, without its limit on the size.

    Source:
        "Beyond the 80/20 rule" (arXiv 2506.01939).

    Example:
        >>> entropy_threshold(torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0]), 0.5)
        tensor(2.)
    """
    values = entropy.detach().float().flatten()
    is_open = mask.bool().flatten() & ~values.isnan()
    count = is_open.sum()
    ordered = torch.where(is_open, values, torch.inf).sort().values
    rank = torch.tensor(1 - top_entropy_quantile, dtype=torch.float32, device=values.device) * (count - 1).clamp(min=0)
    below = rank.floor()
    edges = ordered[torch.stack([below, rank.ceil()]).long()]
    return torch.where(count > 0, torch.lerp(edges[0], edges[1], rank - below), torch.inf)


def adaptive_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float, minimum: float = 0.0, maximum: float = 1.0
) -> float:
    """TRL's adaptive coefficient after one optimizer step: up by delta at or under the target, down above it.

    Args:
        coef: The coefficient of the step that ended.
        entropy: Token-weighted mean entropy of the whole step on all ranks, nats.
        target: Nats.
        delta: Step of the coefficient.
        minimum: Lower bound.
        maximum: Upper bound.

    Returns:
        The coefficient of the next step.

    Source:
        Skywork-OR1 (arXiv 2505.22312).

    Example:
        >>> adaptive_entropy_coef(0.5, 0.1, target=0.2, delta=0.25)
        0.75
    """
    return min(coef + delta, maximum) if entropy <= target else max(coef - delta, minimum)


def applied_entropy_coef(coef: float, last_entropy: float, *, target: float) -> float:
    """The coefficient that enters the loss: ``coef`` while the last step's entropy was at or under the target, else 0.

    Args:
        coef: As ``adaptive_entropy_coef`` left it.
        last_entropy: Mean entropy of the last step, nats; inf before the first.
        target: Nats.

    Returns:
        ``coef`` or 0.

    Example:
        >>> applied_entropy_coef(0.1, float("inf"), target=0.2)
        0.0
    """
    return coef if last_entropy <= target else 0.0
