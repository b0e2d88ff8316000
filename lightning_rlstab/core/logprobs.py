"""Log-probability, entropy and collision probability of every token, in one chunked pass over the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_rlstab.core.masked import at_least_float32

__all__ = [
    "LOGPROB_FLOOR",
    "TokenStatistics",
    "floored_logprobs",
    "position_ids",
    "possible_tokens",
    "token_statistics",
]

LOGPROB_FLOOR = -100.0
"""Lowest log-probability that enters a loss, nats: e^-100 is 0 for every purpose, and differences stay finite."""

# exp(-1e4) is exactly 0 in float64, and 0 * -1e4 is 0 where 0 * -inf would be NaN.
_LOWEST_EXPONENT = -1e4

# Working set per chunk, bytes: small enough for a core's cache, large enough to keep an accelerator busy.
_CHUNK_BYTES = {"cpu": 1 << 20}
_CHUNK_BYTES_ACCELERATOR = 1 << 28


class TokenStatistics(NamedTuple):
    """What one pass over the logits says about every token.

    Attributes:
        logprobs: (batch, time) float32, nats; -inf where the token's logit is -inf.
        entropy: (batch, time) float32, nats, of the whole distribution; in [0, ln vocab].
        sum_squared_probs: (batch, time) float32, sum over the vocabulary of p squared; in (0, 1]; never has a gradient.
    """

    logprobs: Tensor
    entropy: Tensor
    sum_squared_probs: Tensor


def _rows_per_chunk(flat: Tensor, working_dtype: torch.dtype) -> int:
    budget = _CHUNK_BYTES.get(flat.device.type, _CHUNK_BYTES_ACCELERATOR)
    return max(1, budget // (max(1, flat.shape[1]) * working_dtype.itemsize))


class _Rows(NamedTuple):
    """Statistics of (rows, vocab) logits, (rows,) each, and the two numbers from which p is rebuilt."""

    logprobs: Tensor
    entropy: Tensor
    sum_squared_probs: Tensor
    shift: Tensor
    log_total: Tensor


def row_statistics(flat: Tensor, tokens: Tensor, temperature: float) -> _Rows:
    """Statistics of every row of ``flat`` (rows, vocab), in chunks that fit a core's cache; no gradient.

    Args:
        flat: (rows, vocab) logits before the temperature.
        tokens: (rows,) ids.
        temperature: Above 0.

    Returns:
        Tensors of shape (rows,), float32 (float64 for float64 logits).
    """
    working = torch.float64 if flat.dtype == torch.float64 else torch.float32
    rows, vocab = flat.shape
    logprobs, entropy, sum_squared_probs, shift, log_total = flat.new_empty((5, rows), dtype=working).unbind(0)
    step = _rows_per_chunk(flat, working)
    scaled = flat.new_empty((min(step, rows), vocab), dtype=working)
    weights = torch.empty_like(scaled)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        raw = flat[part]
        z, e = scaled[: raw.shape[0]], weights[: raw.shape[0]]
        # Widening first and computing in place is faster than arithmetic between two dtypes.
        wide = raw if raw.dtype == working else z.copy_(raw)
        highest = wide.amax(-1, keepdim=True)
        torch.sub(wide, highest, out=z)
        if temperature != 1.0:
            z.div_(temperature)
        chosen = z.gather(1, tokens[part].unsqueeze(1)).squeeze(1)
        z.clamp_(min=_LOWEST_EXPONENT)
        torch.exp(z, out=e)
        total = e.sum(-1)
        log_s = total.log()
        logprobs[part] = chosen - log_s
        entropy[part] = log_s - torch.linalg.vecdot(e, z) / total
        sum_squared_probs[part] = torch.linalg.vecdot(e, e) / (total * total)
        shift[part] = highest.squeeze(1)
        log_total[part] = log_s
    entropy.clamp_(min=0.0)
    return _Rows(logprobs, entropy, sum_squared_probs, shift, log_total)


def row_gradients(
    flat: Tensor,
    tokens: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    pulls: tuple[Tensor, Tensor | None],
    *,
    temperature: float,
    out: Tensor,
) -> Tensor:
    """Gradient of ``flat`` (rows, vocab) for given gradients of log-probability and entropy, written into ``out``.

    Args:
        flat: (rows, vocab) logits before the temperature.
        tokens: (rows,) ids.
        rows: ``shift``, ``log_total`` and ``entropy`` of these rows.
        pulls: (rows,) gradients of the log-probabilities and, or None, of the entropies.
        temperature: Above 0.
        out: (rows, vocab) of the dtype of ``flat``; may be ``flat`` itself when it is not needed any more.

    Returns:
        ``out``. A row without any upstream gradient gets exactly 0 even when its logits are NaN.
    """
    shift, log_total, entropy = rows
    token_pull = pulls[0] / temperature
    is_closed = token_pull == 0
    entropy_pull = None if pulls[1] is None else pulls[1] / temperature
    if entropy_pull is not None:
        is_closed &= entropy_pull == 0
    step = _rows_per_chunk(flat, shift.dtype)
    needs_cast = flat.dtype != shift.dtype
    buffer = flat.new_empty((min(step, flat.shape[0]), flat.shape[1]), dtype=shift.dtype) if needs_cast else None
    for start in range(0, flat.shape[0], step):
        part = slice(start, min(start + step, flat.shape[0]))
        raw, pull = flat[part], token_pull[part].unsqueeze(1)
        work = out[part] if buffer is None else buffer[: raw.shape[0]].copy_(raw)
        torch.sub(raw if buffer is None else work, shift[part].unsqueeze(1), out=work)
        if temperature != 1.0:
            work.div_(temperature)
        work.sub_(log_total[part].unsqueeze(1))
        if entropy_pull is None:
            work.exp_().mul_(-pull)
        else:
            # d/dx of g_l * logprob + g_h * entropy = p * -(g_l + g_h (log p + H)) + onehot * g_l
            tilt = work.clamp(min=_LOWEST_EXPONENT).add_(entropy[part].unsqueeze(1))
            tilt.mul_(-entropy_pull[part].unsqueeze(1)).sub_(pull)
            work.exp_().mul_(tilt)
        work.scatter_add_(1, tokens[part].unsqueeze(1), pull)
        _close_rows(work, is_closed[part])
        if buffer is not None:
            out[part] = work
    return out


def _close_rows(work: Tensor, is_closed: Tensor) -> None:
    """Write 0 over closed rows, whatever they hold."""
    if work.device.type == "cpu":
        work.index_fill_(0, is_closed.nonzero().squeeze(1), 0.0)  # touches the closed rows only
    else:
        work.masked_fill_(is_closed.unsqueeze(1), 0.0)  # touches every row, but asks the device nothing


def statistics_outputs(ctx: Any, rows: _Rows, *, has_entropy_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of an autograd function over ``rows``, marked with what carries gradient.

    Args:
        ctx: The function's context.
        rows: From :func:`row_statistics`.
        has_entropy_gradient: Whether the entropy is differentiable.
    """
    ctx.has_entropy_gradient = has_entropy_gradient
    ctx.set_materialize_grads(False)
    if has_entropy_gradient:
        ctx.mark_non_differentiable(rows.sum_squared_probs)
    else:
        ctx.mark_non_differentiable(rows.entropy, rows.sum_squared_probs)
    return rows.logprobs, rows.entropy, rows.sum_squared_probs


def upstream_pulls(
    ctx: Any, shift: Tensor, logprobs_grad: Tensor | None, entropy_grad: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """Upstream gradients as :func:`row_gradients` takes them, or None when there are none.

    Args:
        ctx: The function's context.
        shift: (rows,), for the shape of a missing gradient.
        logprobs_grad: (rows,) or None.
        entropy_grad: (rows,) or None.
    """
    if not ctx.has_entropy_gradient:
        entropy_grad = None
    if logprobs_grad is None and entropy_grad is None:
        return None
    return (torch.zeros_like(shift) if logprobs_grad is None else logprobs_grad), entropy_grad


class _TokenStatistics(torch.autograd.Function):
    """Forward keeps the logits and two numbers per row; backward rebuilds the probabilities chunk by chunk.

    The only tensor of the logits' size that is made is the gradient itself.
    """

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, tokens: Tensor, temperature: float, has_entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = row_statistics(flat, tokens, temperature)
        ctx.save_for_backward(flat, tokens, rows.shift, rows.log_total, rows.entropy)
        ctx.temperature = temperature
        return statistics_outputs(ctx, rows, has_entropy_gradient=has_entropy_gradient)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprobs_grad: Tensor | None, entropy_grad: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        flat, tokens, *rows = ctx.saved_tensors
        pulls = upstream_pulls(ctx, rows[0], logprobs_grad, entropy_grad)
        if pulls is None:
            return None, None, None, None
        gradient = torch.empty_like(flat)
        row_gradients(flat, tokens, tuple(rows), pulls, temperature=ctx.temperature, out=gradient)
        return gradient, None, None, None


def token_statistics(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, has_entropy_gradient: bool = False
) -> TokenStatistics:
    """Log-probability of each token, entropy and sum of squared probabilities of each distribution.

    With z = logits / temperature and lse = logsumexp(z): logprob = z_token - lse, entropy = lse - sum p z,
    sum_squared_probs = sum p^2, with p = exp(z - lse). The gradient of the logits is
    ((onehot - p) g_logprob - p (log p + entropy) g_entropy) / temperature, written into one buffer.

    Why it is safe: the row maximum is subtracted first and everything is computed in float32; a logit of -inf has
    probability exactly 0 and adds 0 to the entropy and to the gradient; rows whose upstream gradient is 0 get a
    gradient of exactly 0 even when their logits are NaN.

    Args:
        logits: (batch, time, vocab), before the temperature; float16, bfloat16, float32 or float64.
        tokens: (batch, time) integer ids; slots that do not matter may hold any valid id.
        temperature: Above 0.
        has_entropy_gradient: Whether the entropy is differentiable; costs one more pass in the backward.

    Returns:
        ``TokenStatistics``, each (batch, time), float32 (float64 for float64 logits), nats.

    Example:
        >>> stats = token_statistics(torch.tensor([[[0.0, 0.0, -torch.inf]]]), torch.tensor([[0]]))
        >>> round(stats.entropy.item(), 3), round(stats.logprobs.item(), 3), round(stats.sum_squared_probs.item(), 3)
        (0.693, -0.693, 0.5)
    """
    shape = tokens.shape
    flat = logits.reshape(-1, logits.shape[-1])
    outputs = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        flat, tokens.reshape(-1), float(temperature), has_entropy_gradient
    )
    return TokenStatistics(*(values.reshape(shape) for values in outputs))


def floored_logprobs(logprobs: Tensor, floor: float = LOGPROB_FLOOR) -> Tensor:
    """Log-probabilities not lower than ``floor``; float32.

    Below the floor the value is the floor and the gradient is exactly 0 (also for -inf); NaN stays NaN, so a broken
    value remains visible.

    Args:
        logprobs: Any shape, nats.
        floor: Nats.

    Returns:
        Same shape, float32 (float64 for float64 input).

    Example:
        >>> floored_logprobs(torch.tensor([-1.5, -torch.inf]))
        tensor([  -1.5000, -100.0000])
    """
    exact = at_least_float32(logprobs)
    # Not `clamp`: its gradient at the very bound is 1 in torch 2.13 and 0 in 2.14.
    return torch.where(exact < floor, floor, exact)


def possible_tokens(mask: Tensor, *logprobs: Tensor | None) -> Tensor:
    """The mask without tokens that one of the policies gives probability 0 (log-probability -inf).

    Such a token cannot have been sampled from that policy (a cut-off vocabulary, a suppressed token), so no ratio
    exists for it. Replacing its -inf by 0 would count it as certain; it has to leave numerator and denominator alike,
    so close it before tokens are counted. NaN stays open: that is an error to be seen.

    Args:
        mask: (batch, time) bool or 0/1.
        *logprobs: (batch, time) nats, or None.

    Returns:
        (batch, time) bool.

    Example:
        >>> possible_tokens(torch.tensor([[1, 1]]), torch.tensor([[-1.0, -torch.inf]]))
        tensor([[ True, False]])
    """
    is_open = mask.bool()
    for values in logprobs:
        if values is not None:
            is_open = is_open & (values != -torch.inf)
    return is_open


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of every token when padding does not count: cumsum(mask) - 1, at least 0.

    With left padding the first real token gets position 0, however many pads stand before it.

    Args:
        attention_mask: (batch, time), bool or 0/1.

    Returns:
        (batch, time) int64.

    Example:
        >>> position_ids(torch.tensor([[0, 0, 1, 1, 1]]))
        tensor([[0, 0, 0, 1, 2]])
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
