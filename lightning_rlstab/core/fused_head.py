"""Token statistics straight from the hidden states: the (batch, time, vocab) logits are never whole in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_rlstab.core.logprobs import (
    TokenStatistics,
    row_gradients,
    row_statistics,
    statistics_outputs,
    upstream_pulls,
)

__all__ = ["head_statistics"]

# Logits alive at once, bytes: enough rows for an efficient matrix product, little beside the weights themselves.
_CHUNK_BYTES = {"cpu": 1 << 24}
_CHUNK_BYTES_ACCELERATOR = 1 << 28


def _rows_per_product(hidden: Tensor, weight: Tensor) -> int:
    budget = _CHUNK_BYTES.get(hidden.device.type, _CHUNK_BYTES_ACCELERATOR)
    return max(16, budget // (weight.shape[0] * weight.element_size()))


class _HeadStatistics(torch.autograd.Function):
    """Both passes project a few rows at a time; backward projects again instead of keeping the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        has_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        step = _rows_per_product(hidden, weight)
        parts = [
            row_statistics(
                functional.linear(hidden[start : start + step], weight, bias), tokens[start : start + step], temperature
            )
            for start in range(0, hidden.shape[0], step)
        ]
        rows = type(parts[0])(*(torch.cat(column) for column in zip(*parts, strict=True)))
        ctx.save_for_backward(hidden, weight, bias, tokens, rows.shift, rows.log_total, rows.entropy)
        ctx.temperature = temperature
        return statistics_outputs(ctx, rows, has_entropy_gradient=has_entropy_gradient)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprobs_grad: Tensor | None, entropy_grad: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, tokens, shift, log_total, entropy = ctx.saved_tensors
        pulls = upstream_pulls(ctx, shift, logprobs_grad, entropy_grad)
        if pulls is None:
            return None, None, None, None, None, None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        bias_grad = torch.zeros_like(bias) if needs_bias else None
        step = _rows_per_product(hidden, weight)
        for start in range(0, hidden.shape[0], step):
            part = slice(start, start + step)
            logits = functional.linear(hidden[part], weight, bias)
            entropy_pull = None if pulls[1] is None else pulls[1][part]
            gradient = row_gradients(
                logits,
                tokens[part],
                (shift[part], log_total[part], entropy[part]),
                (pulls[0][part], entropy_pull),
                temperature=ctx.temperature,
                out=logits,
            )
            if hidden_grad is not None:
                torch.mm(gradient, weight, out=hidden_grad[part])
            if weight_grad is not None:
                weight_grad.addmm_(gradient.t(), hidden[part])
            if bias_grad is not None:
                bias_grad.add_(gradient.sum(0))
        return hidden_grad, weight_grad, bias_grad, None, None, None


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    has_entropy_gradient: bool = False,
) -> TokenStatistics:
    """As ``token_statistics(hidden @ weight.T + bias, tokens)``, without ever holding all the logits.

    Memory beyond inputs and gradients is one chunk of logits (16 MB on a CPU, 256 MB on an accelerator); the price is
    that the backward pass projects a second time.

    Args:
        hidden: (batch, time, hidden) states that enter the output head.
        weight: (vocab, hidden) of the head, in the dtype of ``hidden``.
        bias: (vocab,) or None.
        tokens: (batch, time) ids.
        temperature: Above 0.
        has_entropy_gradient: Whether the entropy is differentiable.

    Returns:
        ``TokenStatistics``, (batch, time) float32 each, nats.

    Source:
        The chunked projection of Liger-Kernel (arXiv 2410.10989), for log-probabilities instead of a loss.

    Example:
        >>> hidden, weight = torch.eye(3).unsqueeze(0), torch.zeros(4, 3)
        >>> head_statistics(hidden, weight, None, torch.zeros(1, 3, dtype=torch.long)).entropy
        tensor([[1.3863, 1.3863, 1.3863]])
    """
    shape = tokens.shape
    flat = hidden.reshape(-1, hidden.shape[-1])
    outputs = _HeadStatistics.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, tokens.reshape(-1), float(temperature), has_entropy_gradient
    )
    return TokenStatistics(*(values.reshape(shape) for values in outputs))
