from __future__ import annotations

import pytest

from lightning_rlstab.core.repetition import (
    copied_frac,
    group_similarity,
    ngram_repetition_frac,
    text_repetition_frac,
)

PROSE = (
    "The committee met on Tuesday to discuss the harbour wall, which had begun to lean after the storms of early "
    "spring. Nobody could say how long it would stand, and the engineer's report, when it finally arrived, offered "
    "three remedies of very different price."
)


@pytest.mark.parametrize("text", ["P" + "e" * 60, "!" * 40, "I think so. " * 12])
def test_fr138_fr139_degenerate_answers_score_high(text):
    assert text_repetition_frac(text) > 0.7


def test_ordinary_prose_scores_near_zero():
    assert text_repetition_frac(PROSE) < 0.02


@pytest.mark.parametrize("items", ["", "a", [], [1, 2, 3]])
def test_what_is_too_short_to_repeat_scores_zero(items):
    assert ngram_repetition_frac(items) == 0.0


def test_repetition_counts_what_is_not_new():
    assert ngram_repetition_frac([5] * 13, order=4) == 0.9


def test_an_answer_that_copies_its_prompt_is_seen():
    prompt = PROSE.split()
    assert copied_frac(prompt[5:20], prompt) == 1.0
    assert copied_frac(["An", "entirely", "different", "set", "of", "words", "stands", "here", "today"], prompt) == 0.0
    assert copied_frac(["short"], prompt) == 0.0


def test_fr138_eight_near_identical_answers_are_similar_and_eight_different_ones_are_not():
    alike = [f"{PROSE} ({index})".split() for index in range(8)]
    assert min(group_similarity(alike)) > 0.9
    different = [[f"{word}{index}" for word in PROSE.split()] for index in range(8)]
    assert max(group_similarity(different)) == 0.0


def test_an_n_gram_counts_at_most_as_often_as_another_completion_holds_it():
    assert group_similarity([[1, 1, 1, 1], [1]], max_order=1) == [0.25, 1.0]


def test_similarity_does_not_depend_on_the_order_of_the_group():
    group = [["a", "b", "c", "d"], ["a", "b", "x", "y"], ["c", "d", "a", "b"]]
    forward, backward = group_similarity(group), group_similarity(group[::-1])
    assert forward == backward[::-1]


def test_a_group_of_one_or_of_empty_answers_is_not_similar_to_anything():
    assert group_similarity([["a", "b"]]) == [0.0]
    assert group_similarity([[], []]) == [0.0, 0.0]
