"""The policy's forward on prompts and completions, reduced to what the loss and the localizer need of each token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_rlstab.core.fused_head import head_statistics
from lightning_rlstab.core.logprobs import TokenStatistics, token_statistics
from lightning_rlstab.module.policy import forward_logits
from lightning_rlstab.rollout.records import Rollout

__all__ = ["PolicyStatistics", "attention_mask_of", "has_dropout", "policy_logprobs", "policy_statistics"]


class PolicyStatistics(NamedTuple):
    """What one forward says about every completion token; (batch, time) float32 each.

    Attributes:
        logprobs: Log-probability of the token, nats, with gradient.
        entropy: Entropy of the distribution it was drawn from, nats; with gradient only when asked for.
        sum_squared_probs: Sum over the vocabulary of p squared.
        hidden_norms: Norm of the hidden state that enters the output head, or None when not asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    sum_squared_probs: Tensor
    hidden_norms: Tensor | None


def attention_mask_of(rollout: Rollout) -> Tensor:
    """(batch, time) bool: generated tokens, whether or not they count in the loss."""
    time = torch.arange(rollout.completion_ids.shape[1], device=rollout.completion_ids.device)
    return time < rollout.completion_lengths.unsqueeze(1)


def policy_statistics(
    policy: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_attention: Tensor,
    *,
    temperature: float,
    has_entropy_gradient: bool = False,
    has_hidden_norms: bool = False,
) -> PolicyStatistics:
    """Run the policy over prompts and completions; where its output head is a plain projection, without whole logits.

    Args:
        policy: A causal language model.
        prompt_ids: (batch, prompt) left-padded.
        prompt_mask: (batch, prompt) bool.
        completion_ids: (batch, time) right-padded.
        completion_attention: (batch, time) bool, True on generated tokens.
        temperature: The logits are divided by it.
        has_entropy_gradient: Whether the entropy carries gradient.
        has_hidden_norms: Whether the norms of the last hidden states are wanted.

    Returns:
        The statistics; values on padding are meaningless.
    """
    batch = (prompt_ids, prompt_mask, completion_ids, completion_attention)
    if _has_plain_head(policy, batch):
        with _fused_head(policy, completion_ids, temperature=temperature, has_entropy_gradient=has_entropy_gradient):
            output, norms = _forward(policy, batch, has_hidden_norms=has_hidden_norms)
        logprobs, entropy, sum_squared_probs = output.unbind(-1)
    else:
        output, norms = _forward(policy, batch, has_hidden_norms=has_hidden_norms)
        logprobs, entropy, sum_squared_probs = token_statistics(
            output, completion_ids, temperature=temperature, has_entropy_gradient=has_entropy_gradient
        )
    return PolicyStatistics(logprobs, entropy, sum_squared_probs, norms)


def _forward(
    policy: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor], *, has_hidden_norms: bool
) -> tuple[Tensor, Tensor | None]:
    if has_hidden_norms:
        return forward_logits(policy, *batch, with_hidden_norm=True)
    return forward_logits(policy, *batch), None


@contextmanager
def _fused_head(policy: Any, tokens: Tensor, **options: Any) -> Iterator[None]:
    """Let the output head return token statistics, (batch, time + 1, 3), in the place of logits.

    The head is still called by the model's own forward, so sharding, adapters and hooks see what they always see.
    """
    head = policy.get_output_embeddings()
    time = tokens.shape[1]

    def statistics(hidden: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        columns: TokenStatistics = head_statistics(hidden[:, -time - 1 : -1], weight, bias, tokens, **options)
        # The position after the last token predicts nothing; it is kept so that the width is that of logits.
        return functional.pad(torch.stack(columns, dim=-1), (0, 0, 0, 1))

    head.forward = statistics
    try:
        yield
    finally:
        del head.forward


# Fields with which some families change the logits after the projection, and the values that mean "not at all".
_AFTER_THE_HEAD = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)
_plain_heads: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _has_plain_head(policy: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> bool:
    """Whether the logits are nothing but a linear projection of the last hidden states; tried out once per policy."""
    if policy not in _plain_heads:
        _plain_heads[policy] = _is_head_linear(policy) and _agrees_with_logits(policy, batch)
    return _plain_heads[policy]


def _is_head_linear(policy: Any) -> bool:
    head = getattr(policy, "get_output_embeddings", lambda: None)()
    config: Any = getattr(policy, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_changed_after = any(getattr(text, name, None) not in (None, 1, 1.0) for name in _AFTER_THE_HEAD)
    return type(head) is nn.Linear and not is_changed_after


@torch.no_grad()
def _agrees_with_logits(policy: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> bool:
    row = tuple(part[:1] for part in batch)
    tokens, is_token = row[2], row[3].bool()
    # Dropout would make two forwards differ.
    modes = {module: module.training for module in policy.modules()}
    for module in modes:
        module.training = False
    try:
        expected = token_statistics(forward_logits(policy, *row), tokens).logprobs
        with _fused_head(policy, tokens, temperature=1.0):
            fused = forward_logits(policy, *row)[..., 0]
    finally:
        for module, is_training in modes.items():
            module.training = is_training
    gap = torch.where(is_token, (fused - expected).abs(), 0.0).max()
    return bool(gap < 1e-2)


@torch.no_grad()
def policy_logprobs(policy: nn.Module, rollout: Rollout, *, temperature: float, rows_per_forward: int) -> Tensor:
    """Log-probabilities of a whole rollout without gradient, a few rows at a time.

    Args:
        policy: A causal language model.
        rollout: Any number of completions.
        temperature: The logits are divided by it.
        rows_per_forward: Rows that go through the model at once; bounds the memory.

    Returns:
        (batch, time) float32 nats, 0 on padding.
    """
    parts = []
    attention = attention_mask_of(rollout)
    for start in range(0, len(rollout), rows_per_forward):
        rows = slice(start, start + rows_per_forward)
        statistics = policy_statistics(
            policy,
            rollout.prompt_ids[rows],
            rollout.prompt_mask[rows],
            rollout.completion_ids[rows],
            attention[rows],
            temperature=temperature,
        )
        parts.append(statistics.logprobs)
    return torch.where(attention, torch.cat(parts), 0.0)


def has_dropout(policy: nn.Module) -> bool:
    """Whether a training forward draws random numbers, so that running it again needs the generators' states.

    Args:
        policy: Any model; attention kernels take their dropout as a plain float on the block.
    """
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0) or (getattr(module, "attention_dropout", None) or 0) > 0
        for module in policy.modules()
    )
