"""What a float16 gradient scaler needs to hear about steps it was not asked to take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gradient_scaler", "inverse_scale", "withhold_scaler_step"]


def gradient_scaler(precision_plugin: Any) -> torch.amp.GradScaler | None:
    """The precision plugin's scaler, or None for a precision without one."""
    scaler: torch.amp.GradScaler | None = getattr(precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def inverse_scale(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """1 / scale as a scalar on the device, without waiting for it; None without a scaler."""
    return None if scaler is None else scaler.scale(torch.ones((), device=device)).reciprocal()


def withhold_scaler_step(scaler: torch.amp.GradScaler | None, *, is_overflow: bool) -> None:
    """Close the scaler's step after a skip, or after a micro-batch with an overflow was dropped.

    A finite gradient that a guard refused says nothing about the scale, so scale and growth counter stay. An overflow
    is the scaler's own business: it backs off, or the same overflow would come back for ever.

    Args:
        scaler: The scaler, or None.
        is_overflow: Whether the refused gradient was not finite.
    """
    if scaler is None:
        return
    scale = scaler.get_scale()
    # With a given scale `update` forgets the unscaled optimizers and leaves the growth counter as it is.
    scaler.update(scale * scaler.get_backoff_factor() if is_overflow else scale)
