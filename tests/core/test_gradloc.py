from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlstab.core.gradloc import (
    effective_tokens,
    head_gradient_norms,
    probe_shift,
    segment_threshold,
    token_shares,
)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_the_closed_form_head_norm_equals_autograd_for_an_untied_head(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 16, generator=generator)
    head = (0.5 * torch.randn(50, 16, generator=generator)).requires_grad_()
    tokens = torch.randint(50, (12,), generator=generator)
    slope = torch.randn(12, generator=generator)
    logprobs = torch.log_softmax(hidden @ head.T / temperature, dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    norms = head_gradient_norms(
        slope, chosen.detach(), logprobs.exp().square().sum(-1).detach(), hidden.norm(dim=-1), temperature=temperature
    )
    for index in range(12):
        (gradient,) = torch.autograd.grad(slope[index] * chosen[index], head, retain_graph=True)
        torch.testing.assert_close(norms[index], gradient.norm(), rtol=1e-5, atol=0)


def test_a_token_the_model_is_certain_of_has_a_head_norm_near_zero() -> None:
    logprob = torch.tensor([-1e-7, -1e-4])
    # The sum of squares as float32 gives it: rounded to 1, so 1 - 2p + sum p^2 would be rounding noise.
    norms = head_gradient_norms(torch.ones(2), logprob, torch.ones(2), torch.ones(2))
    assert norms.max() <= math.sqrt(2) * 1e-4
    assert (norms >= 0).all()


def test_a_head_norm_does_not_hide_a_slope_that_is_not_finite() -> None:
    norms = head_gradient_norms(
        torch.tensor([math.nan, math.inf]), torch.full((2,), -1.0), torch.ones(2), torch.ones(2)
    )
    assert not norms.isfinite().any()


@given(st.integers(1, 40), st.integers(0, 1000))
def test_shares_of_a_linear_loss_sum_to_one(tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slope = torch.randn(tokens, generator=generator).double()
    directions = torch.randn(tokens, 8, generator=generator).double()
    gradient = (slope[:, None] * directions).sum(0)
    norm = float(gradient.norm())
    moved = slope * (directions @ (gradient / norm)) * 1e-2
    shares = token_shares(moved, -moved, distance=2e-2, grad_norm=norm)
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-9)


def test_the_probe_moves_the_steepest_token_by_the_wanted_change() -> None:
    slope, jacobian = 0.5, 80.0
    shift = probe_shift(slope * jacobian, slope, logprob_change=0.03)
    assert jacobian * shift == pytest.approx(0.03)


@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (16, 64), (64, 64)])
def test_thresholds_of_segments_follow_independent_noise(tokens: int, window: int) -> None:
    # A sum over L tokens of noise s / N has norm s sqrt(L) / N.
    assert segment_threshold(3.0, segment_tokens=tokens, window_tokens=window) == pytest.approx(
        3.0 * math.sqrt(tokens) / window
    )


def test_the_threshold_of_the_whole_step_is_tau_over_the_root_of_its_tokens() -> None:
    assert segment_threshold(8.0, segment_tokens=64, window_tokens=64) == pytest.approx(8.0 / math.sqrt(64))


def test_one_token_with_everything_counts_as_one_and_equal_tokens_as_many() -> None:
    assert effective_tokens(torch.tensor([0.0, 1.0, 0.0])) == 1.0
    assert effective_tokens(torch.full((100,), 0.01)) == pytest.approx(100.0)
    assert effective_tokens(torch.zeros(3)) == 0.0
