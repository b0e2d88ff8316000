"""Why a spike came: train/inference mismatch of tokens, of a sequence, of everything; layers; or none of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlstab.gradloc.finding import Cause
from lightning_rlstab.gradloc.oracle import TokenAddress, WindowSignals

__all__ = [
    "Mismatch",
    "concentrated_layers",
    "layer_shares",
    "mismatch_reading",
    "token_cause",
]

# Nats. A healthy engine differs from the training forward by about 0.01 per token, with rare tokens at 0.5.
_OFF_TYPICALLY = 0.2
_OFF_TOKEN = math.log(2.0)
_TIMES_TYPICAL = 3.0
_FEWEST_TOKENS = 4  # of a sequence that can be said to be off as a whole
_FAR_FROM_REFERENCE = 3.0
_RARE_LOGPROB = -8.0
_LARGE_ADVANTAGE = 4.0
# A layer verdict needs a few layers with most of the spike, at odds that are unusual for them.
_MOST_OF_THE_SPIKE = 0.6
_TIMES_USUAL_ODDS = 4.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Mismatch:
    """How far the policy in training is from the policy that sampled.

    Attributes:
        typical: Median over all loss tokens of |log-ratio|, nats; 0 when the sampler's log-probs are unknown.
        is_systematic: More than half of all tokens are off.
        per_sequence: (micro_batch, rank, sequence) median of |log-ratio| over the sequence's loss tokens.
        off_sequences: Bool of the same shape: most of the sequence's tokens are off and the batch as a whole is not.
    """

    typical: float
    is_systematic: bool
    per_sequence: Tensor
    off_sequences: Tensor


def mismatch_reading(signals: WindowSignals) -> Mismatch:
    """Read the log-ratios: medians, because one token of ratio 50 must not make its sequence look off."""
    known = signals.mask & ~signals.log_ratios.isnan()
    sizes = torch.where(known, signals.log_ratios.abs(), torch.full_like(signals.log_ratios, math.nan))
    per_sequence = sizes.nanmedian(dim=-1).values.nan_to_num(nan=0.0)
    typical = float(sizes.flatten().nanmedian().nan_to_num(nan=0.0)) if known.any() else 0.0
    is_systematic = typical > _OFF_TYPICALLY
    limit = max(_OFF_TYPICALLY, _TIMES_TYPICAL * typical)
    return Mismatch(
        typical=typical,
        is_systematic=is_systematic,
        per_sequence=per_sequence,
        off_sequences=(per_sequence > limit) & (known.sum(dim=-1) >= _FEWEST_TOKENS),
    )


def token_cause(signals: WindowSignals, mismatch: Mismatch, address: TokenAddress) -> Cause:
    """Why this token may be a culprit, judged by its ratio first.

    Example:
        ``token_mismatch`` when the token is off by a factor of two and by three times what its sequence is usually off.
    """
    sequence = (address.micro_batch, address.rank, address.sequence)
    size = abs(float(signals.log_ratios[address]))
    is_token_off = size > _OFF_TOKEN and size > _TIMES_TYPICAL * float(mismatch.per_sequence[sequence])
    signs: tuple[tuple[Cause, bool], ...] = (
        ("token_mismatch", is_token_off),
        ("sequence_mismatch", bool(mismatch.off_sequences[sequence])),
        ("systematic_mismatch", mismatch.is_systematic),
        ("reference_gap", abs(float(signals.reference_gaps[address])) > _FAR_FROM_REFERENCE),
        ("rare_token", float(signals.logprobs[address]) < _RARE_LOGPROB),
        ("large_advantage", abs(float(signals.advantages[sequence])) > _LARGE_ADVANTAGE),
    )
    return next((cause for cause, is_seen in signs if is_seen), "unknown")


def layer_shares(layer_norms: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Each layer's share of the squared norm, largest first; empty when there is no finite gradient.

    Example:
        >>> layer_shares({"a": 3.0, "b": 4.0})
        (('b', 0.64), ('a', 0.36))
    """
    largest = max(layer_norms.values(), default=0.0)
    if not 0 < largest < math.inf or any(math.isnan(norm) for norm in layer_norms.values()):
        return ()
    squares = {name: (norm / largest) ** 2 for name, norm in layer_norms.items()}
    total = sum(squares.values())
    ranked = sorted(squares.items(), key=lambda item: item[1], reverse=True)
    return tuple((name, square / total) for name, square in ranked)


def concentrated_layers(shares: tuple[tuple[str, float], ...], usual: Mapping[str, float] | None) -> tuple[str, ...]:
    """The few layers that have most of the spike although they usually have much less of the gradient; else empty.

    "A few" is a tenth of the layers, at least one. Without a usual profile nothing can be called unusual.

    Args:
        shares: Layer shares of the spike, largest first.
        usual: Usual share of each layer, or None while unknown.
    """
    if not shares or not usual:
        return ()
    top = shares[: max(1, len(shares) // 10)]
    now = sum(share for _, share in top)
    before = sum(usual.get(name, 0.0) for name, _ in top)
    if now < _MOST_OF_THE_SPIKE or _odds(now) < _TIMES_USUAL_ODDS * _odds(before):
        return ()
    return tuple(name for name, share in top if share > usual.get(name, 0.0))


def _odds(share: float) -> float:
    return share / max(1.0 - share, 1e-9)
