from __future__ import annotations

import pytest

pytest.importorskip("reasoning_gym")

from lightning_rlstab.demo.arithmetic import last_number_score, task_rows

SMALL = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def _questions(rows):
    return [row["prompt"][-1]["content"] for row in rows]


def test_held_out_questions_never_appear_in_training_whatever_the_seed():
    held_out = _questions(task_rows(count=60, seed=1, split="held_out", task_kwargs=SMALL))
    for seed in (1, 2):
        train = _questions(task_rows(count=200, seed=seed, task_kwargs=SMALL))
        assert len(set(train)) == 200
        assert set(train).isdisjoint(held_out)


def test_rows_repeat_with_their_seed():
    assert task_rows(count=20, seed=3, task_kwargs=SMALL) == task_rows(count=20, seed=3, task_kwargs=SMALL)


def test_the_last_number_of_text_or_messages_is_scored_by_the_task():
    row = task_rows(count=1, seed=0, task_kwargs=SMALL)[0]
    right = row["answer"]
    completions = [
        f"7 minus 3 gives {right}.",
        [{"role": "assistant", "content": f"The answer is {right}"}],
        f"{right} or rather 1000",
        "no idea",
    ]
    columns = {"task": [row["task"]] * 4, "entry": [row["entry"]] * 4, "answer": [right] * 4, "prompts": [None] * 4}
    scores = last_number_score(completions=completions, **columns)
    assert scores[:2] == [1.0, 1.0]
    assert max(scores[2:]) < 1.0


def test_a_task_with_too_few_questions_says_how_many_there_are():
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
    with pytest.raises(ValueError, match=r"`count` must be at most \d+ for this task and split"):
        task_rows(count=3000, task_kwargs=few, split="held_out")


def test_a_misspelt_task_is_answered_with_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'chain_sum'"):
        task_rows("chain_sums", count=1)
