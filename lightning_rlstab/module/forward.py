"""The policy's forward on prompts and completions, reduced to what the loss and the localizer need of each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rlstab.core.logprobs import token_statistics
from lightning_rlstab.module.policy import forward_logits
from lightning_rlstab.rollout.records import Rollout

__all__ = ["PolicyStatistics", "attention_mask_of", "policy_logprobs", "policy_statistics"]


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
    policy: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_attention: Tensor,
    *,
    temperature: float,
    has_entropy_gradient: bool = False,
    has_hidden_norms: bool = False,
) -> PolicyStatistics:
    """Run the policy over prompts and completions.

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
    arguments = (policy, prompt_ids, prompt_mask, completion_ids, completion_attention)
    hidden_norms: Tensor | None = None
    if has_hidden_norms:
        logits, hidden_norms = forward_logits(*arguments, with_hidden_norm=True)
    else:
        logits = forward_logits(*arguments)
    statistics = token_statistics(
        logits, completion_ids, temperature=temperature, has_entropy_gradient=has_entropy_gradient
    )
    return PolicyStatistics(*statistics, hidden_norms)


@torch.no_grad()
def policy_logprobs(policy: Any, rollout: Rollout, *, temperature: float, rows_per_forward: int) -> Tensor:
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
