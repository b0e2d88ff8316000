from __future__ import annotations

import pytest

from lightning_rlstab.demo.digits import addition_rows, digit_share, exact_sum, forgetful_sum
from lightning_rlstab.rollout.reward_loading import load_reward


def _terms(rows):
    return {frozenset(row["prompt"].removesuffix("=").split("+")) for row in rows}


def test_no_held_out_sum_was_seen_in_training_even_with_its_terms_exchanged():
    train, held_out = addition_rows(split="train"), addition_rows(split="held_out")
    assert len(train) + len(held_out) == 90 * 90
    assert _terms(train).isdisjoint(_terms(held_out))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_the_sums(split):
    for row in addition_rows(100, seed=3, split=split):
        first, second = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == str(int(first) + int(second))


def test_rows_are_distinct_and_repeat_with_their_seed():
    rows = addition_rows(500, seed=7)
    assert rows == addition_rows(500, seed=7) != addition_rows(500, seed=8)
    assert len({row["prompt"] for row in rows}) == 500


def test_more_rows_than_pairs_are_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"`count` must be at most 1624 in split 'held_out', got 1625"):
        addition_rows(1625, split="held_out")


def test_a_misspelt_split_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'held_out'"):
        addition_rows(1, split="heldout")  # type: ignore[arg-type]


def test_rewards_are_found_by_path_and_take_every_column():
    columns = {"prompts": ["12+39="] * 4, "answer": ["51"] * 4, "completion_ids": [[]] * 4, "trainer_state": None}
    completions = ["51", "41", "051", ""]
    assert load_reward("lightning_rlstab.demo.digits.exact_sum")(completions=completions, **columns) == [1.0, 0, 0, 0]
    assert digit_share(completions=completions, **columns) == [1.0, 0.5, 0.0, 0.0]


def test_the_forgetful_teacher_is_right_exactly_where_nothing_is_carried():
    for row in addition_rows(300, seed=1):
        first, second = row["prompt"].removesuffix("=").split("+")
        carries = any(int(a) + int(b) > 9 for a, b in zip(first, second, strict=True))
        is_right = exact_sum([row["prompt"]], [forgetful_sum(row["prompt"])], [row["answer"]]) == [1.0]
        assert is_right is not carries
