"""When a gradient is a spike: a threshold given or learned from the run, and what is usual for each layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_rlstab.core.checks import integer, number

__all__ = ["TriggerConfig", "TriggerReading", "TriggerState", "spike_threshold", "trigger_step"]

_LAYER_BETA = 0.9


@dataclass(frozen=True, kw_only=True)
class TriggerConfig:
    """When to look for a culprit. A non-finite gradient always counts as a spike.

    Args:
        tau_token: Threshold of one token's gradient: a step of N loss tokens is a spike above tau_token / sqrt(N), > 0.
            None learns it: ``factor`` times the running median of norm * sqrt(N).
        factor: How many times the running level makes a spike, > 1; only read while the level is learned.
        min_norm: A finite norm at or under this is never a spike while the level is learned, >= 0. The default is
            TRL's clip value: a smaller gradient is applied as it is.
        warmup_steps: Steps before a learned level is trusted, >= 1; until then only non-finite gradients trigger.
        memory_steps: Steps that the running median looks back, >= 1.
        max_unresolved_steps: Spikes in a row without a culprit to remove, after which the level counts as changed for
            good and is learned anew, >= 1.

    Raises:
        ValueError: Naming the field, the rule and the value.
    """

    tau_token: float | None = None
    factor: float = 5.0
    min_norm: float = 1.0
    warmup_steps: int = 10
    memory_steps: int = 64
    max_unresolved_steps: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.tau_token is not None:
            number("trigger", self.tau_token, above=0, advice="Leave it out to learn it from the run")
        number("trigger_factor", self.factor, above=1, advice="Use 4 to 8")
        number("min_norm", self.min_norm, at_least=0)
        integer("warmup_steps", self.warmup_steps, at_least=1)
        integer("memory_steps", self.memory_steps, at_least=1)
        integer("max_unresolved_steps", self.max_unresolved_steps, at_least=1)


@dataclass(frozen=True, kw_only=True)
class TriggerState:
    """What the trigger remembers.

    Attributes:
        levels: norm * sqrt(N) of the latest applied steps, newest last.
        usual_layers: (layer, usual share of the squared gradient norm).
        spikes: Spikes seen.
        unresolved_steps: Spikes in a row for which nothing could be removed.
        releases: Times the level was taken as changed for good.
    """

    levels: tuple[float, ...] = ()
    usual_layers: tuple[tuple[str, float], ...] = ()
    spikes: int = 0
    unresolved_steps: int = 0
    releases: int = 0


@dataclass(frozen=True, kw_only=True)
class TriggerReading:
    """What one optimizer step showed.

    Attributes:
        norm: Norm of the gradient that will be applied; None when the step is not applied.
        window_tokens: Loss tokens of the step over all ranks.
        layer_shares: Share of each layer in the squared norm; empty to leave the usual profile alone.
        is_spike: Whether the step triggered.
        is_unresolved: Whether it was a finite spike and nothing could be removed.
    """

    norm: float | None
    window_tokens: float
    layer_shares: Mapping[str, float]
    is_spike: bool = False
    is_unresolved: bool = False


def spike_threshold(config: TriggerConfig, state: TriggerState, window_tokens: float) -> float | None:
    """Norm above which a step of so many loss tokens is a spike.

    tau_token / sqrt(N), where tau_token is given or ``factor`` times the median of the latest norm * sqrt(N).

    Args:
        config: The settings.
        state: The memory.
        window_tokens: Loss tokens of the step over all ranks, N.

    Returns:
        The threshold, or None while it is not known yet.

    Example:
        >>> spike_threshold(TriggerConfig(tau_token=8.0), TriggerState(), 64)
        1.0
        >>> spike_threshold(TriggerConfig(), TriggerState(levels=(8.0,) * 10), 64)
        5.0
    """
    root = math.sqrt(max(window_tokens, 1.0))
    if config.tau_token is not None:
        return config.tau_token / root
    if len(state.levels) < min(config.warmup_steps, config.memory_steps):
        return None
    return max(config.factor * statistics.median(state.levels) / root, config.min_norm)


def trigger_step(config: TriggerConfig, state: TriggerState, reading: TriggerReading) -> TriggerState:
    """The memory after one optimizer step.

    Only norms that are applied enter the level, so a spike cannot raise the bar for the next one; a norm of exactly 0
    (all groups without spread) says nothing about the level. A level that really changed would trigger for ever: after
    ``max_unresolved_steps`` spikes in a row with nobody to blame the level starts from this norm.

    Args:
        config: The settings.
        state: The memory before.
        reading: What the step showed.
    """
    unresolved = state.unresolved_steps + 1 if reading.is_unresolved else 0
    if unresolved >= config.max_unresolved_steps:
        return replace(
            state, levels=(), usual_layers=(), spikes=state.spikes + 1, unresolved_steps=0, releases=state.releases + 1
        )
    state = replace(state, spikes=state.spikes + int(reading.is_spike), unresolved_steps=unresolved)
    if reading.norm is None or not math.isfinite(reading.norm) or reading.norm == 0:
        return state
    level = reading.norm * math.sqrt(max(reading.window_tokens, 1.0))
    levels = (*state.levels, level)[-config.memory_steps :]
    return replace(state, levels=levels, usual_layers=_usual(state.usual_layers, reading.layer_shares))


def _usual(usual: tuple[tuple[str, float], ...], shares: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    if not shares:
        return usual
    before = dict(usual)
    return tuple(
        (name, _LAYER_BETA * before.get(name, share) + (1 - _LAYER_BETA) * share) for name, share in shares.items()
    )
