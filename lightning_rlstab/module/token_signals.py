"""What a localizer wants to know of every token, kept from the forward that was run anyway."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.core.policy_loss import LossInputs, PolicyLoss
from lightning_rlstab.module.forward import PolicyStatistics

__all__ = ["head_signals", "token_signals", "without_gradient"]


def head_signals(statistics: PolicyStatistics) -> dict[str, Tensor]:
    """What hooks of the loss may know of the forward beyond ``LossInputs``: the head norm's ingredients, detached.

    Args:
        statistics: The forward's statistics.

    Returns:
        (batch, time) ``sum_squared_probs`` and, where a callback asked for token signals, ``hidden_norms``.
    """
    signals = {"sum_squared_probs": statistics.sum_squared_probs.detach()}
    return signals if statistics.hidden_norms is None else {**signals, "hidden_norms": statistics.hidden_norms}


def without_gradient(inputs: LossInputs) -> LossInputs:
    """The same inputs without the graph of the forward, so that keeping them keeps no activations.

    Args:
        inputs: As the hooks left them.
    """
    return dataclasses.replace(inputs, logprobs=inputs.logprobs.detach(), entropy=inputs.entropy.detach())


def token_signals(logprobs: Tensor, statistics: PolicyStatistics, result: PolicyLoss) -> dict[str, Any]:
    """Detached (batch, time) tensors for the closed-form head norm of each token.

    Args:
        logprobs: The forward's log-probs, before any hook; the slope is taken with respect to them.
        statistics: The forward's statistics, with hidden norms.
        result: The loss; its graph is kept for the backward pass that follows.

    Returns:
        ``logprobs``, ``sum_squared_probs``, ``hidden_norms``, and ``token_loss_slope``: the derivative of the summed
        loss with respect to the token's log-probability.
    """
    (slope,) = torch.autograd.grad(result.token_loss.sum(), logprobs, retain_graph=True)
    return {
        "logprobs": logprobs.detach(),
        "sum_squared_probs": statistics.sum_squared_probs.detach(),
        "hidden_norms": statistics.hidden_norms,
        "token_loss_slope": slope,
    }
