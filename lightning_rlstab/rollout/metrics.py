"""What a rollout says about itself under TRL's metric names: readings that add up over ranks, then the numbers.

Readings are 0-d tensors whose last word says how they merge: ``_sum`` and ``_count`` add, ``_min`` and ``_max`` take
the extreme; ``core.policy_loss.merged_readings`` merges two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_rlstab.core.advantages import GroupAdvantages
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.rewards import RewardTable

__all__ = ["equal_lengths_warning", "logged_metrics", "rollout_metrics", "rollout_readings"]

_ZERO_STD = 1e-8  # torch.isclose's absolute tolerance, which TRL's figure rests on
_ENOUGH_ROWS = 4  # fewer completions of equal length are no surprise


def rollout_readings(rollout: Rollout, table: RewardTable, estimate: GroupAdvantages) -> dict[str, Tensor]:
    """Sums, counts and extremes of one rank's rollout; nothing is read back from the device.

    Args:
        rollout: The completions; their generated lengths count, whatever the loss mask says.
        table: Their rewards.
        estimate: Their advantages, for the share of rows whose rewards have no spread.

    Returns:
        0-d float64 tensors on the rollout's device, the same names on every rank.
    """
    device = rollout.completion_ids.device
    lengths, has_ended = rollout.completion_lengths.to(device), ~rollout.is_truncated
    everything = torch.ones_like(has_ended)
    readings = {
        "num_tokens_count": rollout.prompt_mask.sum() + lengths.sum(),
        "completions/clipped_count": rollout.is_truncated.sum(),
        "reward_zero_std_count": _without_spread(estimate, rollout, table).sum(),
        "rewards_missing_count": table.per_func.isnan().sum(),
        "rewards_nan_count": table.nan.sum(),
        "rewards_inf_count": table.inf.sum(),
        "rewards_timed_out_count": table.timed_out.sum(),
        **_moments("completions/length", lengths, everything),
        **_moments("completions/terminated_length", lengths, has_ended),
        **_moments("reward", table.weighted, ~table.weighted.isnan()),
    }
    for column, name in enumerate(table.names):
        rewards = table.per_func[:, column]
        readings |= _moments(f"rewards/{name}", rewards, ~rewards.isnan())
    return {name: value.to(device=device, dtype=torch.float64) for name, value in readings.items()}


def _moments(name: str, values: Tensor, is_counted: Tensor) -> dict[str, Tensor]:
    exact = values.double()
    counted = torch.where(is_counted, exact, 0.0)
    return {
        f"{name}_sum": counted.sum(),
        f"{name}_square_sum": (counted * counted).sum(),
        f"{name}_count": is_counted.sum(),
        f"{name}_min": torch.where(is_counted, exact, math.inf).amin(),
        f"{name}_max": torch.where(is_counted, exact, -math.inf).amax(),
    }


def _without_spread(estimate: GroupAdvantages, rollout: Rollout, table: RewardTable) -> Tensor:
    # TRL's std of fewer than two rewards is NaN, which is not close to 0: such rows do not count.
    is_scored = ~table.weighted.isnan().to(rollout.group_ids.device)
    _, group = torch.unique(rollout.group_ids, return_inverse=True)
    scored = is_scored.new_zeros(len(rollout), dtype=torch.int64).index_add_(0, group, is_scored.long())[group]
    return (estimate.scale_std.abs().to(scored.device) <= _ZERO_STD) & (scored > 1)


def rollout_metrics(readings: Mapping[str, Tensor]) -> dict[str, float]:
    """TRL's completion and reward metrics.

    A reward function without a single value has no mean: its point is left out rather than drawn as NaN, and
    ``rlstab/grpo/rewards_missing`` says how many values were missing.

    Args:
        readings: Merged over all ranks and rollouts.

    Returns:
        Finite numbers by metric name. ``reward`` is the weighted sum; standard deviations are unbiased, over all
        completions that have a value.
    """
    values = {name: float(value) for name, value in readings.items()}
    completions = max(values["completions/length_count"], 1.0)
    metrics = {
        "completions/clipped_ratio": values["completions/clipped_count"] / completions,
        "frac_reward_zero_std": values["reward_zero_std_count"] / completions,
        "rlstab/grpo/rewards_missing": values["rewards_missing_count"],
        "rlstab/grpo/rewards_nan": values["rewards_nan_count"],
        "rlstab/grpo/rewards_inf": values["rewards_inf_count"],
        "rlstab/grpo/rewards_timed_out": values["rewards_timed_out_count"],
    }
    for kind in ("length", "terminated_length"):
        name = f"completions/{kind}"
        count = values[f"{name}_count"]
        # TRL draws 0 when no completion has ended by itself.
        metrics[f"completions/mean_{kind}"] = values[f"{name}_sum"] / count if count else 0.0
        metrics[f"completions/min_{kind}"] = values[f"{name}_min"] if count else 0.0
        metrics[f"completions/max_{kind}"] = values[f"{name}_max"] if count else 0.0
    for name in _reward_names(values):
        mean, std = ("reward", "reward_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
        if values[f"{name}_count"] > 0:
            metrics[mean] = values[f"{name}_sum"] / values[f"{name}_count"]
        if values[f"{name}_count"] > 1:
            metrics[std] = _std(values, name)
    return metrics


def _reward_names(values: Iterable[str]) -> list[str]:
    ending = "_square_sum"
    return [name[: -len(ending)] for name in values if name.startswith("reward") and name.endswith(ending)]


def _std(values: Mapping[str, float], name: str) -> float:
    if values[f"{name}_min"] == values[f"{name}_max"]:
        return 0.0  # exactly, where the difference of two sums would leave rounding behind
    count, total = values[f"{name}_count"], values[f"{name}_sum"]
    return math.sqrt(max(values[f"{name}_square_sum"] - total * total / count, 0.0) / (count - 1))


def logged_metrics(per_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Means of what reward functions passed to ``log_metric``, over all calls of all ranks.

    Args:
        per_rank: ``RewardTable.metrics`` of every rank; names may differ.

    Returns:
        One finite number per name; names without a finite value are left out.

    Example:
        >>> logged_metrics([{"parsed": [1.0, 0.0]}, {"parsed": [0.5, float("nan")]}])
        {'parsed': 0.5}
    """
    means = {}
    for name in sorted({name for metrics in per_rank for name in metrics}):
        finite = [value for metrics in per_rank for value in metrics.get(name, ()) if math.isfinite(value)]
        if finite:
            means[name] = sum(finite) / len(finite)
    return means


def equal_lengths_warning(readings: Mapping[str, Tensor]) -> str | None:
    """Words for a batch whose completions all have one length although none was cut off; None when there is no need.

    Equal lengths without truncation mostly mean that end-of-sequence tokens are not seen and the masks are wrong.

    Args:
        readings: Merged over all ranks.
    """
    shortest, longest = readings["completions/length_min"], readings["completions/length_max"]
    count, clipped = int(readings["completions/length_count"]), int(readings["completions/clipped_count"])
    if count < _ENOUGH_ROWS or clipped or float(shortest) != float(longest):
        return None
    return (
        f"All {count} completions have exactly {int(shortest)} tokens and none was cut off. Unless the task is like "
        "that, the end-of-sequence ids or the completion masks are wrong."
    )
