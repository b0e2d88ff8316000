"""The default optimizer and schedule, and gradient clipping that reports the norm it clipped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_rlstab.module.settings import GRPOSettings

__all__ = ["clipped_gradient_norm", "default_optimizer", "default_schedule"]


def default_optimizer(parameters: Iterable[nn.Parameter], settings: GRPOSettings) -> AdamW:
    """AdamW with TRL's defaults: learning rate 1e-6, no weight decay.

    Args:
        parameters: The trainable parameters.
        settings: Where the learning rate, decay, betas and epsilon come from.
    """
    return AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )


def default_schedule(optimizer: Optimizer, settings: GRPOSettings, total_steps: float) -> dict[str, Any]:
    """The schedule named by ``lr_scheduler_type``, stepped once per optimizer step.

    Args:
        optimizer: The optimizer to schedule.
        settings: Name and warm-up.
        total_steps: Optimizer steps of the whole run; infinite for an endless run, which takes a constant rate.

    Returns:
        A Lightning scheduler config.
    """
    from transformers import get_scheduler

    name = settings.lr_scheduler_type if math.isfinite(total_steps) else "constant_with_warmup"
    schedule = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=int(total_steps) if math.isfinite(total_steps) else None,
    )
    return {"scheduler": schedule, "interval": "step", "frequency": 1}


def clipped_gradient_norm(optimizer: Optimizer, max_norm: float | None) -> Tensor | None:
    """Clip all gradients of ``optimizer`` to a global norm, in place.

    Args:
        optimizer: Whose parameters' gradients are clipped; plain (unsharded) tensors.
        max_norm: Bound on the global L2 norm; None measures without clipping.

    Returns:
        The norm before clipping, a scalar, or None when no parameter has a gradient.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return None
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.to(torch.float32)
