"""What sampling must change for a while, and put back: module modes, generation settings, generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["own_generation_config", "sampling_modes", "seeded"]


@contextmanager
def sampling_modes(policy: nn.Module, *, is_eval_mode: bool) -> Iterator[None]:
    """Every module in the mode for sampling inside the block, and in exactly its own again afterwards.

    Args:
        policy: The model.
        is_eval_mode: Whether to turn dropout off; gradient checkpointing is turned off in any case.
    """
    # Flags are set one by one: `eval()` followed by `train()` would wake up modules that were frozen in eval mode.
    modules = list(policy.modules())
    modes = [module.training for module in modules]
    # In train mode, checkpointed layers drop the KV cache and generation becomes quadratic.
    checkpointed = [module for module in modules if vars(module).get("gradient_checkpointing") is True]
    try:
        for module in checkpointed:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if is_eval_mode:
            for module in modules:
                module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]


@contextmanager
def own_generation_config(model: Any, configuration: Any) -> Iterator[None]:
    """The model without generation settings of its own inside the block.

    Args:
        model: The model whose ``generate`` is called.
        configuration: A ``GenerationConfig``, for its type.
    """
    # `generate` fills every field that is None from the model's own settings, e.g. a top-k or a penalty that the
    # model's folder recommends for chatting.
    before = model.generation_config
    model.generation_config = type(configuration)()
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """The device's generator at ``seed`` inside the block, and where it was afterwards.

    Args:
        device: The device that draws.
        seed: Any whole number that its generator takes.
    """
    # Not torch.manual_seed: it would reseed the generators of all devices, also of those not restored here.
    if device.type == "cpu":
        source: Any = torch.default_generator
        before = source.get_state()
        source.manual_seed(seed)
        try:
            yield
        finally:
            source.set_state(before)
        return
    source = torch.get_device_module(device)
    before = source.get_rng_state(device)
    with source.device(device):
        source.manual_seed(seed)
    try:
        yield
    finally:
        source.set_rng_state(before, device)
