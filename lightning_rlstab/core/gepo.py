"""GEPO's formulas: robust advantages, and bounds on log-ratios.

The name is this package's working name for one layer of a field recipe (Gradient Engineering for Policy Optimization);
papers that use the same four letters (arXiv 2508.17850, 2510.26270) describe other methods.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_rlstab.core.advantages import GroupAdvantages, group_advantages
from lightning_rlstab.core.logprobs import floored_logprobs
from lightning_rlstab.core.policy_loss import LossInputs

__all__ = ["bounded_loss_inputs", "robust_advantages", "within_log_ratio"]

_MAD_TO_STD = 1.4826  # of a normal distribution
_REFERENCE_OFFSET = 1e-8


def robust_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    bound: float = 3.0,
    scale_floor: float = 0.01,
    reference: bool = False,
) -> GroupAdvantages:
    """A = c tanh(z / c), z = (r - median of the group) / (1.4826 MAD of the group).

    Where the MAD is 0 though rewards differ (always so with 0/1 rewards that are not split evenly), z = (r - mean) /
    std of that group, unbiased. Either scale is at least ``scale_floor``.

    Why it is safe: groups are found by id; NaN and infinite rewards leave centre and scale and get 0; equal rewards
    give exactly 0; a spread below the floor is damped, not blown up; nothing exceeds ``bound``.

    Args:
        rewards: (N,) NaN means no reward.
        group_ids: (N,) integers, equal for completions of one prompt, in any order.
        bound: c, above 0.
        scale_floor: Reward units, above 0.
        reference: The recipe's formula to the letter: lower median, scale ``1.4826 MAD + 1e-8``, no fallback, no floor.
            With 0/1 rewards it gives the minority +-c and the majority 0.

    Returns:
        ``GroupAdvantages``; ``scale_std`` is the scale that was divided by.

    Source:
        Field recipe; median of an even count is the midpoint here, and the fallback and the floor are ours.

    Example:
        >>> robust_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)).advantages
        tensor([ 1.3864, -0.4954, -0.4954, -0.4954])
    """
    plain = group_advantages(rewards, group_ids, scale="none")
    values = rewards.double()
    is_usable = values.isfinite()
    centred, mad = _median_and_mad(values, is_usable, group_ids, is_lower=reference)
    if reference:
        scale = _MAD_TO_STD * mad + _REFERENCE_OFFSET
        z = centred / scale
    else:
        has_mad = mad > 0
        scale = torch.where(has_mad, _MAD_TO_STD * mad, plain.group_std.double()).clamp(min=scale_floor)
        z = torch.where(has_mad, centred, plain.advantages.double()) / scale
    is_taught = is_usable if reference else is_usable & plain.has_spread
    advantages = torch.where(is_taught, bound * torch.tanh(z / bound), 0.0)
    return dataclasses.replace(plain, advantages=advantages.float(), scale_std=scale.float())


def _median_and_mad(values: Tensor, is_usable: Tensor, group_ids: Tensor, *, is_lower: bool) -> tuple[Tensor, Tensor]:
    """(N,) distance of each value from its group's median, and the group's MAD, both over usable rows; 0 elsewhere."""
    _, group = torch.unique(group_ids, return_inverse=True)
    centred = torch.where(is_usable, values, 0.0) - _group_median(values, is_usable, group, is_lower=is_lower)[group]
    mad = _group_median(centred.abs(), is_usable, group, is_lower=is_lower)[group]
    return torch.where(is_usable, centred, 0.0), mad


def _group_median(values: Tensor, is_usable: Tensor, group: Tensor, *, is_lower: bool) -> Tensor:
    """(groups,) median of the usable values of each group; 0 for a group without any."""
    groups = int(group.max()) + 1 if group.numel() else 0
    usable_values, usable_group = values[is_usable], group[is_usable]
    # Two stable sorts order by group and by value within it.
    order = usable_values.argsort(stable=True)
    order = order[usable_group[order].argsort(stable=True)]
    ranked = torch.cat([usable_values[order], usable_values.new_zeros(1)])
    counts = torch.bincount(usable_group, minlength=groups)
    starts = counts.cumsum(0) - counts
    lower = ranked[starts + (counts - 1).clamp(min=0).div(2, rounding_mode="floor")]
    upper = (
        lower
        if is_lower
        else ranked[starts + counts.div(2, rounding_mode="floor").clamp(max=(counts - 1).clamp(min=0))]
    )
    return torch.where(counts > 0, (lower + upper) / 2, 0.0)


def within_log_ratio(logprobs: Tensor, anchor: Tensor, *, limit: float, floor: float) -> Tensor:
    """``logprobs`` held within ``limit`` nats of ``anchor``; a token outside becomes a constant without gradient.

    Why it is safe: tokens inside are returned bit for bit; the selection cuts the gradient instead of multiplying it,
    so a -inf or a distance of 100 nats leaves no NaN in the backward pass, clipped or masked or not. NaN stays NaN.

    Args:
        logprobs: (batch, time) nats, with gradient.
        anchor: (batch, time) nats, what it is compared with.
        limit: Nats, above 0.
        floor: Nats, below 0; -inf and everything under it count as the floor on both sides.

    Returns:
        (batch, time) nats.

    Example:
        >>> within_log_ratio(torch.tensor([-1.0, -90.0]), torch.tensor([-1.5, -2.0]), limit=20.0, floor=-100.0)
        tensor([ -1., -22.])
    """
    base = floored_logprobs(anchor.detach(), floor)
    value = floored_logprobs(logprobs, floor)
    distance = value.detach() - base
    bounded = base + distance.clamp(-limit, limit)
    return torch.where(distance.abs() > limit, bounded, value)


def bounded_loss_inputs(inputs: LossInputs, *, log_ratio: float, floor: float) -> LossInputs:
    """Hold the policy near its old log-probs and the reference near the policy, token by token.

    Args:
        inputs: One micro-batch.
        log_ratio: Nats, above 0.
        floor: Nats, below 0.

    Returns:
        The inputs with ``logprobs`` and ``reference_logprobs`` bounded; what lies inside is unchanged bit for bit.
    """
    logprobs = floored_logprobs(inputs.logprobs, floor)
    if inputs.old_logprobs is not None:
        logprobs = within_log_ratio(logprobs, inputs.old_logprobs, limit=log_ratio, floor=floor)
    reference = inputs.reference_logprobs
    if reference is not None:
        reference = within_log_ratio(reference, logprobs, limit=log_ratio, floor=floor)
    return dataclasses.replace(inputs, logprobs=logprobs, reference_logprobs=reference)
