from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlstab.core.quatro import (
    DROP_REASONS,
    copied_fracs,
    drop_reasons,
    outliers,
    repetition_fracs,
    replayed_old_logprobs,
)
from lightning_rlstab.core.repetition import copied_frac, ngram_repetition_frac

NAN, INF = float("nan"), float("inf")


def found(values: list[float], window: list[float], z_limit: float = 3.5) -> list[bool]:
    return outliers(torch.tensor(values), torch.tensor(window), z_limit=z_limit).tolist()


def reasons(
    rewards: list[float],
    ids: list[int] | None = None,
    *,
    outlier: tuple[int, ...] = (),
    length: tuple[int, ...] = (),
    repeated: tuple[int, ...] = (),
    drops_no_spread: bool = True,
) -> list[str]:
    def rows(chosen: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([row in chosen for row in range(len(rewards))], dtype=torch.bool)

    codes = drop_reasons(
        torch.tensor(rewards),
        torch.tensor(ids if ids is not None else [0] * len(rewards)),
        is_outlier=rows(outlier),
        is_odd_length=rows(length),
        is_repetitive=rows(repeated),
        drops_no_spread=drops_no_spread,
    )
    return [DROP_REASONS[code] for code in codes.tolist()]


def test_a_reward_a_thousand_times_the_usual_is_an_outlier() -> None:
    assert found([1000.0, -1000.0, 1.0, 0.0], [0.0, 1.0] * 50) == [True, True, False, False]


def test_a_lone_success_among_many_failures_is_never_an_outlier() -> None:
    window = [0.0] * 500 + [1.0] * 12  # |z| of a success is 6.5
    assert found([1.0, 0.0, 0.0, 0.0], window) == [False] * 4


def test_a_window_without_spread_is_no_basis_to_judge_by() -> None:
    assert found([1.0], [0.0] * 500) == [False]
    assert found([1.0], []) == [False]


def test_an_outlier_that_keeps_coming_becomes_a_level() -> None:
    window = [0.0, 0.1] * 250
    assert found([1.0], window) == [True]
    assert found([1.0], window + [1.0] * 8) == [False]


def test_a_non_finite_reward_is_somebody_elses_business() -> None:
    assert found([NAN, INF, -INF], [0.0, 1.0] * 50) == [False] * 3


def test_z_within_a_group_of_eight_could_never_exceed_the_limit() -> None:
    """Why the window is needed at all."""
    group = torch.tensor([1e9] + [0.0] * 7, dtype=torch.float64)
    assert ((group - group.mean()) / group.std()).abs().max() < 2.65


@settings(max_examples=50, deadline=None)
@given(window=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=80), shift=st.floats(-100, 100, width=32))
def test_outliers_do_not_depend_on_the_order_of_the_window_or_a_common_shift(window: list[float], shift: float) -> None:
    values = [0.0, 50.0, -50.0, window[0]]
    assert found(values, window) == found(values, window[::-1])
    assert found([window[0]], window * 4) == [False]


def test_a_good_group_is_left_alone() -> None:
    assert reasons([1.0, 0.0, 0.0, 0.0]) == ["kept"] * 4


def test_a_group_with_an_outlying_reward_goes_whole() -> None:
    assert reasons([900.0, 1.0, 0.0, 1.0], [0, 1, 0, 1], outlier=(0,), drops_no_spread=False) == [
        "reward",
        "kept",
        "reward",
        "kept",
    ]


def test_an_odd_completion_goes_alone_while_the_others_still_differ() -> None:
    assert reasons([1.0, 0.0, 0.0, 1.0], repeated=(1,)) == ["kept", "repetition", "kept", "kept"]
    assert reasons([1.0, 0.0, 0.0, 1.0], length=(0,)) == ["length", "kept", "kept", "kept"]


def test_one_success_and_three_failures_are_never_reduced_to_three_failures() -> None:
    assert reasons([1.0, 0.0, 0.0, 0.0], repeated=(0,)) == ["repetition", "emptied", "emptied", "emptied"]


def test_groups_without_spread_go_only_when_asked() -> None:
    assert reasons([1.0] * 4) == ["no_spread"] * 4
    assert reasons([1.0] * 4, drops_no_spread=False) == ["kept"] * 4
    assert reasons([NAN, NAN]) == ["no_spread"] * 2


def test_interleaved_groups_are_told_apart_by_id() -> None:
    assert reasons([1.0, 0.0, 1.0, 1.0], [4, 7, 4, 7]) == ["no_spread", "kept", "no_spread", "kept"]


def test_eight_repetitive_answers_are_all_left_out() -> None:
    """FR-138."""
    assert reasons([0.0] * 8, repeated=tuple(range(8))) == ["repetition"] * 8


def test_an_empty_rollout_has_no_reasons() -> None:
    assert reasons([]) == []


def test_fresh_rows_are_compared_with_themselves_and_replayed_rows_with_their_own_past() -> None:
    now = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    old = replayed_old_logprobs(torch.tensor([[NAN, NAN], [-1.5, -2.5]]), now)
    assert old.tolist() == [[-1.0, -2.0], [-1.5, -2.5]]
    assert not old.requires_grad


tokens = st.lists(st.integers(0, 3), max_size=9)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4), order=st.integers(1, 4))
def test_text_scores_of_all_rows_at_once_are_those_of_each_row_alone(
    rows: list[tuple[list[int], list[int]]], order: int
) -> None:
    width = max(*(len(completion) for completion, _ in rows), 1)
    prompt_width = max(*(len(prompt) for _, prompt in rows), 1)
    ids = torch.tensor([completion + [9] * (width - len(completion)) for completion, _ in rows])
    lengths = torch.tensor([len(completion) for completion, _ in rows])
    prompt_ids = torch.tensor([[9] * (prompt_width - len(prompt)) + prompt for _, prompt in rows])
    mask = torch.tensor([[False] * (prompt_width - len(prompt)) + [True] * len(prompt) for _, prompt in rows])
    repetition = [ngram_repetition_frac(completion, order) for completion, _ in rows]
    copied = [copied_frac(completion, prompt, order) for completion, prompt in rows]
    assert repetition_fracs(ids, lengths, order).tolist() == pytest.approx(repetition)
    assert copied_fracs(ids, lengths, prompt_ids, mask, order).tolist() == pytest.approx(copied)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.6]])
def test_the_rules_do_not_depend_on_the_order_of_rows(rewards: list[float]) -> None:
    order = [2, 0, 3, 1]
    straight = reasons(rewards, repeated=(1,))
    assert reasons([rewards[i] for i in order], repeated=(order.index(1),)) == [straight[i] for i in order]
