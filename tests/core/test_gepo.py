from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlstab.core.gepo import bounded_loss_inputs, robust_advantages, within_log_ratio
from lightning_rlstab.core.policy_loss import LossInputs, LossSettings, policy_loss

NAN, INF = float("nan"), float("inf")


def advantages(rewards: list[float], ids: list[int] | None = None, **options: Any) -> list[float]:
    group_ids = torch.tensor(ids if ids is not None else [0] * len(rewards))
    return robust_advantages(torch.tensor(rewards), group_ids, **options).advantages.tolist()


def scalar_advantages(rewards: list[float], bound: float, scale_floor: float) -> list[float]:
    """The formula for one group, spelled out slowly."""
    usable = sorted(r for r in rewards if math.isfinite(r))
    if len(usable) < 2 or usable[0] == usable[-1]:
        return [0.0] * len(rewards)

    def median(values: list[float]) -> float:
        values = sorted(values)
        middle = len(values) // 2
        return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2

    centre = median(usable)
    mad = median([abs(r - centre) for r in usable])
    scale = 1.4826 * mad
    if mad == 0:
        centre = sum(usable) / len(usable)
        scale = math.sqrt(sum((r - centre) ** 2 for r in usable) / (len(usable) - 1))
    scale = max(scale, scale_floor)
    return [bound * math.tanh((r - centre) / scale / bound) if math.isfinite(r) else 0.0 for r in rewards]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.386351, -0.495418, -0.495418, -0.495418]),
        ([1.0] * 4 + [0.0] * 4, [0.663351] * 4 + [-0.663351] * 4),
        ([0.0] + [0.95] * 7, [-2.033278] + [0.351926] * 7),
        ([1e-3, 0.0, 0.0, 0.0], [0.074984, -0.024999, -0.024999, -0.024999]),
        ([1.0, NAN, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1.357764, 0.0, -0.578216, 1.357764] + [-0.578216] * 4),
    ],
    ids=["one success", "even split", "one failure", "tiny spread", "one NaN in 8"],
)
def test_the_worked_examples_give_these_numbers(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected, abs=1e-5)


def test_two_prompts_interleaved_are_treated_each_alone() -> None:
    easy, hard = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    mixed = advantages([r for pair in zip(easy, hard, strict=True) for r in pair], [5, 9] * 4)
    assert mixed[0::2] == pytest.approx(advantages(easy))
    assert mixed[1::2] == pytest.approx(advantages(hard))


def test_interleaved_prompts_that_are_all_right_and_all_wrong_teach_nothing() -> None:
    """FR-022: grouping is by id; by position these rows would look spread out."""
    assert advantages([1.0, 0.0] * 4, [0, 1] * 4) == [0.0] * 8


def test_the_batch_mean_plays_no_part() -> None:
    """FR-025."""
    assert advantages([1, 1, 1, 0, 0, 0, 0, 1.0], [0] * 4 + [1] * 4) == pytest.approx(
        advantages([1, 1, 1, 0.0]) + advantages([0, 0, 0, 1.0])
    )


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [1.0] * 4 + [0.0] * 4])
def test_binary_rewards_whose_mad_is_zero_stay_bounded_and_ordered(rewards: list[float]) -> None:
    """FR-016: a plain MAD scale breaks on both groups."""
    result = advantages(rewards)
    right = [a for a, r in zip(result, rewards, strict=True) if r == 1.0]
    wrong = [a for a, r in zip(result, rewards, strict=True) if r == 0.0]
    assert min(right) > 0 > max(wrong)
    assert max(map(abs, result)) <= 3.0


def test_the_reference_gives_the_source_formula_to_the_letter() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], reference=True) == pytest.approx([3.0, 0, 0, 0])
    even = advantages([1.0] * 4 + [0.0] * 4, reference=True)  # lower median 0, MAD 0
    assert even == pytest.approx([3.0] * 4 + [0.0] * 4)
    rewards = [0.0, 1.0, 3.0, 7.0]
    median, mad = 1.0, 1.0  # lower medians of the values and of [1, 0, 2, 6]
    expected = [3 * math.tanh((r - median) / (1.4826 * mad + 1e-8) / 3) for r in rewards]
    assert advantages(rewards, reference=True) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -2.5])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    assert advantages([value] * 7) == [0.0] * 7


def test_an_infinite_reward_is_left_out_and_counted_apart_from_nan() -> None:
    """FR-128, FR-121: [1, inf, 0] and [1, NaN, 3]; None arrives as NaN."""
    result = robust_advantages(torch.tensor([1.0, INF, 0.0, 1.0, NAN, 3.0]), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert result.advantages.isfinite().all()
    assert result.advantages[1] == result.advantages[4] == 0.0
    assert (int(result.inf_count), int(result.nan_count)) == (1, 1)
    assert result.advantages[0] > 0 > result.advantages[2]
    assert result.advantages[5] > 0 > result.advantages[3]


@pytest.mark.parametrize("rewards", [[1.0], [NAN, NAN], [NAN, 2.0], []])
def test_a_group_with_fewer_than_two_rewards_gives_zero(rewards: list[float]) -> None:
    """FR-008."""
    assert advantages(rewards) == [0.0] * len(rewards)


reward_values = st.one_of(st.sampled_from([0.0, 1.0, NAN, INF, -INF]), st.floats(-10, 10, width=32))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(reward_values, min_size=1, max_size=9), min_size=1, max_size=5),
    bound=st.floats(0.5, 5),
    order=st.randoms(use_true_random=False),
)
def test_it_equals_the_slow_formula_group_by_group_in_any_order(
    groups: list[list[float]], bound: float, order: Any
) -> None:
    expected = [a for group in groups for a in scalar_advantages(group, bound, 0.01)]
    rows = [(r, index) for index, group in enumerate(groups) for r in group]
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    result = advantages([rows[i][0] for i in permutation], [rows[i][1] * 7 for i in permutation], bound=bound)
    assert result == pytest.approx([expected[i] for i in permutation], abs=1e-4)


def loss_inputs(logprobs: list[float], **fields: Any) -> tuple[LossInputs, torch.Tensor]:
    leaf = torch.tensor([logprobs], requires_grad=True)
    time = len(logprobs)
    defaults: dict[str, Any] = {
        "entropy": torch.ones(1, time),
        "completion_mask": torch.ones(1, time, dtype=torch.bool),
        "advantages": torch.tensor([1.0]),
        "num_items": time,
    }
    inputs = LossInputs(logprobs=leaf * 1.0, **{**defaults, **fields})
    return inputs, leaf


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "bnpo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("new", "old"), [(-1.0, -101.0), (-INF, -1.0), (-1.0, -INF), (-INF, -INF), (-120.0, -1.0)])
def test_extreme_log_ratios_leave_loss_and_gradient_finite(
    loss_type: str, advantage: float, is_masked: bool, new: float, old: float
) -> None:
    inputs, leaf = loss_inputs(
        [-0.5, new],
        old_logprobs=torch.tensor([[-0.6, old]]),
        reference_logprobs=torch.tensor([[-0.5, 100.0]]),
        completion_mask=torch.tensor([[True, not is_masked]]),
        advantages=torch.tensor([advantage]),
    )
    bounded = bounded_loss_inputs(inputs, log_ratio=20.0, floor=-100.0)
    loss = policy_loss(bounded, LossSettings(loss_type=loss_type, beta=0.04), accumulation=1).loss
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_a_saturated_token_has_no_gradient_and_its_neighbour_keeps_its_own() -> None:
    old = torch.tensor([[-0.6, -90.0]])
    plain, plain_leaf = loss_inputs([-0.5, -1.0], old_logprobs=old, advantages=torch.tensor([-1.0]))
    policy_loss(plain, LossSettings(), accumulation=1).loss.backward()
    inputs, leaf = loss_inputs([-0.5, -1.0], old_logprobs=old, advantages=torch.tensor([-1.0]))
    bounded = bounded_loss_inputs(inputs, log_ratio=20.0, floor=-100.0)
    policy_loss(bounded, LossSettings(), accumulation=1).loss.backward()
    assert plain_leaf.grad is not None
    assert leaf.grad is not None
    assert plain_leaf.grad[0, 1].abs() > 1e6  # what the bound takes away
    assert leaf.grad[0, 1] == 0.0
    assert torch.equal(leaf.grad[0, 0], plain_leaf.grad[0, 0])


def test_log_probs_inside_the_bounds_come_back_bit_for_bit() -> None:
    logprobs, anchor = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 9)
    assert torch.equal(within_log_ratio(logprobs, anchor, limit=20.0, floor=-100.0), logprobs)


def test_a_nan_on_an_open_token_is_still_seen() -> None:
    """FR-030: the bounds must not hide it."""
    inputs, _ = loss_inputs([-0.5, NAN], old_logprobs=torch.tensor([[-0.6, -0.6]]))
    assert bounded_loss_inputs(inputs, log_ratio=20.0, floor=-100.0).logprobs.isnan().any()


def test_without_old_and_reference_only_the_floor_acts() -> None:
    inputs, _ = loss_inputs([-0.5, -INF])
    bounded = bounded_loss_inputs(inputs, log_ratio=20.0, floor=-100.0)
    assert bounded.logprobs.tolist() == [[-0.5, -100.0]]
    assert bounded.old_logprobs is bounded.reference_logprobs is None
