"""Behavior against training log-probs: every usual reason for a systematic gap is found by its own fingerprint."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_rlstab.rollout.self_check import mismatch_report

BATCH, TIME, VOCAB = 6, 40, 50


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(BATCH, TIME, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


@pytest.fixture
def tokens(logits: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).view(BATCH, TIME)


@pytest.fixture
def mask() -> Tensor:
    return torch.arange(TIME) < torch.tensor([40, 30, 20, 40, 25, 35]).unsqueeze(1)


def picked(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)


def test_equal_log_probs_are_fine_to_1e_6(logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
    logprobs = picked(logits, tokens)
    check = mismatch_report(logprobs, logprobs + 1e-7, mask, tolerance=1e-6)
    assert check.is_ok
    assert check.cause == "none"
    assert check.max_abs_diff < 1e-6
    assert check.ratio_mean == pytest.approx(1.0)


def test_fr_067_a_sampler_at_another_temperature_is_named_at_step_0(
    logits: Tensor, tokens: Tensor, mask: Tensor
) -> None:
    behavior, training = picked(logits, tokens), picked(logits / 0.6, tokens)
    check = mismatch_report(behavior, training, mask, alternatives={"temperature 1.0": behavior.clone()})
    assert not check.is_ok
    assert check.cause == "temperature 1.0"
    assert "Likely cause: temperature 1.0" in check.message


def test_a_temperature_is_named_through_bfloat16_noise_too(logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
    behavior, training = picked(logits.bfloat16().float(), tokens), picked(logits / 0.6, tokens)
    check = mismatch_report(behavior, training, mask, alternatives={"temperature 1.0": picked(logits, tokens)})
    assert check.cause == "temperature 1.0"


@pytest.mark.parametrize("shift", [1, -1])
def test_an_off_by_one_is_named(logits: Tensor, tokens: Tensor, mask: Tensor, shift: int) -> None:
    behavior = picked(logits, tokens)
    check = mismatch_report(behavior, behavior.roll(shift, dims=1), mask)
    assert check.cause == "shift"


def test_fr_028_a_fault_of_masks_or_positions_is_blamed_on_the_padding(
    logits: Tensor, tokens: Tensor, mask: Tensor
) -> None:
    behavior = picked(logits, tokens)
    pads = torch.tensor([0, 10, 5, 0, 2, 8])
    noise = torch.randn(BATCH, TIME, generator=torch.Generator().manual_seed(2)).abs()
    training = behavior + noise * pads.unsqueeze(1) / 10
    assert mismatch_report(behavior, training, mask, pad_counts=pads).cause == "padding"
    growing = torch.tensor([1, 10, 5, 2, 3, 8])
    training = behavior + noise * growing.unsqueeze(1) / 10
    assert mismatch_report(behavior, training, mask, pad_counts=growing).cause == "padding"
    assert mismatch_report(behavior, behavior + 1 + noise, mask, pad_counts=growing).cause == "unknown"


@pytest.mark.parametrize("top_k", [5, 20])
def test_log_probs_of_a_truncated_distribution_are_named(
    logits: Tensor, tokens: Tensor, mask: Tensor, top_k: int
) -> None:
    kept = logits >= logits.topk(top_k, dim=-1).values[..., -1:]
    likely = logits.argmax(-1)
    tokens = torch.where(kept.gather(2, tokens.unsqueeze(2)).squeeze(2), tokens, likely)
    behavior = picked(logits.masked_fill(~kept, -math.inf), tokens)
    assert mismatch_report(behavior, picked(logits, tokens), mask).cause == "truncated sampling"


def test_fr_072_bfloat16_noise_is_a_warning_that_says_dtype(logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
    check = mismatch_report(picked(logits, tokens), picked(logits.bfloat16().float(), tokens), mask, tolerance=1e-6)
    assert not check.is_ok
    assert check.cause == "dtype"


def test_fr_070_a_large_mismatch_before_any_update_is_said_at_once(
    logits: Tensor, tokens: Tensor, mask: Tensor
) -> None:
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)) * 2
    check = mismatch_report(picked(logits, tokens), picked(other, tokens), mask)
    assert not check.is_ok
    assert check.cause == "unknown"
    assert "before any update" in check.message
    assert "nats" in check.message


def test_a_closed_mask_hides_whatever_is_behind_it(logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
    logprobs = picked(logits, tokens)
    poisoned = torch.where(mask, logprobs, torch.nan)
    assert mismatch_report(poisoned, torch.where(mask, logprobs, torch.inf), mask).is_ok
    empty = mismatch_report(poisoned, logprobs, torch.zeros_like(mask))
    assert empty.is_ok
    assert empty.ratio_mean == 1.0


def test_a_value_that_is_not_finite_is_named_before_anything_else(logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
    logprobs = picked(logits, tokens)
    broken = logprobs.clone()
    broken[0, 3] = math.nan
    check = mismatch_report(broken, logprobs, mask)
    assert check.cause == "non-finite"
    assert "1 values are not finite" in check.message
    assert math.isfinite(check.mean_abs_diff)


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan"), "1e-4", True])
def test_a_tolerance_that_is_none_is_refused(mask: Tensor, tolerance: float) -> None:
    with pytest.raises(ValueError, match="`tolerance` must"):
        mismatch_report(mask.float(), mask.float(), mask, tolerance=tolerance)
