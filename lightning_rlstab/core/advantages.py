"""Group-relative advantages: rewards against the other completions of the same prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlstab.core.checks import choice

__all__ = ["AGGREGATIONS", "SCALES", "GroupAdvantages", "combined_rewards", "group_advantages"]

SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

_STD_OFFSET = 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAdvantages:
    """Advantages and what was seen on the way.

    Attributes:
        advantages: (N,) float32, finite; 0 for excluded rows and for groups without spread.
        group_std: (N,) float32, unbiased standard deviation of the row's own group, 0 with fewer than two usable rows.
        scale_std: (N,) float32, the standard deviation that the scale refers to: the group's for "group" and "none",
            the whole batch's for "batch" and for "normalize_then_sum".
        has_spread: (N,) bool, whether the usable rewards of the row's group differ; always decided per group.
        nan_count: 0-d int64, rows left out because their reward is NaN (missing).
        inf_count: 0-d int64, rows left out because their reward is infinite.
    """

    advantages: Tensor
    group_std: Tensor
    scale_std: Tensor
    has_spread: Tensor
    nan_count: Tensor
    inf_count: Tensor


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale: str = "group") -> GroupAdvantages:
    """A = (r - mean of the group) / (std + 1e-4); without the division for scale "none".

    Why it is safe: groups are found by id in whatever order rows come; NaN and infinite rewards leave mean and std and
    get advantage 0; moments are formed in float64, so equal rewards give exactly 0.

    Args:
        rewards: (N,) NaN means no reward.
        group_ids: (N,) integers, equal for completions of one prompt.
        scale: "group" (std of the group), "batch" (std of all rows) or "none".

    Returns:
        ``GroupAdvantages``.

    Raises:
        ValueError: If ``scale`` is unknown.

    Source:
        GRPO (arXiv 2402.03300); "batch" as in Lite PPO (arXiv 2508.08221), "none" as in Dr. GRPO (arXiv 2503.20783).

    Example:
        >>> group_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.tensor([7, 3, 7, 3]), scale="none").advantages
        tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    choice("scale", scale, SCALES)
    values = rewards.double()
    is_usable = values.isfinite()
    mean, std, has_spread = _grouped_moments(values.unsqueeze(1), is_usable.unsqueeze(1), group_ids)
    group_std = std.squeeze(1)
    scale_std = _whole_std(values, is_usable).expand_as(group_std) if scale == "batch" else group_std
    centred = torch.where(is_usable, values, 0.0) - mean.squeeze(1)
    scaled = centred if scale == "none" else centred / (scale_std + _STD_OFFSET)
    return GroupAdvantages(
        advantages=torch.where(is_usable, scaled, 0.0).float(),
        group_std=group_std.float(),
        scale_std=scale_std.float(),
        has_spread=has_spread.squeeze(1),
        nan_count=values.isnan().sum(),
        inf_count=values.isinf().sum(),
    )


def combined_rewards(
    rewards_per_func: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    *,
    aggregation: str = "sum_then_normalize",
    scale: str = "group",
) -> tuple[Tensor, GroupAdvantages]:
    """Weighted rewards of several functions, and the advantages they give.

    "sum_then_normalize": r = sum_k w_k r_k, then ``group_advantages(r, scale)``.
    "normalize_then_sum": every function is first normalised in its group, s = sum_k w_k (r_k - mean_k)/(std_k + 1e-4),
    then A = (s - mean s)/(std s + 1e-4) over the whole batch; ``scale`` is not used.

    Args:
        rewards_per_func: (N, F), NaN where a function gave none.
        weights: (F,) finite.
        group_ids: (N,) integers.
        aggregation: "sum_then_normalize" or "normalize_then_sum".
        scale: As in ``group_advantages``.

    Returns:
        The weighted sum (N,) float32, NaN where every function abstained and inf where one gave inf; the advantages.

    Raises:
        ValueError: If ``aggregation`` or ``scale`` is unknown.

    Source:
        "normalize_then_sum": GDPO (arXiv 2601.05242). Both as in TRL, apart from infinite rewards, which TRL lets in.

    Example:
        >>> per_func = torch.tensor([[1.0, 0.0], [0.0, float("nan")]])
        >>> rewards, _ = combined_rewards(per_func, torch.tensor([0.7, 0.3]), torch.tensor([0, 0]))
        >>> rewards
        tensor([0.7000, 0.0000])
    """
    choice("aggregation", aggregation, AGGREGATIONS)
    choice("scale", scale, SCALES)
    per_func, factors = rewards_per_func.double(), weights.double()
    rewards = _weighted_sum(per_func, per_func, factors)
    if aggregation == "sum_then_normalize":
        # Advantages start from float64, so that rounding of the sum adds no spread to equal rewards.
        return rewards.float(), group_advantages(rewards, group_ids, scale=scale)
    is_usable = per_func.isfinite() & rewards.isfinite().unsqueeze(1)
    mean, std, _ = _grouped_moments(per_func, is_usable, group_ids)
    normalized = torch.where(is_usable, (torch.where(is_usable, per_func, 0.0) - mean) / (std + _STD_OFFSET), torch.nan)
    scores = _weighted_sum(normalized, per_func, factors)
    is_scored = scores.isfinite()
    batch_mean = torch.where(is_scored, scores, 0.0).sum() / is_scored.sum().clamp(min=1)
    batch_std = _whole_std(scores, is_scored)
    _, group_std, has_spread = _grouped_moments(scores.unsqueeze(1), is_scored.unsqueeze(1), group_ids)
    advantages = torch.where(is_scored, (scores - batch_mean) / (batch_std + _STD_OFFSET), 0.0)
    return rewards.float(), GroupAdvantages(
        advantages=advantages.float(),
        group_std=group_std.squeeze(1).float(),
        scale_std=batch_std.expand_as(scores).float(),
        has_spread=has_spread.squeeze(1),
        nan_count=rewards.isnan().sum(),
        inf_count=rewards.isinf().sum(),
    )


def _weighted_sum(values: Tensor, per_func: Tensor, factors: Tensor) -> Tensor:
    """Sum over functions of the usable values; NaN where every function abstained, inf where one gave inf."""
    total = torch.where(values.isfinite(), values * factors, 0.0).sum(1)
    total = torch.where(per_func.isnan().all(1), torch.nan, total)
    return torch.where(per_func.isinf().any(1), torch.inf, total)


def _grouped_moments(values: Tensor, is_usable: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased std and spread of each row's group, (N, F) each, over usable rows only."""
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = values.shape[0]  # an upper bound that needs no synchronisation with the device
    selected = torch.where(is_usable, values, 0.0)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros((groups, x.shape[1])).index_add_(0, group, x)[group]

    count = total(is_usable.to(values.dtype))
    mean = total(selected) / count.clamp(min=1)
    square = torch.where(is_usable, (selected - mean) ** 2, 0.0)
    std = (total(square) / (count - 1).clamp(min=1)).sqrt()
    index = group.unsqueeze(1).expand_as(values)
    blank = torch.full_like(values, -torch.inf)
    highest = blank.scatter_reduce(0, index, torch.where(is_usable, values, -torch.inf), "amax")[group]
    lowest = -blank.scatter_reduce(0, index, torch.where(is_usable, -values, -torch.inf), "amax")[group]
    has_spread = highest > lowest
    # Rounding of the mean must not turn equal rewards into advantages.
    return (
        torch.where(has_spread, mean, torch.where(count > 0, highest, 0.0)),
        torch.where(has_spread, std, 0.0),
        has_spread,
    )


def _whole_std(values: Tensor, is_usable: Tensor) -> Tensor:
    """Unbiased standard deviation of the usable values, 0-d; 0 with fewer than two."""
    count = is_usable.sum()
    selected = torch.where(is_usable, values, 0.0)
    mean = selected.sum() / count.clamp(min=1)
    square = torch.where(is_usable, (selected - mean) ** 2, 0.0)
    return (square.sum() / (count - 1).clamp(min=1)).sqrt()
