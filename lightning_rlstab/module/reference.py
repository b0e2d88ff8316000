"""The reference model: what the KL term measures the policy against."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lightning_rlstab.core.checks import refusal

__all__ = ["reference_context", "reference_of", "sync_reference"]


def reference_of(policy: nn.Module, beta: float) -> nn.Module | None:
    """The frozen reference of a policy, or None where no model of its own is needed.

    To be called before the policy is sharded or trained. Three cases: no KL term, no reference. A policy without
    adapter: a copy in which tied weights stay tied. A policy under an adapter: none when the adapter changes nothing
    yet, because ``reference_context`` then switches it off; otherwise a copy that shares the frozen base weights, so
    that the KL at step 0 is 0 whatever the adapter was trained on before.

    Args:
        policy: The policy at the start of training.
        beta: KL coefficient, at least 0.

    Returns:
        A module in eval mode without trainable parameters, or None.
    """
    if beta == 0 or (_is_adapted(policy) and _is_adapter_neutral(policy)):
        return None
    # Entries of the memo are taken instead of copied: the frozen base of an adapter is shared.
    shared: dict[int, Any] = {}
    if _is_adapted(policy):
        shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
    reference = copy.deepcopy(policy, shared)
    return reference.requires_grad_(False).eval()


@contextmanager
def reference_context(policy: nn.Module, reference: nn.Module | None) -> Iterator[nn.Module]:
    """The module to run for reference log-probabilities, without gradient.

    Args:
        policy: The policy.
        reference: What ``reference_of`` returned.

    Yields:
        The reference, or the policy in eval mode with its adapter switched off; every submodule's mode is put back.

    Raises:
        ValueError: If there is no reference and no adapter to switch off.
    """
    if reference is not None:
        with torch.no_grad():
            yield reference
        return
    if not _is_adapted(policy):
        raise refusal("beta", "be above 0 for a reference model to exist", 0.0)
    modes = {module: module.training for module in policy.modules()}
    policy.eval()
    try:
        with torch.no_grad(), cast(Any, policy).disable_adapter():
            yield policy
    finally:
        for module, is_training in modes.items():
            module.training = is_training


@torch.no_grad()
def sync_reference(policy: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Move the reference towards the policy: reference = (1 - alpha) * reference + alpha * policy.

    Works shard by shard where both are sharded alike. Weights that the two share are left alone.

    Args:
        policy: The policy.
        reference: Its reference, with the same parameters.
        alpha: TRL's ``ref_model_mixup_alpha``, in [0, 1].
    """
    pairs = zip(reference.parameters(), policy.parameters(), strict=True)
    apart = [(own, new) for own, new in pairs if own is not new]
    for own, new in apart:
        own.mul_(1.0 - alpha).add_(new.to(own.dtype), alpha=alpha)


def _is_adapted(policy: nn.Module) -> bool:
    return hasattr(policy, "peft_config") and hasattr(policy, "disable_adapter")


def _is_adapter_neutral(policy: nn.Module) -> bool:
    """Whether the adapter is known to change nothing: plain LoRA whose second factors are all zero."""
    trainable = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    second = [weight for name, weight in trainable.items() if "lora_B." in name or "lora_embedding_B." in name]
    first = [name for name in trainable if "lora_A." in name or "lora_embedding_A." in name]
    # Anything else that trains (DoRA magnitudes, saved embeddings, IA3 vectors) is not undone by switching off exactly.
    is_plain_lora = len(second) > 0 and len(second) + len(first) == len(trainable)
    return is_plain_lora and not any(bool(weight.any()) for weight in second)
