"""What the clips remember: each layer's usual gradient norm, and a high quantile of the tokens' head norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_rlstab.core.checks import integer, number
from lightning_rlstab.core.clips import layer_scales

__all__ = [
    "HeadNormConfig",
    "HeadNormState",
    "LayerClipConfig",
    "LayerClipState",
    "clipped_layers",
    "head_norm_limit",
    "head_norm_step",
    "layer_clip_step",
]


@dataclass(frozen=True, kw_only=True)
class LayerClipConfig:
    """How a layer is clipped.

    Args:
        ratio: How many times its usual norm a layer may have (lambda), > 0.
        beta: Memory of the usual norm, in (0, 1).
        warmup_steps: Steps under the global clip ``warmup_norm`` alone, while the usual norms are learned, >= 1.
        warmup_norm: Global norm to which the gradient is clipped during the warm-up, > 0.

    Raises:
        ValueError: Naming the field, the rule and the value.
    """

    ratio: float = 2.0
    beta: float = 0.98
    warmup_steps: int = 20
    warmup_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("ratio", self.ratio, above=0, advice="Use 2")
        number("beta", self.beta, above=0, below=1, advice="Use 0.98")
        integer("warmup_steps", self.warmup_steps, at_least=1)
        number("warmup_norm", self.warmup_norm, above=0)


@dataclass(frozen=True, kw_only=True)
class LayerClipState:
    """Running norms.

    Attributes:
        sums: (layer, running sum of its clipped norms, not yet corrected for its start at 0).
        weight: Running sum of ones, 1 - beta^n.
        steps: Steps that entered.
    """

    sums: tuple[tuple[str, float], ...] = ()
    weight: float = 0.0
    steps: int = 0


def clipped_layers(config: LayerClipConfig, state: LayerClipState, norms: Mapping[str, float]) -> dict[str, float]:
    """Factor on each layer's gradient in this step.

    Args:
        config: The settings.
        state: The memory.
        norms: Norm of each layer's gradient.

    Returns:
        Factors in (0, 1]: one for all layers during the warm-up, then each layer's own.
    """
    if state.steps >= config.warmup_steps:
        usual = {name: total / state.weight for name, total in state.sums}
        return layer_scales(norms, usual, ratio=config.ratio)
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    scale = config.warmup_norm / total if math.isfinite(total) and total > config.warmup_norm else 1.0
    return dict.fromkeys(norms, scale)


def layer_clip_step(
    config: LayerClipConfig, state: LayerClipState, norms: Mapping[str, float], scales: Mapping[str, float]
) -> LayerClipState:
    """The memory after one applied step: clipped norms enter, so a spike moves the usual level by at most its bound.

    Args:
        config: The settings.
        state: The memory before.
        norms: Norms before clipping.
        scales: The factors that were put on them.
    """
    if not all(math.isfinite(norm) for norm in norms.values()):
        return state
    before = dict(state.sums)
    sums = tuple(
        (name, config.beta * before.get(name, 0.0) + (1 - config.beta) * norm * scales[name])
        for name, norm in norms.items()
    )
    weight = config.beta * state.weight + (1 - config.beta)
    return replace(state, sums=sums, weight=weight, steps=state.steps + 1)


@dataclass(frozen=True, kw_only=True)
class HeadNormConfig:
    """How a token's head norm is clipped.

    Args:
        times: How many times the running quantile a token's head norm may be, > 0.
        quantile: Which quantile, in (0, 1).
        beta: Memory of the quantile's logarithm, in (0, 1).
        warmup_steps: Steps before anything is clipped, >= 1.

    Raises:
        ValueError: Naming the field, the rule and the value.
    """

    times: float = 3.0
    quantile: float = 0.99
    beta: float = 0.95
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("times", self.times, above=0, advice="Use 3")
        number("quantile", self.quantile, above=0, below=1, advice="Use 0.99")
        number("beta", self.beta, above=0, below=1)
        integer("warmup_steps", self.warmup_steps, at_least=1)


@dataclass(frozen=True, kw_only=True)
class HeadNormState:
    """Running quantile.

    Attributes:
        log_quantile: Running sum of the quantile's logarithm, not yet corrected for its start at 0.
        weight: Running sum of ones, 1 - beta^n.
        steps: Steps that entered.
    """

    log_quantile: float = 0.0
    weight: float = 0.0
    steps: int = 0


def head_norm_limit(config: HeadNormConfig, state: HeadNormState) -> float:
    """Largest head norm that is left alone; inf during the warm-up.

    Example:
        >>> head_norm_limit(HeadNormConfig(), HeadNormState())
        inf
    """
    if state.steps < config.warmup_steps:
        return math.inf
    return config.times * math.exp(state.log_quantile / state.weight)


def head_norm_step(config: HeadNormConfig, state: HeadNormState, quantile: float) -> HeadNormState:
    """The memory after one optimizer step; a step without positive norms leaves it alone.

    Args:
        config: The settings.
        state: The memory before.
        quantile: The quantile of this step's head norms, averaged over ranks as logarithms.
    """
    if not (math.isfinite(quantile) and quantile > 0):
        return state
    return HeadNormState(
        log_quantile=config.beta * state.log_quantile + (1 - config.beta) * math.log(quantile),
        weight=config.beta * state.weight + (1 - config.beta),
        steps=state.steps + 1,
    )
