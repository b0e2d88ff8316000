"""How the rooms of floor 2 meet: structural types only, so that none of them imports another.

A callback that wants to change the loop implements one of the hook protocols; ``GRPOModule`` calls them for every
callback of the trainer, in the trainer's order. A callback that needs the gate or a probe asks the strategy by
``isinstance(trainer.strategy, StepGate)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_rlstab.core.policy_loss import LossInputs, LossSettings

__all__ = [
    "GenerationHost",
    "GradientNorms",
    "GradientProbe",
    "MicroBatchGuard",
    "PolicyLossHook",
    "PolicyModule",
    "RolloutReadyHook",
    "RolloutScoredHook",
    "StepGate",
    "TokenSource",
    "Verdict",
    "Vote",
    "WeightHost",
    "WeightLoader",
    "WindowEntry",
]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One guard's wish for the current optimizer step.

    Attributes:
        source: Name of the guard, e.g. ``"gepo"``.
        action: ``"apply"`` (with ``scale``), ``"skip"`` the whole step, or ``"stop"`` the run.
        scale: Factor on the gradient; votes multiply. Only read with ``"apply"``.
        reason: Words for the log and the event line.
    """

    source: str
    action: Literal["apply", "skip", "stop"]
    scale: float = 1.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks agreed to do with the current optimizer step.

    Attributes:
        action: The strongest of all votes on all ranks: stop over skip over apply.
        scale: Product of the votes' scales, the same on all ranks.
        sources: Names of the guards whose votes carried the action.
        reasons: Their words.
    """

    action: Literal["apply", "skip", "stop"]
    scale: float = 1.0
    sources: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GradientNorms:
    """Global gradient norms, float32, unscaled, before clipping, the same on all ranks.

    Attributes:
        total: L2 norm over all trainable parameters; inf or NaN when any entry is.
        is_finite: Whether every gradient entry on every rank is finite.
        per_parameter: Norm of each parameter by qualified name.
        per_layer: Norm of each layer by its name (``model.layers.3``); outside of blocks, of each module.
    """

    total: float
    is_finite: bool
    per_parameter: Mapping[str, float] = field(default_factory=dict)
    per_layer: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class WindowEntry:
    """One micro-batch of the current optimizer step, kept until the step ends so that its loss can be run again.

    Attributes:
        micro_batch: Index in the window, from 0.
        rollout: The micro-batch's rows (a ``rollout.records.Rollout``).
        token_weights: (batch, time) factors that hooks put on the token losses, or None for ones.
        constants: Whatever else the loss needs that must not be recomputed (e.g. the entropy threshold).
        rng_state: CPU and device generator states just before the forward (dropout is replayed from them).
        is_dropped: True when a guard dropped this micro-batch's contribution.
    """

    micro_batch: int
    rollout: Any
    token_weights: Tensor | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    rng_state: dict[str, Tensor] = field(default_factory=dict)
    is_dropped: bool = False


@runtime_checkable
class StepGate(Protocol):
    """The step gate of the ``rlstab`` strategies."""

    applied_steps: int
    skipped_steps: int

    def vote(self, vote: Vote) -> None:
        """Record a vote; only inside ``on_before_optimizer_step``. All votes of all ranks are merged once per step."""
        ...

    def gradient_norms(self) -> GradientNorms:
        """Norms of the complete, reduced gradient of this step (cached: one pass and one reduction per step)."""
        ...

    @property
    def last_verdict(self) -> Verdict | None:
        """The verdict of the optimizer step that ended last, for ``on_train_batch_end``."""
        ...

    @property
    def last_gradient_norm(self) -> float | None:
        """Total norm of the optimizer step that ended last, also of a skipped one; None where nobody measured it."""
        ...


@runtime_checkable
class GradientProbe(Protocol):
    """Services for localizers; every method is collective where the strategy is distributed."""

    def stashed_gradients(self) -> AbstractContextManager[None]:
        """Set every ``.grad`` aside and put it back on exit, bit for bit."""
        ...

    def perturbed(self, scale: float, directions: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        """Add ``scale * direction`` (default: ``.grad``) to every trainable parameter; restored bit for bit."""
        ...

    def backward_of(self, loss: Tensor) -> None:
        """Backward through the strategy's own path (scaler, sharding), accumulating into ``.grad``."""
        ...

    def replayed_rng(self, rng_state: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Run with the given generator states; the current ones are put back on exit."""
        ...

    def all_gathered(self, value: Tensor) -> Sequence[Tensor]:
        """``value`` of every rank in rank order; shapes must be equal."""
        ...

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Qualified name to parameter (sharded where the strategy shards), in a fixed order."""
        ...


@runtime_checkable
class GenerationHost(Protocol):
    """A strategy whose weights must be brought together before the policy can generate."""

    def generation_ready(self, policy: nn.Module) -> AbstractContextManager[None]:
        """Make ``policy.generate`` free of collectives inside the block; sharded again on exit."""
        ...


@runtime_checkable
class WeightHost(Protocol):
    """A strategy whose weights must be brought together before they can be exported."""

    def full_state_dict(self, policy: nn.Module) -> Mapping[str, Tensor]:
        """Whole weights under the names of ``policy.state_dict()``, on the CPU of rank 0; empty on other ranks."""
        ...


@runtime_checkable
class WeightLoader(Protocol):
    """A strategy that builds a sharded model whose weights only one rank has read."""

    def loaded(self, load: Callable[[], nn.Module], empty: Callable[[], nn.Module]) -> nn.Module:
        """The sharded model: ``load`` gives its weights on rank 0, ``empty`` its structure on the meta device."""
        ...


@runtime_checkable
class PolicyModule(Protocol):
    """What callbacks may ask of ``GRPOModule``."""

    loss_settings: LossSettings
    window: list[WindowEntry]

    def token_losses(self, entry: WindowEntry, *, token_mask: Tensor | None = None) -> Tensor:
        """Run one micro-batch's forward again; (batch, time) float32 token losses with gradient, summing to its loss.

        ``token_mask`` (batch, time) bool keeps only these tokens; the normaliser stays that of the whole window.
        """
        ...


@runtime_checkable
class TokenSource(PolicyModule, Protocol):
    """A policy module that also runs its plain forward again; what localizers ask for."""

    def token_statistics(self, rollout: Any) -> Any:
        """Log-probs, entropies and what else the loss's forward knows of each completion token of any rows.

        Returns:
            An object with ``logprobs`` and ``entropy``, (batch, time), with gradient.
        """
        ...


@runtime_checkable
class RolloutScoredHook(Protocol):
    """Called once per rollout, after rewards and before advantages."""

    def on_rollout_scored(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        """Return the rollout to go on with (same shapes on every rank)."""
        ...


@runtime_checkable
class RolloutReadyHook(Protocol):
    """Called once per rollout, after advantages and old/reference log-probs, before slicing into micro-batches."""

    def on_rollout_ready(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        """Return the rollout to go on with (same shapes on every rank)."""
        ...


@runtime_checkable
class PolicyLossHook(Protocol):
    """Called for every micro-batch between the forward and the loss; must be differentiable and free of collectives."""

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: LossInputs) -> LossInputs:
        """Return the inputs to go on with, e.g. with ``token_weights`` set."""
        ...


@runtime_checkable
class MicroBatchGuard(Protocol):
    """Asks the strategy to stage each micro-batch's own gradient before it is added to the window's sum."""

    def is_staging_needed(self, trainer: Any) -> bool:
        """Whether the next micro-batch must be staged (constant over an optimizer step, same on all ranks)."""
        ...

    def on_micro_batch_gradient(self, trainer: Any, pl_module: Any, norms: GradientNorms) -> bool:
        """Look at this micro-batch's own reduced gradient; return False to drop its contribution."""
        ...
