"""QUATRO's two controllers: the KL anchor that moves ``beta``, and the entropy floor that moves the entropy bonus.

The name is this package's working name for four mechanisms around the rollout loop; the paper of that name
(arXiv 2602.04620) describes another method. Replay and rollout filter are in their own files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_rlstab.core.checks import integer, number, refusal

__all__ = [
    "EntropyFloorConfig",
    "EntropyFloorState",
    "KLAnchorConfig",
    "KLAnchorState",
    "KLReading",
    "entropy_floor",
    "entropy_mean",
    "step_entropy_floor",
    "step_kl_anchor",
]

_SMALLEST_STEP = 1.0 / 16.0


@dataclass(frozen=True, kw_only=True)
class KLAnchorConfig:
    """How the KL coefficient follows its target.

    Args:
        target: Mean per-token KL in nats to hold; sensible 0.01 to 0.05.
        every_steps: Applied optimizer steps between two comparisons.
        raise_factor: Coefficient factor when the KL is above the band.
        lower_factor: Coefficient factor when it is below.
        dead_band: Half-width of the band in which nothing moves, as a share of the target; 0 for none. Without a band
            1.2 and 0.8 drift down (1.2 * 0.8 = 0.96) and cycle for ever.
        coef_min: Lowest coefficient.
        coef_max: Highest coefficient.
        token_cap: Nats at which one token's KL stops counting more, so that a single broken token cannot drive the
            coefficient to its bound.
    """

    target: float = 0.02
    every_steps: int = 10
    raise_factor: float = 1.2
    lower_factor: float = 0.8
    dead_band: float = 0.2
    coef_min: float = 0.001
    coef_max: float = 0.2
    token_cap: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("kl.target", self.target, above=0, advice="Use 0.01 to 0.05")
        integer("kl.every_steps", self.every_steps, at_least=1)
        number("kl.raise_factor", self.raise_factor, above=1)
        number("kl.lower_factor", self.lower_factor, above=0, below=1)
        number("kl.dead_band", self.dead_band, at_least=0, below=1)
        number("kl.coef_min", self.coef_min, above=0, advice="A coefficient of 0 could never rise again")
        number("kl.coef_max", self.coef_max, at_least=self.coef_min)
        number("kl.token_cap", self.token_cap, above=self.target, advice="Use 50 times the target")


@dataclass(frozen=True, kw_only=True)
class KLReading:
    """The KL of one applied optimizer step, summed over its micro-batches and ranks.

    Attributes:
        capped_sum: Sum over tokens of min(KL, token_cap), nats.
        tokens: Number of tokens.
    """

    capped_sum: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class KLAnchorState:
    """What the anchor remembers.

    Attributes:
        coef: The coefficient now in the loss.
        capped_sum: Capped KL since the last comparison, nats.
        tokens: Tokens since then.
        steps: Applied steps since then.
        last_kl: Mean capped KL at the last comparison, nats.
        direction: +1 after a raise, -1 after a lowering, 0 before the first move.
        stride: Share of the full factor that the next move takes; halved at every change of direction.
        moves: Moves so far.
    """

    coef: float
    capped_sum: float = 0.0
    tokens: float = 0.0
    steps: int = 0
    last_kl: float = 0.0
    direction: int = 0
    stride: float = 1.0
    moves: int = 0

    def __post_init__(self) -> None:
        """Refuse a coefficient that could never move."""
        if not self.coef > 0:
            raise refusal("beta", "be above 0 for the KL anchor", self.coef, "An adaptive coefficient of 0 stays 0")


def step_kl_anchor(config: KLAnchorConfig, state: KLAnchorState, reading: KLReading) -> KLAnchorState:
    """The memory after one applied optimizer step; the coefficient moves at every ``every_steps``-th.

    KL above ``target * (1 + dead_band)``: coefficient times ``raise_factor ** stride``; below ``target * (1 -
    dead_band)``: times ``lower_factor ** stride``; between: unchanged. The stride halves at each change of direction
    and doubles back to 1 while the direction holds, so an overshoot dies out instead of cycling.

    Args:
        config: The settings.
        state: The memory before.
        reading: Of an applied step; do not call this for a skipped one.

    Returns:
        The memory after.

    Example:
        >>> config = KLAnchorConfig(every_steps=1)
        >>> round(step_kl_anchor(config, KLAnchorState(coef=0.04), KLReading(capped_sum=5.0, tokens=100)).coef, 4)
        0.048
    """
    total, tokens, steps = state.capped_sum + reading.capped_sum, state.tokens + reading.tokens, state.steps + 1
    if steps < config.every_steps:
        return replace(state, capped_sum=total, tokens=tokens, steps=steps)
    emptied = replace(state, capped_sum=0.0, tokens=0.0, steps=0)
    if tokens <= 0 or not math.isfinite(total):
        return emptied
    kl = total / tokens
    if abs(kl - config.target) <= config.dead_band * config.target:
        return replace(emptied, last_kl=kl)
    direction = 1 if kl > config.target else -1
    stride = max(state.stride / 2, _SMALLEST_STEP) if state.direction == -direction else min(state.stride * 2, 1.0)
    factor = (config.raise_factor if direction > 0 else config.lower_factor) ** stride
    coef = min(max(state.coef * factor, config.coef_min), config.coef_max)
    return replace(
        emptied, coef=coef, last_kl=kl, direction=direction, stride=stride, moves=state.moves + (coef != state.coef)
    )


@dataclass(frozen=True, kw_only=True)
class EntropyFloorConfig:
    """When the policy's entropy is too low, and what is done about it.

    Args:
        floor_frac: Floor as a share of the entropy in the first steps; sensible 0.6 to 0.9.
        baseline_steps: Applied steps whose mean entropy is the baseline.
        window_steps: Applied steps in the rolling mean that is compared with the floor.
        lead_frac: The bonus begins when the rolling mean is within this share above the floor, so that the entropy
            turns round before it is through.
        coef_start: Coefficient of the entropy bonus when it begins.
        coef_growth: Factor per applied step while the mean is under the middle of that share.
        coef_max: Highest coefficient, so that the reward is never swamped.
        epsilon_factor: Factor on the clip range, ``epsilon`` and ``epsilon_high``, while the bonus is on; 1 for none.
        ceiling_frac: Entropy above this many times the baseline is reported as exploding.
    """

    floor_frac: float = 0.8
    baseline_steps: int = 10
    window_steps: int = 3
    lead_frac: float = 0.15
    coef_start: float = 0.05
    coef_growth: float = 1.4
    coef_max: float = 0.3
    epsilon_factor: float = 0.5
    ceiling_frac: float = 2.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("entropy.floor_frac", self.floor_frac, above=0, below=1, advice="Use 0.6 to 0.9")
        integer("entropy.baseline_steps", self.baseline_steps, at_least=1)
        integer("entropy.window_steps", self.window_steps, at_least=1)
        number("entropy.lead_frac", self.lead_frac, at_least=0)
        number("entropy.coef_start", self.coef_start, above=0)
        number("entropy.coef_growth", self.coef_growth, above=1)
        number("entropy.coef_max", self.coef_max, at_least=self.coef_start)
        number("entropy.epsilon_factor", self.epsilon_factor, above=0, at_most=1)
        number("entropy.ceiling_frac", self.ceiling_frac, above=1)


@dataclass(frozen=True, kw_only=True)
class EntropyFloorState:
    """What the floor remembers.

    Attributes:
        baseline_sum: Sum of the entropies of the first steps, nats.
        baseline_count: Their number; the baseline stands when it reaches ``baseline_steps``.
        recent: Entropies of the newest applied steps, nats, oldest first.
        coef: Coefficient of the bonus in the loss now; exactly 0 while the floor does not act.
        remembered_coef: Coefficient that was last needed; the next bout begins near it.
        is_exploding: Whether the entropy is above its ceiling.
        bouts: Times the floor began to act.
    """

    baseline_sum: float = 0.0
    baseline_count: int = 0
    recent: tuple[float, ...] = ()
    coef: float = 0.0
    remembered_coef: float = 0.0
    is_exploding: bool = False
    bouts: int = 0

    @property
    def is_active(self) -> bool:
        """Whether the floor acts on the loss."""
        return self.coef > 0


def entropy_floor(config: EntropyFloorConfig, state: EntropyFloorState) -> float | None:
    """The floor in nats, or None while the baseline is still being formed."""
    if state.baseline_count < config.baseline_steps:
        return None
    return config.floor_frac * state.baseline_sum / state.baseline_count


def entropy_mean(state: EntropyFloorState) -> float | None:
    """Rolling mean entropy in nats, or None before the first step."""
    return sum(state.recent) / len(state.recent) if state.recent else None


def step_entropy_floor(config: EntropyFloorConfig, state: EntropyFloorState, entropy: float) -> EntropyFloorState:
    """The memory after one applied optimizer step with this mean token entropy.

    Under ``floor * (1 + lead_frac / 2)`` the coefficient grows by ``coef_growth`` per step up to ``coef_max``; from
    there to ``floor * (1 + lead_frac)`` it fades by the same factor; above, it is exactly 0. So the mean comes to rest
    in the middle of that band and not at the floor itself, half of the time below it.

    Args:
        config: The settings.
        state: The memory before.
        entropy: Mean over the step's tokens, nats; non-finite values are passed over.

    Returns:
        The memory after.
    """
    if not math.isfinite(entropy):
        return state
    if state.baseline_count < config.baseline_steps:
        return replace(
            state,
            baseline_sum=state.baseline_sum + entropy,
            baseline_count=state.baseline_count + 1,
            recent=(*state.recent, entropy)[-config.window_steps :],
        )
    moved = replace(state, recent=(*state.recent, entropy)[-config.window_steps :])
    floor, mean = entropy_floor(config, moved), entropy_mean(moved)
    assert floor is not None
    assert mean is not None
    baseline = floor / config.floor_frac
    moved = replace(moved, is_exploding=mean > config.ceiling_frac * baseline)
    if mean > floor * (1 + config.lead_frac):
        return replace(moved, coef=0.0)
    if not state.is_active:
        coef = min(max(config.coef_start, state.remembered_coef), config.coef_max)
        return replace(moved, coef=coef, remembered_coef=coef, bouts=state.bouts + 1)
    if mean < floor * (1 + config.lead_frac / 2):
        coef = min(state.coef * config.coef_growth, config.coef_max)
    else:
        coef = max(state.coef / config.coef_growth, config.coef_start)
    return replace(moved, coef=coef, remembered_coef=coef)
