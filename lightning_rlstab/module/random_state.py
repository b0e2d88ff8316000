"""Generator states as plain types, so that they travel through a checkpoint loaded with ``weights_only=True``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_rlstab.control.generators import generator_states, restore_generators

__all__ = ["device_rng_state", "random_state", "restore_random_state", "sampling_seed"]


def device_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Generator states that a forward on ``device`` may draw from: the CPU's and the device's own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def random_state(device: torch.device) -> dict[str, Any]:
    """States of torch, Python and NumPy generators, in plain types and tensors.

    Args:
        device: The device whose generator is saved beside the CPU's.

    Returns:
        A record for :func:`restore_random_state`.
    """
    return generator_states(device_rng_state(device))


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put every generator back to a state saved by :func:`random_state`.

    Args:
        state: The saved record.
        device: The device whose generator is restored beside the CPU's.
    """
    torch.set_rng_state(state["torch"]["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state["torch"]:
        torch.cuda.set_rng_state(state["torch"]["cuda"].cpu(), device)
    restore_generators(state)


def sampling_seed(base: int, stream: str, index: int, replica: int) -> int:
    """A seed that depends on nothing but its arguments, so that a resumed run samples what the first would have.

    Args:
        base: The run's seed.
        stream: What is drawn, e.g. ``"train"``.
        index: Number of the draw.
        replica: Data-parallel replica.

    Returns:
        A seed in [0, 2**63).

    Example:
        >>> sampling_seed(0, "train", 3, 1) == sampling_seed(0, "train", 3, 1)
        True
        >>> sampling_seed(0, "train", 3, 1) == sampling_seed(0, "train", 4, 1)
        False
    """
    words = [base, index, replica, *stream.encode()]
    high, low = np.random.SeedSequence(words).generate_state(2)
    return (int(high) << 31) ^ int(low)
