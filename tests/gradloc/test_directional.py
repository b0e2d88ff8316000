from __future__ import annotations

import math

import pytest
import torch

from lightning_rlstab.gradloc.directional import gradient_shares


def exact_shares(oracle):
    whole = oracle.whole.double()
    return (oracle.gradients.double() @ whole) / whole.square().sum()


def test_shares_equal_the_inner_products_and_sum_to_one(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0, (3, 0, 0, 0): 0.5})
    shares = gradient_shares(oracle, tolerance=0.05)
    assert shares.is_complete
    assert shares.completeness == pytest.approx(1.0, abs=1e-3)
    torch.testing.assert_close(shares.values, exact_shares(oracle), atol=1e-3, rtol=0)


def test_only_sequences_that_matter_are_run_a_second_time(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0}, size=0.003)
    gradient_shares(oracle, tolerance=0.05)
    assert oracle.rows_run[0] == 16
    assert oracle.rows_run[1] < 8
    assert oracle.cost_sweeps < 0.5


def test_a_first_shift_that_is_far_off_is_corrected_after_one_sweep(oracle_of) -> None:
    # The head norms point at a token with a slope a thousand times the culprit's, so the first step is far too long.
    slope = torch.full((4, 1, 4, 16), -1e-3)
    slope[0, 0, 0, 0] = -10.0
    oracle = oracle_of({(1, 0, 2, 5): 1.0}, slope=slope, curvature=3.0, has_head_norms=False)
    shares = gradient_shares(oracle, tolerance=0.05)
    assert shares.is_complete
    assert abs(oracle.shifts[1]) < abs(oracle.shifts[0])
    torch.testing.assert_close(shares.values, exact_shares(oracle), atol=0.02, rtol=0)


@pytest.mark.parametrize(("weight_norm", "change"), [(0.0, 0.005), (1e3, 0.05), (1e6, 0.1)])
def test_the_weights_are_moved_by_more_than_their_rounding_but_no_further_than_a_tenth_nat(
    oracle_of, weight_norm: float, change: float
) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0}, size=1e-6)
    oracle.norm_of_weights = weight_norm
    gradient_shares(oracle, tolerance=0.05)
    assert oracle.shifts[0] / 0.01 * oracle.grad_norm == pytest.approx(change, rel=0.01)


@pytest.mark.parametrize("norm_of_weights", [600.0, 1e3, 1e6])
def test_a_shift_for_large_weights_that_bends_the_log_probs_is_shortened(oracle_of, norm_of_weights: float) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0, (0, 0, 0, 0): 0.8})
    bent = type(oracle)(oracle.gradients, curvature=400.0, bend="cubic")
    bent.norm_of_weights = norm_of_weights
    shares = gradient_shares(bent, tolerance=0.05)
    assert shares.is_complete
    assert abs(shares.shift) < abs(bent.shifts[0])


def test_a_nan_of_the_first_attempt_does_not_hide_a_good_second_one(oracle_of, monkeypatch) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0})
    plain = oracle.linear_losses

    def spoilt(shift, sequences=None):
        losses = plain(shift, sequences)
        return losses * (math.nan if len(oracle.shifts) == 2 else 1.0)  # the first one below

    monkeypatch.setattr(oracle, "linear_losses", spoilt)
    assert gradient_shares(oracle, tolerance=0.05).is_complete


def test_shares_from_a_noisy_probe_do_not_pass_their_own_check(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0}, noise=0.1, is_base_reusable=False)
    shares = gradient_shares(oracle, tolerance=0.05)
    assert not shares.is_complete
    assert abs(shares.completeness - 1) > 0.05


def test_without_a_reusable_base_both_sides_are_swept_whole(oracle_of) -> None:
    oracle = oracle_of({(1, 0, 2, 5): 1.0}, is_base_reusable=False)
    assert gradient_shares(oracle, tolerance=0.05).is_complete
    assert oracle.rows_run == [16, 16]


def test_a_gradient_that_the_tokens_do_not_explain_fails_the_check(oracle_of) -> None:
    outside = torch.zeros(64)
    outside[3] = 5.0
    shares = gradient_shares(oracle_of({(1, 0, 2, 5): 1.0}, outside=outside), tolerance=0.05)
    assert not shares.is_complete


def test_a_nan_log_prob_behind_the_mask_has_no_share(oracle_of) -> None:
    mask = torch.ones((4, 1, 4, 16), dtype=torch.bool)
    mask[0, 0, 0, 8:] = False
    logprobs = torch.full((4, 1, 4, 16), -1.0)
    logprobs[0, 0, 0, 8:] = float("nan")
    shares = gradient_shares(oracle_of({(1, 0, 2, 5): 1.0}, mask=mask, logprobs=logprobs), tolerance=0.05)
    assert shares.is_complete
    assert (shares.values[0, 0, 0, 8:] == 0).all()
