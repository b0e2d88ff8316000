from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest

from lightning_rlstab.control.gepo import (
    GuardReading,
    LogprobBoundsConfig,
    RobustAdvantagesConfig,
    StepGuardConfig,
    StepGuardState,
    guard_level,
    guard_limit,
    guard_ruling,
    guard_warnings,
    step_guard,
)

NAN, INF = math.nan, math.inf


def guarded(norms: list[float], **settings: Any) -> tuple[list[str], StepGuardState, list[str]]:
    """Actions, final memory and warnings of a run with these norms, until it is stopped."""
    config, state = StepGuardConfig(**settings), StepGuardState()
    actions, warnings = [], []
    for norm in norms:
        ruling = guard_ruling(config, state, norm)
        was_applied = ruling.action in ("apply", "release")
        after = step_guard(config, state, GuardReading(norm=norm, was_applied=was_applied))
        warnings += guard_warnings(config, state, after)
        actions.append(ruling.action)
        state = after
        if ruling.action == "stop":
            break
    return actions, state, warnings


def test_a_steady_run_is_never_skipped() -> None:
    actions, state, warnings = guarded([2.0 + 0.1 * math.sin(i) for i in range(500)])
    assert set(actions) == {"apply"}
    assert guard_level(state) == pytest.approx(2.0, abs=0.1)
    assert warnings == []


def test_a_thousandfold_spike_is_skipped_once_and_leaves_the_level_alone() -> None:
    calm, _, _ = guarded([2.0] * 100)
    actions, state, _ = guarded([2.0] * 100 + [2000.0] + [2.0] * 50)
    assert [i for i, action in enumerate(actions) if action == "skip"] == [100]
    assert set(calm) == {"apply"}
    assert guard_level(state) == pytest.approx(2.0)


def test_a_level_that_rises_sixfold_for_good_does_not_lock_training() -> None:
    actions, state, _ = guarded([2.0] * 100 + [12.0] * 100)
    assert actions[100:109] == ["skip"] * 8 + ["release"]
    assert set(actions[109:]) == {"apply"}
    assert (state.releases, state.total_skips) == (1, 8)
    assert guard_level(state) == pytest.approx(12.0)


def test_the_guard_is_awake_again_after_a_release() -> None:
    actions, _, _ = guarded([2.0] * 100 + [12.0] * 50 + [12000.0, 12.0])
    assert actions[-2:] == ["skip", "apply"]


def test_growth_of_one_percent_per_step_is_warned_about_and_never_skipped() -> None:
    """FR-015."""
    actions, state, warnings = guarded([2.0 * 1.01**i for i in range(1000)])
    assert set(actions) == {"apply"}
    assert state.drifts == len(warnings) >= 3
    assert "too slowly for the spike rule" in warnings[0]


def test_nan_from_the_first_step_is_skipped_and_then_stops_with_the_count() -> None:
    """FR-078, FR-080."""
    config = StepGuardConfig()
    actions, state, _ = guarded([NAN] * 100)
    assert actions == ["skip"] * 25 + ["stop"]
    assert (state.level, state.weight, state.total_nonfinite) == (0.0, 0.0, 26)
    ruling = guard_ruling(config, dataclasses.replace(state, consecutive_nonfinite=25), NAN)
    assert ruling.reason == "25 gradients in a row were not finite (`max_nonfinite_skips`)"


def test_one_bad_step_is_passed_over_and_training_goes_on() -> None:
    """FR-080."""
    actions, state, _ = guarded([2.0] * 20 + [NAN] + [2.0] * 20)
    assert actions.count("skip") == 1
    assert (state.consecutive_nonfinite, state.total_skips) == (0, 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.6, 10.0])
def test_lognormal_noise_of_sigma_one_is_almost_never_skipped(seed: int, scale: float) -> None:
    source = random.Random(seed)
    actions, state, warnings = guarded([scale * math.exp(source.gauss(0.0, 1.0)) for _ in range(10_000)])
    assert actions.count("skip") <= 10  # 0.1 %
    assert (state.releases, warnings) == (0, [])


def test_the_plain_ratio_rule_alone_would_skip_that_noise() -> None:
    source = random.Random(0)
    actions, _, _ = guarded([10 * math.exp(source.gauss(0.0, 1.0)) for _ in range(5_000)], noise_sigmas=0)
    assert actions.count("skip") > 25


def test_noise_widens_the_limit_at_most_fourfold() -> None:
    _, state, _ = guarded([10.0**i for i in range(9, -1, -1)] * 2, ratio=1e3)
    config = StepGuardConfig()
    assert guard_limit(config, state) <= 4 * config.ratio * guard_level(state)


def test_norms_falling_from_400_to_1_are_not_skipped() -> None:
    """FR-082: a fixed limit would skip them all."""
    actions, _, _ = guarded([400 * (1 / 400) ** (i / 49) for i in range(50)])
    assert set(actions) == {"apply"}


def test_an_alarm_is_given_when_more_than_a_set_share_is_skipped() -> None:
    """FR-082."""
    _, state, warnings = guarded(([2.0] * 2 + [NAN]) * 200)
    assert sum("of the recent steps were skipped" in warning for warning in warnings) == 1
    assert state.skip_frac == pytest.approx(1 / 3, abs=0.01)


def test_the_budget_of_skips_ends_in_a_clear_stop() -> None:
    actions, _, _ = guarded([2.0] * 20 + [2.0, NAN] * 30, max_total_skips=10)
    assert actions.count("skip") == 10
    assert actions[-1] == "stop"


def test_norms_at_or_below_the_hard_threshold_pass_whatever_their_ratio() -> None:
    actions, _, _ = guarded([0.01] * 100 + [5.0, 5.1])
    assert actions[-2:] == ["apply", "skip"]


def test_a_norm_of_zero_does_not_enter_the_level() -> None:
    """FR-063."""
    _, state, _ = guarded([2.0] * 50 + [0.0] * 50)
    assert guard_level(state) == pytest.approx(2.0)
    assert state.applied == 50


def test_an_early_spike_does_not_set_the_level() -> None:
    _, state, _ = guarded([2.0] * 3 + [2000.0] + [2.0] * 6)
    assert guard_level(state) < 3.0


def test_the_level_is_corrected_for_its_start() -> None:
    _, state, _ = guarded([3.0])
    assert guard_level(state) == pytest.approx(3.0)


def test_another_guards_skip_changes_nothing() -> None:
    config, (_, state, _) = StepGuardConfig(), guarded([2.0] * 20)
    assert step_guard(config, state, GuardReading(norm=2.5, was_applied=False)) is state


def test_a_step_with_a_dropped_micro_batch_is_counted_and_not_learned_from() -> None:
    config, (_, state, _) = StepGuardConfig(), guarded([2.0] * 20)
    after = step_guard(config, state, GuardReading(norm=1.5, was_applied=True, is_partial=True))
    assert (after.total_skips, after.level, after.applied) == (1, state.level, state.applied)


def test_step_is_pure_and_its_state_survives_json() -> None:
    config, (_, state, _) = StepGuardConfig(), guarded([2.0] * 20 + [NAN, 9.0])
    reading = GuardReading(norm=2.5, was_applied=True)
    restored = StepGuardState(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert restored == state
    assert step_guard(config, state, reading) == step_guard(config, restored, reading)


@pytest.mark.parametrize("value", [0, -1, NAN, INF, True, "1.0"])
@pytest.mark.parametrize(
    ("config", "field"),
    [
        (StepGuardConfig, "ratio"),
        (StepGuardConfig, "hard_threshold"),
        (StepGuardConfig, "ema_beta"),
        (StepGuardConfig, "warmup_steps"),
        (StepGuardConfig, "max_consecutive_skips"),
        (StepGuardConfig, "max_nonfinite_skips"),
        (StepGuardConfig, "max_total_skips"),
        (StepGuardConfig, "skip_frac_alarm"),
        (StepGuardConfig, "drift_ratio"),
        (RobustAdvantagesConfig, "bound"),
        (RobustAdvantagesConfig, "scale_floor"),
        (LogprobBoundsConfig, "log_ratio"),
    ],
)
def test_values_that_cannot_be_thresholds_are_refused_by_name(config: Any, field: str, value: Any) -> None:
    """FR-012, FR-147."""
    with pytest.raises(ValueError, match=rf"`\w+\.{field}` must "):
        config(**{field: value})


def test_an_unknown_way_to_isolate_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'staging'"):
        StepGuardConfig(isolate="stagings")  # type: ignore[arg-type]
