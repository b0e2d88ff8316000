from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch

from lightning_rlstab.gradloc.bisection import bisection, halves


def found(result) -> set[tuple[int, ...]]:
    return {tuple(address) for address, _ in result.found}


TAU = 0.05 * 256  # five times the usual gradient of one token, without the step's normaliser of 256 tokens


@pytest.mark.parametrize("is_reusing_parent", [True, False])
def test_the_reference_search_finds_one_culprit(oracle_of, is_reusing_parent: bool) -> None:
    oracle = oracle_of({(2, 0, 3, 15): 1.0})
    result = bisection(oracle, tau_token=TAU, budget=100, is_reusing_parent=is_reusing_parent)
    assert found(result) == {(2, 0, 3, 15)}
    assert not result.is_budget_exhausted


def test_reusing_the_parent_halves_the_probes_of_the_descent(oracle_of) -> None:
    costs = []
    for is_reusing_parent in (True, False):
        oracle = oracle_of({(2, 0, 3, 15): 1.0})
        costs.append(bisection(oracle, tau_token=TAU, budget=100, is_reusing_parent=is_reusing_parent).probes - 4)
    assert costs == [6, 12]


def test_neighbours_over_the_threshold_are_found_as_well(oracle_of) -> None:
    culprits = {(1, 0, 1, 7): 1.0, (1, 0, 1, 8): 0.9, (3, 0, 0, 0): 1.1}
    result = bisection(oracle_of(culprits), tau_token=TAU, budget=100)
    assert found(result) == set(culprits)
    assert result.found[0][0] == (3, 0, 0, 0)


def test_ranks_are_halved_before_tokens(oracle_of) -> None:
    oracle = oracle_of({(0, 5, 1, 2): 1.0}, shape=(2, 8, 2, 4))
    assert found(bisection(oracle, tau_token=0.05 * 128, budget=100)) == {(0, 5, 1, 2)}
    segment = torch.zeros((2, 8, 2, 4), dtype=torch.bool)
    segment[0] = True
    left, right = halves(segment)
    assert left[0, :4].all()
    assert not left[0, 4:].any()
    assert (left ^ right)[0].all()


def test_two_opposite_neighbours_are_missed_as_documented(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 1, 6): 1.0})
    oracle.gradients[1, 0, 1, 7] = -oracle.gradients[1, 0, 1, 6]
    oracle.whole = oracle.gradients.flatten(0, 3).sum(0)
    assert found(bisection(oracle, tau_token=TAU, budget=100)) == set()


def test_many_micro_batches_do_not_use_up_the_budget(oracle_of) -> None:
    oracle = oracle_of({(70, 0, 1, 2): 3.0}, shape=(80, 1, 2, 4), size=0.001)
    result = bisection(oracle, tau_token=0.05 * 640, budget=8)
    assert found(result) == {(70, 0, 1, 2)}
    assert result.probes == 83
    assert not result.is_budget_exhausted


def test_of_the_enumeration_only_gradients_over_their_threshold_are_kept(oracle_of, monkeypatch) -> None:
    oracle = oracle_of({(2, 0, 3, 15): 1.0})
    alive: list[weakref.ref[Any]] = []
    record = oracle.subset_gradient

    def kept(tokens: torch.Tensor, *, is_kept: bool = False) -> Any:
        part = record(tokens, is_kept=is_kept)
        if len(alive) == 4:  # the first halving: what the enumeration left is what is alive now
            assert [reference() is not None for reference in alive] == [False, False, True, False]
        alive.append(weakref.ref(part))
        return part

    monkeypatch.setattr(oracle, "subset_gradient", kept)
    assert found(bisection(oracle, tau_token=TAU, budget=100)) == {(2, 0, 3, 15)}
    assert len(alive) > 4


def test_an_exhausted_budget_is_reported(oracle_of) -> None:
    result = bisection(oracle_of({(2, 0, 3, 15): 1.0}), tau_token=TAU, budget=5)
    assert result.is_budget_exhausted
    assert result.probes == 9  # four to enumerate, five to halve
    assert found(result) == set()


def test_masked_tokens_are_never_named(oracle_of) -> None:
    mask = torch.ones((4, 1, 4, 16), dtype=torch.bool)
    mask[:, :, :, 10:] = False
    oracle = oracle_of({(2, 0, 3, 9): 1.0, (2, 0, 3, 10): 50.0}, mask=mask)
    assert found(bisection(oracle, tau_token=0.05 * 160, budget=100)) == {(2, 0, 3, 9)}


def test_with_an_infinite_threshold_only_non_finite_tokens_are_found(oracle_of) -> None:
    oracle = oracle_of({(0, 0, 0, 3): 7.0})
    oracle.gradients[1, 0, 2, 4, 10] = math.nan
    result = bisection(oracle, tau_token=math.inf, budget=100, is_reusing_parent=False)
    assert found(result) == {(1, 0, 2, 4)}
