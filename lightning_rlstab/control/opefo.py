"""OPEFO's memories: looks at the second moments, what is still to be fed back, recovery from a rollback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_rlstab.core.checks import choice, flag, integer, number, refusal

__all__ = [
    "ErrorFeedbackConfig",
    "ErrorFeedbackState",
    "PendingResidual",
    "RecoveryState",
    "SecondMomentConfig",
    "SecondMomentState",
    "SnapshotConfig",
    "after_rollback",
    "due_feedback",
    "learning_rate_factor",
    "step_error_feedback",
    "step_recovery",
    "step_second_moment",
    "with_residual",
]


@dataclass(frozen=True, kw_only=True)
class SecondMomentConfig:
    """When Adam's second moments are lifted, and to what.

    Args:
        every_steps: Applied steps between two looks; sensible 50 to 200.
        tiny_fraction: Share of tiny values (sqrt(v) at or under eps) in a parameter group above which it is lifted.
        percentile: Percentile of the group's positive values that is the floor; sensible 5 to 20.
    """

    every_steps: int = 100
    tiny_fraction: float = 0.05
    percentile: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        integer("second_moment.every_steps", self.every_steps, at_least=1, advice="Use 50 to 200")
        number("second_moment.tiny_fraction", self.tiny_fraction, at_least=0, below=1)
        number("second_moment.percentile", self.percentile, above=0, below=100, advice="Use 5 to 20")


@dataclass(frozen=True, kw_only=True)
class SecondMomentState:
    """What the floor remembers.

    Attributes:
        steps: Applied steps since the last look.
        looks: Looks so far.
        lifted: Coordinates lifted so far.
        tiny_frac: Largest share of tiny values over the groups at the last look.
    """

    steps: int = 0
    looks: int = 0
    lifted: int = 0
    tiny_frac: float = 0.0


def step_second_moment(config: SecondMomentConfig, state: SecondMomentState) -> tuple[SecondMomentState, bool]:
    """Count one applied step; the second value says whether to look now."""
    steps = state.steps + 1
    if steps < config.every_steps:
        return replace(state, steps=steps), False
    return replace(state, steps=0, looks=state.looks + 1), True


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackConfig:
    """How a skipped gradient comes back.

    Args:
        weights: Shares of the rescaled residual fed back over the next applied steps; they must add up to 1.
        max_pending: Residuals kept at once; a further skip pushes the oldest out.
        residual_dtype: ``"float32"`` or ``"bfloat16"``.
        offload: Whether residuals lie on the CPU.
    """

    weights: tuple[float, ...] = (0.3, 0.3, 0.2, 0.2)
    max_pending: int = 2
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    offload: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not isinstance(self.weights, list | tuple) or not self.weights:
            raise refusal("error_feedback.weights", "be a list of numbers", self.weights, "Use [0.3, 0.3, 0.2, 0.2]")
        for index, weight in enumerate(self.weights):
            number(f"error_feedback.weights[{index}]", weight, above=0, at_most=1)
        if abs(sum(self.weights) - 1.0) > 1e-6:
            raise refusal("error_feedback.weights", "add up to 1", list(self.weights), "Use [0.3, 0.3, 0.2, 0.2]")
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        integer("error_feedback.max_pending", self.max_pending, at_least=1)
        choice("error_feedback.residual_dtype", self.residual_dtype, ("float32", "bfloat16"))
        flag("error_feedback.offload", self.offload)


@dataclass(frozen=True, kw_only=True)
class PendingResidual:
    """One skipped gradient on its way back.

    Attributes:
        key: Number under which its tensors are kept.
        norm: Global norm of what is kept.
        fed: Applied steps it has been fed into.
    """

    key: int
    norm: float
    fed: int = 0


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackState:
    """What error feedback remembers; the residuals themselves are tensors and kept beside it.

    Attributes:
        pending: Residuals on their way back, oldest first.
        next_key: Key of the next one.
        stored: Residuals stored so far.
        finished: Residuals fed back whole.
        discarded: Residuals let go: non-finite, zero, or pushed out.
    """

    pending: tuple[PendingResidual, ...] = ()
    next_key: int = 0
    stored: int = 0
    finished: int = 0
    discarded: int = 0


def with_residual(
    config: ErrorFeedbackConfig, state: ErrorFeedbackState, *, norm: float, is_finite: bool
) -> tuple[ErrorFeedbackState, int | None]:
    """Take up a skipped gradient.

    Args:
        config: The settings.
        state: The memory before.
        norm: Its global norm.
        is_finite: Whether every entry on every rank is finite; what is not finite never enters.

    Returns:
        The memory after and the key to keep the tensors under, or None to let them go.
    """
    if not is_finite or not norm > 0:
        return replace(state, discarded=state.discarded + 1), None
    pending = (*state.pending, PendingResidual(key=state.next_key, norm=norm))
    pushed_out = max(len(pending) - config.max_pending, 0)
    after = replace(
        state,
        pending=pending[pushed_out:],
        next_key=state.next_key + 1,
        stored=state.stored + 1,
        discarded=state.discarded + pushed_out,
    )
    return after, state.next_key


def due_feedback(config: ErrorFeedbackConfig, state: ErrorFeedbackState) -> tuple[tuple[PendingResidual, float], ...]:
    """What the coming step is fed with: pending residuals and the share of each."""
    return tuple((item, config.weights[item.fed]) for item in state.pending if item.fed < len(config.weights))


def step_error_feedback(config: ErrorFeedbackConfig, state: ErrorFeedbackState) -> ErrorFeedbackState:
    """The memory after one applied step: every pending residual has been fed once more, whole ones leave."""
    moved = tuple(replace(item, fed=item.fed + 1) for item in state.pending)
    left = tuple(item for item in moved if item.fed < len(config.weights))
    return replace(state, pending=left, finished=state.finished + len(moved) - len(left))


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """When the state is saved, and what happens when training has to go back to it.

    Args:
        every_steps: Applied steps between two snapshots; sensible 200 to 1000.
        keep: Newest snapshots kept on disk.
        folder: Where they go; None for ``snapshots`` in the run folder.
        recovery_factor: Factor on whatever the schedule says, after a rollback.
        recovery_steps: Applied steps for which it holds; then it is released.
        max_rollbacks: Rollbacks over the whole run after which it stops with an explanation.
        max_nonfinite_steps: Steps in a row with a non-finite loss or gradient that are merely skipped; the next one
            rolls back.
        at_start: Whether the state before the first step is saved as well, so that there is always a way back.
        has_length_check: Whether a step that moved the weights further than Adam can from a healthy state is undone.
    """

    every_steps: int = 500
    keep: int = 2
    folder: str | None = None
    recovery_factor: float = 0.3
    recovery_steps: int = 100
    max_rollbacks: int = 5
    max_nonfinite_steps: int = 8
    at_start: bool = True
    has_length_check: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        integer("snapshots.every_steps", self.every_steps, at_least=1, advice="Use 200 to 1000")
        integer("snapshots.keep", self.keep, at_least=1)
        if self.folder is not None and (not isinstance(self.folder, str) or not self.folder):
            raise refusal("snapshots.folder", "be a path or null", self.folder)
        number("snapshots.recovery_factor", self.recovery_factor, above=0, at_most=1, advice="Use 0.3")
        integer("snapshots.recovery_steps", self.recovery_steps, at_least=1)
        integer("snapshots.max_rollbacks", self.max_rollbacks, at_least=1)
        integer("snapshots.max_nonfinite_steps", self.max_nonfinite_steps, at_least=1)
        flag("snapshots.at_start", self.at_start)
        flag("snapshots.has_length_check", self.has_length_check)


@dataclass(frozen=True, kw_only=True)
class RecoveryState:
    """What snapshots and rollbacks remember; never rewound by a rollback.

    Attributes:
        steps: Applied steps since the last snapshot.
        nonfinite_steps: Steps in a row whose loss or gradient was not finite.
        recovery_left: Applied steps for which the learning rate is still reduced.
        rollbacks: Rollbacks so far.
        snapshots: Snapshots taken so far.
        refused: Snapshots not taken because the state was not healthy.
        quarantine: Fingerprints of prompts that are set aside.
    """

    steps: int = 0
    nonfinite_steps: int = 0
    recovery_left: int = 0
    rollbacks: int = 0
    snapshots: int = 0
    refused: int = 0
    quarantine: tuple[str, ...] = ()


def learning_rate_factor(config: SnapshotConfig, state: RecoveryState) -> float:
    """Factor on the schedule's learning rate in the coming step; 1 outside of a recovery."""
    return config.recovery_factor if state.recovery_left > 0 else 1.0


def step_recovery(
    config: SnapshotConfig, state: RecoveryState, *, was_applied: bool, is_finite: bool
) -> tuple[RecoveryState, Literal["go on", "snapshot", "roll back"]]:
    """The memory after one optimizer step, and what is due.

    Args:
        config: The settings.
        state: The memory before.
        was_applied: Whether the step updated the weights.
        is_finite: Whether loss and gradient were finite on all ranks.

    Returns:
        The memory after; ``"snapshot"`` every ``every_steps`` applied steps, ``"roll back"`` when more than
        ``max_nonfinite_steps`` in a row were not finite.
    """
    nonfinite = 0 if is_finite else state.nonfinite_steps + 1
    moved = replace(state, nonfinite_steps=nonfinite)
    if nonfinite > config.max_nonfinite_steps:
        return moved, "roll back"
    if not was_applied:
        return moved, "go on"
    steps = state.steps + 1
    moved = replace(moved, steps=steps, recovery_left=max(state.recovery_left - 1, 0))
    return moved, "snapshot" if steps >= config.every_steps else "go on"


def after_rollback(config: SnapshotConfig, state: RecoveryState, set_aside: tuple[str, ...]) -> RecoveryState:
    """The memory after a rollback: the learning rate is reduced, the batch that caused it is set aside.

    Args:
        config: The settings.
        state: The memory before.
        set_aside: Fingerprints of the prompts of the offending batch.
    """
    known = dict.fromkeys((*state.quarantine, *set_aside))
    return replace(
        state,
        steps=0,
        nonfinite_steps=0,
        recovery_left=config.recovery_steps,
        rollbacks=state.rollbacks + 1,
        quarantine=tuple(known),
    )
