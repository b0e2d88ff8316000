"""The ladder: from a spike to its tokens, from the cheapest rung that answers to the next one when a check fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_rlstab.core.checks import choice, integer, number
from lightning_rlstab.core.gradloc import effective_tokens
from lightning_rlstab.gradloc.attribution import (
    Mismatch,
    concentrated_layers,
    layer_shares,
    mismatch_reading,
    token_cause,
)
from lightning_rlstab.gradloc.bisection import bisection
from lightning_rlstab.gradloc.candidates import NormEstimates, relative_weights
from lightning_rlstab.gradloc.directional import Shares, gradient_shares, no_shares
from lightning_rlstab.gradloc.finding import Culprit, Finding, VerdictWord
from lightning_rlstab.gradloc.numeric import nonfinite_finding
from lightning_rlstab.gradloc.oracle import GradientOracle, SubsetGradient, TokenAddress

__all__ = ["LadderSettings", "localized"]

_DOMINANT_SHARE = 0.5
# Of the squared head norms before, of the spike itself after measuring. A token that alone lifts a step five times over
# its level has 0.96 of the squared norm.
_CLEAR_SHARE = 0.9
_MOST_MISSES = 3


@dataclass(frozen=True, kw_only=True)
class LadderSettings:
    """How to search.

    Args:
        search: ``"auto"`` climbs the ladder; ``"directional"`` always takes the shares of all tokens and stays on
            tiers 0 to 2; ``"bisect"`` is the reference search.
        top_k: Culprits named at most, >= 1.
        probe_budget: Masked backward passes allowed in one search, >= 1; the reference search's one per micro-batch
            come on top.
        completeness_tolerance: Largest distance of the sum of shares from 1 that passes the check, in (0, 1).
        culprit_frac: A token is a culprit when its own gradient reaches this fraction of the threshold, in (0, 1].

    Raises:
        ValueError: Naming the field, the rule and the value.
    """

    search: Literal["auto", "directional", "bisect"] = "auto"
    top_k: int = 8
    probe_budget: int = 64
    completeness_tolerance: float = 0.05
    culprit_frac: float = 0.25

    def __post_init__(self) -> None:
        choice("search", self.search, ("auto", "directional", "bisect"))
        integer("top_k", self.top_k, at_least=1)
        integer("probe_budget", self.probe_budget, at_least=1)
        number("completeness_tolerance", self.completeness_tolerance, above=0, below=1)
        number("culprit_frac", self.culprit_frac, above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class _Confirmed:
    """Tokens whose own gradient was measured and deducted from what remains, each with its share of the spike."""

    tokens: tuple[tuple[TokenAddress, SubsetGradient, float], ...]
    remaining: float | None
    probes: int

    @property
    def share(self) -> float:
        """Share of the spike that they hold together."""
        return sum(share for *_, share in self.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """What every rung needs to know about the spike."""

    oracle: GradientOracle
    threshold: float
    settings: LadderSettings
    mismatch: Mismatch
    layers: tuple[str, ...]
    probes_spent: int = 0

    @property
    def probes_left(self) -> int:
        return self.settings.probe_budget - self.probes_spent

    @property
    def has_exploded_block(self) -> bool:
        """A single token often sits in the head or the embedding; only blocks can be said to have exploded on it."""
        return bool(self.layers) and self.layers[0].rpartition(".")[2].isdigit()

    @property
    def blameless_verdict(self) -> VerdictWord:
        if self.mismatch.is_systematic:
            return "systematic"
        return "layer" if self.layers else "diffuse"

    def is_explained(self, remaining: float | None) -> bool:
        """Whether what was taken away was the spike: most of the norm is gone, or the rest is usual."""
        limit = max(self.threshold, _DOMINANT_SHARE * self.oracle.grad_norm)
        return remaining is not None and remaining <= limit


def localized(
    oracle: GradientOracle,
    *,
    threshold: float,
    tau_token: float,
    settings: LadderSettings,
    usual_layers: Mapping[str, float] | None = None,
) -> Finding:
    """Find what made the gradient of this step larger than ``threshold``.

    Args:
        oracle: Whom to ask about the step.
        threshold: Norm above which the step is a spike, > 0.
        tau_token: The same for one token's gradient, used by the reference search.
        settings: How to search.
        usual_layers: Usual share of each layer in the squared gradient norm, or None while unknown.

    Returns:
        The finding; what remains of the gradient after deducting the culprits is left with the oracle.
    """
    if not math.isfinite(oracle.grad_norm):
        return nonfinite_finding(oracle, threshold=threshold, budget=settings.probe_budget, top_k=settings.top_k)
    finding = _finding(oracle, threshold, tau_token, settings, usual_layers)
    return dataclasses.replace(
        finding, layers=layer_shares(oracle.layer_norms), cost_sweeps=oracle.cost_sweeps, threshold=threshold
    )


def _finding(
    oracle: GradientOracle,
    threshold: float,
    tau_token: float,
    settings: LadderSettings,
    usual_layers: Mapping[str, float] | None,
) -> Finding:
    case = _Case(
        oracle=oracle,
        threshold=threshold,
        settings=settings,
        mismatch=mismatch_reading(oracle.signals),
        layers=concentrated_layers(layer_shares(oracle.layer_norms), usual_layers),
    )
    blank = Finding(
        verdict=case.blameless_verdict, culprits=(), tier=1, grad_norm=oracle.grad_norm, threshold=threshold
    )
    if settings.search == "bisect" or not bool((oracle.signals.slope != 0).any()):
        return _by_bisection(case, tau_token, blank)
    if settings.search == "auto":
        found, probes = _by_head_norms(case, blank)
        if found is not None:
            return found
        case = dataclasses.replace(case, probes_spent=probes)
    shares = gradient_shares(oracle, tolerance=settings.completeness_tolerance)
    blank = dataclasses.replace(blank, completeness=shares.completeness, shares_of="all tokens")
    if not shares.is_complete:
        note = f"The shares sum to {shares.completeness:.3g} instead of 1: the forward probe was not trusted."
        blank = dataclasses.replace(blank, notes=(note,), tier=2)
    finding = _by_tokens(case, shares, blank)
    if shares.is_complete or finding.culprits or finding.verdict == "layer" or settings.search == "directional":
        return finding
    oracle.start_over()
    case = dataclasses.replace(case, probes_spent=finding.backward_probes)
    return _by_bisection(case, tau_token, blank)


def _by_head_norms(case: _Case, blank: Finding) -> tuple[Finding | None, int]:
    """Measure the tokens that head norms point to at once: where they prove to be the spike no sweep is needed.

    Tried where a few tokens hold nearly all of the squared head norms and nothing speaks for a cause beyond tokens.

    Returns:
        The finding, or None, and then nothing stays deducted; and the probes spent.
    """
    oracle = case.oracle
    if oracle.signals.head_norms is None or case.mismatch.is_systematic or case.has_exploded_block:
        return None, 0
    shares = no_shares(oracle)
    weight = relative_weights(oracle, shares)
    if _weight_of_largest(case, weight) < _CLEAR_SHARE or _dominant_sequence(weight, case.mismatch) is not None:
        return None, 0
    confirmed = _confirmed_tokens(case, shares, least_first_share=_CLEAR_SHARE / case.settings.top_k / 2)
    if not _is_proof(case, confirmed):
        oracle.start_over()
        return None, confirmed.probes
    blank = dataclasses.replace(
        blank,
        tier=2,
        completeness=confirmed.share,
        shares_of="culprits",
        effective_tokens=effective_tokens(weight),
        backward_probes=confirmed.probes,
    )
    finding = _token_finding(case, _ranked_culprits(case, confirmed), confirmed.remaining, blank)
    return _with_strip(finding, weight), confirmed.probes


def _weight_of_largest(case: _Case, weight: Tensor) -> float:
    """What the ``top_k`` heaviest tokens hold together."""
    return float(weight.flatten().topk(min(case.settings.top_k, weight.numel())).values.sum())


def _is_proof(case: _Case, confirmed: _Confirmed) -> bool:
    """Whether single tokens are the spike: they hold nearly all of it, a usual step remains, no sequence is off."""
    off = case.mismatch.off_sequences
    return (
        confirmed.remaining is not None
        and confirmed.remaining <= case.threshold
        and confirmed.share >= _CLEAR_SHARE
        and not any(bool(off[address[:3]]) for address, *_ in confirmed.tokens)
    )


def _ranked_culprits(case: _Case, confirmed: _Confirmed) -> tuple[Culprit, ...]:
    ranked = sorted(confirmed.tokens, key=lambda item: item[1].norm, reverse=True)
    return tuple(_culprit(case, address, part, share) for address, part, share in ranked)


def _by_tokens(case: _Case, shares: Shares, blank: Finding) -> Finding:
    """Tiers 1 and 2: rank by shares (or by head norms when those failed), confirm with masked backward passes."""
    weight = relative_weights(case.oracle, shares)
    blank = dataclasses.replace(blank, effective_tokens=effective_tokens(weight), backward_probes=case.probes_spent)
    sequence = _dominant_sequence(weight, case.mismatch)
    if sequence is not None and not case.mismatch.is_systematic:
        return _with_strip(_sequence_finding(case, sequence, shares, blank), weight)
    if _weight_of_largest(case, weight) < _DOMINANT_SHARE:
        return blank
    confirmed = _confirmed_tokens(case, shares)
    blank = dataclasses.replace(blank, backward_probes=case.probes_spent + confirmed.probes)
    if not case.is_explained(confirmed.remaining):
        case.oracle.start_over()
        return blank
    return _with_strip(_token_finding(case, _ranked_culprits(case, confirmed), confirmed.remaining, blank), weight)


def _with_strip(finding: Finding, weight: Tensor) -> Finding:
    if not finding.culprits:
        return finding
    strip = weight[finding.culprits[0].address[:3]]
    return dataclasses.replace(finding, strip=tuple(round(value, 6) for value in strip.tolist()))


def _token_finding(case: _Case, culprits: tuple[Culprit, ...], remaining: float | None, blank: Finding) -> Finding:
    has_mismatch = any(culprit.cause.endswith("_mismatch") for culprit in culprits)
    if case.has_exploded_block and not has_mismatch:
        culprits = tuple(dataclasses.replace(culprit, cause="layer") for culprit in culprits)
        return dataclasses.replace(blank, verdict="layer", culprits=culprits, remaining_norm=remaining)
    if case.mismatch.is_systematic and not any(culprit.cause == "token_mismatch" for culprit in culprits):
        return dataclasses.replace(blank, verdict="systematic")
    return dataclasses.replace(blank, verdict="tokens", culprits=culprits, remaining_norm=remaining)


def _dominant_sequence(weight: Tensor, mismatch: Mismatch) -> tuple[int, int, int] | None:
    """The sequence with most of the weight, if its tokens are off as a whole."""
    per_sequence = weight.sum(dim=-1)
    place = tuple(int(index) for index in torch.unravel_index(per_sequence.argmax(), per_sequence.shape))
    is_blamed = float(per_sequence[place]) >= _DOMINANT_SHARE and bool(mismatch.off_sequences[place])
    return (place[0], place[1], place[2]) if is_blamed else None


def _sequence_finding(case: _Case, sequence: tuple[int, int, int], shares: Shares, blank: Finding) -> Finding:
    """Take the whole sequence away with one masked backward, then look for single tokens in the others.

    Its largest tokens are listed, after them the single ones.
    """
    signals = case.oracle.signals
    values = shares.values if shares.is_complete else None
    tokens = torch.zeros_like(signals.mask)
    tokens[sequence] = signals.mask[sequence]
    whole = case.oracle.subset_gradient(tokens)
    profile = layer_shares(whole.layers)
    remaining = case.oracle.deduct(whole).remaining_norm
    others = _confirmed_tokens(case, shares, closed=tokens)
    size = values if values is not None else signals.slope.abs() if signals.head_norms is None else signals.head_norms
    order = size[sequence].argsort(descending=True).tolist()
    listed = [TokenAddress(*sequence, token) for token in order if bool(tokens[sequence][token])]
    room = max(case.settings.top_k - len(others.tokens), 1)
    of_sequence = [
        _culprit(case, address, None, None if values is None else float(values[address])) for address in listed[:room]
    ]
    culprits = (
        *(dataclasses.replace(culprit, cause="sequence_mismatch", layers=profile) for culprit in of_sequence),
        *(_culprit(case, address, part, share) for address, part, share in others.tokens),
    )
    return dataclasses.replace(
        blank,
        verdict="sequence",
        culprits=culprits,
        remaining_norm=remaining if others.remaining is None else others.remaining,
        backward_probes=case.probes_spent + 1 + others.probes,
    )


def _confirmed_tokens(
    case: _Case, shares: Shares, *, closed: Tensor | None = None, least_first_share: float = -math.inf
) -> _Confirmed:
    """Measure candidates one by one, largest estimate first, until what is left would not be a culprit.

    Where the first one has less than ``least_first_share`` of the spike, the estimates lead nowhere: no further ones.
    """
    oracle, settings = case.oracle, case.settings
    floor = settings.culprit_frac * case.threshold
    estimates = NormEstimates(oracle, shares, closed=closed)
    tokens: list[tuple[TokenAddress, SubsetGradient, float]] = []
    remaining: float | None = None
    misses = probes = 0
    while len(tokens) < settings.top_k and misses < _MOST_MISSES and probes < case.probes_left:
        address = estimates.next_candidate(floor)
        if address is None:
            break
        part = oracle.subset_gradient(oracle.signals.selection(address))
        probes += 1
        estimates.learn(address, part.norm)
        if part.norm >= floor:
            remaining, share = oracle.deduct(part)
            tokens.append((address, part, share))
        else:
            misses += 1
        if (tokens[0][2] if tokens else 0.0) < least_first_share:
            break
    return _Confirmed(tokens=tuple(tokens), remaining=remaining, probes=probes)


def _culprit(case: _Case, address: TokenAddress, part: SubsetGradient | None, share: float | None) -> Culprit:
    signals = case.oracle.signals
    log_ratio = float(signals.log_ratios[address])
    return Culprit(
        address=address,
        token_id=int(signals.token_ids[address]),
        share=share,
        grad_norm=None if part is None else part.norm,
        importance_ratio=None if math.isnan(log_ratio) else math.exp(min(max(log_ratio, -700.0), 700.0)),
        cause=token_cause(signals, case.mismatch, address),
        layers=() if part is None else layer_shares(part.layers),
    )


def _by_bisection(case: _Case, tau_token: float, blank: Finding) -> Finding:
    """Tier 3: the reference search, then one masked backward to take what it found away."""
    oracle, settings = case.oracle, case.settings
    result = bisection(oracle, tau_token=tau_token, budget=case.probes_left, most=settings.top_k)
    probes = case.probes_spent + result.probes
    notes = blank.notes
    if result.is_budget_exhausted:
        notes = (*notes, "The probe budget ended before every segment over its threshold was visited.")
    blank = dataclasses.replace(
        blank, tier=3, backward_probes=probes, is_budget_exhausted=result.is_budget_exhausted, notes=notes
    )
    if not result.found:
        return blank
    together = oracle.subset_gradient(oracle.signals.selection(*(address for address, _ in result.found)))
    remaining = oracle.deduct(together).remaining_norm
    blank = dataclasses.replace(blank, backward_probes=probes + 1)
    if not case.is_explained(remaining):
        listed = ", ".join(str(tuple(address)) for address, _ in result.found[:3])
        note = f"Tokens over their own threshold ({listed}) do not explain the spike."
        oracle.start_over()
        return dataclasses.replace(blank, notes=(*notes, note))
    culprits = tuple(
        dataclasses.replace(_culprit(case, address, None, None), grad_norm=norm) for address, norm in result.found
    )
    return _token_finding(case, culprits, remaining, blank)
