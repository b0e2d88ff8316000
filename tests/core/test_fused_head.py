"""The fused head equals projection plus token statistics, in value and in gradient, without holding the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_rlstab.core import fused_head
from lightning_rlstab.core.fused_head import head_statistics
from lightning_rlstab.core.logprobs import token_statistics


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "_rows_per_product", lambda hidden, weight: 4)


def case(dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 7, generator=generator, dtype=dtype)
    weight = torch.randn(11, 7, generator=generator, dtype=dtype)
    bias = torch.randn(11, generator=generator, dtype=dtype) if has_bias else None
    return hidden, weight, bias, torch.randint(0, 11, (3, 5), generator=generator)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_entropy_gradient", [False, True])
def test_values_and_gradients_equal_those_of_whole_logits(has_bias: bool, has_entropy_gradient: bool) -> None:
    hidden, weight, bias, tokens = case(torch.float32, has_bias=has_bias)
    results = []
    for is_fused in (True, False):
        leaves = [part.clone().requires_grad_() for part in (hidden, weight, bias) if part is not None]
        options = {"temperature": 0.7, "has_entropy_gradient": has_entropy_gradient}
        if is_fused:
            statistics = head_statistics(leaves[0], leaves[1], leaves[2] if has_bias else None, tokens, **options)
        else:
            logits = functional.linear(leaves[0], leaves[1], leaves[2] if has_bias else None)
            statistics = token_statistics(logits, tokens, **options)
        total = (statistics.logprobs * torch.arange(5.0)).sum()
        if has_entropy_gradient:
            total = total + (statistics.entropy * torch.arange(5.0).flip(0)).sum()
        results.append((statistics, torch.autograd.grad(total, leaves)))
    (fused, fused_gradients), (whole, whole_gradients) = results
    for ours, theirs in zip([*fused, *fused_gradients], [*whole, *whole_gradients], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


def test_gradients_pass_gradcheck() -> None:
    hidden, weight, bias, tokens = case(torch.float64, has_bias=True)
    leaves = [part.requires_grad_() for part in (hidden, weight, bias)]

    def statistics(*parts: Tensor) -> tuple[Tensor, Tensor]:
        return head_statistics(*parts, tokens, temperature=1.3, has_entropy_gradient=True)[:2]

    assert torch.autograd.gradcheck(statistics, leaves)


def test_a_frozen_head_gives_gradient_to_the_hidden_states_only() -> None:
    hidden, weight, _, tokens = case(torch.float32, has_bias=False)
    hidden.requires_grad_()
    head_statistics(hidden, weight, None, tokens).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_row_without_upstream_gradient_stays_closed_even_when_it_is_nan() -> None:
    hidden, weight, _, tokens = case(torch.float32, has_bias=False)
    hidden[0, 0] = torch.nan
    hidden.requires_grad_()
    logprobs = head_statistics(hidden, weight, None, tokens).logprobs
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    mask[0, 0] = False
    torch.where(mask, logprobs, 0.0).sum().backward()
    assert hidden.grad[0, 0].eq(0).all()
    assert hidden.grad[0, 1:].isfinite().all()


def test_half_precision_hidden_states_give_float32_statistics() -> None:
    hidden, weight, _, tokens = case(torch.float32, has_bias=False)
    statistics = head_statistics(hidden.bfloat16(), weight.bfloat16(), None, tokens)
    assert statistics.logprobs.dtype == torch.float32
    exact = head_statistics(hidden, weight, None, tokens)
    torch.testing.assert_close(statistics.logprobs, exact.logprobs, rtol=0.05, atol=0.1)
