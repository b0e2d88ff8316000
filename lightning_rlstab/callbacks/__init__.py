"""The guards as Lightning callbacks: each holds its state, asks the floor below, votes, logs and checkpoints.

Beside them stand the records that set their mechanisms: ``QUATRO(replay=ReplayConfig(ratio=0.5))``.
"""

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gepo import GEPO, LogprobBoundsConfig, RobustAdvantagesConfig, StepGuardConfig
from lightning_rlstab.callbacks.gradloc import GradLoc
from lightning_rlstab.callbacks.layer_clip import LayerClip
from lightning_rlstab.callbacks.opefo import OPEFO, ErrorFeedbackConfig, SecondMomentConfig, SnapshotConfig
from lightning_rlstab.callbacks.quatro import (
    QUATRO,
    EntropyFloorConfig,
    KLAnchorConfig,
    ReplayConfig,
    RolloutFilterConfig,
)
from lightning_rlstab.callbacks.seq_clip import SeqClip
from lightning_rlstab.callbacks.stability_monitor import StabilityMonitor
from lightning_rlstab.callbacks.token_clip import TokenClip

__all__ = [
    "GEPO",
    "OPEFO",
    "QUATRO",
    "EntropyFloorConfig",
    "ErrorFeedbackConfig",
    "FireDrill",
    "GradLoc",
    "KLAnchorConfig",
    "LayerClip",
    "LogprobBoundsConfig",
    "ReplayConfig",
    "RobustAdvantagesConfig",
    "RolloutFilterConfig",
    "SecondMomentConfig",
    "SeqClip",
    "SnapshotConfig",
    "StabilityMonitor",
    "StepGuardConfig",
    "TokenClip",
]
