"""QUATRO's formulas: outliers against a running window, and which completions a rollout filter leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DROP_REASONS", "copied_fracs", "drop_reasons", "outliers", "repetition_fracs", "replayed_old_logprobs"]

DROP_REASONS = ("kept", "reward", "length", "repetition", "no_spread", "emptied")
"""Names of the codes of ``drop_reasons``: kept; group with an outlying reward; completion of unusual length; repetitive
completion; group without spread; rest of a group that lost its spread to the row rules."""

_MAD_TO_STD = 1.4826
_HASH_BASE = 6364136223846793005  # odd, so that no power of it vanishes modulo 2**64
_NO_GRAM = torch.iinfo(torch.int64).max


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


def repetition_fracs(ids: Tensor, lengths: Tensor, order: int) -> Tensor:
    """1 - distinct n-grams / n-grams of every row, as ``core.repetition.ngram_repetition_frac`` of its tokens.

    Why it is cheap: all rows at once; an n-gram is a 64-bit hash of its tokens, distinct ones are counted by sorting.

    Args:
        ids: (batch, time) int64, right-padded.
        lengths: (batch,) tokens of each row.
        order: n, at least 1.

    Returns:
        (batch,) float32 in [0, 1); 0 for rows shorter than n.

    Example:
        >>> repetition_fracs(torch.tensor([[1, 2, 1, 2, 1, 2, 0]]), torch.tensor([6]), 2)
        tensor([0.6000])
    """
    grams, count = _grams(ids, lengths, order)
    ranked = grams.sort(dim=1).values
    places = torch.arange(1, ranked.shape[1], device=ids.device)
    is_new = (ranked[:, 1:] != ranked[:, :-1]) & (places < count.unsqueeze(1))
    distinct = 1 + is_new.sum(dim=1)
    return torch.where(count > 0, 1 - distinct / count.clamp(min=1), 0.0).float()


def copied_fracs(ids: Tensor, lengths: Tensor, prompt_ids: Tensor, prompt_mask: Tensor, order: int) -> Tensor:
    """Share of every row's n-grams that stand in its prompt, as ``core.repetition.copied_frac`` of its tokens.

    Args:
        ids: (batch, time) int64, right-padded.
        lengths: (batch,) tokens of each row.
        prompt_ids: (batch, prompt) int64, left-padded.
        prompt_mask: (batch, prompt) bool.
        order: n, at least 1.

    Returns:
        (batch,) float32 in [0, 1]; 0 for rows shorter than n.

    Example:
        >>> prompt = torch.tensor([[0, 5, 6, 7]])
        >>> copied_fracs(torch.tensor([[6, 7, 8]]), torch.tensor([3]), prompt, prompt > 0, 2)
        tensor([0.5000])
    """
    grams, count = _grams(ids, lengths, order)
    # Rolled so that the padding is on the right: the places of n-grams do not matter here.
    prompt_lengths = prompt_mask.sum(dim=1)
    places = torch.arange(prompt_ids.shape[1], device=ids.device)
    shifted = (places + prompt_ids.shape[1] - prompt_lengths.unsqueeze(1)).clamp(max=prompt_ids.shape[1] - 1)
    known, _ = _grams(prompt_ids.gather(1, shifted), prompt_lengths, order)
    ranked = known.sort(dim=1).values
    at = torch.searchsorted(ranked, grams).clamp(max=ranked.shape[1] - 1)
    is_copied = (ranked.gather(1, at) == grams) & (grams != _NO_GRAM)
    return torch.where(count > 0, is_copied.sum(dim=1) / count.clamp(min=1), 0.0).float()


def _grams(ids: Tensor, lengths: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """(batch, places) hashes of the n-grams, ``_NO_GRAM`` where a row has none, and (batch,) how many it has."""
    width = max(ids.shape[1] - order + 1, 1)
    padded = torch.nn.functional.pad(ids, (0, max(order - ids.shape[1], 0)))
    grams = torch.zeros(len(ids), width, dtype=torch.int64, device=ids.device)
    for place in range(order):
        grams = grams * _HASH_BASE + padded[:, place : place + width] + 1
    count = (lengths - order + 1).clamp(min=0)
    has_gram = torch.arange(width, device=ids.device) < count.unsqueeze(1)
    return torch.where(has_gram, grams, _NO_GRAM), count


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
