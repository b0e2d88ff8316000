from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lightning_rlstab.control.replay import ReplayConfig, ReplayEntry, ReplayState, drawn, with_new_groups


def played(steps: int, *, batch_groups: int = 8, capacity: int = 64, replica: int = 0, **settings: Any) -> Any:
    config, state, draws = ReplayConfig(**settings), ReplayState(), []
    for step in range(steps):
        state, draw = drawn(config, state, batch_groups=batch_groups, step=step, replica=replica)
        draws.append((draw, {entry.key for entry in state.entries}))
        state = with_new_groups(config, state, count=batch_groups - len(draw.keys), step=step, capacity=capacity)
    return state, draws


@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("batch_groups", [1, 2, 3, 8, 32])
def test_the_share_of_old_groups_is_exact_over_a_hundred_steps(ratio: float, batch_groups: int) -> None:
    state, _ = played(100, batch_groups=batch_groups, capacity=8 * batch_groups, ratio=ratio, max_ratio=0.75)
    if batch_groups == 1:  # a batch of one group can only be all old or all new, and 0.75 of one is none
        assert state.old_groups == 0
        return
    assert abs(state.old_groups - ratio * 100 * batch_groups) < 1 + 1e-9


def test_no_group_is_drawn_twice_into_one_batch() -> None:
    """FR-154."""
    _, draws = played(200)
    assert all(len(set(draw.keys)) == len(draw.keys) for draw, _ in draws)


def test_a_buffer_of_one_group_gives_one_group() -> None:
    """FR-154: capacity one, a batch that wants more."""
    config = ReplayConfig(ratio=0.5)
    state = with_new_groups(config, ReplayState(), count=16, step=0, capacity=1)
    _, draw = drawn(config, state, batch_groups=16, step=1)
    assert draw.keys == (15,)
    assert draw.missing == 7


def test_a_buffer_that_is_short_is_not_waited_for_and_the_shortfall_is_counted() -> None:
    """FR-103."""
    state, draws = played(1)
    assert (draws[0][0].keys, draws[0][0].missing, state.missing_groups) == ((), 2, 2)


def test_a_shortfall_is_made_up_for_but_never_by_more_than_max_ratio() -> None:
    _, draws = played(20)
    assert max(len(draw.keys) for draw, _ in draws) <= 4


def test_only_what_is_in_the_buffer_is_drawn_and_nothing_stale() -> None:
    _, draws = played(60, max_age_steps=3)
    assert all(set(draw.keys) <= held for draw, held in draws)
    config = ReplayConfig(max_age_steps=3)
    state = ReplayState(entries=(ReplayEntry(key=0, step=0), ReplayEntry(key=1, step=5)), credit=1.0, next_key=2)
    after, draw = drawn(config, state, batch_groups=8, step=6)
    assert draw.keys == (1,)
    assert [entry.key for entry in after.entries] == [1]


def test_the_newest_groups_stay() -> None:
    config = ReplayConfig()
    state = with_new_groups(config, ReplayState(), count=20, step=0, capacity=8)
    assert [entry.key for entry in state.entries] == list(range(12, 20))


def test_replicas_draw_differently_and_each_repeats_itself() -> None:
    first, again, other = played(30)[1], played(30)[1], played(30, replica=1)[1]
    assert [d.keys for d, _ in first] == [d.keys for d, _ in again]
    assert [d.keys for d, _ in first] != [d.keys for d, _ in other]


def test_drawing_is_pure_and_its_state_survives_json() -> None:
    config, (state, _) = ReplayConfig(), played(10)
    saved = json.loads(json.dumps(dataclasses.asdict(state)))
    restored = ReplayState(**{**saved, "entries": tuple(ReplayEntry(**entry) for entry in saved["entries"])})
    assert restored == state
    assert drawn(config, state, batch_groups=8, step=10) == drawn(config, restored, batch_groups=8, step=10)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1.0"])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ReplayConfig)])
def test_values_that_cannot_be_meant_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`replay\.{field}` must "):
        ReplayConfig(**{field: value})
