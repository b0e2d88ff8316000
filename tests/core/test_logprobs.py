from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlstab.core import logprobs as module
from lightning_rlstab.core.logprobs import (
    floored_logprobs,
    position_ids,
    possible_tokens,
    token_statistics,
)
from lightning_rlstab.core.masked import masked_mean


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-30, 30), min_size=5, max_size=5), min_size=1, max_size=4),
    temperature=st.floats(0.3, 2.0),
)
def test_statistics_equal_the_slow_twin(twin, rows, temperature):
    logits = torch.tensor([rows])
    tokens = torch.arange(len(rows)).unsqueeze(0) % 5
    stats = token_statistics(logits, tokens, temperature=temperature)
    for index, row in enumerate(logits[0].tolist()):
        expected, entropy, squares = twin.distribution(row, temperature)
        assert stats.logprobs[0, index].item() == pytest.approx(expected[index % 5], rel=1e-5, abs=1e-5)
        assert stats.entropy[0, index].item() == pytest.approx(entropy, rel=1e-4, abs=1e-5)
        assert stats.sum_squared_probs[0, index].item() == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("has_entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows_per_chunk", [1, 2, 100])
def test_gradients_pass_gradcheck_in_every_chunking(monkeypatch, has_entropy_gradient, temperature, rows_per_chunk):
    monkeypatch.setattr(module, "_rows_per_chunk", lambda *_: rows_per_chunk)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, dtype=torch.double, generator=g, requires_grad=True)
    tokens = torch.randint(7, (2, 3), generator=g)

    def outputs(x):
        stats = token_statistics(x, tokens, temperature=temperature, has_entropy_gradient=has_entropy_gradient)
        return (stats.logprobs, stats.entropy) if has_entropy_gradient else stats.logprobs

    assert torch.autograd.gradcheck(outputs, (logits,))


def test_entropy_has_no_gradient_unless_asked():
    logits = torch.randn(1, 2, 4, requires_grad=True)
    stats = token_statistics(logits, torch.zeros(1, 2, dtype=torch.long))
    assert not stats.entropy.requires_grad
    assert not stats.sum_squared_probs.requires_grad


@pytest.mark.parametrize(
    ("row", "dtype", "entropy"),
    [
        ([0.0, -math.inf], torch.float32, 0.0),
        ([0.0, 0.0, -math.inf], torch.float32, math.log(2)),
        ([65504.0, -65504.0], torch.float16, 0.0),
    ],
)
def test_fr034_a_probability_of_zero_leaves_entropy_and_gradient_finite(row, dtype, entropy):
    logits = torch.tensor([[row]], dtype=dtype, requires_grad=True)
    stats = token_statistics(logits, torch.tensor([[0]]), has_entropy_gradient=True)
    assert stats.entropy.item() == pytest.approx(entropy, abs=1e-6)
    (stats.entropy + stats.logprobs).sum().backward()
    assert logits.grad.isfinite().all()


def test_a_token_of_probability_zero_reports_minus_infinity_and_a_finite_gradient():
    logits = torch.tensor([[[0.0, -math.inf]]], requires_grad=True)
    stats = token_statistics(logits, torch.tensor([[1]]))
    assert stats.logprobs.item() == -math.inf
    floored_logprobs(stats.logprobs).sum().backward()
    assert torch.equal(logits.grad, torch.zeros(1, 1, 2))


def test_nan_logits_of_a_row_without_upstream_gradient_give_exactly_zero():
    logits = torch.tensor([[[0.0, math.nan], [0.0, 1.0]]], requires_grad=True)
    stats = token_statistics(logits, torch.tensor([[1, 0]]), has_entropy_gradient=True)
    assert stats.logprobs[0, 0].isnan()
    (stats.logprobs[0, 1] + stats.entropy[0, 1]).backward()
    assert torch.equal(logits.grad[0, 0], torch.zeros(2))
    assert logits.grad[0, 1].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_give_float32_statistics_and_gradients_of_their_own_dtype(dtype):
    g = torch.Generator().manual_seed(1)
    logits = (torch.randn(2, 3, 50, generator=g) * 3).to(dtype).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    tokens = torch.randint(50, (2, 3), generator=g)
    narrow_stats = token_statistics(logits, tokens, has_entropy_gradient=True)
    wide_stats = token_statistics(wide, tokens, has_entropy_gradient=True)
    for narrow, expected in zip(narrow_stats, wide_stats, strict=True):
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, expected)
    (narrow_stats.logprobs - 0.3 * narrow_stats.entropy).sum().backward()
    (wide_stats.logprobs - 0.3 * wide_stats.entropy).sum().backward()
    assert logits.grad.dtype == dtype
    assert torch.equal(logits.grad, wide.grad.to(dtype))


def test_fr072_without_an_update_the_log_ratio_of_bf16_logits_is_zero():
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    old, new = token_statistics(logits, tokens).logprobs, token_statistics(logits.clone(), tokens).logprobs
    assert (old - new).abs().max() < 1e-6


def test_statistics_do_not_keep_a_second_copy_of_the_logits():
    logits = torch.randn(4, 8, 1000, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        token_statistics(logits, torch.zeros(4, 8, dtype=torch.long))
    large = [t for t in saved if t.numel() >= logits.numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == logits.data_ptr()


def test_the_floor_keeps_nan_visible_and_stops_the_gradient_below_it():
    values = torch.tensor([-1.0, -101.0, -math.inf, math.nan], requires_grad=True)
    floored = floored_logprobs(values)
    assert floored[:3].tolist() == [-1.0, -100.0, -100.0]
    assert floored[3].isnan()
    floored[:3].sum().backward()
    assert values.grad.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_fr037_an_impossible_token_leaves_the_denominator():
    logprobs = torch.full((1, 20), -1.0)
    logprobs[0, 4] = -math.inf
    mask = possible_tokens(torch.ones(1, 20, dtype=torch.bool), logprobs)
    assert mask.sum() == 19
    assert masked_mean(logprobs, mask).item() == -1.0


def test_fr037_a_nan_is_not_an_impossible_token():
    logprobs = torch.tensor([[math.nan, -1.0]])
    assert possible_tokens(torch.ones(1, 2, dtype=torch.bool), logprobs, None).tolist() == [[True, True]]


def test_left_padding_does_not_move_positions():
    assert position_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_fr028_ten_more_left_pads_leave_log_probabilities_where_they_were(tiny_policy):
    policy = tiny_policy().eval()
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(3))

    def scored(pads):
        padded = torch.cat([torch.full((2, pads), 256), ids], 1)
        mask = torch.cat([torch.zeros(2, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        logits = policy(input_ids=padded, attention_mask=mask, position_ids=position_ids(mask)).logits
        return token_statistics(logits[:, pads:-1], ids[:, 1:]).logprobs

    with torch.no_grad():
        assert (scored(2) - scored(12)).abs().max() < 1e-4
