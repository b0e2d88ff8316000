"""Non-finite gradients: which token, and where on the training path the first non-finite value appeared."""

from __future__ import annotations

import math

import torch

from lightning_rlstab.gradloc.bisection import bisection
from lightning_rlstab.gradloc.finding import Culprit, Finding
from lightning_rlstab.gradloc.oracle import GradientOracle, TokenAddress

__all__ = ["FORWARD_PLACES", "nonfinite_finding"]

FORWARD_PLACES = (
    "reward",
    "advantage",
    "behavior_logprob",
    "old_logprob",
    "reference_logprob",
    "hidden_state",
    "logprob",
    "ratio",
    "loss",
)
"""Where a non-finite value can be seen before the backward pass, in the order of the training path."""


def nonfinite_finding(
    oracle: GradientOracle, *, threshold: float, budget: int, top_k: int, is_rebuilding: bool = True
) -> Finding:
    """Name the tokens behind a non-finite gradient.

    Forward flags answer at no cost; a flagged hidden state is followed to its layer with one forward of that sequence.
    Without flags the fault is in the backward pass: masked backward passes are bisected by finiteness. When every
    token's gradient is finite on its own, the fault came from outside the loss and the parameters are named instead.

    Args:
        oracle: Whom to ask; ``grad_norm`` is inf or NaN.
        threshold: Norm above which a step counts as a spike.
        budget: Masked backward passes allowed beyond one per micro-batch.
        top_k: Culprits listed at most; all are taken away.
        is_rebuilding: Whether to compute the gradient anew without the culprits.
    """
    flagged = _flagged_tokens(oracle)
    notes: list[str] = []
    tier, probes, is_exhausted = 0, 0, False
    if any(place in ("hidden_state", "logprob") for place in flagged.values()):
        spoiled = oracle.nonfinite_parameters()
        if spoiled:
            return _parameter_finding(oracle, threshold, spoiled)
    if not flagged:
        tier = 3
        result = bisection(oracle, tau_token=math.inf, budget=budget, is_reusing_parent=False)
        flagged = {address: "backward" for address, _ in result.found}
        probes, is_exhausted = result.probes, result.is_budget_exhausted
    if not flagged:
        if is_exhausted:
            notes.append("The probe budget ended before a token was found.")
        else:
            listed = _listed(oracle.nonfinite_gradients())
            notes.append(f"No token's own gradient is non-finite: the value was put into the gradient of {listed}.")
    culprits = tuple(_culprit(oracle, address, place) for address, place in list(flagged.items())[:top_k])
    remaining = None
    if is_rebuilding and not is_exhausted and (flagged or tier == 3):
        remaining = oracle.rebuild_without(oracle.signals.selection(*flagged))
        probes += 1
    return Finding(
        verdict="numeric",
        culprits=culprits,
        tier=tier,
        grad_norm=oracle.grad_norm,
        threshold=threshold,
        remaining_norm=remaining,
        cost_sweeps=oracle.cost_sweeps,
        backward_probes=probes,
        is_budget_exhausted=is_exhausted,
        notes=tuple(notes),
    )


def _parameter_finding(oracle: GradientOracle, threshold: float, names: tuple[str, ...]) -> Finding:
    """The weights themselves are spoiled: no token is to blame, and leaving some out would not help the next step."""
    return Finding(
        verdict="numeric",
        culprits=(),
        tier=0,
        grad_norm=oracle.grad_norm,
        threshold=threshold,
        cost_sweeps=oracle.cost_sweeps,
        notes=(f"The weights themselves are non-finite, in {_listed(names)}: roll back to a healthy snapshot.",),
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _flagged_tokens(oracle: GradientOracle) -> dict[TokenAddress, str]:
    """First flagged token of each sequence, with the earliest place on the path.

    Attention carries one NaN to other tokens of its sequence, so one address stands for all of them; values that belong
    to a single token (its log-probs, ratio, loss) flag every token they were seen at.
    """
    signals = oracle.signals
    found: dict[TokenAddress, str] = {}
    spoiled = torch.zeros(signals.mask.shape[:-1], dtype=torch.bool)
    for place in FORWARD_PLACES:
        flags = signals.nonfinite.get(place)
        if flags is None or not (flags & signals.mask).any():
            continue
        is_carried_on = place in ("reward", "advantage", "hidden_state")
        for address in signals.addresses(flags & signals.mask):
            sequence = address[:3]
            if bool(spoiled[sequence]) or address in found:
                continue
            found[address] = place
            if is_carried_on:
                spoiled[sequence] = True
    return found


def _culprit(oracle: GradientOracle, address: TokenAddress, place: str) -> Culprit:
    signals = oracle.signals
    if place in ("hidden_state", "logprob"):
        origin = oracle.first_nonfinite(address)
        if origin is not None:
            address, place = address._replace(token=origin[0]), f"{place} of {origin[1]}"
    ratio = float(signals.log_ratios[address])
    return Culprit(
        address=address,
        token_id=int(signals.token_ids[address]),
        share=None,
        grad_norm=None,
        importance_ratio=None if math.isnan(ratio) else _bounded_exp(ratio),
        cause=f"non-finite: {place}",
    )


def _bounded_exp(value: float) -> float:
    return math.exp(min(value, 700.0))
