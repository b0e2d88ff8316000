"""Held-out metrics: estimators, padding, missing values, and sums that add in any order."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlstab.module.evaluation import HeldOutMetrics, MeanReward, PassAtK, pass_at_k
from lightning_rlstab.rollout.records import Rollout

NAN = float("nan")


def rollout(rewards: list[float], group_ids: list[int], **fields: Any) -> Rollout:
    count = len(rewards)
    width = 6
    return Rollout(
        prompts=["p"] * count,
        completions=["c"] * count,
        prompt_ids=torch.zeros(count, 1, dtype=torch.long),
        prompt_mask=torch.ones(count, 1, dtype=torch.bool),
        completion_ids=torch.zeros(count, width, dtype=torch.long),
        completion_mask=torch.ones(count, width, dtype=torch.bool),
        is_truncated=fields.pop("is_truncated", torch.zeros(count, dtype=torch.bool)),
        group_ids=torch.tensor(group_ids),
        pad_token_id=0,
        rewards=torch.tensor(rewards),
        rewards_per_func=torch.tensor(rewards).unsqueeze(1),
        **fields,
    )


def no_padding(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.bool)


class TestPassAtK:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 7), st.data())
    def test_it_is_the_share_of_draws_that_hold_a_success(self, generations: int, data: st.DataObject) -> None:
        successes = data.draw(st.integers(0, generations))
        k = data.draw(st.integers(1, generations))
        outcomes = [index < successes for index in range(generations)]
        draws = list(combinations(outcomes, k))
        expected = sum(map(any, draws)) / len(draws)
        estimate = pass_at_k(torch.tensor([successes]), torch.tensor([generations]), k)
        torch.testing.assert_close(estimate, torch.tensor([expected], dtype=torch.float32))

    def test_hundreds_of_completions_neither_overflow_nor_cancel(self) -> None:
        estimate = pass_at_k(torch.tensor([0, 1, 1000]), torch.tensor([1000, 1000, 1000]), 500)
        torch.testing.assert_close(estimate, torch.tensor([0.0, 0.5, 1.0]))

    def test_groups_of_different_sizes_stand_side_by_side(self) -> None:
        torch.testing.assert_close(pass_at_k(torch.tensor([1, 1]), torch.tensor([2, 4]), 2), torch.tensor([1.0, 0.5]))

    def test_no_group_gives_no_estimate(self) -> None:
        empty = torch.zeros(0, dtype=torch.long)
        assert pass_at_k(empty, empty, 1).shape == (0,)

    def test_groups_are_told_apart_by_id_not_by_position(self) -> None:
        metric = PassAtK(2)
        metric.update(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([7, 3, 7, 3]), no_padding(4))
        assert metric.compute() == 0.5  # prompt 7 solved twice, prompt 3 never

    def test_a_missing_reward_is_a_failure(self) -> None:
        metric = PassAtK(1)
        metric.update(torch.tensor([NAN, 1.0]), torch.tensor([0, 0]), no_padding(2))
        assert metric.compute() == 0.5

    def test_the_threshold_is_part_of_success(self) -> None:
        rewards, groups = torch.tensor([0.5, 0.4]), torch.tensor([0, 1])
        metric = PassAtK(1, threshold=0.5)
        metric.update(rewards, groups, no_padding(2))
        assert metric.compute() == 0.5

    def test_more_draws_than_completions_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"`k` must be at most the completions per prompt, got 3. There are 2"):
            PassAtK(3).update(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), no_padding(2))
        with pytest.raises(ValueError, match="`ks` must be a whole number of at least 1 and at most 4, got 5"):
            HeldOutMetrics(4, ks=[5])


class TestHeldOut:
    def test_every_scalar_has_its_value(self) -> None:
        metrics = HeldOutMetrics(2, reward_names=["exact"])
        metrics.update(
            rollout(
                [1.0, 0.0, 0.0, NAN],
                [0, 0, 1, 1],
                is_truncated=torch.tensor([True, False, False, False]),
                completion_lengths=torch.tensor([6, 2, 3, 1]),
            ),
            no_padding(4),
        )
        assert {name: round(value.item(), 6) for name, value in metrics.scalars().items()} == {
            "val/reward": round(1 / 3, 6),
            "val/rewards/exact/mean": round(1 / 3, 6),
            "val/rewards_missing_frac": 0.25,
            "val/pass@1": 0.25,
            "val/pass@2": 0.5,
            "val/completions/mean_length": 3.0,
            "val/completions/clipped_ratio": 0.25,
        }

    def test_fr_100_repeated_prompts_count_nowhere(self) -> None:
        alone, padded = HeldOutMetrics(2), HeldOutMetrics(2)
        alone.update(rollout([1.0, 0.0], [0, 0]), no_padding(2))
        extra = {
            "is_truncated": torch.tensor([False, False, True, True]),
            "completion_lengths": torch.tensor([6, 6, 99, 99]),
        }
        padded.update(rollout([1.0, 0.0, NAN, 5.0], [0, 0, 9, 9], **extra), torch.tensor([False, False, True, True]))
        assert padded.scalars() == alone.scalars()

    def test_metrics_that_agree_after_one_batch_stay_apart(self) -> None:
        metrics = HeldOutMetrics(1, ks=[1])
        metrics.update(rollout([1.0, 1.0], [0, 1]), no_padding(2))
        metrics.update(rollout([0.5, 0.5], [2, 3]), no_padding(2))
        values = metrics.scalars()
        assert values["val/reward"] == 0.75
        assert values["val/pass@1"] == 0.5

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=12, max_size=12), st.permutations(range(3)))
    def test_batches_add_in_any_order(self, rewards: list[float], order: list[int]) -> None:
        groups = [number // 2 for number in range(12)]
        whole, split = HeldOutMetrics(2), HeldOutMetrics(2)
        whole.update(rollout(rewards, groups), no_padding(12))
        for part in order:
            rows = slice(4 * part, 4 * part + 4)
            split.update(rollout(rewards[rows], groups[rows]), no_padding(4))
        one, two = whole.scalars(), split.scalars()
        assert one.keys() == two.keys()
        assert all(torch.isclose(one[name], two[name]) for name in one)

    def test_fr_143_what_was_never_counted_leaves_no_point(self) -> None:
        metrics = HeldOutMetrics(2)
        assert metrics.scalars() == {}
        metrics.update(rollout([NAN, NAN], [0, 0]), no_padding(2))
        values = metrics.scalars()
        assert "val/reward" not in values
        assert values["val/rewards_missing_frac"] == 1.0

    def test_fr_131_a_fully_truncated_batch_is_finite(self) -> None:
        metrics = HeldOutMetrics(2)
        metrics.update(rollout([0.0, 0.0], [0, 0], is_truncated=torch.tensor([True, True])), no_padding(2))
        values = metrics.scalars()
        assert values["val/completions/clipped_ratio"] == 1.0
        assert values["val/completions/mean_length"] == 6.0

    def test_a_reset_forgets_everything(self) -> None:
        metrics = HeldOutMetrics(2)
        metrics.update(rollout([1.0, 1.0], [0, 0]), no_padding(2))
        metrics.reset()
        assert metrics.scalars() == {}

    @pytest.mark.parametrize("threshold", [True, "1.0", NAN, float("inf")])
    def test_fr_147_odd_thresholds_are_refused(self, threshold: Any) -> None:
        with pytest.raises(ValueError, match="`threshold` must be a finite number"):
            HeldOutMetrics(2, threshold=threshold)


def test_half_precision_rewards_are_summed_in_float32() -> None:
    metric = MeanReward()
    for _ in range(3000):
        metric.update(torch.ones(1, dtype=torch.bfloat16), no_padding(1))
    assert metric.compute() == 1.0
    assert metric.total == 3000
