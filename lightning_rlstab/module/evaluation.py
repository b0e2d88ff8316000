"""Held-out scores as torchmetrics: sums and counts that add over batches and ranks in any order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_rlstab.core.checks import integer, number, refusal
from lightning_rlstab.rollout.records import Rollout

__all__ = [
    "ClippedRatio",
    "HeldOutMetrics",
    "MeanLength",
    "MeanReward",
    "MeanRewardOf",
    "MissingRewards",
    "PassAtK",
    "pass_at_k",
]


def pass_at_k(successes: Tensor, generations: Tensor, k: int) -> Tensor:
    """Chance that at least one of k completions drawn without replacement succeeds.

    1 - C(n - c, k) / C(n, k) for c successes among n, as the product of (1 - k / i) for i from n - c + 1 to n, which
    neither overflows nor cancels.

    Args:
        successes: (group,) c, whole numbers, 0 to n.
        generations: (group,) n, whole numbers, at least k.
        k: Draws, at least 1.

    Returns:
        (group,) float32 in [0, 1]; without bias for the true chance.

    Source:
        Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.

    Example:
        >>> pass_at_k(torch.tensor([0, 1, 3]), torch.tensor([4, 4, 4]), k=2)
        tensor([0.0000, 0.5000, 1.0000])
    """
    most = int(generations.max()) if generations.numel() else 0
    factor = torch.arange(1, most + 1, device=successes.device)
    is_in_product = (factor > (generations - successes).unsqueeze(1)) & (factor <= generations.unsqueeze(1))
    terms = (1.0 - k / factor.float()).clamp(min=0.0).expand_as(is_in_product)
    return 1.0 - torch.where(is_in_product, terms, 1.0).prod(dim=1)


class _Mean(Metric):
    """A mean kept as a float32 total and a whole-number count; NaN when nothing was counted."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """The mean over everything counted on all ranks."""
        return self.total / self.count

    def _count(self, values: Tensor, is_counted: Tensor) -> None:
        # Not in place: the states may have been made under Lightning's inference mode, by an evaluation before `fit`.
        self.total = self.total + torch.where(is_counted, values.float(), 0.0).sum()
        self.count = self.count + is_counted.sum()


class MeanReward(_Mean):
    """Mean reward over completions that have a finite one."""

    higher_is_better = True

    def update(self, rewards: Tensor, is_padding: Tensor) -> None:
        """Count (batch,) rewards, NaN where missing; ``is_padding`` (batch,) bool marks repeated prompts."""
        self._count(rewards, ~is_padding & rewards.isfinite())


class MissingRewards(_Mean):
    """Share of completions whose reward is missing or not finite."""

    higher_is_better = False

    def update(self, rewards: Tensor, is_padding: Tensor) -> None:
        """Count (batch,) rewards, NaN where missing; ``is_padding`` (batch,) bool marks repeated prompts."""
        self._count(~rewards.isfinite(), ~is_padding)


class PassAtK(_Mean):
    """Mean over prompts of the chance that one of k completions succeeds.

    A completion succeeds when its reward is at least ``threshold``; a missing reward is a failure.

    Args:
        k: Draws per prompt.
        threshold: Smallest reward of a success.
        **kwargs: For ``torchmetrics.Metric``.
    """

    higher_is_better = True

    def __init__(self, k: int, *, threshold: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = integer("k", k, at_least=1)
        self.threshold = number("threshold", threshold)

    def update(self, rewards: Tensor, group_ids: Tensor, is_padding: Tensor) -> None:
        """Count whole groups.

        Args:
            rewards: (batch,) rewards, NaN where missing.
            group_ids: (batch,) id of each completion's prompt; every group is complete in one call, in any order.
            is_padding: (batch,) bool, True for completions of repeated prompts.

        Raises:
            ValueError: If a group has fewer than k completions.
        """
        groups, position = cast("tuple[Tensor, Tensor]", torch.unique(group_ids, return_inverse=True))
        zeros = torch.zeros(groups.numel(), dtype=torch.long, device=rewards.device)
        generations = zeros.scatter_add(0, position, torch.ones_like(position))
        successes = zeros.scatter_add(0, position, (rewards >= self.threshold).long())
        padded = zeros.scatter_add(0, position, is_padding.long()) > 0
        if generations.numel() and int(generations.min()) < self.k:
            raise refusal("k", "be at most the completions per prompt", self.k, f"There are {int(generations.min())}")
        self._count(pass_at_k(successes, generations, self.k), ~padded)


class MeanLength(_Mean):
    """Mean completion length in tokens."""

    def update(self, lengths: Tensor, is_padding: Tensor) -> None:
        """Count (batch,) lengths; ``is_padding`` (batch,) bool marks repeated prompts."""
        self._count(lengths, ~is_padding)


class ClippedRatio(_Mean):
    """Share of completions cut off at the length limit."""

    higher_is_better = False

    def update(self, is_truncated: Tensor, is_padding: Tensor) -> None:
        """Count (batch,) flags; ``is_padding`` (batch,) bool marks repeated prompts."""
        self._count(is_truncated, ~is_padding)


class MeanRewardOf(_Mean):
    """Mean of one reward function over the completions for which it gave a finite value.

    Args:
        column: Which function, in the order of the reward functions.
        **kwargs: For ``torchmetrics.Metric``.
    """

    higher_is_better = True

    def __init__(self, column: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.column = integer("column", column, at_least=0)

    def update(self, rewards_per_func: Tensor, is_padding: Tensor) -> None:
        """Count (batch, function) values, NaN where a function gave none; ``is_padding`` (batch,) bool."""
        values = rewards_per_func[:, self.column]
        self._count(values, ~is_padding & values.isfinite())


class HeldOutMetrics(MetricCollection):
    """Everything measured on held-out prompts.

    ``{prefix}reward``, ``rewards/{name}/mean``, ``rewards_missing_frac``, ``pass@{k}``, ``completions/mean_length`` and
    ``completions/clipped_ratio``.

    Args:
        num_generations: Completions per held-out prompt.
        reward_names: Names of the reward functions, in the order of ``rollout.rewards_per_func``.
        ks: Which pass@k to measure; None for 1 and ``num_generations``.
        threshold: Smallest reward of a success.
        prefix: Put before every name.

    Raises:
        ValueError: If a k is not between 1 and ``num_generations``.

    Example:
        >>> sorted(HeldOutMetrics(4, ks=[2]).scalars())  # nothing was counted, so there is nothing to log
        []
    """

    def __init__(
        self,
        num_generations: int,
        *,
        reward_names: Sequence[str] = (),
        ks: Sequence[int] | None = None,
        threshold: float = 1.0,
        prefix: str = "val/",
    ) -> None:
        most = integer("num_generations", num_generations, at_least=1)
        wanted = sorted({1, most} if ks is None else {integer("ks", k, at_least=1, at_most=most) for k in ks})
        metrics: dict[str, Metric] = {
            "reward": MeanReward(),
            **{f"rewards/{name}/mean": MeanRewardOf(column) for column, name in enumerate(reward_names)},
            "rewards_missing_frac": MissingRewards(),
            **{f"pass@{k}": PassAtK(k, threshold=threshold) for k in wanted},
            "completions/mean_length": MeanLength(),
            "completions/clipped_ratio": ClippedRatio(),
        }
        # Compute groups would merge metrics whose states agree by chance after one batch, such as reward and pass@1.
        super().__init__(cast(Any, metrics), prefix=prefix, compute_groups=False)

    def update(self, rollout: Rollout, is_padding: Tensor) -> None:  # type: ignore[override]
        """Count one batch of whole groups.

        Args:
            rollout: Scored completions.
            is_padding: (batch,) bool, True for completions of prompts repeated to even out the ranks.
        """
        super().update(
            rewards=rollout.rewards,
            rewards_per_func=rollout.rewards_per_func,
            group_ids=rollout.group_ids,
            lengths=rollout.completion_lengths,
            is_truncated=rollout.is_truncated,
            is_padding=is_padding,
        )

    def scalars(self) -> dict[str, Tensor]:
        """The values over all ranks that are numbers: what was never counted leaves no NaN point in a curve.

        Every rank gets the same names, because ``compute`` reduces over ranks first.
        """
        with warnings.catch_warnings():
            # A run without a single held-out batch is no mistake of the caller.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
            values = self.compute()
        return {name: value for name, value in values.items() if math.isfinite(value)}
