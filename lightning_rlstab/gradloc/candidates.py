"""Whom to suspect first: weights of the tokens in a spike, and estimates of their own gradient norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_rlstab.gradloc.directional import Shares
from lightning_rlstab.gradloc.oracle import GradientOracle, TokenAddress

__all__ = ["NormEstimates", "relative_weights"]


def relative_weights(oracle: GradientOracle, shares: Shares) -> Tensor:
    """Non-negative weights of the tokens that sum to about 1: shares, else squared head norms."""
    if shares.is_complete:
        return shares.values.clamp(min=0)
    signals = oracle.signals
    norms = signals.slope.abs() if signals.head_norms is None else signals.head_norms
    squares = torch.where(signals.mask, norms.double().nan_to_num().square(), torch.zeros_like(norms).double())
    return squares / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)


class NormEstimates:
    """What each token's own gradient norm probably is, before it is measured.

    The first candidate is the token with the largest sqrt(|s|) ||g||, its norm if its gradient is unlike the others'.
    From then on the head norms are known in units of full norms, by the ratio seen on the tokens measured so far; that
    finds culprits that partly cancel or that another dwarfs. |s| ||g|| is a lower bound of the norm and always counts.
    When the shares were not trusted, the head norms alone give the order; when no head norms were recorded, the shares
    do.

    Args:
        oracle: Whose tokens are ranked.
        shares: Tier 1's answer, trusted or not.
        closed: Bool, tokens that are spoken for already.
    """

    def __init__(self, oracle: GradientOracle, shares: Shares, *, closed: Tensor | None = None) -> None:
        signals = oracle.signals
        sizes = shares.values.abs() if shares.is_complete else torch.zeros_like(shares.values)
        self._has_shares = shares.is_complete
        self._has_head_norms = signals.head_norms is not None
        self._lower_bounds = sizes * oracle.grad_norm
        self._if_alone = sizes.sqrt() * oracle.grad_norm
        self._head = (signals.slope.abs() if signals.head_norms is None else signals.head_norms).double().nan_to_num()
        self._is_open = signals.mask.clone() if closed is None else signals.mask & ~closed
        self._ratios: list[float] = []

    def next_candidate(self, floor: float) -> TokenAddress | None:
        """The open token with the largest estimate, or None when it is under ``floor``."""
        estimates, limit = self._estimates(floor)
        estimates = torch.where(self._is_open, estimates, torch.full_like(estimates, -1.0))
        place = torch.unravel_index(estimates.argmax(), estimates.shape)
        address = TokenAddress(*(int(index) for index in place))
        if float(estimates[address]) < limit:
            return None
        self._is_open[address] = False
        return address

    def _estimates(self, floor: float) -> tuple[Tensor, float]:
        if self._ratios and (self._has_head_norms or not self._has_shares):
            middle = sorted(self._ratios)[len(self._ratios) // 2]
            return self._lower_bounds.maximum(self._head * middle), floor
        if self._has_shares:
            return self._if_alone, floor
        return self._head, torch.finfo(torch.float64).tiny  # only the order is known

    def learn(self, address: TokenAddress, norm: float) -> None:
        """Take note of a measured norm."""
        head = float(self._head[address])
        if head > 0 and math.isfinite(norm):
            self._ratios.append(norm / head)
