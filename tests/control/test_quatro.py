from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from typing import Any

import pytest

from lightning_rlstab.control.quatro import (
    EntropyFloorConfig,
    EntropyFloorState,
    KLAnchorConfig,
    KLAnchorState,
    KLReading,
    entropy_floor,
    entropy_mean,
    step_entropy_floor,
    step_kl_anchor,
)

NAN, INF = math.nan, math.inf


def anchored(
    start: float, kl: float, *, steps: int = 2000, power: float = 1.0, lag: float = 20.0, noise: float = 0.0
) -> tuple[list[float], list[float]]:
    """A policy whose KL drifts, with a lag in steps, towards 0.0008 / coef ** power (0.02 at a coefficient of 0.04)."""
    config, state, source = KLAnchorConfig(), KLAnchorState(coef=start), random.Random(0)
    kls, coefs = [], []
    for _ in range(steps):
        settled = 0.02 * (0.04 / state.coef) ** power
        kl += (settled - kl) / lag
        seen = kl * math.exp(noise * source.gauss(0, 1))
        state = step_kl_anchor(config, state, KLReading(capped_sum=seen * 1000, tokens=1000))
        kls.append(kl)
        coefs.append(state.coef)
    return kls, coefs


STARTS = [
    (0.001, 0.0), (0.001, 0.5), (0.005, 0.02), (0.01, 0.001), (0.02, 0.04),
    (0.04, 0.02), (0.04, 0.2), (0.08, 0.02), (0.15, 0.0), (0.2, 0.3),
]  # fmt: skip


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("start", "kl"), STARTS)
def test_from_ten_starts_the_kl_comes_to_its_target_and_stays(start: float, kl: float, power: float) -> None:
    kls, coefs = anchored(start, kl, power=power)
    settled = kls[-500:]
    assert all(abs(value - 0.02) <= 0.2 * 0.02 for value in settled)
    assert len(set(coefs[-500:])) == 1  # not cycling


@pytest.mark.parametrize(("start", "kl"), STARTS)
def test_noisy_readings_do_not_make_it_cycle(start: float, kl: float) -> None:
    kls, coefs = anchored(start, kl, noise=0.3, steps=3000)
    assert all(abs(value - 0.02) <= 0.25 * 0.02 for value in kls[-1000:])
    assert max(coefs[-1000:]) / min(coefs[-1000:]) < 1.5


def test_without_a_dead_band_the_pair_cycles_for_ever() -> None:
    """What the band is for."""
    config, state, moves = KLAnchorConfig(dead_band=0.0, every_steps=1), KLAnchorState(coef=0.04), []
    for _ in range(400):
        state = step_kl_anchor(config, state, KLReading(capped_sum=0.0201 if len(moves) % 2 else 0.0199, tokens=1))
        moves.append(state.coef)
    assert len(set(moves[-100:])) > 50


def test_it_moves_by_the_recipes_factors_and_only_every_n_steps() -> None:
    config = KLAnchorConfig(every_steps=3)
    state = KLAnchorState(coef=0.04)
    coefs = []
    for _ in range(3):
        state = step_kl_anchor(config, state, KLReading(capped_sum=5.0, tokens=100))
        coefs.append(state.coef)
    assert coefs == pytest.approx([0.04, 0.04, 0.048])
    below = KLAnchorState(coef=0.04)
    for _ in range(3):
        below = step_kl_anchor(config, below, KLReading(capped_sum=0.1, tokens=100))
    assert below.coef == pytest.approx(0.032)


def test_the_coefficient_stays_within_its_bounds() -> None:
    config = KLAnchorConfig(every_steps=1)
    high = low = KLAnchorState(coef=0.04)
    for _ in range(100):
        high = step_kl_anchor(config, high, KLReading(capped_sum=500, tokens=500))
        low = step_kl_anchor(config, low, KLReading(capped_sum=0, tokens=500))
    assert (high.coef, low.coef) == (0.2, 0.001)


@pytest.mark.parametrize(
    ("tokens", "capped"), [(4000, 1.0), (201, 1.0 + 200 * 0.001)], ids=["log-ratio of 22.6", "end token of 50 nats"]
)
def test_one_broken_token_does_not_drive_the_coefficient_to_its_bound(tokens: int, capped: float) -> None:
    """FR-041, FR-049: each token counts at most ``token_cap``; the plain means would be 1.6e6 and 0.25."""
    config, state = KLAnchorConfig(every_steps=1), KLAnchorState(coef=0.04)
    assert step_kl_anchor(config, state, KLReading(capped_sum=capped, tokens=tokens)).coef <= 0.04


def test_training_that_is_hacked_raises_the_coefficient_within_bounds() -> None:
    """FR-043: KL times ten in twenty steps."""
    config, state = KLAnchorConfig(every_steps=5), KLAnchorState(coef=0.04)
    for step in range(20):
        state = step_kl_anchor(config, state, KLReading(capped_sum=100 * 0.03 * 10 ** (step / 19), tokens=100))
    assert 0.04 < state.coef <= 0.2


def test_a_start_at_zero_is_refused() -> None:
    """FR-048."""
    with pytest.raises(ValueError, match=r"`beta` must be above 0 for the KL anchor, got 0.0"):
        KLAnchorState(coef=0.0)


def test_steps_without_tokens_or_with_a_broken_sum_leave_the_coefficient_alone() -> None:
    config, state = KLAnchorConfig(every_steps=1), KLAnchorState(coef=0.04)
    for reading in (KLReading(capped_sum=0.0, tokens=0), KLReading(capped_sum=NAN, tokens=10)):
        assert step_kl_anchor(config, state, reading).coef == 0.04


def floored(entropies: list[float], **settings: Any) -> list[EntropyFloorState]:
    config, state, states = EntropyFloorConfig(**settings), EntropyFloorState(), []
    for entropy in entropies:
        state = step_entropy_floor(config, state, entropy)
        states.append(state)
    return states


def test_above_the_floor_the_bonus_is_exactly_zero() -> None:
    """FR-053."""
    assert {state.coef for state in floored([1.0] * 50 + [0.95] * 50)} == {0.0}


def test_the_floor_is_a_share_of_the_entropy_in_the_first_steps() -> None:
    states = floored([1.0, 3.0] * 5 + [2.0])
    config = EntropyFloorConfig()
    assert entropy_floor(config, states[8]) is None
    assert entropy_floor(config, states[-1]) == pytest.approx(0.8 * 2.0)
    assert entropy_mean(states[-1]) == pytest.approx((1 + 3 + 2) / 3)


def test_a_collapse_to_almost_nothing_is_met_with_a_bounded_bonus_that_lets_go() -> None:
    """FR-054."""
    states = floored([1.0] * 10 + [0.02] * 100 + [1.0] * 10)
    coefs = [state.coef for state in states]
    assert max(coefs) == EntropyFloorConfig().coef_max
    assert coefs[-1] == 0.0
    assert states[-1].bouts == 1


def test_the_next_bout_begins_where_the_last_one_was() -> None:
    states = floored([1.0] * 10 + [0.5] * 20 + [1.0] * 10 + [0.5] * 10)
    first, last = states[29].coef, next(s.coef for s in states[40:] if s.is_active)
    assert first > 0.01
    assert last == pytest.approx(states[35].remembered_coef)


def test_the_bonus_fades_in_the_upper_half_of_the_lead_and_grows_in_the_lower() -> None:
    """The floor is 0.8 and the lead ends at 0.92: the mean comes to rest between them, not at the floor."""
    states = floored([1.0] * 10 + [0.5] * 20 + [0.89] * 20)
    coefs = [state.coef for state in states[36:]]
    assert all(after < before for before, after in itertools.pairwise(coefs) if before > 0.05)
    assert coefs[-1] >= 0.05
    just_above = [state.coef for state in floored([1.0] * 10 + [0.82] * 10)]
    assert just_above[-1] > just_above[13] >= 0.05


def test_entropy_that_explodes_is_reported() -> None:
    states = floored([1.0] * 10 + [2.5] * 10 + [1.0] * 10)
    assert states[19].is_exploding
    assert not states[-1].is_exploding


def test_a_non_finite_entropy_changes_nothing() -> None:
    config, state = EntropyFloorConfig(), floored([1.0] * 12)[-1]
    assert step_entropy_floor(config, state, NAN) is state


@pytest.mark.parametrize(
    "state", [KLAnchorState(coef=0.03, steps=3), floored([1.0] * 10 + [0.5] * 9)[-1]], ids=["kl", "entropy"]
)
def test_states_survive_json(state: Any) -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(state)))
    if "recent" in saved:
        saved["recent"] = tuple(saved["recent"])
    assert type(state)(**saved) == state


@pytest.mark.parametrize("value", [-1, NAN, INF, True, "1.0"])
@pytest.mark.parametrize("config", [KLAnchorConfig, EntropyFloorConfig])
def test_values_that_cannot_be_thresholds_are_refused_by_name(config: Any, value: Any) -> None:
    """FR-012, FR-147."""
    for field in dataclasses.fields(config):
        with pytest.raises(ValueError, match=rf"`(kl|entropy)\.{field.name}` must "):
            config(**{field.name: value})
