"""The guards as Lightning callbacks: each holds its state, asks its floor below, votes, logs and checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rlstab.callbacks.fire_drill import FireDrill
    from lightning_rlstab.callbacks.gepo import GEPO
    from lightning_rlstab.callbacks.gradloc import GradLoc
    from lightning_rlstab.callbacks.layer_clip import LayerClip
    from lightning_rlstab.callbacks.opefo import OPEFO
    from lightning_rlstab.callbacks.quatro import QUATRO
    from lightning_rlstab.callbacks.seq_clip import SeqClip
    from lightning_rlstab.callbacks.stability_monitor import StabilityMonitor
    from lightning_rlstab.callbacks.token_clip import TokenClip

__all__ = [
    "GEPO",
    "OPEFO",
    "QUATRO",
    "FireDrill",
    "GradLoc",
    "LayerClip",
    "SeqClip",
    "StabilityMonitor",
    "TokenClip",
]

_HOMES = {
    "FireDrill": "fire_drill",
    "GEPO": "gepo",
    "GradLoc": "gradloc",
    "LayerClip": "layer_clip",
    "OPEFO": "opefo",
    "QUATRO": "quatro",
    "SeqClip": "seq_clip",
    "StabilityMonitor": "stability_monitor",
    "TokenClip": "token_clip",
}


def __getattr__(name: str) -> Any:
    """Load a callback on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
