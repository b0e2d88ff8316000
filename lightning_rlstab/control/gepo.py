"""GEPO's memory: the step guard that keeps abnormal gradients away from the optimizer.

The guard looks at the global norm of a gradient and rules: apply, skip, release or stop. Its memory is a running level
of the norms that were applied; what it skipped never enters that level, so one spike cannot raise the bar for the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lightning_rlstab.core.checks import choice, flag, integer, number

__all__ = [
    "GuardReading",
    "LogprobBoundsConfig",
    "RobustAdvantagesConfig",
    "Ruling",
    "StepGuardConfig",
    "StepGuardState",
    "guard_level",
    "guard_limit",
    "guard_ruling",
    "guard_warnings",
    "step_guard",
]

_MOST_NATURAL = 4.0


@dataclass(frozen=True, kw_only=True)
class RobustAdvantagesConfig:
    """Settings of :func:`lightning_rlstab.core.gepo.robust_advantages`.

    Args:
        bound: c of ``A = c tanh(z / c)``; sensible 2 to 4.
        scale_floor: Smallest spread, in reward units, that a group is divided by.
        reference: Use the recipe's formula to the letter instead: lower median, ``MAD + 1e-8``, no fallback.
    """

    bound: float = 3.0
    scale_floor: float = 0.01
    reference: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("advantages.bound", self.bound, above=0, advice="Use 2 to 4")
        number(
            "advantages.scale_floor",
            self.scale_floor,
            above=0,
            advice="Use the smallest reward step that means something",
        )
        flag("advantages.reference", self.reference)


@dataclass(frozen=True, kw_only=True)
class LogprobBoundsConfig:
    """Bounds that keep every log-prob and log-ratio inside what ``exp`` can take.

    Args:
        floor: Lowest log-prob in nats; below it, and at -inf, a log-prob is a constant without gradient.
        log_ratio: Largest absolute distance in nats of the policy's log-prob from the one it is compared with.
    """

    floor: float = -100.0
    log_ratio: float = 20.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("bounds.floor", self.floor, below=0, advice="Use -100")
        number("bounds.log_ratio", self.log_ratio, above=0, at_most=80, advice="exp(88) overflows float32; use 20")


@dataclass(frozen=True, kw_only=True)
class StepGuardConfig:
    """When a gradient is abnormal, and for how long it may be.

    Args:
        ratio: Skip above this many times the running level; sensible 4 to 8.
        hard_threshold: Never skip a finite norm at or below this; sensible 3 to 10.
        ema_beta: Memory of the running level, 0.95 to 0.999.
        noise_sigmas: Never skip within this many standard deviations of the running log-norm, so that a run whose
            norms are heavy-tailed by nature is not skipped at its tail; 0 for the plain ratio rule.
        warmup_steps: Applied norms before the level is trusted; until then only non-finite norms are skipped.
        max_consecutive_skips: Finite skips in a row after which the level is taken as really changed.
        max_nonfinite_skips: Non-finite norms in a row after which the run stops.
        max_total_skips: Skips over the whole run after which it stops.
        skip_frac_alarm: Recent share of skipped steps, in (0, 1], that is worth an alarm.
        drift_ratio: Rise of the level over its lowest value that is worth a warning: slow growth never trips ``ratio``.
        isolate: What is left out when several micro-batches make a step. ``"staging"``: only the abnormal one; every
            micro-batch is measured as it comes, which takes one extra gradient copy. ``"step"``: the whole step.
    """

    ratio: float = 5.0
    hard_threshold: float = 5.0
    ema_beta: float = 0.99
    noise_sigmas: float = 3.5
    warmup_steps: int = 10
    max_consecutive_skips: int = 8
    max_nonfinite_skips: int = 25
    max_total_skips: int = 1000
    skip_frac_alarm: float = 0.2
    drift_ratio: float = 4.0
    isolate: Literal["staging", "step"] = "staging"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("guard.ratio", self.ratio, above=1, advice="Use 4 to 8")
        number("guard.hard_threshold", self.hard_threshold, above=0, advice="Use 3 to 10")
        number("guard.ema_beta", self.ema_beta, above=0, below=1, advice="Use 0.95 to 0.999")
        number("guard.noise_sigmas", self.noise_sigmas, at_least=0)
        integer("guard.warmup_steps", self.warmup_steps, at_least=1)
        integer("guard.max_consecutive_skips", self.max_consecutive_skips, at_least=1)
        integer("guard.max_nonfinite_skips", self.max_nonfinite_skips, at_least=1)
        integer("guard.max_total_skips", self.max_total_skips, at_least=1)
        number("guard.skip_frac_alarm", self.skip_frac_alarm, above=0, at_most=1)
        number("guard.drift_ratio", self.drift_ratio, above=1)
        choice("guard.isolate", self.isolate, ("staging", "step"))


@dataclass(frozen=True, kw_only=True)
class StepGuardState:
    """What the guard remembers. The three running means are raw; divide by ``weight`` to correct their start at 0.

    Attributes:
        level: Running sum of applied norms.
        log_level: Running sum of their logarithms.
        log_square: Running sum of the squared logarithms.
        weight: Running sum of ones: 1 - beta^n.
        applied: Norms in the level since the last restart.
        consecutive_skips: Finite skips in a row.
        consecutive_nonfinite: Non-finite skips in a row.
        total_skips: Skips since the run began.
        total_nonfinite: Those of them that were non-finite.
        releases: Times the level was taken as really changed.
        skip_frac: Running share of skipped steps.
        lowest_level: Lowest level since the last drift warning; 0 before the warm-up is over.
        drifts: Drift warnings given.
        is_alarmed: Whether ``skip_frac`` is over its alarm; holds until the share has fallen to half of it.
    """

    level: float = 0.0
    log_level: float = 0.0
    log_square: float = 0.0
    weight: float = 0.0
    applied: int = 0
    consecutive_skips: int = 0
    consecutive_nonfinite: int = 0
    total_skips: int = 0
    total_nonfinite: int = 0
    releases: int = 0
    skip_frac: float = 0.0
    lowest_level: float = 0.0
    drifts: int = 0
    is_alarmed: bool = False


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What the guard wants done with one gradient.

    Attributes:
        action: ``"apply"``, ``"skip"``, ``"release"`` (apply, and start the level anew) or ``"stop"``.
        reason: Words for the log; empty with ``"apply"``.
    """

    action: Literal["apply", "skip", "release", "stop"]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class GuardReading:
    """One optimizer step as it ended.

    Attributes:
        norm: Global gradient norm before clipping.
        was_applied: Whether the step was applied; any guard may have skipped it.
        is_partial: Whether some of its micro-batches were left out, so that ``norm`` is not on like terms.
    """

    norm: float
    was_applied: bool
    is_partial: bool = False


def guard_level(state: StepGuardState) -> float:
    """Running level of applied norms, corrected for its start; 0 before the first one."""
    return state.level / state.weight if state.weight > 0 else 0.0


def guard_limit(config: StepGuardConfig, state: StepGuardState) -> float:
    """Norm above which a gradient is abnormal; inf during the warm-up.

    limit = max(hard_threshold, ratio * level, min(exp(mean + noise_sigmas * std of the log-norms), 4 * ratio * level))

    The last term only matters where the spread of the norms is wide; its cap keeps a run whose level moved, and whose
    log-norms therefore look spread out, from losing its guard.
    """
    if state.applied < config.warmup_steps:
        return math.inf
    mean = state.log_level / state.weight
    variance = max(state.log_square / state.weight - mean * mean, 0.0)
    relative = config.ratio * guard_level(state)
    natural = math.exp(min(mean + config.noise_sigmas * math.sqrt(variance), 700.0)) if config.noise_sigmas else 0.0
    return max(config.hard_threshold, relative, min(natural, _MOST_NATURAL * relative))


def guard_ruling(config: StepGuardConfig, state: StepGuardState, norm: float) -> Ruling:
    """Judge one gradient norm; reads the memory, does not change it.

    Args:
        config: The settings.
        state: The memory.
        norm: Global gradient norm: float32, unscaled, before clipping, the same on all ranks.

    Returns:
        The ruling; the same on every rank because every input is.

    Example:
        >>> guard_ruling(StepGuardConfig(), StepGuardState(), float("nan")).action
        'skip'
    """
    is_finite = math.isfinite(norm)
    limit = guard_limit(config, state)
    if is_finite and norm <= limit:
        return Ruling(action="apply")
    if state.total_skips >= config.max_total_skips:
        return Ruling(action="stop", reason=f"{state.total_skips} steps were skipped, the limit of `max_total_skips`")
    if not is_finite:
        if state.consecutive_nonfinite >= config.max_nonfinite_skips:
            count = state.consecutive_nonfinite
            return Ruling(action="stop", reason=f"{count} gradients in a row were not finite (`max_nonfinite_skips`)")
        return Ruling(action="skip", reason=f"gradient norm is {norm}")
    words = f"gradient norm {norm:.4g} is above the limit {limit:.4g} (usual {guard_level(state):.4g})"
    if state.consecutive_skips >= config.max_consecutive_skips:
        return Ruling(
            action="release", reason=f"{words} for the {state.consecutive_skips + 1}th time in a row: new level"
        )
    return Ruling(action="skip", reason=words)


def step_guard(config: StepGuardConfig, state: StepGuardState, reading: GuardReading) -> StepGuardState:
    """The memory after one optimizer step.

    A norm enters the level only when its step was applied whole and was neither 0 nor non-finite. During the warm-up a
    norm counts at most ``ratio`` times the level so far, so that an early spike does not set it.

    Args:
        config: The settings.
        state: The memory before.
        reading: How the step ended.

    Returns:
        The memory after.
    """
    ruling = guard_ruling(config, state, reading.norm)
    if ruling.action in ("skip", "stop"):
        return _skipped(config, state, is_finite=math.isfinite(reading.norm))
    if not reading.was_applied:  # another guard's skip: says nothing about this guard's level
        return state
    share = _ema(config.ema_beta, state.skip_frac, 0.0)
    cleared = replace(
        state,
        consecutive_skips=0,
        consecutive_nonfinite=0,
        skip_frac=share,
        is_alarmed=state.is_alarmed and share >= config.skip_frac_alarm / 2,
    )
    if reading.is_partial:
        return replace(cleared, total_skips=state.total_skips + 1)
    if reading.norm == 0.0:  # an empty batch: not a gradient to learn a level from
        return cleared
    if ruling.action == "release":
        fresh = replace(
            cleared, level=0.0, log_level=0.0, log_square=0.0, weight=0.0, applied=0, releases=state.releases + 1
        )
        return replace(_fed(config, fresh, reading.norm), lowest_level=0.0)
    return _fed(config, cleared, reading.norm)


def _skipped(config: StepGuardConfig, state: StepGuardState, *, is_finite: bool) -> StepGuardState:
    share = _ema(config.ema_beta, state.skip_frac, 1.0)
    return replace(
        state,
        consecutive_skips=state.consecutive_skips + 1 if is_finite else state.consecutive_skips,
        consecutive_nonfinite=0 if is_finite else state.consecutive_nonfinite + 1,
        total_skips=state.total_skips + 1,
        total_nonfinite=state.total_nonfinite + (not is_finite),
        skip_frac=share,
        is_alarmed=state.is_alarmed or share >= config.skip_frac_alarm,
    )


def _fed(config: StepGuardConfig, state: StepGuardState, norm: float) -> StepGuardState:
    beta = config.ema_beta
    if 0 < state.applied < config.warmup_steps:
        norm = min(norm, config.ratio * guard_level(state))
    logarithm = math.log(norm)
    fed = replace(
        state,
        level=_ema(beta, state.level, norm),
        log_level=_ema(beta, state.log_level, logarithm),
        log_square=_ema(beta, state.log_square, logarithm * logarithm),
        weight=_ema(beta, state.weight, 1.0),
        applied=state.applied + 1,
    )
    if fed.applied < config.warmup_steps:
        return fed
    level = guard_level(fed)
    if state.lowest_level == 0.0:
        return replace(fed, lowest_level=level)
    if level >= config.drift_ratio * state.lowest_level:
        return replace(fed, lowest_level=level, drifts=state.drifts + 1)
    return replace(fed, lowest_level=min(level, state.lowest_level))


def _ema(beta: float, mean: float, value: float) -> float:
    return beta * mean + (1.0 - beta) * value


def guard_warnings(config: StepGuardConfig, before: StepGuardState, after: StepGuardState) -> tuple[str, ...]:
    """What is worth saying about the change of memory over one step.

    Args:
        config: The settings.
        before: The memory before the step.
        after: The memory after it.

    Returns:
        One sentence per warning; mostly none.
    """
    warnings = []
    if after.drifts > before.drifts:
        warnings.append(
            f"the usual gradient norm rose from {before.lowest_level:.4g} to {guard_level(after):.4g} "
            f"(x{config.drift_ratio:g}) too slowly for the spike rule"
        )
    if after.is_alarmed and not before.is_alarmed:
        warnings.append(f"{after.skip_frac:.0%} of the recent steps were skipped ({after.total_skips} in all)")
    return tuple(warnings)
