"""What a localization found: plain records for events, logs and decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_rlstab.gradloc.oracle import TokenAddress

__all__ = ["Cause", "Culprit", "Finding", "VerdictWord"]

VerdictWord = Literal["tokens", "sequence", "layer", "systematic", "diffuse", "numeric"]
"""What made the spike: single tokens, a whole sequence, a few layers, a mismatch of everything, no one in particular,
or a non-finite value."""

Cause = str
"""Why a culprit is one: ``token_mismatch``, ``sequence_mismatch``, ``systematic_mismatch``, ``layer``,
``reference_gap`` (the KL term), ``rare_token``, ``large_advantage``, ``unknown``, or ``non-finite: <where it was>``."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """One token that made the spike.

    Attributes:
        address: Where it is.
        token_id: Its id in the vocabulary.
        share: Its share of the squared gradient norm, signed: to rounding where its gradient was measured, else from
            the forward probe; None when neither was taken.
        grad_norm: Norm of its own gradient; None when it was not measured.
        importance_ratio: Policy in training over policy that sampled; None when the latter is unknown.
        cause: Why.
        layers: (layer, share of the token's squared gradient norm), largest first.
    """

    address: TokenAddress
    token_id: int
    share: float | None
    grad_norm: float | None
    importance_ratio: float | None
    cause: Cause
    layers: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one spike.

    Attributes:
        verdict: What kind of thing made it.
        culprits: The tokens to blame, largest first; empty where nobody is.
        tier: The rung of the ladder that gave the answer: 0 forward flags, 1 shares of all tokens, 2 masked backward of
            the tokens with the largest head norms, 3 bisection.
        grad_norm: Norm of the step's gradient.
        threshold: Norm above which it counted as a spike.
        remaining_norm: Norm without the culprits; None when nothing was taken away.
        completeness: Sum of the shares that were taken; None when none were.
        shares_of: Whose shares these are: of all tokens, where 1 means that nothing is missing, or of the culprits
            alone, where the remaining norm is the proof.
        effective_tokens: Participation number of the shares, or of the squared head norms; None when neither was taken.
        layers: (layer, share of the spike's squared norm), largest first.
        strip: Weight of every token of the first culprit's sequence in the spike; empty when weights were not taken.
        cost_sweeps: Work spent, in forward+backward sweeps over the step.
        backward_probes: Masked backward passes spent.
        is_budget_exhausted: Whether the search ended because its budget did.
        notes: Sentences for the log, e.g. that a check failed.
    """

    verdict: VerdictWord
    culprits: tuple[Culprit, ...]
    tier: int
    grad_norm: float
    threshold: float
    remaining_norm: float | None = None
    completeness: float | None = None
    shares_of: Literal["all tokens", "culprits"] | None = None
    effective_tokens: float | None = None
    layers: tuple[tuple[str, float], ...] = ()
    strip: tuple[float, ...] = ()
    cost_sweeps: float = 0.0
    backward_probes: int = 0
    is_budget_exhausted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_removal_enough(self) -> bool:
        """Whether the step without the culprits is back at or under the threshold."""
        return bool(self.culprits) and self.remaining_norm is not None and self.remaining_norm <= self.threshold
