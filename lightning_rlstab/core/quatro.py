"""QUATRO's formulas: outliers against a running window, and which completions a rollout filter leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DROP_REASONS", "drop_reasons", "outliers", "replayed_old_logprobs"]

DROP_REASONS = ("kept", "reward", "length", "repetition", "no_spread", "emptied")
"""Names of the codes of ``drop_reasons``: kept; group with an outlying reward; completion of unusual length; repetitive
completion; group without spread; rest of a group that lost its spread to the row rules."""

_MAD_TO_STD = 1.4826


def outliers(values: Tensor, window: Tensor, *, z_limit: float, level_frac: float = 0.01) -> Tensor:
    """Which values lie outside everything the window knows, by more than ``z_limit`` robust standard deviations.

    A value is an outlier when it is beyond the range between the ``level_frac`` and ``1 - level_frac`` quantiles of the
    window, and |value - median| > z_limit * scale with scale = 1.4826 MAD, or the standard deviation of the window cut
    to that range where the MAD is 0.

    Why it is safe: inside a group of 8 no |z| exceeds 2.65, hence the window. A level that ``level_frac`` of the window
    has seen is a level, not an outlier: rare successes among many failures stay, however large their z. A window
    without any spread is no basis, and nothing is an outlier to it. Non-finite values are never outliers here.

    Args:
        values: (N,).
        window: (W,) recent values, finite, in any order.
        z_limit: Above 0.
        level_frac: In [0, 0.5).

    Returns:
        (N,) bool.

    Example:
        >>> window = torch.tensor([0.0, 1.0] * 50)
        >>> outliers(torch.tensor([1.0, 0.0, 900.0]), window, z_limit=3.5)
        tensor([False, False,  True])
    """
    if window.numel() == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    ranked = window.double().sort().values
    cut = int(level_frac * len(ranked))
    low, high = ranked[cut], ranked[len(ranked) - 1 - cut]
    median = _midpoint_median(ranked)
    mad = _midpoint_median((ranked - median).abs().sort().values)
    scale = torch.where(mad > 0, _MAD_TO_STD * mad, ranked.clamp(low, high).std(correction=0))
    numbers = values.double()
    is_far = (numbers - median).abs() > z_limit * scale
    return numbers.isfinite() & is_far & (scale > 0) & ((numbers < low) | (numbers > high))


def _midpoint_median(ranked: Tensor) -> Tensor:
    count = len(ranked)
    return (ranked[(count - 1) // 2] + ranked[count // 2]) / 2


def drop_reasons(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    is_outlier: Tensor,
    is_odd_length: Tensor,
    is_repetitive: Tensor,
    drops_no_spread: bool,
) -> Tensor:
    """Why each completion is left out of training, as an index into ``DROP_REASONS``; 0 for kept.

    The rules, in order:
    1. A group with an outlying reward goes whole: its centre and spread are not to be trusted.
    2. Completions of unusual length or with too much repetition go one by one, and their rewards leave the group's
       statistics.
    3. A group that had spread and lost it through rule 2 goes whole: [1, 0, 0, 0] never becomes [0, 0, 0].
    4. A group without spread goes whole, when asked to: it teaches nothing but the KL.

    Args:
        rewards: (N,) non-finite where there is none.
        group_ids: (N,) integers.
        is_outlier: (N,) bool, reward far outside the usual.
        is_odd_length: (N,) bool.
        is_repetitive: (N,) bool.
        drops_no_spread: Whether rule 4 applies.

    Returns:
        (N,) int64.

    Example:
        >>> no = torch.zeros(4, dtype=torch.bool)
        >>> first = torch.tensor([True, False, False, False])
        >>> rules = dict(is_outlier=no, is_odd_length=no, is_repetitive=first, drops_no_spread=True)
        >>> drop_reasons(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4), **rules)
        tensor([3, 5, 5, 5])
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    reasons = torch.zeros_like(group)
    reasons[is_odd_length] = DROP_REASONS.index("length")
    reasons[is_repetitive] = DROP_REASONS.index("repetition")
    had_spread = _has_spread(rewards, rewards.isfinite(), group)
    has_spread = _has_spread(rewards, rewards.isfinite() & (reasons == 0), group)
    is_emptied = had_spread & ~has_spread & (reasons == 0)
    reasons = torch.where(is_emptied, DROP_REASONS.index("emptied"), reasons)
    if drops_no_spread:
        reasons = torch.where(~had_spread & (reasons == 0), DROP_REASONS.index("no_spread"), reasons)
    group_has_outlier = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.bool, device=group.device)
    group_has_outlier[group[is_outlier]] = True
    return torch.where(group_has_outlier[group], DROP_REASONS.index("reward"), reasons)


def _has_spread(rewards: Tensor, is_usable: Tensor, group: Tensor) -> Tensor:
    """(N,) bool: whether the usable rewards of the row's group differ."""
    groups = int(group.max()) + 1 if len(group) else 0
    values = torch.where(is_usable, rewards.double(), 0.0)
    empty = values.new_full((groups,), torch.inf)
    lowest = empty.scatter_reduce(0, group, torch.where(is_usable, values, torch.inf), "amin")
    highest = (-empty).scatter_reduce(0, group, torch.where(is_usable, values, -torch.inf), "amax")
    return (highest > lowest)[group]


def replayed_old_logprobs(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Old log-probs with the policy's own in place of NaN, so that fresh rows have a ratio of exactly 1.

    A batch that mixes fresh and replayed rows needs old log-probs for all of them; NaN stands for "none: compare the
    policy with itself".

    Args:
        old_logprobs: (batch, time) nats, NaN on fresh rows.
        logprobs: (batch, time) nats of the policy now.

    Returns:
        (batch, time) nats, without gradient.
    """
    return torch.where(old_logprobs.isnan(), logprobs.detach().to(old_logprobs.dtype), old_logprobs)
