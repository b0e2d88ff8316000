from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlstab.core.advantages import SCALES, combined_rewards, group_advantages

NAN, INF = math.nan, math.inf


def advantages(rewards, groups=None, scale="group"):
    ids = torch.zeros(len(rewards), dtype=torch.long) if groups is None else torch.tensor(groups)
    return group_advantages(torch.tensor(rewards), ids, scale=scale)


REWARDS = st.one_of(st.floats(-10, 10, width=32), st.sampled_from([0.0, 1.0, NAN, INF, -INF]))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=16), scale=st.sampled_from(SCALES))
def test_advantages_equal_the_slow_twin_in_any_order_of_rows(twin, rows, scale):
    rewards, groups = [row[0] for row in rows], [row[1] for row in rows]
    made = advantages(rewards, groups, scale)
    expected = twin.advantages(rewards, groups, scale)
    assert made.advantages.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert made.nan_count == sum(math.isnan(reward) for reward in rewards)
    assert made.inf_count == sum(math.isinf(reward) for reward in rewards)


@pytest.mark.parametrize("scale", SCALES)
def test_fr008_a_group_of_one_has_advantage_zero(scale):
    made = advantages([1.0], scale=scale)
    assert made.advantages.tolist() == [0.0]
    assert not made.has_spread.any()


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
def test_fr016_binary_rewards_give_bounded_advantages_with_successes_on_top(rewards):
    values = advantages(rewards).advantages
    successes = torch.tensor(rewards) == 1
    assert values.abs().max() < 3
    assert values[successes].min() > 0 > values[~successes].max()


def test_fr022_prompts_are_told_apart_by_id_not_by_position():
    made = advantages([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], [7, 3, 7, 3, 7, 3])
    assert made.advantages.tolist() == [0.0] * 6
    assert not made.has_spread.any()


def test_fr025_a_prompt_gets_the_same_advantages_alone_and_in_company():
    easy, hard = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    together = advantages(easy + hard, [0] * 4 + [1] * 4).advantages
    assert torch.equal(together[:4], advantages(easy).advantages)
    assert torch.equal(together[4:], advantages(hard).advantages)


@pytest.mark.parametrize("scale", SCALES)
def test_fr019_spread_is_decided_per_group_even_when_the_scale_is_the_batch_s(scale):
    made = advantages([0.5, 0.5, 0.0, 1.0], [0, 0, 1, 1], scale)
    assert made.has_spread.tolist() == [False, False, True, True]
    assert made.advantages[:2].tolist() == [0.0, 0.0]


def test_fr121_a_missing_reward_is_left_out_and_counted():
    made = advantages([1.0, NAN, 0.0, 1.0])
    assert made.advantages.isfinite().all()
    assert made.advantages[1] == 0.0
    assert made.nan_count == 1
    kept = advantages([1.0, 0.0, 1.0]).advantages
    assert torch.equal(made.advantages[[0, 2, 3]], kept)


@pytest.mark.parametrize(
    ("rewards", "zeros", "nan_count", "inf_count"),
    [
        ([1.0, NAN, 3.0], [1], 1, 0),
        ([1.0, INF, 0.0], [1], 0, 1),
        ([-INF, 1.0, NAN], [0, 1, 2], 1, 1),
        ([1.0], [0], 0, 0),
    ],
)
@pytest.mark.parametrize("scale", SCALES)
def test_fr128_nan_and_inf_rewards_are_out_and_counted_apart(rewards, zeros, nan_count, inf_count, scale):
    made = advantages(rewards, scale=scale)
    assert made.advantages.isfinite().all()
    assert made.advantages.abs().max() < 10
    assert [index for index, value in enumerate(made.advantages.tolist()) if value == 0.0] == zeros
    assert made.nan_count == nan_count
    assert made.inf_count == inf_count


def test_equal_rewards_that_floats_cannot_average_exactly_give_exactly_zero():
    assert torch.equal(advantages([0.1] * 7, scale="none").advantages, torch.zeros(7))
    rewards, made = combined_rewards(
        torch.tensor([[0.1, 0.7]] * 7), torch.tensor([0.3, 0.9]), torch.zeros(7, dtype=torch.long)
    )
    assert torch.equal(made.advantages, torch.zeros(7))
    assert rewards.tolist() == pytest.approx([0.66] * 7)


def test_huge_rewards_do_not_overflow():
    assert advantages([3e38, -3e38, 0.0]).advantages.isfinite().all()


def test_fr140_the_combined_reward_carries_its_weights():
    rewards, _ = combined_rewards(torch.tensor([[1.0, 0.0]]), torch.tensor([0.7, 0.3]), torch.tensor([0]))
    assert rewards.item() == pytest.approx(0.7)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_one_abstaining_function_leaves_the_others_and_all_abstaining_leaves_the_row_out(aggregation):
    per_func = torch.tensor([[1.0, NAN], [NAN, NAN], [0.0, 1.0], [INF, 0.0]])
    rewards, made = combined_rewards(
        per_func, torch.tensor([1.0, 0.5]), torch.zeros(4, dtype=torch.long), aggregation=aggregation
    )
    assert rewards[0] == 1.0
    assert rewards[1].isnan()
    assert rewards[3] == INF
    assert made.advantages.isfinite().all()
    assert made.advantages[1] == 0.0
    assert made.advantages[3] == 0.0
    assert (made.nan_count, made.inf_count) == (1, 1)


def test_a_weight_of_zero_ignores_the_function():
    per_func = torch.tensor([[1.0, 5.0], [0.0, -5.0]])
    ids = torch.zeros(2, dtype=torch.long)
    _, made = combined_rewards(per_func, torch.tensor([1.0, 0.0]), ids)
    assert torch.equal(made.advantages, advantages([1.0, 0.0]).advantages)


@pytest.mark.parametrize("fields", [{"scale": "groups"}, {"aggregation": "sum"}])
def test_unknown_words_are_refused(fields):
    with pytest.raises(ValueError, match="must be one of"):
        combined_rewards(torch.zeros(2, 1), torch.ones(1), torch.zeros(2, dtype=torch.long), **fields)
