"""What the forward passes of one optimizer step left behind, gathered from all ranks into global tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.control.protocols import WindowEntry
from lightning_rlstab.core.gradloc import head_gradient_norms
from lightning_rlstab.core.policy_loss import policy_loss
from lightning_rlstab.gradloc.numeric import FORWARD_PLACES
from lightning_rlstab.gradloc.oracle import WindowSignals

__all__ = ["entropy_slope", "gathered_signals", "local_slope"]

Gather = Callable[[Tensor], Sequence[Tensor]]

_FIELDS = (
    "mask",
    "slope",
    "logprobs",
    "head_norms",
    "log_ratios",
    "reference_gaps",
    "token_ids",
    "advantages",
    "places",
)


def local_slope(entry: WindowEntry) -> Tensor:
    """(batch, time) dL/dlogprob of one micro-batch, L being this rank's summed token losses; 0 outside the loss."""
    slope: Tensor = entry.constants["token_loss_slope"]
    return torch.where(entry.rollout.completion_mask.bool(), slope.detach().float(), 0.0)


def entropy_slope(entry: WindowEntry) -> Tensor | None:
    """(batch, time) dL/dentropy of one micro-batch, or None when the loss holds no entropy bonus.

    The bonus does not depend on how many ranks share the normaliser, so the loss may be formed as if alone.
    """
    settings = entry.constants["settings"]
    if settings.entropy_coef == 0.0:
        return None
    kept = entry.constants["inputs"]
    with torch.enable_grad():
        entropy = kept.entropy.detach().requires_grad_()
        result = policy_loss(replace(kept, entropy=entropy), settings, accumulation=entry.constants["accumulation"])
        (slope,) = torch.autograd.grad(result.token_loss.sum(), entropy)
    return torch.where(entry.rollout.completion_mask.bool(), slope.float(), 0.0)


def gathered_signals(
    window: Sequence[WindowEntry], *, temperature: float, all_gathered: Gather, is_of_dropped: bool = False
) -> WindowSignals:
    """Global tensors of shape (micro_batch, rank, sequence, token) on the CPU, equal on all ranks.

    Two collectives: one for the widths, one for everything else packed into float32 (token ids up to 2^24 are exact).

    Args:
        window: The step's micro-batches on this rank; as many as on every other rank.
        temperature: Divisor of the logits.
        all_gathered: A tensor of every rank in rank order.
        is_of_dropped: Count the micro-batches that a guard dropped instead of the others.
    """
    device = window[0].rollout.completion_ids.device
    own = torch.tensor([max(len(entry.rollout) for entry in window), max(_width(entry) for entry in window)])
    rows, width = (int(size) for size in torch.stack(list(all_gathered(own.to(device)))).max(dim=0).values)
    packed = torch.stack(
        [_packed(entry, rows, width, temperature, is_counted=entry.is_dropped == is_of_dropped) for entry in window],
        dim=1,
    )
    ranks = torch.stack([part.cpu() for part in all_gathered(packed)], dim=2)
    fields = dict(zip(_FIELDS, ranks.unbind(0), strict=True))
    places = fields["places"].long()
    return WindowSignals(
        mask=fields["mask"].bool(),
        slope=fields["slope"] / ranks.shape[2],
        logprobs=fields["logprobs"],
        head_norms=fields["head_norms"] / ranks.shape[2],
        log_ratios=fields["log_ratios"],
        reference_gaps=fields["reference_gaps"],
        token_ids=fields["token_ids"].long(),
        advantages=fields["advantages"][..., 0],
        nonfinite={place: places == code for code, place in enumerate(FORWARD_PLACES, start=1)},
    )


def _width(entry: WindowEntry) -> int:
    return int(entry.rollout.completion_ids.shape[1])


def _packed(entry: WindowEntry, rows: int, width: int, temperature: float, *, is_counted: bool) -> Tensor:
    """(field, rows, width) float32 of one micro-batch, padded with closed slots."""
    rollout, constants = entry.rollout, entry.constants
    mask = rollout.completion_mask.bool()
    if not is_counted:
        mask = torch.zeros_like(mask)
    slope, logprobs = local_slope(entry), constants["logprobs"].float()
    head_norms = head_gradient_norms(
        slope, logprobs, constants["sum_squared_probs"], constants["hidden_norms"], temperature=temperature
    )
    reference, unknown = constants["inputs"].reference_logprobs, torch.full_like(logprobs, torch.nan)
    advantages = constants["inputs"].advantages
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    values = {
        "mask": mask,
        "slope": torch.where(mask, slope, 0.0),
        "logprobs": logprobs,
        "head_norms": torch.where(mask, head_norms, 0.0),
        "log_ratios": _log_ratios(entry),
        "reference_gaps": unknown if reference is None else reference.float() - logprobs,
        "token_ids": rollout.completion_ids,
        "advantages": advantages.expand_as(logprobs),
        "places": _places(entry, slope, mask),
    }
    packed = torch.zeros((len(_FIELDS), rows, width), dtype=torch.float32, device=mask.device)
    for index, name in enumerate(_FIELDS):
        packed[index, : mask.shape[0], : mask.shape[1]] = values[name].float()
    return packed


def _log_ratios(entry: WindowEntry) -> Tensor:
    """Policy in training against the policy that sampled; against the start of the update where that is farther off."""
    logprobs, inputs = entry.constants["logprobs"].float(), entry.constants["inputs"]
    unknown = torch.full_like(logprobs, torch.nan)
    by_sampler = unknown if inputs.behavior_logprobs is None else logprobs - inputs.behavior_logprobs.float()
    by_update = unknown if inputs.old_logprobs is None else logprobs - inputs.old_logprobs.float()
    is_farther = by_sampler.isnan() | (by_update.abs() > by_sampler.abs())
    return torch.where(is_farther, by_update, by_sampler)


def _places(entry: WindowEntry, slope: Tensor, mask: Tensor) -> Tensor:
    """1 + index into ``FORWARD_PLACES`` of the first non-finite value on the path of each token; 0 where all is well.

    Only tokens at which the fault arrives count, in the forward or in the slope: a log-prob of -inf that the loss
    bounded or masked away did no harm.
    """
    rollout, inputs = entry.rollout, entry.constants["inputs"]
    logprobs, hidden = entry.constants["logprobs"], entry.constants["hidden_norms"]
    is_hit = mask & ~(slope.isfinite() & logprobs.isfinite() & hidden.isfinite())
    ratio = inputs.correction_ratio
    sources: dict[str, Tensor | None] = {
        "reward": None if rollout.rewards is None else rollout.rewards.unsqueeze(1),
        "advantage": inputs.advantages if inputs.advantages.dim() == 2 else inputs.advantages.unsqueeze(1),
        "behavior_logprob": None if inputs.behavior_logprobs is None else _infinite_only(inputs.behavior_logprobs),
        "old_logprob": inputs.old_logprobs,
        "reference_logprob": inputs.reference_logprobs,
        "hidden_state": hidden,
        "logprob": logprobs,
        "ratio": ratio if ratio is not None else _ratio(logprobs, inputs.old_logprobs),
        "loss": torch.where(is_hit, torch.nan, torch.zeros_like(slope)),
    }
    places = torch.zeros_like(slope)
    for code, place in reversed(list(enumerate(FORWARD_PLACES, start=1))):
        values = sources[place]
        if values is not None:
            places = torch.where(is_hit & ~values.isfinite(), float(code), places)
    return places


def _infinite_only(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), 0.0, values)  # NaN says that the sampler's log-prob is not known


def _ratio(logprobs: Tensor, old_logprobs: Tensor | None) -> Any:
    return None if old_logprobs is None else (logprobs - old_logprobs).exp()
