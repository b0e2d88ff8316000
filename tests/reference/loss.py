"""Slow twins of the loss in plain Python floats, one token at a time, straight from the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """One completion: lists over its real tokens, and its advantage."""

    advantage: float
    logprobs: list[float]
    old: list[float]
    behavior: list[float]
    reference: list[float]
    entropy: list[float]


@dataclass
class Options:
    """TRL's names; see ``LossSettings``."""

    loss_type: str = "dapo"
    level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    is_kl_weighted: bool = True
    entropy_coef: float = 0.0
    off_policy_threshold: float | None = None
    top_share: float = 1.0
    ratio_mode: str | None = None
    clip_max: float = 3.0
    clip_min: float = 0.0
    max_length: int = 16
    slices: int = 1
    accumulation: int = 1
    world_size: int = 1
    num_items: float = 1.0
    sapo: tuple[float, float] = (1.0, 1.05)
    vespo: dict[str, Any] = field(default_factory=lambda: {"pos": (2.0, 3.0), "neg": (3.0, 2.0)})


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between the sorted values."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def kl(policy: float, reference: float) -> float:
    """k3 of one token."""
    gap = reference - policy
    return math.exp(gap) - gap - 1


def correction(row: Row, options: Options) -> list[float]:
    """The train/inference ratio of every token."""
    if options.ratio_mode is None:
        return [1.0] * len(row.logprobs)
    gaps = [old - behavior for old, behavior in zip(row.old, row.behavior, strict=True)]
    if options.ratio_mode.startswith("sequence"):
        gaps = [sum(gaps)] * len(gaps)
    ratios = [math.exp(gap) for gap in gaps]
    if options.ratio_mode.endswith("truncate"):
        return [min(max(ratio, options.clip_min), options.clip_max) for ratio in ratios]
    return [ratio if options.clip_min <= ratio <= options.clip_max else 0.0 for ratio in ratios]


def vespo_weight(row: Row, options: Options) -> float:
    """phi of the sequence."""
    log_w = sum(p - o for p, o in zip(row.logprobs, row.old, strict=True))
    if options.ratio_mode is not None:
        log_w += sum(max(math.log(max(c, 1e-8)), math.log(1e-8)) for c in correction(row, options))
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    k, decay = options.vespo["pos" if row.advantage >= 0 else "neg"]
    return math.exp(decay + k * log_w - decay * math.exp(log_w))


def surrogate(row: Row, token: int, ratio: float, options: Options) -> float:
    """Token loss before masks and normalisers."""
    a, kind = row.advantage, options.loss_type
    if kind == "cispo":
        return -min(ratio, options.epsilon_high) * a * row.logprobs[token]
    if kind == "sapo":
        tau = options.sapo[0] if a > 0 else options.sapo[1]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    if kind == "vespo":
        return -vespo_weight(row, options) * a * row.logprobs[token]
    clipped = min(max(ratio, 1 - options.epsilon), 1 + options.epsilon_high)
    bounded = ratio if options.delta is None else min(ratio, options.delta)
    return -min(bounded * a, clipped * a)


def row_losses(row: Row, threshold: float, options: Options) -> list[float]:
    """Token losses of one completion, without normaliser."""
    length = len(row.logprobs)
    log_ratios = [p - o for p, o in zip(row.logprobs, row.old, strict=True)]
    if options.level == "sequence":
        log_ratios = [sum(log_ratios) / max(length, 1)] * length
    drift = sum(b - p for p, b in zip(row.logprobs, row.behavior, strict=True)) / max(length, 1)
    is_dropped = options.off_policy_threshold is not None and row.advantage < 0 and drift > options.off_policy_threshold
    losses = []
    for token in range(length):
        ratio = math.exp(log_ratios[token])
        loss = 0.0 if is_dropped or row.entropy[token] < threshold else surrogate(row, token, ratio, options)
        if options.loss_type != "vespo":
            loss *= correction(row, options)[token]
        penalty = kl(row.logprobs[token], row.reference[token])
        losses.append(loss + options.beta * penalty * (ratio if options.is_kl_weighted else 1.0))
    return losses


def aggregated(losses: list[list[float]], options: Options) -> float:
    """One number from all token losses."""
    rows, sums = len(losses), [sum(row) for row in losses]
    kind = options.loss_type
    if kind in ("grpo", "sapo"):
        return sum(s / max(len(row), 1) for s, row in zip(sums, losses, strict=True)) / rows / options.accumulation
    if kind == "bnpo":
        return sum(sums) / max(sum(map(len, losses)), 1) / options.accumulation
    if kind == "dr_grpo":
        return sum(sums) / (rows * options.max_length) / options.accumulation
    if kind == "luspo":
        return sum(sums) / rows / options.accumulation
    items = max(options.num_items, 1.0) / options.world_size
    return sum(sums) / (items * options.accumulation / options.slices)


def loss(rows: list[Row], options: Options) -> float:
    """The loss of one micro-batch."""
    entropies = [value for row in rows for value in row.entropy]
    threshold = -math.inf
    if options.top_share < 1 and entropies:
        threshold = quantile(entropies, 1 - options.top_share)
    total = aggregated([row_losses(row, threshold, options) for row in rows], options)
    kept = [value for value in entropies if value >= threshold]
    return total - options.entropy_coef * sum(kept) / max(len(kept), 1) / options.accumulation


def advantages(rewards: list[float], groups: list[int], scale: str) -> list[float]:
    """Group-relative advantages; NaN and inf rewards get 0."""
    usable = [math.isfinite(reward) for reward in rewards]

    def spread(values: list[float]) -> float:
        if len(values) < 2:
            return 0.0
        centre = sum(values) / len(values)
        return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))

    out = []
    for row, reward in enumerate(rewards):
        mates = [r for r, g, ok in zip(rewards, groups, usable, strict=True) if ok and g == groups[row]]
        everyone = [r for r, ok in zip(rewards, usable, strict=True) if ok]
        if not usable[row]:
            out.append(0.0)
            continue
        difference = reward - sum(mates) / len(mates)
        std = spread(mates if scale == "group" else everyone)
        out.append(difference if scale == "none" else difference / (std + 1e-4))
    return out


def distribution(logits: list[float], temperature: float) -> tuple[list[float], float, float]:
    """Log-probabilities, entropy and sum of squared probabilities of one row of logits."""
    scaled = [logit / temperature for logit in logits]
    top = max(scaled)
    weights = [math.exp(value - top) for value in scaled]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    logprobs = [value - top - math.log(total) for value in scaled]
    return logprobs, entropy, sum(p * p for p in probs)
