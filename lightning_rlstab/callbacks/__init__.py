"""The guards as Lightning callbacks: each holds its state, asks the floor below, votes, logs and checkpoints."""

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
