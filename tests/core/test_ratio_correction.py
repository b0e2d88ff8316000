from __future__ import annotations

import math

import pytest
import torch

from lightning_rlstab.core.ratio_correction import RATIO_MODES, correction_ratio

OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -2.0, 0.0]])
BEHAVIOR = torch.tensor([[-1.0, -1.5, -3.0], [-2.0, -1.5, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
E = math.e


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[1.0, E**0.5, 2.0], [2.0, 0.8, 1.0]]),
        ("token_mask", [[1.0, E**0.5, 0.0], [0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[2.0], [E**0.5]]),
        ("sequence_mask", [[0.0], [E**0.5]]),
    ],
)
def test_every_mode_keeps_its_bounds(mode, expected):
    ratio = correction_ratio(OLD, BEHAVIOR, MASK, mode=mode, clip_max=2.0, clip_min=0.8)
    assert torch.allclose(ratio, torch.tensor(expected))


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_poison_behind_the_mask_and_unscored_tokens_count_as_no_difference(mode):
    poisoned = torch.where(MASK.bool(), OLD, math.nan), torch.where(MASK.bool(), BEHAVIOR, -math.inf)
    assert torch.equal(correction_ratio(*poisoned, MASK, mode=mode), correction_ratio(OLD, BEHAVIOR, MASK, mode=mode))
    unscored = torch.where(BEHAVIOR == -3.0, math.nan, BEHAVIOR)
    alike = torch.where(BEHAVIOR == -3.0, OLD, BEHAVIOR)
    assert torch.equal(correction_ratio(OLD, unscored, MASK, mode=mode), correction_ratio(OLD, alike, MASK, mode=mode))


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_without_bounds_an_extreme_mismatch_is_still_finite(mode):
    old, behavior = torch.tensor([[0.0, -math.inf]]), torch.tensor([[-math.inf, -1.0]])
    ratio = correction_ratio(old, behavior, torch.ones(1, 2), mode=mode, clip_max=None, clip_min=None)
    assert ratio.isfinite().all()


def test_a_nan_of_the_training_forward_stays_visible():
    old = torch.tensor([[math.nan, -1.0]])
    assert correction_ratio(old, BEHAVIOR[:1, :2], torch.ones(1, 2), mode="token_truncate")[0, 0].isnan()


def test_an_unknown_mode_is_answered_with_the_nearest_name():
    with pytest.raises(ValueError, match="token_mask"):
        correction_ratio(OLD, BEHAVIOR, MASK, mode="token_masks")
