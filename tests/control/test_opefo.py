from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lightning_rlstab.control.opefo import (
    ErrorFeedbackConfig,
    ErrorFeedbackState,
    PendingResidual,
    RecoveryState,
    SecondMomentConfig,
    SecondMomentState,
    SnapshotConfig,
    after_rollback,
    due_feedback,
    learning_rate_factor,
    step_error_feedback,
    step_recovery,
    step_second_moment,
    with_residual,
)

NAN, INF = math.nan, math.inf


def test_a_skipped_gradient_comes_back_over_four_applied_steps_with_weights_that_add_up_to_one() -> None:
    config, state = ErrorFeedbackConfig(), ErrorFeedbackState()
    state, key = with_residual(config, state, norm=40.0, is_finite=True)
    fed = []
    for _ in range(6):
        fed += [weight for _, weight in due_feedback(config, state)]
        state = step_error_feedback(config, state)
    assert key == 0
    assert fed == [0.3, 0.3, 0.2, 0.2]
    assert (state.pending, state.finished) == ((), 1)


@pytest.mark.parametrize(("norm", "is_finite"), [(NAN, False), (INF, False), (0.0, True)])
def test_what_is_not_finite_never_enters(norm: float, is_finite: bool) -> None:
    """FR-076."""
    state, key = with_residual(ErrorFeedbackConfig(), ErrorFeedbackState(), norm=norm, is_finite=is_finite)
    assert key is None
    assert (state.pending, state.discarded) == ((), 1)


def test_a_full_buffer_lets_the_oldest_go_and_counts_it() -> None:
    config, state = ErrorFeedbackConfig(max_pending=2), ErrorFeedbackState()
    for _ in range(3):
        state, _ = with_residual(config, state, norm=1.0, is_finite=True)
    assert [item.key for item in state.pending] == [1, 2]
    assert state.discarded == 1


def test_fewer_weights_after_a_restart_end_the_old_residuals() -> None:
    state = ErrorFeedbackState(pending=(PendingResidual(key=0, norm=1.0, fed=3),))
    config = ErrorFeedbackConfig(weights=(0.5, 0.5))
    assert due_feedback(config, state) == ()
    assert step_error_feedback(config, state).pending == ()


def test_the_second_moments_are_looked_at_every_so_many_applied_steps() -> None:
    config, state, looks = SecondMomentConfig(every_steps=3), SecondMomentState(), []
    for _ in range(7):
        state, is_due = step_second_moment(config, state)
        looks.append(is_due)
    assert looks == [False, False, True] * 2 + [False]
    assert state.looks == 2


def test_a_snapshot_is_due_every_so_many_applied_steps() -> None:
    config, state, dues = SnapshotConfig(every_steps=2), RecoveryState(), []
    for applied in (True, False, True):
        state, due = step_recovery(config, state, was_applied=applied, is_finite=True)
        dues.append(due)
    assert dues == ["go on", "go on", "snapshot"]


def test_one_bad_step_is_passed_over_and_too_many_in_a_row_roll_back() -> None:
    """FR-080."""
    config, state, dues = SnapshotConfig(max_nonfinite_steps=3), RecoveryState(), []
    for finite in (False, True, False, False, False, False):
        state, due = step_recovery(config, state, was_applied=finite, is_finite=finite)
        dues.append(due)
    assert dues == ["go on"] * 5 + ["roll back"]


def test_the_learning_rate_is_reduced_for_a_hundred_applied_steps_and_then_released() -> None:
    config = SnapshotConfig()
    state = after_rollback(config, RecoveryState(steps=7), ("a", "b"))
    factors = []
    for _ in range(101):
        factors.append(learning_rate_factor(config, state))
        state, _ = step_recovery(config, state, was_applied=True, is_finite=True)
    assert factors == [0.3] * 100 + [1.0]


def test_the_offending_batch_is_set_aside_once() -> None:
    """FR-013."""
    state = after_rollback(SnapshotConfig(), RecoveryState(quarantine=("a",)), ("b", "a"))
    assert state.quarantine == ("a", "b")
    assert state.rollbacks == 1


@pytest.mark.parametrize(
    "state",
    [
        ErrorFeedbackState(pending=(PendingResidual(key=3, norm=0.5, fed=1),), next_key=4, stored=1),
        SecondMomentState(steps=3, lifted=7),
        RecoveryState(steps=2, quarantine=("a", "b")),
    ],
)
def test_states_survive_json(state: Any) -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(state)))
    if "pending" in saved:
        saved["pending"] = tuple(PendingResidual(**item) for item in saved["pending"])
    if "quarantine" in saved:
        saved["quarantine"] = tuple(saved["quarantine"])
    assert type(state)(**saved) == state


@pytest.mark.parametrize("value", [-1, NAN, INF, "1.0"])
@pytest.mark.parametrize("config", [SecondMomentConfig, ErrorFeedbackConfig, SnapshotConfig])
def test_values_that_cannot_be_meant_are_refused_by_name(config: Any, value: Any) -> None:
    """FR-012, FR-147."""
    for field in dataclasses.fields(config):
        if field.name == "folder" and isinstance(value, str):
            continue
        with pytest.raises(ValueError, match=rf"`\w+\.{field.name}` must "):
            config(**{field.name: value})


@pytest.mark.parametrize("weights", [[0.5, 0.4], [0.3, 0.3, 0.2, 0.3], [1.5, -0.5], []])
def test_weights_that_do_not_add_up_to_one_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"`error_feedback\.weights"):
        ErrorFeedbackConfig(weights=weights)  # type: ignore[arg-type]
