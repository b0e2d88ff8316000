"""How callbacks that intervene tell each other: structural types only, beside ``protocols``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lightning_rlstab.control.protocols import GradientNorms, Vote

__all__ = [
    "BackgroundSaver",
    "DroppedGradientHook",
    "GradientGuard",
    "GradientRepairer",
    "Rewindable",
    "RolloutOwner",
    "VoteBook",
]


@runtime_checkable
class GradientGuard(Protocol):
    """A callback that judges the gradient; whoever adds to the gradient must come after it in the list of callbacks."""

    guards_gradient: bool


@runtime_checkable
class GradientRepairer(Protocol):
    """A callback that can take what spoilt a step out of its gradient, and knows when it cannot."""

    has_repaired_step: bool
    """Whether ``.grad`` of the current step was rebuilt, so that a loss of NaN no longer speaks against it."""

    is_step_spoilt: bool
    """Whether the current step's gradient is bad as a whole, so that nobody should keep it for later."""


@runtime_checkable
class DroppedGradientHook(Protocol):
    """Told of every gradient that a guard leaves out, at the moment when ``.grad`` holds just that gradient."""

    def on_gradient_dropped(self, trainer: Any, pl_module: Any, norms: GradientNorms) -> None:
        """Look at ``.grad`` now; it will be gone. Called on all ranks."""
        ...


@runtime_checkable
class VoteBook(Protocol):
    """A step gate that shows the votes cast so far in this optimizer step."""

    @property
    def pending_votes(self) -> Sequence[Vote]:
        """This rank's votes, in order."""
        ...


@runtime_checkable
class BackgroundSaver(Protocol):
    """A strategy that writes sharded checkpoints in the background."""

    def saved_in_background(self, save: Callable[[], None]) -> Callable[[], None] | None:
        """Run a save with shards copied instead of written; called on all ranks.

        Returns:
            To be called on every rank: waits for the writing. None where the save wrote no shards.
        """
        ...


@runtime_checkable
class Rewindable(Protocol):
    """A callback whose memory goes back together with the weights when a run is rolled back."""

    def rewind(self, trainer: Any, pl_module: Any, state: Mapping[str, Any]) -> None:
        """Take over the memory that ``state_dict`` gave when the snapshot was taken."""
        ...


@runtime_checkable
class RolloutOwner(Protocol):
    """A module that holds a rollout over several training steps."""

    def discard_rollout(self) -> None:
        """Let what is left of the current rollout go; the next training step samples a new one."""
        ...
