from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from lightning_rlstab.control.rollout_filter import (
    FilterReading,
    FilterState,
    RolloutFilterConfig,
    judged,
    step_filter,
)
from lightning_rlstab.core.quatro import DROP_REASONS


def names(state: FilterState, rewards: list[float], **fields: Any) -> list[str]:
    count = len(rewards)
    settings = fields.pop("settings", {})
    given: dict[str, Any] = {
        "lengths": [20.0] * count,
        "group_ids": [0] * count,
        "repetition": [0.0] * count,
        "prompt_overlap": [0.0] * count,
        **fields,
    }
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    codes = judged(RolloutFilterConfig(**settings), state, rewards=torch.tensor(rewards), **tensors)
    return [DROP_REASONS[code] for code in codes.tolist()]


def usual(rewards: list[float] | None = None, lengths: list[float] | None = None, rollouts: int = 8) -> FilterState:
    config, state = RolloutFilterConfig(), FilterState()
    for _ in range(rollouts):
        reading = FilterReading(
            rewards=rewards or [0.0, 1.0] * 8,
            lengths=lengths or [10.0, 15, 20, 22, 25, 28, 30, 40] * 2,
            dropped=[16, 0, 0, 0, 0, 0],
        )
        state = step_filter(config, state, reading)
    return state


def test_nothing_is_judged_unusual_before_the_window_is_filled() -> None:
    assert names(FilterState(), [1000.0, 0.0], lengths=[1.0, 4000.0]) == ["kept"] * 2


def test_an_outlying_reward_takes_its_group_along() -> None:
    assert names(usual(), [1000.0, 0.0, 1.0, 0.0], group_ids=[0, 0, 1, 1]) == ["reward", "reward", "kept", "kept"]


def test_one_success_among_three_failures_stays_whole_in_a_run_that_mostly_fails() -> None:
    state = usual(rewards=[0.0] * 15 + [1.0], rollouts=30)
    assert names(state, [1.0, 0.0, 0.0, 0.0]) == ["kept"] * 4


def test_the_first_successes_of_a_run_stay() -> None:
    state = usual(rewards=[0.0] * 16, rollouts=30)
    assert names(state, [1.0, 0.0, 0.0, 0.0]) == ["kept"] * 4


def test_a_completion_a_hundred_times_the_usual_length_is_left_out_alone() -> None:
    kept = names(usual(), [1.0, 0.0, 0.0, 1.0], lengths=[2000.0, 20.0, 30.0, 25.0])
    assert kept == ["length", "kept", "kept", "kept"]


def test_lengths_that_are_always_the_same_are_no_basis() -> None:
    state = usual(lengths=[16.0] * 16)
    assert names(state, [1.0, 0.0], lengths=[3.0, 16.0]) == ["kept"] * 2


def test_repetition_and_copied_prompts_are_left_out() -> None:
    kept = names(FilterState(), [1.0, 0.0, 0.0, 1.0], repetition=[0.9, 0, 0, 0.0], prompt_overlap=[0.0, 0.95, 0, 0])
    assert kept == ["repetition", "repetition", "kept", "kept"]


def test_groups_without_spread_can_be_kept_for_their_kl() -> None:
    """FR-019: decided per group; left out with their KL by default, kept with it on demand."""
    rewards, ids = [1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1]
    assert names(FilterState(), rewards, group_ids=ids) == ["no_spread", "no_spread", "kept", "kept"]
    assert names(FilterState(), rewards, group_ids=ids, settings={"no_spread": False}) == ["kept"] * 4


def test_the_memory_counts_reasons_and_idle_rollouts() -> None:
    """FR-139."""
    config, state = RolloutFilterConfig(), FilterState()
    for _ in range(3):
        state = step_filter(
            config, state, FilterReading(rewards=[0.0] * 4, lengths=[5] * 4, dropped=[0, 0, 0, 0, 4, 0])
        )
    assert (state.idle_rollouts, state.dropped[4], state.seen) == (3, 12, 12)
    after = step_filter(config, state, FilterReading(rewards=[0.0, 1.0], lengths=[5, 5], dropped=[2, 0, 0, 0, 0, 0]))
    assert after.idle_rollouts == 0


def test_the_window_is_bounded_and_takes_finite_rewards_only() -> None:
    config, state = RolloutFilterConfig(window=16, min_window=8), FilterState()
    for _ in range(10):
        reading = FilterReading(rewards=[1.0, math.nan, math.inf], lengths=[5, 6, 7], dropped=[3, 0, 0, 0, 0, 0])
        state = step_filter(config, state, reading)
    assert state.rewards == (1.0,) * 10
    assert len(state.log_lengths) == 16


def test_the_state_survives_json() -> None:
    state = usual()
    saved = json.loads(json.dumps(dataclasses.asdict(state)))
    assert FilterState(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}) == state


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1.0"])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RolloutFilterConfig)])
def test_values_that_cannot_be_meant_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`filter\.{field}` must "):
        RolloutFilterConfig(**{field: value})
