"""TRL's own input dictionary to our loss: the door through which parity is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_rlstab.core.policy_loss import LossInputs, LossSettings, policy_loss
from lightning_rlstab.module.forward import policy_statistics

__all__ = ["trl_loss"]


def trl_loss(
    policy: Any,
    inputs: Mapping[str, Any],
    settings: LossSettings,
    *,
    temperature: float,
    has_correction: bool,
    accumulation: int,
    is_training: bool,
) -> Tensor:
    """The loss that ``GRPOTrainer.compute_loss`` gives for the same dictionary.

    Args:
        policy: A causal language model.
        inputs: As described at ``GRPOModule.loss_from_trl_inputs``.
        settings: What the loss is.
        temperature: The logits are divided by it.
        has_correction: Whether a given ``importance_sampling_ratio`` weighs the loss.
        accumulation: Micro-batches in this optimizer step.
        is_training: Whether the accumulation factors apply.

    Returns:
        The loss, 0-d with gradient.
    """
    attention = inputs["completion_mask"].bool()
    tool_mask = inputs.get("tool_mask")
    ratio = inputs.get("importance_sampling_ratio")
    if has_correction and ratio is not None:
        # The ratio is ready-made, so the mode that would form it plays no part.
        settings = dataclasses.replace(
            settings, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_mask"
        )
    else:
        settings = dataclasses.replace(settings, vllm_importance_sampling_correction=False)
    statistics = policy_statistics(
        policy,
        inputs["prompt_ids"],
        inputs["prompt_mask"].bool(),
        inputs["completion_ids"],
        attention,
        temperature=temperature,
        has_entropy_gradient=settings.entropy_coef != 0.0,
    )
    loss_inputs = LossInputs(
        logprobs=statistics.logprobs,
        entropy=statistics.entropy,
        completion_mask=attention if tool_mask is None else attention & tool_mask.bool(),
        advantages=inputs["advantages"],
        old_logprobs=inputs.get("old_per_token_logps"),
        behavior_logprobs=inputs.get("sampling_per_token_logps"),
        reference_logprobs=inputs.get("ref_per_token_logps"),
        correction_ratio=ratio,
        num_items=inputs.get("num_items_in_batch"),
    )
    return policy_loss(loss_inputs, settings, accumulation=accumulation, is_training=is_training).loss
