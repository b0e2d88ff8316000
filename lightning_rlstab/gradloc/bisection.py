"""Tier 3, the reference search: enumerate micro-batches, bisect ranks and tokens, follow what is over its threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlstab.core.gradloc import segment_threshold
from lightning_rlstab.gradloc.oracle import GradientOracle, SubsetGradient, TokenAddress

__all__ = ["BisectionResult", "bisection"]


@dataclass(frozen=True, kw_only=True)
class BisectionResult:
    """What the search found.

    Attributes:
        found: (address, norm of its gradient), largest first; non-finite norms come before all others.
        probes: Masked backward passes spent.
        is_budget_exhausted: True when the search ended with segments over their threshold unvisited.
    """

    found: tuple[tuple[TokenAddress, float], ...]
    probes: int
    is_budget_exhausted: bool


def bisection(
    oracle: GradientOracle, *, tau_token: float, budget: int, most: int | None = None, is_reusing_parent: bool = True
) -> BisectionResult:
    """Greedy depth-first bisection along the larger half, under a probe budget.

    Micro-batches are enumerated; in each one over its threshold the ranks are halved until one is left, then its loss
    tokens in reading order. The larger half is visited first; the other one too when it is over its own threshold, so
    that neighbours are found. With ``is_reusing_parent`` the second half's gradient is the parent's minus the first's,
    which halves the backward passes at the price of one gradient copy per level.

    Two limits are known. Neighbours of opposite gradients cancel in every segment that holds both. And the threshold
    of a segment grows with its size, so a small culprit may hide in a large segment.

    Args:
        oracle: Whom to ask.
        tau_token: Threshold of one token's gradient, see ``segment_threshold``; with inf only non-finite segments
            are over theirs.
        budget: Masked backward passes allowed beyond those of the enumeration, which are one sweep over the step
            however often it is cut.
        most: Stop after so many tokens; None for no limit.
        is_reusing_parent: Spend memory to save backward passes; off where gradients are not finite.
    """
    mask = oracle.signals.mask
    present = [index for index in range(mask.shape[0]) if mask[index].any()]
    hunt = _Hunt(oracle, tau_token, budget + len(present) if budget > 0 else 0, most, is_reusing_parent)
    for segment, part in sorted(hunt.enumerated(present), key=lambda item: _size(item[1]), reverse=True):
        hunt.visit(segment, part)
    found = sorted(hunt.found, key=lambda item: math.inf if not math.isfinite(item[1]) else item[1], reverse=True)
    return BisectionResult(found=tuple(found), probes=hunt.probes, is_budget_exhausted=hunt.is_budget_exhausted)


def _size(part: SubsetGradient) -> float:
    return part.norm if math.isfinite(part.norm) else math.inf


class _Hunt:
    """The running search: what was found and what may still be spent."""

    def __init__(
        self, oracle: GradientOracle, tau_token: float, budget: int, most: int | None, is_reusing_parent: bool
    ) -> None:
        self.oracle = oracle
        self.tau_token = tau_token
        self.budget = budget
        self.most = most
        self.is_reusing_parent = is_reusing_parent
        self.window_tokens = oracle.signals.window_tokens
        self.probes = 0
        self.is_budget_exhausted = False
        self.found: list[tuple[TokenAddress, float]] = []

    def probe(self, segment: Tensor) -> SubsetGradient | None:
        if self.probes >= self.budget:
            self.is_budget_exhausted = True
            return None
        self.probes += 1
        return self.oracle.subset_gradient(segment, is_kept=self.is_reusing_parent)

    def enumerated(self, micro_batches: Sequence[int]) -> list[tuple[Tensor, SubsetGradient]]:
        """The micro-batches over their threshold; the others' gradients, each as large as the model, are let go."""
        mask, parts = self.oracle.signals.mask, []
        for index in micro_batches:
            segment = torch.zeros_like(mask)
            segment[index] = mask[index]
            part = self.probe(segment)
            if part is not None and self.is_over(segment, part):
                parts.append((segment, part))
        return parts

    def is_over(self, segment: Tensor, part: SubsetGradient) -> bool:
        limit = segment_threshold(self.tau_token, segment_tokens=int(segment.sum()), window_tokens=self.window_tokens)
        return not math.isfinite(part.norm) or part.norm > limit

    def visit(self, segment: Tensor, part: SubsetGradient) -> None:
        if not self.is_over(segment, part) or (self.most is not None and len(self.found) >= self.most):
            return
        if int(segment.sum()) == 1:
            self.found.append((TokenAddress(*segment.nonzero()[0].tolist()), part.norm))
            return
        left, right = halves(segment)
        left_part = self.probe(left)
        if left_part is None:
            return
        is_derived = self.is_reusing_parent and math.isfinite(part.norm) and part.gradient is not None
        right_part = self.oracle.difference(part, left_part) if is_derived else self.probe(right)
        if right_part is None:
            return
        children = sorted(((left, left_part), (right, right_part)), key=lambda item: _size(item[1]), reverse=True)
        for child, child_part in children:
            self.visit(child, child_part)


def halves(segment: Tensor) -> tuple[Tensor, Tensor]:
    """Split a segment of one micro-batch: by ranks while it spans several, else by its tokens in reading order."""
    places = segment.nonzero()
    ranks = sorted(set(places[:, 1].tolist()))
    first = torch.zeros_like(segment)
    if len(ranks) > 1:
        for rank in ranks[: len(ranks) // 2]:
            first[:, rank] = segment[:, rank]
    else:
        kept = places[: len(places) // 2]
        first[tuple(kept.T)] = True
    return first, segment & ~first
