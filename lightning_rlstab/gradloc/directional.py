"""Tier 1: every token's share of the spike from forward sweeps along the gradient, with a built-in check."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlstab.core.gradloc import probe_shift, token_shares
from lightning_rlstab.gradloc.oracle import GradientOracle, WindowSignals

__all__ = ["Shares", "gradient_shares", "no_shares"]

_WANTED_CHANGE = 0.005  # nats, of the steepest token's log-prob
_LARGEST_CHANGE = 0.1
# A weight moves by whole float32 steps. Spread over many weights a short move vanishes: on 135 M of them a change of
# 0.002 nats, at 1e-8 of their norm, lost 7 % of the sum, one at 5e-7 lost 0.1 %.
_SMALLEST_RELATIVE_MOVE = 5e-7
_TOLERATED = (1 / 25, 6.0)  # of the shift that would have been right
_HEAVY_SEQUENCE = 0.01  # sum of |shares| of a sequence from which a central difference is worth its sweep
_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Shares of all tokens and how far to trust them.

    Attributes:
        values: Float64, the shape of the signals.
        completeness: Their sum; 1 when nothing is missing.
        is_complete: Whether the sum is 1 within the tolerance.
        shift: The distance along the unit gradient that was used.
    """

    values: Tensor
    completeness: float
    is_complete: bool
    shift: float

    @property
    def distance(self) -> float:
        """How far the sum is from 1; inf for NaN."""
        return math.inf if math.isnan(self.completeness) else abs(self.completeness - 1)


def no_shares(oracle: GradientOracle) -> Shares:
    """What is known of the shares before any was taken."""
    values = torch.zeros(oracle.signals.mask.shape, dtype=torch.float64)
    return Shares(values=values, completeness=math.nan, is_complete=False, shift=0.0)


def gradient_shares(oracle: GradientOracle, *, tolerance: float) -> Shares:
    """s_t = <g_t, g> / ||g||^2 of every token from a finite difference of log-probs along g.

    One forward sweep above theta, and one below it only for the sequences that matter: there the difference is central
    (error of second order), for the rest it is taken against the log-probs of training. The shift is chosen so that the
    steepest token moves by 0.005 nats, or by up to 0.1 where the weights would else move by less than their rounding;
    when the step proves too long or too short, or the sum misses 1 by more than the tolerance, it is chosen anew.

    Args:
        oracle: Whom to ask; ``grad_norm`` finite and above 0.
        tolerance: Largest distance of the sum from 1 that still counts as complete.

    Returns:
        The shares of the attempt whose sum came nearest to 1.
    """
    rounding = _SMALLEST_RELATIVE_MOVE * oracle.weight_norm()
    shift = _right_shift(probe_shift(oracle.grad_norm, _steepest_slope(oracle.signals), logprob_change=1.0), rounding)
    best: Shares | None = None
    factor, longest = 1.0, math.inf
    for _ in range(_ATTEMPTS):
        above = oracle.linear_losses(shift)
        if best is None and oracle.base_losses is not None:
            change = _decisive_change(oracle.signals, above - oracle.base_losses)
            right = _corrected(shift, change, rounding)
            if right != shift:
                shift = right
                above = oracle.linear_losses(shift)
                change = _decisive_change(oracle.signals, above - oracle.base_losses)
            factor = 0.2 if change > _WANTED_CHANGE / 10 else 5.0
            longest = shift * _LARGEST_CHANGE / change if change > 0 else math.inf
        shares = _difference(oracle, above, shift, tolerance)
        if best is None or shares.distance < best.distance:
            best = shares
        else:
            factor = 1 / factor  # the other way
        # In low precision another shift costs two whole sweeps and seldom helps.
        if best.is_complete or oracle.base_losses is None or best.shift * factor > longest:
            break
        shift = best.shift * factor
    assert best is not None
    return best


def _right_shift(per_nat: float, rounding: float) -> float:
    """The shift to take when ``per_nat`` would change the steepest log-prob by one nat."""
    return min(max(_WANTED_CHANGE * per_nat, rounding), _LARGEST_CHANGE * per_nat)


def _corrected(shift: float, change: float, rounding: float) -> float:
    """The first shift was a guess from the slope: one sweep tells how far off it was. The same value if it was near."""
    if not 0 < change < math.inf:
        return 0.1 * shift
    factor = _right_shift(shift / change, rounding) / shift
    low, high = _TOLERATED
    return shift if low <= 1 / factor <= high else shift * min(max(factor, 1e-6), 1e3)


def _difference(oracle: GradientOracle, above: Tensor, shift: float, tolerance: float) -> Shares:
    mask, base, norm = oracle.signals.mask, oracle.base_losses, oracle.grad_norm
    if base is None:
        values = token_shares(above, oracle.linear_losses(-shift), distance=2 * shift, grad_norm=norm)
    else:
        values = token_shares(above, base, distance=shift, grad_norm=norm)
        heavy = values.abs().nan_to_num().sum(dim=-1) >= _HEAVY_SEQUENCE
        below = oracle.linear_losses(-shift, heavy)
        central = token_shares(above, below, distance=2 * shift, grad_norm=norm)
        values = torch.where(heavy.unsqueeze(-1), central, values)
    values = torch.where(mask, values, torch.zeros_like(values))
    completeness = float(values.sum())
    is_complete = abs(completeness - 1) <= tolerance  # False for NaN
    return Shares(values=values.nan_to_num(), completeness=completeness, is_complete=is_complete, shift=shift)


def _steepest_slope(signals: WindowSignals) -> float:
    """|c| of the token that most likely dominates: the largest head norm, else the largest slope."""
    size = signals.slope.abs() if signals.head_norms is None else signals.head_norms
    size = torch.where(signals.mask, size, torch.zeros_like(size)).nan_to_num()
    slope = float(signals.slope.abs().flatten()[size.flatten().argmax()])
    return slope if slope > 0 else float(signals.slope.abs().max())


def _decisive_change(signals: WindowSignals, moved: Tensor) -> float:
    """Change of the log-prob, nats, of the token whose loss moved most."""
    index = torch.where(signals.mask, moved.abs(), torch.zeros_like(moved)).flatten().argmax()
    slope = float(signals.slope.flatten()[index].abs())
    return float(moved.flatten()[index].abs()) / slope if slope > 0 else 0.0
