"""TRL's completion and reward metrics, from readings that add over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlstab.core.advantages import GroupAdvantages, group_advantages
from lightning_rlstab.core.policy_loss import merged_readings
from lightning_rlstab.report.scalars import undeclared
from lightning_rlstab.rollout.metrics import equal_lengths_warning, logged_metrics, rollout_metrics, rollout_readings
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.rewards import RewardSuite, RewardTable

Make = Callable[..., Rollout]


def table_of(rewards: dict[str, list[Any]], weights: list[float] | None = None) -> RewardTable:
    rows = len(next(iter(rewards.values())))
    functions = [lambda _values=values, **_: _values for values in rewards.values()]
    suite = RewardSuite(functions, weights=weights, names=list(rewards))
    return suite.score(prompts=["p"] * rows, completions=["c"] * rows, completion_ids=[[0]] * rows, columns={})


def readings_of(rollout: Rollout, table: RewardTable) -> dict[str, Tensor]:
    estimate: GroupAdvantages = group_advantages(table.weighted, rollout.group_ids)
    return rollout_readings(rollout, table, estimate)


def test_lengths_and_truncation_are_trls(make_rollout: Make) -> None:
    metrics = rollout_metrics(readings_of(make_rollout(), table_of({"f": [1, 0, 1, 0]})))
    assert metrics["completions/mean_length"] == 2.5
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1, 4)
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/mean_terminated_length"] == 2.0
    assert (metrics["completions/min_terminated_length"], metrics["completions/max_terminated_length"]) == (1, 3)


def test_rewards_are_trls_nan_aware_mean_and_unbiased_std(make_rollout: Make) -> None:
    table = table_of({"f": [1.0, 0.0, None, 4.0], "g": [2.0, 2.0, 2.0, None]}, weights=[0.5, 2.0])
    metrics = rollout_metrics(readings_of(make_rollout(), table))
    assert metrics["rewards/f/mean"] == pytest.approx(5 / 3)
    assert metrics["rewards/f/std"] == pytest.approx(float(torch.tensor([1.0, 0.0, 4.0]).std()))
    assert metrics["rewards/g/mean"] == 2.0
    assert metrics["rewards/g/std"] == 0.0
    weighted = torch.tensor([4.5, 4.0, 4.0, 2.0])
    assert metrics["reward"] == pytest.approx(float(weighted.mean()))
    assert metrics["reward_std"] == pytest.approx(float(weighted.std()))


def test_fr_140_the_logged_reward_respects_the_weights(make_rollout: Make) -> None:
    table = table_of({"f": [1, 1, 1, 1], "g": [0, 0, 0, 0]}, weights=[0.7, 0.3])
    assert rollout_metrics(readings_of(make_rollout(), table))["reward"] == pytest.approx(0.7)


def test_a_large_mean_does_not_swallow_a_small_spread(make_rollout: Make) -> None:
    values = [4096.0, 4096.0, 4096.0, 4096.015625]
    metrics = rollout_metrics(readings_of(make_rollout(), table_of({"f": values})))
    assert metrics["rewards/f/std"] == pytest.approx(float(torch.tensor(values, dtype=torch.float64).std()), rel=1e-4)
    constant = rollout_metrics(readings_of(make_rollout(), table_of({"f": [0.1, 0.1, 0.1, 0.1]})))
    assert constant["reward_std"] == 0.0


def test_the_share_without_spread_counts_groups_and_not_abstentions(make_rollout: Make) -> None:
    half = table_of({"f": [1, 1, 0, 1]})
    assert rollout_metrics(readings_of(make_rollout(), half))["frac_reward_zero_std"] == 0.5
    abstaining = table_of({"f": [1, 1, None, None]})
    assert rollout_metrics(readings_of(make_rollout(), abstaining))["frac_reward_zero_std"] == 0.5


def test_readings_of_two_ranks_add_up_to_those_of_one(make_rollout: Make) -> None:
    rollout, table = make_rollout(), table_of({"f": [1.0, 0.0, None, 4.0]})
    parts = [
        readings_of(make_rollout().select(rows), table_of({"f": values}))
        for rows, values in (([0, 1], [1.0, 0.0]), ([2, 3], [None, 4.0]))
    ]
    merged = merged_readings(parts[1], parts[0])
    assert rollout_metrics(merged) == pytest.approx(rollout_metrics(readings_of(rollout, table)))


def test_fr_131_metrics_stay_finite_when_everything_is_truncated_and_masked(make_rollout: Make) -> None:
    rollout = make_rollout(is_truncated=torch.ones(4, dtype=torch.bool))
    rollout = rollout.replace(completion_mask=torch.zeros_like(rollout.completion_mask))
    metrics = rollout_metrics(readings_of(rollout, table_of({"f": [0, 0, 0, 0]})))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["completions/clipped_ratio"] == 1.0
    assert metrics["completions/mean_length"] == 2.5
    assert metrics["completions/mean_terminated_length"] == 0.0


def test_fr_143_a_function_that_abstains_for_a_whole_step_draws_no_nan_but_a_count(make_rollout: Make) -> None:
    metrics = rollout_metrics(readings_of(make_rollout(), table_of({"f": [None] * 4})))
    assert "rewards/f/mean" not in metrics
    assert "rewards/f/std" not in metrics
    assert "reward" not in metrics
    assert metrics["rlstab/grpo/rewards_missing"] == 4
    assert all(math.isfinite(value) for value in metrics.values())


def test_one_value_has_a_mean_and_no_std(make_rollout: Make) -> None:
    metrics = rollout_metrics(readings_of(make_rollout(), table_of({"f": [None, None, 3.0, None]})))
    assert metrics["rewards/f/mean"] == 3.0
    assert "rewards/f/std" not in metrics


def test_nan_and_inf_are_counted_apart(make_rollout: Make) -> None:
    table = table_of({"f": [math.nan, math.inf, 1.0, None]})
    metrics = rollout_metrics(readings_of(make_rollout(), table))
    counts = [metrics[f"rlstab/grpo/rewards_{kind}"] for kind in ("missing", "nan", "inf")]
    assert counts == [3, 1, 1]


def test_every_metric_is_declared(make_rollout: Make) -> None:
    metrics = rollout_metrics(readings_of(make_rollout(), table_of({"f": [1, 0, 1, 0]})))
    assert not undeclared(list(metrics))


def test_tokens_of_prompts_and_completions_are_counted(make_rollout: Make) -> None:
    readings = readings_of(make_rollout(), table_of({"f": [1, 0, 1, 0]}))
    assert readings["num_tokens_count"] == 10 + 10


def test_logged_metrics_are_means_over_all_calls_of_all_ranks() -> None:
    assert logged_metrics([{"a": [1.0, 2.0]}, {"a": [6.0], "b": [0.5]}]) == {"a": 3.0, "b": 0.5}
    assert logged_metrics([{"a": [math.nan]}, {}]) == {}


def test_fr_033_equal_lengths_without_truncation_raise_a_warning(make_rollout: Make) -> None:
    full = torch.ones(4, 4, dtype=torch.bool)
    ended = torch.zeros(4, dtype=torch.bool)
    table = table_of({"f": [1, 0, 1, 0]})
    words = equal_lengths_warning(readings_of(make_rollout(completion_mask=full, is_truncated=ended), table))
    assert words is not None
    assert "All 4 completions have exactly 4 tokens" in words
    assert equal_lengths_warning(readings_of(make_rollout(), table)) is None
    assert equal_lengths_warning(readings_of(make_rollout(completion_mask=full, is_truncated=~ended), table)) is None
