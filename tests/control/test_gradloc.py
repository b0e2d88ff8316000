from __future__ import annotations

import dataclasses
import json
import math

import pytest

from lightning_rlstab.control.gradloc import (
    TriggerConfig,
    TriggerReading,
    TriggerState,
    spike_threshold,
    trigger_step,
)


def calm(norm: float = 1.0, tokens: float = 100.0, **fields: object) -> TriggerReading:
    return TriggerReading(**{"norm": norm, "window_tokens": tokens, "layer_shares": {}, **fields})  # type: ignore[arg-type]


def after(config: TriggerConfig, *readings: TriggerReading) -> TriggerState:
    state = TriggerState()
    for reading in readings:
        state = trigger_step(config, state, reading)
    return state


def test_a_given_threshold_scales_with_the_root_of_the_tokens() -> None:
    config = TriggerConfig(tau_token=30.0)
    assert spike_threshold(config, TriggerState(), 100) == 3.0
    assert spike_threshold(config, TriggerState(), 400) == 1.5


def test_a_learned_threshold_waits_for_its_warm_up() -> None:
    config = TriggerConfig(warmup_steps=3, min_norm=0.0)
    assert spike_threshold(config, after(config, calm(), calm()), 100) is None
    assert spike_threshold(config, after(config, calm(), calm(), calm()), 100) == pytest.approx(5.0)


def test_one_spike_in_the_memory_does_not_move_the_median() -> None:
    config = TriggerConfig(warmup_steps=3, min_norm=0.0)
    state = after(config, *[calm()] * 5, calm(norm=1e6), *[calm()] * 5)
    assert spike_threshold(config, state, 100) == pytest.approx(5.0)


def test_a_small_norm_never_triggers_while_the_level_is_learned() -> None:
    config = TriggerConfig(warmup_steps=1, min_norm=1.0)
    assert spike_threshold(config, after(config, calm(norm=1e-3)), 100) == 1.0


@pytest.mark.parametrize("norm", [0.0, math.nan, math.inf, None])
def test_what_is_not_applied_not_finite_or_zero_teaches_nothing(norm: float | None) -> None:
    config = TriggerConfig()
    assert after(config, calm(norm=norm)).levels == ()  # type: ignore[arg-type]


def test_the_memory_is_bounded() -> None:
    config = TriggerConfig(memory_steps=4)
    assert len(after(config, *[calm(norm=float(i + 1)) for i in range(9)]).levels) == 4


def test_a_level_that_stays_high_is_accepted_after_so_many_steps() -> None:
    """A real change of level must not lock the trigger for ever."""
    config = TriggerConfig(warmup_steps=2, max_unresolved_steps=3, min_norm=0.0)
    state = after(config, calm(), calm())
    stuck = calm(norm=None, is_spike=True, is_unresolved=True)  # type: ignore[arg-type]
    for _ in range(2):
        state = trigger_step(config, state, stuck)
    assert spike_threshold(config, state, 100) == pytest.approx(5.0)
    state = trigger_step(config, state, stuck)
    assert (state.releases, state.spikes, state.levels) == (1, 3, ())
    state = trigger_step(config, trigger_step(config, state, calm(norm=20.0)), calm(norm=20.0))
    assert spike_threshold(config, state, 100) == pytest.approx(100.0)


def test_a_resolved_spike_between_breaks_the_row() -> None:
    config = TriggerConfig(max_unresolved_steps=2)
    stuck = calm(norm=None, is_spike=True, is_unresolved=True)  # type: ignore[arg-type]
    state = after(config, stuck, calm(is_spike=True), stuck)
    assert state.releases == 0
    assert state.spikes == 3


def test_usual_layers_follow_slowly_and_start_at_what_was_seen_first() -> None:
    config = TriggerConfig()
    state = after(config, calm(layer_shares={"a": 0.5, "b": 0.5}), calm(layer_shares={"a": 1.0, "b": 0.0}), calm())
    assert dict(state.usual_layers) == pytest.approx({"a": 0.55, "b": 0.45})


def test_its_memory_survives_json() -> None:
    state = after(TriggerConfig(), calm(layer_shares={"a": 1.0}))
    plain = json.loads(json.dumps(dataclasses.asdict(state)))
    assert plain["levels"] == [10.0]
    assert plain["usual_layers"] == [["a", 1.0]]


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("tau_token", -1.0, "trigger"),
        ("factor", 1.0, "trigger_factor"),
        ("min_norm", math.inf, "min_norm"),
        ("memory_steps", 0, "memory_steps"),
        ("max_unresolved_steps", 2.0, "max_unresolved_steps"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must"):
        TriggerConfig(**{field: value})  # type: ignore[arg-type]
