"""How small a culprit can GradLoc see among how many tokens, how often does it cry wolf, and what does a search cost?

    python benchmarks/detection_power.py [--quick] [--markdown FILE] [--plot FILE]

The model: N tokens, each with a gradient drawn from N(0, s^2 I) in D dimensions, and one culprit of norm a in a fixed
direction. D is the effective dimension of the gradient noise, which may be far below the number of parameters. A usual
token has the norm b = s sqrt(D); a culprit is given by its ratio a/b. G is the sum over tokens, g = G/N the gradient.

Nothing of size N x D is made. What the decisions look at has an exact distribution of its own: ||G||^2 is a noncentral
chi-square; the innocents' inner products with G, given G, are (<G, unit> - culprit's part)/n + s (w_t - mean of w) with
independent normal w_t; the sum over a segment, given the sum over a longer one, is a Gaussian bridge. The thresholds,
the naming rule and the search are the package's own functions, asked through an oracle that answers from these draws.
A second oracle that does hold every vector checks the first at small N and D.

Formulas and simulation must agree: probabilities within 0.02 plus three standard errors of the simulation.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _plots import log_chart
from torch import Tensor

from lightning_rlstab.control.clips import HeadNormConfig, HeadNormState, head_norm_limit, head_norm_step
from lightning_rlstab.control.gradloc import TriggerConfig, TriggerReading, TriggerState, spike_threshold, trigger_step
from lightning_rlstab.core.clips import head_norm_weights, quantile_of
from lightning_rlstab.gradloc.ladder import LadderSettings, localized
from lightning_rlstab.gradloc.oracle import Deduction, SubsetGradient, TokenAddress, WindowSignals

FACTOR = TriggerConfig().factor
MEMORY = TriggerConfig().memory_steps
CULPRIT_FRAC = LadderSettings().culprit_frac
ABSOLUTE_TOLERANCE = 0.02
STANDARD_ERRORS = 3.0
# Trials share the learned levels, and a level from 64 steps varies from run to run: 400 of them gave a rate a standard
# error of 0.008, 20,000 trials one of 0.0035.
MEMORIES = 2_000

# ---- formulas ----------------------------------------------------------------------------------------------------


def chi_square_tail(x: Any, freedom: Any) -> Any:
    """P(chi^2_freedom > x)."""
    return torch.special.gammaincc(_double(freedom) / 2, _double(x).clamp(min=0) / 2).numpy()


def noncentral_tail(x: Any, freedom: float, noncentrality: float) -> Any:
    """P(noncentral chi^2 > x) by Sankaran's normal approximation; exact without noncentrality."""
    if noncentrality == 0:
        return chi_square_tail(x, freedom)
    mean, spread = freedom + noncentrality, freedom + 2 * noncentrality
    h = 1 - 2 / 3 * mean * (freedom + 3 * noncentrality) / spread**2
    p, m = spread / mean**2, (h - 1) * (1 - 3 * h)
    centre = 1 + h * p * (h - 1 - 0.5 * (2 - h) * m * p)
    return normal_cdf((centre - (np.asarray(x) / mean) ** h) / (h * math.sqrt(2 * p) * (1 + 0.5 * m * p)))


@functools.cache
def chi_median(freedom: float) -> float:
    """Median of chi_freedom, by bisection on the exact tail."""
    low, high = 0.0, freedom + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > 0.5 else (low, middle)
    return math.sqrt(low)


def normal_cdf(x: Any) -> Any:
    """P(standard normal <= x)."""
    return torch.special.ndtr(_double(x)).numpy()


def normal_quantile(p: float) -> float:
    """Inverse of the normal distribution."""
    return float(torch.special.ndtri(_double(p)))


def largest_normal(count: int) -> float:
    """Median of the largest of ``count`` standard normals."""
    return -normal_quantile(-math.expm1(-math.log(2.0) / count))


def _double(value: Any) -> Tensor:
    return torch.as_tensor(np.asarray(value, dtype=float))


def _normal_nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """An even grid: what is averaged over it often steps from 0 to 1, which few clever nodes would miss."""
    nodes = np.linspace(-6, 6, count)
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


@functools.cache
def learned_medians(dims: float, levels: int = MEMORY) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the learned level: the median of ``levels`` clean norms, in units of s.

    A sample median is normal about the median with standard deviation 1/(2 density sqrt(levels)).
    """
    middle = chi_median(dims)
    step = 1e-4 * middle
    density = float(chi_square_tail((middle - step) ** 2, dims) - chi_square_tail((middle + step) ** 2, dims))
    nodes, weights = _normal_nodes(201)
    return np.maximum(middle + nodes * step / density / math.sqrt(levels), 1e-9), weights


def trigger_false_alarm(dims: float, *, factor: float = FACTOR, levels: int = MEMORY) -> float:
    """Chance that a clean step is over ``factor`` times the learned level; free of N."""
    medians, weights = learned_medians(dims, levels)
    return float((weights * chi_square_tail((factor * medians) ** 2, dims)).sum())


def trigger_power(ratio: float, tokens: int, dims: float, *, factor: float = FACTOR, levels: int = MEMORY) -> float:
    """Chance that a step of ``tokens`` tokens with one culprit is over the threshold."""
    return segment_power(ratio, tokens, dims, factor=factor, levels=levels)


def segment_power(ratio: float, segment: int, dims: float, *, factor: float = FACTOR, levels: int = MEMORY) -> float:
    """Chance that a segment of so many tokens, one of them the culprit, is over its threshold tau sqrt(L)/N.

    The innocents' sum has variance s^2 (L - 1) per dimension, the threshold is factor * median * s sqrt(L).
    """
    medians, weights = learned_medians(dims, levels)
    if segment == 1:
        return float((weights * (ratio * math.sqrt(dims) > factor * medians)).sum())
    others = segment - 1
    limit = (factor * medians) ** 2 * segment / others
    return float((weights * noncentral_tail(limit, dims, ratio**2 * dims / others)).sum())


def search_power(ratio: float, sizes: Iterable[int], dims: float, *, factor: float = FACTOR) -> float:
    """Chance that every segment around the culprit is over its threshold: that of the worst one.

    The segments are nested, so their norms rise and fall together.
    """
    return min(segment_power(ratio, size, dims, factor=factor) for size in sizes)


def search_false_segment(dims: float, *, factor: float = FACTOR) -> float:
    """Chance that one clean segment of any size is over its threshold: the same as for a whole clean step."""
    return trigger_false_alarm(dims, factor=factor)


def _culprit_grid(ratio: float, tokens: int, dims: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes of the culprit's projection <c, G>/||G|| and of ||G||, both in units of s, and their weights.

    <c, S> is normal; what S has beside c is chi-square with D - 1 degrees of freedom, by Wilson and Hilferty.
    """
    size, others, beside = ratio * math.sqrt(dims), max(tokens - 1, 1), max(dims - 1.0, 1e-9)
    nodes, weights = _normal_nodes(601)
    beside_nodes, beside_weights = _normal_nodes(61)
    along = math.sqrt(others) * nodes[:, None]
    cube = 2.0 / (9.0 * beside)
    squares = others * beside * np.maximum(1 - cube + math.sqrt(cube) * beside_nodes[None, :], 0.0) ** 3
    norms = np.sqrt((size + along) ** 2 + squares)
    return size * (size + along) / norms, norms, weights[:, None] * beside_weights[None, :]


def culprit_share(ratio: float, tokens: int) -> float:
    """Typical share of the culprit, a^2 / (a^2 + (N - 1) b^2)."""
    return ratio**2 / (ratio**2 + tokens - 1)


def top_share_power(ratio: float, tokens: int, dims: float) -> float:
    """Chance that the culprit has the largest share: it beats the largest of N - 1 normals of size s/||G||."""
    projection, norms, weights = _culprit_grid(ratio, tokens, dims)
    innocents = max(tokens - 1, 1)
    lead = projection - (norms - projection) / innocents
    log_below = innocents * np.log(np.maximum(normal_cdf(lead), 1e-300))
    return float((weights * np.exp(log_below)).sum())


def top_share_ratio(power: float, tokens: int, dims: float) -> float:
    """Ratio from which the culprit has the largest share with this chance.

    Near certainty comes late: its inner product with the others' sum is normal with standard deviation sqrt(N) b a/
    sqrt(D), and only from about 2 sqrt(N/D) on does that no longer turn its share negative.
    """
    low, high = 0.0, math.log(1e6)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if top_share_power(math.exp(middle), tokens, dims) > power else (middle, high)
    return math.exp((low + high) / 2)


def naming_power(ratio: float, tokens: int, dims: float, *, factor: float = FACTOR) -> float:
    """Chance that the shares name the culprit of a step that is searched whether or not it triggered.

    Its own norm and its estimate sqrt(share) ||g|| must both reach ``culprit_frac`` of the threshold, and the largest
    shares must hold half of the gradient.
    """
    projection, norms, weights = _culprit_grid(ratio, tokens, dims)
    medians, of_medians = learned_medians(dims)
    floors = CULPRIT_FRAC * factor * medians * math.sqrt(tokens)
    enough = np.array([min(floor, ratio * math.sqrt(dims)) == floor for floor in floors])
    has_half = projection >= 0.5 * norms
    estimate = np.sqrt(np.maximum(projection * norms, 0.0))
    passed = [(weights * (has_half & (estimate >= floor))).sum() * ok for floor, ok in zip(floors, enough, strict=True)]
    return float((of_medians * np.array(passed)).sum())


def innocents_over_floor(ratio: float, tokens: int, dims: float, *, factor: float = FACTOR) -> float:
    """Expected number of innocents whose estimate sqrt(|share|) ||g|| reaches the naming threshold."""
    _, norms, weights = _culprit_grid(ratio, tokens, dims)
    floor = CULPRIT_FRAC * factor * chi_median(dims) * math.sqrt(tokens)
    return float((tokens - 1) * 2 * (weights * normal_cdf(-(floor**2) / norms)).sum())


def head_norm_ratio(dims: float, *, spread: float = 0.0, config: HeadNormConfig | None = None) -> float:
    """Ratio from which TokenClip(by="head_norm") holds a token back: ``times`` the quantile of the usual norms.

    With ``spread`` the norms vary between tokens like exp(spread * normal), which dwarfs the chi's own variation.
    """
    config = config or HeadNormConfig()
    z = normal_quantile(config.quantile)
    if spread:
        return config.times * math.exp(spread * z)
    cube = 2.0 / (9.0 * dims)
    return config.times * (1 - cube + math.sqrt(cube) * z) ** 1.5


def head_norm_false_share(spread: float, config: HeadNormConfig | None = None) -> float:
    """Share of innocent tokens over the limit when norms vary like exp(spread * normal)."""
    config = config or HeadNormConfig()
    return float(normal_cdf(-(normal_quantile(config.quantile) + math.log(config.times) / spread)))


def half_power_ratios(tokens: int, dims: float, micro_batches: int, *, factor: float = FACTOR) -> dict[str, float]:
    """Ratio a/b at which each stage sees half of the culprits."""
    x = largest_normal(tokens - 1) ** 2
    excess = factor**2 * chi_median(dims) ** 2 / dims - 1
    return {
        "trigger": math.sqrt(excess * tokens),
        "search": max(math.sqrt(excess * tokens / micro_batches), factor),
        "naming": max(CULPRIT_FRAC * factor, 1.0) * math.sqrt(tokens),
        "top_share": math.sqrt((x + math.sqrt(x**2 + 4 * dims * x * tokens)) / (2 * dims)),
        "head_norm": head_norm_ratio(dims),
    }


def trigger_ratio_with_common(tokens: int, common: float, *, factor: float = FACTOR) -> float:
    """Ratio at which half of the culprits trigger when all tokens share a part of norm common * b.

    The clean norm is then sqrt(N b^2 + N^2 common^2 b^2), and so is the learned level, as long as N stays the same.
    """
    return math.sqrt((factor**2 - 1) * (tokens + (tokens * common) ** 2))


def completeness_error(ratio: float, tokens: int, *, rounding: float, change: float = 0.005) -> float:
    """Standard error of the sum of shares when every log-prob is off by ``rounding`` nats.

    The probe moves the culprit's log-prob by ``change``; a token of ratio 1 enters with 1/ratio of its weight.
    """
    return math.sqrt(2.0) * rounding / change * math.sqrt(tokens + ratio**2) / ratio


def search_probes(micro_batches: int, ranks: int, tokens_per_rank: int) -> int:
    """Masked backwards of the reference search for one culprit: M + ceil(log2 ranks) + log2 of a rank's tokens.

    The last part is exact when the tokens are a power of two, and at most one too many otherwise.
    """
    return micro_batches + math.ceil(math.log2(max(ranks, 1))) + math.ceil(math.log2(max(tokens_per_rank, 1)))


# ---- draws instead of vectors ------------------------------------------------------------------------------------


class Step:
    """One step with at most one culprit, as the oracle of the package's own search.

    Args:
        shape: (micro-batches, ranks, sequences, tokens), no padding.
        dims: Effective dimension D, a whole number.
        ratio: The culprit's norm over b; 0 for a clean step.
        place: Flat index of the culprit.
        rng: Source of the draws.
        rounding: Error of every forward log-prob, nats.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dims: int,
        ratio: float,
        place: int,
        rng: np.random.Generator,
        *,
        rounding: float = 0.0,
    ) -> None:
        self.shape, self.dims, self.place, self.rng, self.rounding = shape, dims, place, rng, rounding
        self.tokens = math.prod(shape)
        self.is_clean = ratio == 0
        self.culprit = np.zeros(dims)
        self.culprit[0] = ratio * math.sqrt(dims)
        self.innocents = self.tokens if self.is_clean else self.tokens - 1
        noise = math.sqrt(self.innocents) * rng.standard_normal(dims)
        self.whole = noise + self.culprit
        self.norm = float(np.linalg.norm(self.whole))
        self.sums: dict[tuple[int, int], np.ndarray] = {(0, self.tokens): noise}
        self.remaining, self.last = self.whole.copy(), np.zeros(dims)
        self.cost_sweeps, self.layer_norms = 0.0, {}
        self._signals: WindowSignals | None = None
        self._base: Tensor | None = None
        self.projections: np.ndarray | None = None

    @property
    def grad_norm(self) -> float:
        """||g||."""
        return self.norm / self.tokens

    # The tokens' parts along g, drawn when the shares are asked for ---------------------------------------------------

    def draw_projections(self) -> np.ndarray:
        """<g_t, g>/||g|| of every token in units of s, flat."""
        if self.projections is None:
            along = float(self.culprit @ self.whole) / self.norm
            values = self.rng.standard_normal(self.tokens)
            if not self.is_clean:
                values[self.place] = 0.0
            mean = values.sum() / self.innocents
            values += (self.norm - along) / self.innocents - mean
            if not self.is_clean:
                values[self.place] = along
            self.projections = values
        return self.projections

    def draw_norms(self) -> np.ndarray:
        """Norm of every token's gradient in units of s, given its part along g."""
        squares = self.draw_projections() ** 2 + self.rng.chisquare(max(self.dims - 1, 1), self.tokens)
        if not self.is_clean:
            squares[self.place] = float(self.culprit @ self.culprit)
        return np.sqrt(squares)

    @property
    def signals(self) -> WindowSignals:
        """What the forward passes would have left behind: head norms in proportion to the full norms."""
        if self._signals is None:
            norms = torch.from_numpy(self.draw_norms()).float().reshape(self.shape) / self.tokens
            self._signals = WindowSignals(
                mask=torch.ones(self.shape, dtype=torch.bool),
                slope=-norms,
                logprobs=torch.full(self.shape, -1.0),
                head_norms=norms,
                log_ratios=torch.zeros(self.shape),
                reference_gaps=torch.full(self.shape, math.nan),
                token_ids=torch.zeros(self.shape, dtype=torch.int64),
                advantages=torch.ones(self.shape[:-1]),
            )
        return self._signals

    @property
    def base_losses(self) -> Tensor:
        """Linearised losses of the training forward."""
        if self._base is None:
            self._base = self.signals.slope.double() * self.signals.logprobs.double()
        return self._base

    def linear_losses(self, shift: float, sequences: Tensor | None = None) -> Tensor:
        """Linearised losses at theta + shift * g/||g||."""
        self.cost_sweeps += (1.0 if sequences is None else float(sequences.double().mean())) / 3
        moved = torch.from_numpy(self.draw_projections()).reshape(self.shape) * (shift / self.tokens)
        if self.rounding:
            errors = torch.from_numpy(self.rng.standard_normal(self.tokens)).reshape(self.shape)
            moved = moved + self.signals.slope.double() * errors * (math.sqrt(2.0) * self.rounding)
        return self.base_losses + moved

    # Gradients of some tokens -----------------------------------------------------------------------------------------

    def subset_gradient(self, tokens: Tensor, *, is_kept: bool = False) -> SubsetGradient:
        """Kept: a segment of the search. Not kept: single tokens that are to be measured and deducted."""
        if is_kept:
            flat = tokens.flatten()
            first, count = int(flat.to(torch.uint8).argmax()), int(flat.sum())
            self._note_cost(first, count)
            vector = self.segment(first, first + count)
        else:
            vector = sum((self._token(place) for place in tokens.flatten().nonzero().flatten().tolist()), self._zero)
        self.last = vector
        return SubsetGradient(norm=float(np.linalg.norm(vector)) / self.tokens, gradient=vector if is_kept else None)

    @property
    def _zero(self) -> np.ndarray:
        return np.zeros(self.dims)

    def _note_cost(self, first: int, count: int) -> None:
        micro_batches, _, sequences, length = self.shape
        own = min(count, sequences * length)
        inside = first % (sequences * length)
        rows = (inside + own - 1) // length - inside // length + 1
        width = length if rows > 1 else (inside + own - 1) % length + 1
        self.cost_sweeps += rows * width / (micro_batches * sequences * length)

    def segment(self, first: int, end: int) -> np.ndarray:
        """Sum over a range of tokens, drawn given the sums that are known already."""
        if (first, end) not in self.sums:
            outer = min((r for r in self.sums if r[0] <= first and end <= r[1]), key=lambda r: r[1] - r[0])
            if outer[0] < first:
                self._split(outer, first)
                outer = (first, outer[1])
            if end < outer[1]:
                self._split(outer, end)
        holds = not self.is_clean and first <= self.place < end
        return self.sums[first, end] + (self.culprit if holds else 0.0)

    def _split(self, outer: tuple[int, int], at: int) -> None:
        """A Gaussian bridge: the first part of a sum, given the sum."""
        left, right = self._innocents(outer[0], at), self._innocents(at, outer[1])
        total = self.sums[outer]
        part = total * (left / (left + right))
        part = part + math.sqrt(left * right / (left + right)) * self.rng.standard_normal(self.dims)
        self.sums[outer[0], at], self.sums[at, outer[1]] = part, total - part

    def _innocents(self, first: int, end: int) -> int:
        return end - first - int(not self.is_clean and first <= self.place < end)

    def _token(self, place: int) -> np.ndarray:
        if (place, place + 1) in self.sums:
            return self.segment(place, place + 1)
        if place == self.place and not self.is_clean:
            return self.culprit
        # An innocent: its part along g and its norm are known, the direction beside g is free.
        unit = self.whole / self.norm
        beside = self.rng.standard_normal(self.dims)
        beside -= (beside @ unit) * unit
        along = float(self.draw_projections()[place])
        norm = float(self.signals.head_norms.flatten()[place]) * self.tokens  # type: ignore[union-attr]
        return along * unit + math.sqrt(max(norm**2 - along**2, 0.0)) * beside / np.linalg.norm(beside)

    def difference(self, parent: SubsetGradient, part: SubsetGradient) -> SubsetGradient:
        """Parent minus part."""
        vector = parent.gradient - part.gradient
        return SubsetGradient(norm=float(np.linalg.norm(vector)) / self.tokens, gradient=vector)

    def weight_norm(self) -> float:
        """No rounding of weights here."""
        return 0.0

    def deduct(self, part: SubsetGradient) -> Deduction:
        """Take the last gradient away."""
        self.remaining = self.remaining - self.last
        norm = float(np.linalg.norm(self.remaining)) / self.tokens
        return Deduction(remaining_norm=norm, share=float(self.last @ self.whole) / self.norm**2)

    def start_over(self) -> None:
        """Forget all deductions."""
        self.remaining = self.whole.copy()


class MaterializedStep(Step):
    """The same step with every vector held, the judge of the draws at small N and D."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.vectors = self.rng.standard_normal((self.tokens, self.dims))
        if not self.is_clean:
            self.vectors[self.place] = self.culprit
        self.whole = self.vectors.sum(axis=0)
        self.norm = float(np.linalg.norm(self.whole))
        self.remaining = self.whole.copy()

    def draw_projections(self) -> np.ndarray:
        """Inner products with the unit gradient."""
        return self.vectors @ self.whole / self.norm

    def draw_norms(self) -> np.ndarray:
        """Norms of the rows."""
        return np.linalg.norm(self.vectors, axis=1)

    def segment(self, first: int, end: int) -> np.ndarray:
        """Sum of the rows."""
        return self.vectors[first:end].sum(axis=0)

    def _token(self, place: int) -> np.ndarray:
        return self.vectors[place]


def trained_states(
    dims: float, runs: int, rng: np.random.Generator, *, levels: int = MEMORY, noncentrality: float = 0.0
) -> list[TriggerState]:
    """Trigger memories after so many clean steps, by the package's own step function.

    ``noncentrality``: squared norm of what all tokens share, over that of the noise in one dimension.
    """
    config = TriggerConfig(min_norm=0.0)
    states = []
    for _ in range(runs):
        state = TriggerState()
        for norm in np.sqrt(rng.noncentral_chisquare(dims, noncentrality, levels)):
            reading = TriggerReading(norm=float(norm), window_tokens=1.0, layer_shares={})  # level: norm * sqrt(N)
            state = trigger_step(config, state, reading)
        states.append(state)
    return states


def thresholds(states: Iterable[TriggerState], tokens: int, *, factor: float = FACTOR) -> np.ndarray:
    """The package's thresholds, in units of the norm of g."""
    config = TriggerConfig(min_norm=0.0, factor=factor)
    return np.array([spike_threshold(config, state, tokens) for state in states], dtype=float)


def trigger_rate(
    states: list[TriggerState],
    ratio: float,
    tokens: int,
    dims: float,
    trials: int,
    rng: np.random.Generator,
    *,
    factor: float = FACTOR,
    noncentrality: float = 0.0,
) -> float:
    """Share of simulated steps over the threshold."""
    limits = rng.choice(thresholds(states, tokens, factor=factor), trials)
    innocents = tokens if ratio == 0 else tokens - 1
    draws = rng.noncentral_chisquare(dims, ratio**2 * dims / innocents + noncentrality, trials)
    return float((np.sqrt(innocents * draws) / tokens > limits).mean())


def top_share_rate(ratio: float, tokens: int, dims: float, trials: int, rng: np.random.Generator) -> float:
    """Share of simulated steps in which the culprit's inner product with g is the largest.

    The largest of the innocents' normals is drawn by its inverse distribution; their mean, 1/sqrt(N), is left out.
    """
    size, innocents = ratio * math.sqrt(dims), tokens - 1
    along = math.sqrt(innocents) * rng.standard_normal(trials)
    norms = np.sqrt((size + along) ** 2 + innocents * rng.chisquare(dims - 1, trials))
    projection = size * (size + along) / norms
    upper = -np.expm1(np.log(rng.random(trials)) / innocents)
    largest = -torch.special.ndtri(torch.from_numpy(upper)).numpy()
    return float((projection > (norms - projection) / innocents + largest).mean())


@dataclass
class Outcome:
    """Counts over simulated searches of one kind."""

    steps: int = 0
    right: int = 0
    innocents: int = 0
    probes: list[int] = field(default_factory=list)
    sweeps: list[float] = field(default_factory=list)
    completeness: list[float] = field(default_factory=list)
    over_floor: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def searched(
    kind: str,
    shape: tuple[int, int, int, int],
    dims: int,
    ratio: float,
    states: list[TriggerState],
    trials: int,
    rng: np.random.Generator,
    *,
    is_forced: bool = True,
    make: Callable[..., Step] = Step,
    rounding: float = 0.0,
) -> Outcome:
    """Run the package's search on simulated steps; ``is_forced`` searches steps that did not trigger as well."""
    outcome, tokens = Outcome(), math.prod(shape)
    settings = LadderSettings(search=kind, probe_budget=400)  # type: ignore[arg-type]
    for _ in range(trials):
        limit = float(thresholds([states[rng.integers(len(states))]], tokens)[0])
        step = make(shape, dims, ratio, int(rng.integers(tokens)), rng, rounding=rounding)
        outcome.steps += 1
        if not is_forced and step.grad_norm <= limit:
            continue
        _ = step.signals, step.base_losses  # the draws are not the search's work
        began = time.process_time()
        finding = localized(step, threshold=limit, tau_token=limit * math.sqrt(tokens), settings=settings)
        outcome.seconds.append(time.process_time() - began)
        named = {culprit.address for culprit in finding.culprits}
        true = TokenAddress(*(int(i) for i in np.unravel_index(step.place, shape)))
        is_right = true in named and ratio > 0
        outcome.right += is_right
        outcome.innocents += len(named) - is_right
        outcome.probes.append(finding.backward_probes)
        outcome.sweeps.append(finding.cost_sweeps)
        if kind != "bisect":
            outcome.completeness.append(finding.completeness or math.nan)
            sizes = np.abs(step.draw_projections()) / step.norm
            estimates = np.sqrt(sizes) * step.grad_norm
            outcome.over_floor.append(int((np.delete(estimates, step.place) >= CULPRIT_FRAC * limit).sum()))
    return outcome


# ---- the sections of the report ----------------------------------------------------------------------------------


class Ledger:
    """Comparisons of formula and simulation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def compare(self, what: str, formula: float, simulated: float, trials: int, **where: Any) -> None:
        """Note one pair of probabilities."""
        error = math.sqrt(max(formula * (1 - formula), 1.0 / trials / 4) / trials)
        is_close = abs(formula - simulated) <= ABSOLUTE_TOLERANCE + STANDARD_ERRORS * error
        row = {"what": what, **where, "formula": round(formula, 4), "simulated": round(simulated, 4), "trials": trials}
        self.rows.append({**row, "ok": bool(is_close)})

    @property
    def worst(self) -> float:
        """Largest distance of a formula from its simulation."""
        return max(abs(row["formula"] - row["simulated"]) for row in self.rows)


def shape_of(tokens: int) -> tuple[int, int, int, int]:
    """Four micro-batches over more ranks as the step grows: 1,024 ranks at ten million tokens."""
    return {
        1_000: (4, 1, 2, 125),
        10_000: (4, 4, 4, 156),
        100_000: (4, 16, 4, 390),
        1_000_000: (4, 128, 4, 488),
        10_000_000: (4, 1024, 4, 610),
    }[tokens]


def alarms(ledger: Ledger, trials: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """False alarms of the trigger, and of one clean segment of the search, by D and factor."""
    table = []
    for dims in (1, 2, 4, 10, 100, 1000):
        states = trained_states(dims, MEMORIES, rng)
        row: dict[str, Any] = {"D": dims}
        for factor in (1.2, 2.0, 3.0, 5.0):
            formula = trigger_false_alarm(dims, factor=factor)
            rate = trigger_rate(states, 0.0, 1_000_000, dims, trials, rng, factor=factor)
            ledger.compare("trigger_false_alarm", formula, rate, trials, D=dims, factor=factor)
            row[f"x{factor:g}"] = formula
        table.append(row)
    return table


def powers(
    ledger: Ledger, sizes: Iterable[int], dims: int, trials: int, searches: Mapping[int, int], rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Power of every stage at ratios around its own half-power point."""
    states = trained_states(dims, MEMORIES, rng)
    table = []
    for size in sizes:
        shape = shape_of(size)
        tokens = math.prod(shape)
        half = half_power_ratios(tokens, dims, shape[0])
        row: dict[str, Any] = {"N": tokens, "D": dims, "ranks": shape[1], **half}
        for part in (0.9, 0.97, 1.0, 1.03, 1.1):
            ratio = part * half["trigger"]
            rate = trigger_rate(states, ratio, tokens, dims, trials, rng)
            ledger.compare(
                "trigger_power", trigger_power(ratio, tokens, dims), rate, trials, N=tokens, D=dims, part=part
            )
        for part in (0.7, 0.9, 1.0, 1.1, 1.3):
            ratio = part * half["top_share"]
            rate = top_share_rate(ratio, tokens, dims, trials, rng)
            formula = top_share_power(ratio, tokens, dims)
            ledger.compare("top_share_power", formula, rate, trials, N=tokens, D=dims, part=part)
        count = searches[size]
        segments = [tokens // shape[0] // 2**level for level in range(int(math.log2(tokens // shape[0])) + 1)]
        for part in (0.9, 1.0, 1.1) if count >= 20 else (0.9, 1.1):
            ratio = part * half["naming"]
            outcome = searched("directional", shape, dims, ratio, states, count, rng, rounding=1e-6)
            formula = naming_power(ratio, tokens, dims)
            ledger.compare("naming_power", formula, outcome.right / count, count, N=tokens, D=dims, part=part)
            row["innocents_named"] = row.get("innocents_named", 0) + outcome.innocents
            row["innocents_over_floor"] = row.get("innocents_over_floor", 0) + sum(outcome.over_floor)
            ratio = part * half["search"]
            outcome = searched("bisect", shape, dims, ratio, states, count, rng)
            formula = search_power(ratio, segments, dims)
            ledger.compare("search_power", formula, outcome.right / count, count, N=tokens, D=dims, part=part)
            row["innocents_found"] = row.get("innocents_found", 0) + outcome.innocents
        clear = 1.2 * half["trigger"]
        ladder = searched("auto", shape, dims, clear, states, count, rng, is_forced=False, rounding=1e-6)
        formula = trigger_power(clear, tokens, dims)
        ledger.compare("whole_ladder", formula, ladder.right / count, count, N=tokens, D=dims, part=1.2)
        shares = searched("directional", shape, dims, clear, states, count, rng, is_forced=False, rounding=1e-6)
        search = searched("bisect", shape, dims, clear, states, count, rng, is_forced=False)
        row |= {
            "completeness_off": max(abs(value - 1) for value in shares.completeness) if shares.completeness else None,
            "ladder_sweeps": float(np.mean(ladder.sweeps)) if ladder.sweeps else None,
            "shares_sweeps": float(np.mean(shares.sweeps)) if shares.sweeps else None,
            "ladder_host_seconds": float(np.mean(ladder.seconds)) if ladder.seconds else None,
            "search_probes": max(search.probes) if search.probes else None,
            "search_probes_formula": search_probes(shape[0], shape[1], shape[2] * shape[3]) + 1,
            "search_sweeps": float(np.mean(search.sweeps)) if search.sweeps else None,
        }
        if search.probes and not 0 <= row["search_probes_formula"] - max(search.probes) <= 1:
            ledger.compare("search_probes", row["search_probes_formula"], row["search_probes"], 1, N=tokens)
        row["searches"] = count * (9 if count >= 20 else 7)
        row["innocents_named"] += ladder.innocents + shares.innocents
        row["innocents_found"] += search.innocents
        table.append(row)
    return table


def dimensions(ledger: Ledger, tokens: int, trials: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """The half-power ratio of the largest share, and how sharp the trigger is, by D."""
    table = []
    for dims in (3, 10, 100, 1_000, 10_000, 100_000):
        states = trained_states(dims, MEMORIES, rng)
        half = half_power_ratios(tokens, dims, 4)
        for part in (0.9, 1.0, 1.1):
            ratio = part * half["trigger"]
            rate = trigger_rate(states, ratio, tokens, dims, trials, rng)
            ledger.compare(
                "trigger_power", trigger_power(ratio, tokens, dims), rate, trials, N=tokens, D=dims, part=part
            )
            ratio = part * half["top_share"]
            rate = top_share_rate(ratio, tokens, dims, trials, rng)
            formula = top_share_power(ratio, tokens, dims)
            ledger.compare("top_share_power", formula, rate, trials, N=tokens, D=dims, part=part)
        sure = top_share_ratio(0.95, tokens, dims)
        row = {"N": tokens, "D": dims, "trigger": half["trigger"], "top_share": half["top_share"], "sure": sure}
        table.append(row)
    return table


def common_parts(ledger: Ledger, trials: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Half-power ratio of the trigger when all tokens share a part of their gradient, at D = 1,000."""
    dims, table = 1000, []
    for tokens in (10_000, 1_000_000, 10_000_000):
        row: dict[str, Any] = {"N": tokens}
        for common in (0.0, 1e-3, 1e-2, 1e-1):
            ratio = trigger_ratio_with_common(tokens, common)
            shared = tokens * common**2 * dims
            states = trained_states(dims, MEMORIES, rng, noncentrality=shared)
            rate = trigger_rate(states, ratio, tokens, dims, trials, rng, noncentrality=shared)
            ledger.compare("half_power_with_common", 0.5, rate, trials, N=tokens, common=common)
            row[f"{common:g}"] = ratio
        table.append(row)
    return table


def brute_force(ledger: Ledger, trials: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Rates from draws against rates from materialised vectors, N = 256 and D = 24."""
    shape, dims = (4, 4, 2, 8), 24
    states = trained_states(dims, MEMORIES, rng)
    half = half_power_ratios(math.prod(shape), dims, shape[0])
    table = []
    for kind, ratio in (("directional", half["naming"]), ("bisect", half["search"]), ("auto", half["trigger"])):
        outcomes = [
            searched(kind, shape, dims, ratio, states, trials, rng, is_forced=kind != "auto", make=make)
            for make in (Step, MaterializedStep)
        ]
        drawn, held = (outcome.right / trials for outcome in outcomes)
        # Two simulations: the difference has twice the variance of one.
        ledger.compare(f"materialised_{kind}", held, drawn, trials // 2, N=math.prod(shape), D=dims)
        table.append({"search": kind, "ratio": ratio, "drawn": drawn, "materialised": held, "trials": trials})
    return table


def head_norms(ledger: Ledger, rng: np.random.Generator, tokens: int) -> list[dict[str, Any]]:
    """TokenClip by head norm: the ratio from which it acts and the innocents it touches, by the spread of the norms."""
    config, table = HeadNormConfig(), []
    for spread in (0.0, 0.5, 1.0):
        state = HeadNormState()
        for _ in range(config.warmup_steps + 20):
            norms = torch.from_numpy(_usual_norms(rng, 20_000, spread))
            level = float(quantile_of(norms, torch.ones_like(norms, dtype=torch.bool), config.quantile))
            state = head_norm_step(config, state, level)
        limit = head_norm_limit(config, state)
        weights = head_norm_weights(torch.from_numpy(_usual_norms(rng, tokens, spread)), limit)
        touched = int((weights < 1).sum())
        formula = head_norm_false_share(spread) if spread else 0.0
        ledger.compare("head_norm_false_share", formula, touched / tokens, tokens, spread=spread)
        expected = head_norm_ratio(1000, spread=spread)
        ledger.compare("head_norm_limit", 1.0, limit / expected, 1000, spread=spread)
        table.append({"spread": spread, "limit": limit, "formula": expected, "touched": touched, "of": tokens})
    return table


def _usual_norms(rng: np.random.Generator, count: int, spread: float) -> np.ndarray:
    """Norms over b: a chi of 1,000 dimensions, times a log-normal when the tokens differ."""
    return np.sqrt(rng.chisquare(1000, count) / 1000) * np.exp(spread * rng.standard_normal(count))


# ---- what a spike costs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Assumed rates of one GPU and of the wires, none of them measured here.

    Attributes:
        bf16: Effective FLOP/s of bf16 matrix products.
        fp32: Effective FLOP/s of float32 matrix products outside the tensor cores.
        memory: Bytes/s of the GPU's own memory.
        link: Bytes/s between the GPUs of a node.
        network: Bytes/s of one GPU's network card; a node of eight takes weights in through eight of them.
    """

    bf16: float = 400e12
    fp32: float = 45e12
    memory: float = 3.35e12
    link: float = 450e9
    network: float = 50e9

    def seconds(self, gathered_bytes: float, gpus: int) -> float:
        """Time for every GPU to receive so many bytes of sharded weights, or to give as many bytes of gradient."""
        return gathered_bytes / (self.link if gpus <= 8 else min(self.link, 8 * self.network))


@dataclass(frozen=True)
class Load:
    """What one GPU works on in a step."""

    micro_batches: int = 4
    sequences: int = 4
    prompt: int = 414
    length: int = 610

    @property
    def positions(self) -> int:
        """Positions of one micro-batch on one GPU."""
        return self.sequences * (self.prompt + self.length)


def pass_cost(
    parameters: float, gpus: int, positions: float, machine: Machine, *, has_backward: bool, is_fp32: bool
) -> tuple[float, float]:
    """(bytes each GPU moves over the wires, seconds) of one pass over one micro-batch under full sharding.

    Forward 2 FLOP per parameter and position, backward 4. Weights are gathered once per forward and once per backward
    in the compute type, gradients scattered in float32; wires and arithmetic overlap, the slower one counts.
    """
    flops = (6 if has_backward else 2) * parameters * positions
    part = (gpus - 1) / gpus
    weights = (2 if has_backward else 1) * parameters * (4 if is_fp32 else 2) * part
    moved = weights + (4 * parameters * part if has_backward else 0.0)
    arithmetic = flops / (machine.fp32 if is_fp32 else machine.bf16)
    return moved, max(arithmetic, machine.seconds(moved, gpus))


def token_probe_positions(load: Load, place: int) -> list[int]:
    """Positions run by each token-level probe of the search on the culprit's rank, for a culprit at flat ``place``."""
    found, first, count = [], 0, load.sequences * load.length
    while count > 1:
        left = count // 2
        rows = (first + left - 1) // load.length - first // load.length + 1
        width = load.length if rows > 1 else (first + left - 1) % load.length + 1
        found.append(rows * (load.prompt + width))
        first, count = (first, left) if place < first + left else (first + left, count - left)
    return found


def spike_cost(
    parameters: float, gpus: int, load: Load | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """Passes, bytes and seconds of one spike with one culprit, by the way it is searched."""
    load, machine = load or Load(), machine or Machine()
    one = load.prompt + load.length  # a masked backward runs one sequence, on the other ranks a stand-in

    def total(passes: list[tuple[float, bool, bool]]) -> dict[str, float]:
        costs = [
            pass_cost(parameters, gpus, positions, machine, has_backward=backward, is_fp32=fp32)
            for positions, backward, fp32 in passes
        ]
        # Moving the weights along g and back: a copy, an addition and a copy back, about 28 bytes per own parameter.
        shifts = 2 * any(not backward for _, backward, _ in passes)
        moving = shifts * 28 * parameters / gpus / machine.memory
        return {
            "passes": len(passes),
            "gigabytes": round(sum(moved for moved, _ in costs) / 1e9, 1),
            "seconds": round(sum(seconds for _, seconds in costs) + moving, 2),
        }

    sweep = {fp32: [(load.positions, True, fp32)] * load.micro_batches for fp32 in (False, True)}
    forward = {fp32: [(load.positions, False, fp32)] * load.micro_batches for fp32 in (False, True)}
    halvings = [(load.positions, True, False)] * math.ceil(math.log2(gpus))
    tokens = [(positions, True, False) for positions in token_probe_positions(load, load.sequences * load.length // 3)]
    return {
        "parameters": parameters,
        "gpus": gpus,
        "N": load.micro_batches * gpus * load.sequences * load.length,
        "state_gigabytes": round(16 * parameters / gpus / 1e9, 1),
        "sweep": total(sweep[False]),
        "head_norms": total([(one, True, False)]),
        "shares_autocast": total([*forward[True], *forward[True], (one, True, False)]),
        "shares_fail_in_bf16": total([*forward[False], *forward[False], (one, True, False)]),
        "search": total([*sweep[False], *halvings, *tokens, (one, True, False)]),
        "sweep_fp32": total(sweep[True]),
        # Against the log-probs of training; only the culprit's sequence is run on the other side as well.
        "shares_fp32": total([*forward[True], (one, False, True), (one, True, True)]),
    }


# ---- words and pictures ------------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    lines = ["### Ratio a/b at which half of the culprits are seen", ""]
    lines += ["| N | ranks | trigger | search alone | shares alone name it | largest share | head norm |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in results["powers"]:
        figures = " | ".join(f"{row[name]:,.1f}" for name in ("trigger", "search", "naming", "top_share", "head_norm"))
        lines.append(f"| {row['N']:,} | {row['ranks']:,} | {figures} |")
    lines += ["", "### Searches on these steps", ""]
    lines += ["| N | searches | innocents named | sum of shares off by, most | probes of the search | host seconds |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in results["powers"]:
        lines.append(
            f"| {row['N']:,} | {row['searches']:,} | {row['innocents_named'] + row['innocents_found']} | "
            f"{row['completeness_off']:.1e} | {row['search_probes']} (formula {row['search_probes_formula']}) | "
            f"{row['ladder_host_seconds']:.2g} |"
        )
    lines += ["", "### Half-power ratio of the trigger when tokens share a part of their gradient", ""]
    lines += ["| N | nothing shared | 0.1 % of b | 1 % | 10 % |", "|---|---|---|---|---|"]
    for row in results["common"]:
        lines.append("| " + " | ".join(f"{value:,.0f}" for value in row.values()) + " |")
    lines += ["", "### Chance of a false alarm per clean step, by effective dimension and factor", ""]
    lines += ["| D | factor 1.2 | 2 | 3 | 5 (default) |", "|---|---|---|---|---|"]
    for row in results["false_alarms"]:
        cells = [f"{value:,}" if name == "D" else chance(value) for name, value in row.items()]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "### Ratios at a million tokens, by effective dimension",
        "",
        "| D | trigger | largest share | in 95 % |",
        "|---|---|---|---|",
    ]
    for row in results["dimensions"]:
        lines.append(f"| {row['D']:,} | {row['trigger']:,.0f} | {row['top_share']:,.1f} | {row['sure']:,.0f} |")
    lines += ["", "### One spike: passes, GB over each GPU's wires, seconds", ""]
    lines += ["| model | GPUs | N | " + " | ".join(COSTS.values()) + " |", "|---" * (3 + len(COSTS)) + "|"]
    for row in results["costs"]:
        cells = [
            f"{row[kind]['passes']}, {row[kind]['gigabytes']:,.0f} GB, {row[kind]['seconds']:,.1f} s" for kind in COSTS
        ]
        lines.append(f"| {row['parameters'] / 1e9:.0f} B | {row['gpus']:,} | {row['N']:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


COSTS = {
    "sweep": "bf16 sweep",
    "head_norms": "head norms first, bf16",
    "shares_autocast": "shares, autocast",
    "shares_fail_in_bf16": "shares that fail, sharded bf16",
    "search": "reference search, bf16",
    "sweep_fp32": "float32 sweep",
    "shares_fp32": "shares, float32",
}


def chance(value: float) -> str:
    """A probability for a table."""
    return "under 1e-15" if value < 1e-15 else f"{value:.1e}"


STAGES = {
    "trigger": "the trigger fires",
    "search": "search alone finds it",
    "naming": "shares alone name it",
    "top_share": "it has the largest share",
    "head_norm": "its head norm stands out",
}


def picture(results: Mapping[str, Any], dims: int) -> str:
    """An SVG: the ratio from which each stage sees half of the culprits, over N; dots where the simulation crossed."""
    grid = [round(10 ** (3 + index / 10)) for index in range(41)]
    ratios = [half_power_ratios(tokens, dims, 4) for tokens in grid]
    return log_chart(
        f"How large must one culprit be to be seen? (D = {dims:,})",
        "loss tokens in the step",
        "culprit's norm over a usual token's",
        {
            words: [(tokens, half[name]) for tokens, half in zip(grid, ratios, strict=True)]
            for name, words in STAGES.items()
        },
        dots={words: results["crossings"].get(name, []) for name, words in STAGES.items()},
    )


def crossings(
    sizes: Iterable[int], dims: int, trials: int, rng: np.random.Generator
) -> dict[str, list[tuple[int, float]]]:
    """Where the simulated power of trigger and largest share crosses one half, by bisection on the ratio."""
    states = trained_states(dims, MEMORIES, rng)
    rates: dict[str, Callable[[float, int], float]] = {
        "trigger": lambda ratio, tokens: trigger_rate(states, ratio, tokens, dims, trials, rng),
        "top_share": lambda ratio, tokens: top_share_rate(ratio, tokens, dims, trials, rng),
    }
    found: dict[str, list[tuple[int, float]]] = {}
    for name, rate in rates.items():
        for size in sizes:
            tokens = math.prod(shape_of(size))
            low, high = 0.0, math.log(1e5)
            for _ in range(14):
                middle = (low + high) / 2
                low, high = (low, middle) if rate(math.exp(middle), tokens) > 0.5 else (middle, high)
            found.setdefault(name, []).append((tokens, math.exp((low + high) / 2)))
    return found


def main() -> None:
    """Simulate, compare, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 100,000 tokens, fewer trials")
    parser.add_argument("--markdown", default="", help="write the tables to this file")
    parser.add_argument("--plot", default="", help="write the picture to this SVG file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng, ledger = np.random.default_rng(options.seed), Ledger()
    dims = 1000
    sizes = (1_000, 10_000, 100_000) if options.quick else (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    searches = (
        {1_000: 20, 10_000: 20, 100_000: 5}
        if options.quick
        else {1_000: 200, 10_000: 200, 100_000: 60, 1_000_000: 12, 10_000_000: 3}
    )
    trials = 4_000 if options.quick else 20_000
    results: dict[str, Any] = {
        "false_alarms": alarms(ledger, trials, rng),
        "powers": powers(ledger, sizes, dims, trials, searches, rng),
        "common": common_parts(ledger, trials, rng),
        "dimensions": dimensions(ledger, 1_000_000, trials, rng),
        "materialised": brute_force(ledger, 100 if options.quick else 1_000, rng),
        "head_norms": head_norms(ledger, rng, 200_000 if options.quick else 10_000_000),
        "costs": [spike_cost(parameters, gpus) for parameters in (7e9, 70e9) for gpus in (8, 64, 256, 1024)],
        "crossings": crossings(sizes, dims, 2_000, rng) if options.plot else {},
    }
    if options.markdown:
        Path(options.markdown).write_text(markdown(results), encoding="utf-8")
    if options.plot:
        Path(options.plot).write_text(picture(results, dims), encoding="utf-8")
    failed = [row for row in ledger.rows if not row["ok"]]
    innocents = sum(row["innocents_named"] + row["innocents_found"] for row in results["powers"])
    record = {
        "name": "detection_power",
        "value": round(ledger.worst, 4),
        "bar": f"each within {ABSOLUTE_TOLERANCE} + {STANDARD_ERRORS:g} standard errors",
        "ok": not failed and innocents == 0,
        "comparisons": len(ledger.rows),
        "failed": failed,
        "innocents_named": innocents,
        "figures": {name: value for name, value in results.items() if name != "crossings"},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
