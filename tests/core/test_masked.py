from __future__ import annotations

import math

import pytest
import torch

from lightning_rlstab.core.masked import masked_max, masked_mean, masked_min, masked_sum

REDUCTIONS = (masked_sum, masked_mean, masked_max, masked_min)
VALUES = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_poison_behind_the_mask_reaches_neither_value_nor_gradient(reduction, dim, poison):
    clean = torch.where(MASK.bool(), VALUES, 0.0).requires_grad_()
    broken = torch.where(MASK.bool(), VALUES, poison).requires_grad_()
    expected, got = reduction(clean, MASK, dim), reduction(broken, MASK, dim)
    assert torch.equal(expected, got)
    got.sum().backward()
    assert broken.grad.isfinite().all()
    assert torch.equal(broken.grad[MASK == 0], torch.zeros(6))


@pytest.mark.parametrize(
    ("reduction", "whole", "rows"),
    [
        (masked_sum, 4.0, [-1.0, 5.0, 0.0]),
        (masked_mean, 4 / 3, [-0.5, 5.0, 0.0]),
        (masked_max, 5.0, [1.0, 5.0, 0.0]),
        (masked_min, -2.0, [-2.0, 5.0, 0.0]),
    ],
)
def test_reductions_give_what_their_names_say_and_zero_on_an_empty_mask(reduction, whole, rows):
    assert reduction(VALUES, MASK).item() == pytest.approx(whole)
    assert reduction(VALUES, MASK, 1).tolist() == pytest.approx(rows)
    assert reduction(VALUES, torch.zeros_like(MASK)).item() == 0.0
    assert reduction(VALUES[:0], MASK[:0]).item() == 0.0


def test_an_open_nan_stays_visible():
    values = torch.tensor([1.0, math.nan])
    for reduction in REDUCTIONS:
        assert reduction(values, torch.tensor([True, True])).isnan()


def test_low_precision_is_accumulated_in_float32():
    values = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    total = masked_sum(values, torch.ones(4096))
    assert total.dtype == torch.float32
    assert total == 4096


def test_a_column_of_values_broadcasts_against_the_mask():
    column = torch.tensor([[2.0], [4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_sum(column, mask) == 8
    assert masked_mean(column, mask).item() == pytest.approx(8 / 3)
    assert masked_max(column, mask, 1).tolist() == [2.0, 4.0]


def test_the_empty_value_of_extremes_can_be_their_identity():
    nothing = torch.zeros(2)
    assert masked_max(torch.ones(2), nothing, empty=-math.inf) == -math.inf
    assert masked_min(torch.ones(2), nothing, empty=math.inf) == math.inf
