from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from lightning_rlstab.report.causes import CAUSES
from lightning_rlstab.report.diagnosis import ranked
from lightning_rlstab.report.levels import Level, moved
from lightning_rlstab.report.memory import MonitorConfig, MonitorState, state_from_dict, state_to_dict
from lightning_rlstab.report.monitor import restarted, step
from lightning_rlstab.report.rules import PROMPT_RULES, TREND_RULES
from lightning_rlstab.report.run import Reading


def first_cause(state: MonitorState) -> str:
    return next(found.cause for found in ranked(state.findings.values()) if found.is_alarm)


# ---- silence -----------------------------------------------------------------------------------------------------


def test_a_run_that_learns_is_silent(watched):
    _, alarms = watched(steps=300)
    assert alarms == []


def test_controls_are_no_alarms_entropy_at_half_and_kl_above_its_target(watched):
    falling = lambda at: {"entropy": 1.2 * (1 - 0.45 * min(at / 150, 1)), "kl": 0.001 + 0.08 * min(at / 150, 1)}  # noqa: E731
    _, alarms = watched(falling, steps=300)
    assert alarms == []


def test_a_solved_task_is_silent_though_nothing_is_left_to_learn(watched):
    def solved(at):
        done = min(at / 60, 1.0)
        if done < 1:
            return {"reward": 0.3 + 0.7 * done}
        return {"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "entropy": 0.01}

    _, alarms = watched(solved, steps=200)
    assert alarms == []


def test_fr_056_a_loss_of_about_zero_is_no_alarm(watched):
    _, alarms = watched(lambda at: {"loss": 0.0}, steps=100)
    assert alarms == []


def test_fr_020_a_mean_advantage_of_zero_is_no_alarm(watched):
    _, alarms = watched(
        lambda at: {"rlstab/gepo/advantage_mean": 0.0, "rlstab/grpo/advantage_abs_mean": 0.8}, steps=100
    )
    assert alarms == []


def test_fr_143_a_component_that_abstained_is_no_nan_reward(watched):
    _, alarms = watched(lambda at: {"rewards/answer/mean": math.nan} if at == 30 else {})
    assert alarms == []


def test_a_schedule_that_ends_with_the_run_is_no_alarm(watched):
    _, alarms = watched(lambda at: {"learning_rate": 1e-6 * (1 - at / 99)}, steps=100)
    assert alarms == []


def test_warm_up_from_a_rate_of_zero_is_no_alarm(watched):
    _, alarms = watched(lambda at: {"learning_rate": 1e-6 * min(at / 8, 1)}, steps=100)
    assert alarms == []


# ---- hard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "cause"),
    [("grad_norm", "nan_gradient"), ("loss", "nan_loss"), ("reward", "nan_reward"), ("entropy", "nan_logprobs")],
)
def test_a_non_finite_value_is_named_in_the_very_step(watched, name, cause, value):
    state, alarms = watched(lambda at: {name: value} if at == 37 else {}, steps=60)
    assert alarms == [(cause, 37)]
    assert state.findings[cause].first_step == 37
    assert str(value) in state.findings[cause].rule


def test_a_non_finite_value_is_named_in_the_first_step(watched):
    _, alarms = watched(lambda at: {"grad_norm": math.nan}, steps=1)
    assert alarms == [("nan_gradient", 0)]


def test_counted_nan_rewards_are_named_in_the_very_step(watched):
    state, alarms = watched(lambda at: {"rlstab/grpo/rewards_nan": 2.0 if at == 21 else 0.0}, steps=40)
    assert alarms == [("nan_reward", 21)]
    assert state.findings["nan_reward"].figures == {"rlstab/grpo/rewards_nan": 2.0}


def test_a_reward_that_is_left_out_of_a_reading_for_the_first_time_is_a_nan_reward(watched):
    _, alarms = watched(lambda at: {"reward": None, "reward_std": None} if at == 30 else {}, steps=40)
    assert alarms == [("nan_reward", 30)]


@pytest.mark.parametrize(
    "sick",
    [
        lambda at: {"reward": None} if at % 2 else {},
        lambda at: {"reward": None, "frac_reward_zero_std": None} if at == 30 else {},
        lambda at: {"reward": None} if at == 3 else {},
    ],
)
def test_a_reward_that_is_logged_now_and_then_is_no_alarm(watched, sick):
    assert watched(sick, steps=60)[1] == []


def test_one_reward_out_of_all_proportion_is_named_in_its_step_and_not_what_its_fall_looks_like(watched):
    state, alarms = watched(lambda at: {"reward": 31.0, "reward_std": 176.0} if at == 60 else {}, steps=120)
    assert alarms[0] == ("reward_outlier", 60)
    assert ranked(state.findings.values())[0].cause == "reward_outlier"


@pytest.mark.parametrize(
    "sick",
    [
        lambda at: {"reward": 0.9, "reward_std": 0.4} if at >= 60 else {"reward": 0.01 + 0.001 * (at % 3)},
        lambda at: {"reward": 3.0, "reward_std": 0.5} if at >= 60 else {},  # the whole batch is better, none far out
    ],
)
def test_a_jump_of_the_reward_within_its_range_or_of_the_whole_batch_is_no_outlier(watched, sick):
    assert "reward_outlier" not in [cause for cause, _ in watched(sick)[1]]


def test_a_nan_reward_ranks_before_the_nan_gradient_it_caused(watched):
    sick = lambda at: dict.fromkeys(("reward", "loss", "grad_norm", "entropy"), math.nan) if at >= 40 else {}  # noqa: E731
    state, _ = watched(sick, steps=60)
    assert first_cause(state) == "nan_reward"


def test_a_nan_gradient_ranks_before_the_nan_losses_that_follow(watched):
    def sick(at):
        if at < 40:
            return {}
        return {"grad_norm": math.nan, **({"loss": math.nan, "entropy": math.nan} if at > 40 else {})}

    state, _ = watched(sick, steps=80)
    assert first_cause(state) == "nan_gradient"


def test_a_spike_is_told_with_its_size_and_the_usual(watched):
    state, alarms = watched(lambda at: {"grad_norm": 41.2} if at == 50 else {}, steps=80)
    assert alarms == [("gradient_spike", 50)]
    figures = state.findings["gradient_spike"].figures
    assert figures["grad_norm"] == 41.2
    assert figures["usual"] == pytest.approx(0.6, rel=0.1)


def test_several_spikes_are_one_alarm_whose_range_grows(watched):
    state, alarms = watched(lambda at: {"grad_norm": 50.0} if at in {50, 70, 90} else {}, steps=120)
    assert alarms == [("gradient_spike", 50)]
    assert state.findings["gradient_spike"].last_step == 90


def test_a_large_ratio_of_small_norms_is_no_spike(watched):
    _, alarms = watched(lambda at: {"grad_norm": 4.0 if at == 50 else 0.05}, steps=80)
    assert alarms == []


def test_norms_that_always_jump_about_need_a_wider_margin(watched):
    jumps = np.exp(np.random.default_rng(3).normal(0, 0.6, size=400))
    _, alarms = watched(lambda at: {"grad_norm": 2.0 * float(jumps[at])}, steps=400)
    assert alarms == []


def test_fr_015_growth_of_one_percent_per_step_is_a_drift_warning_and_never_a_spike(watched):
    state, alarms = watched(lambda at: {"grad_norm": 0.5 * 1.01**at}, steps=1000)
    assert alarms[0][0] == "gradient_drift"
    assert "gradient_spike" not in state.findings
    assert state.findings["gradient_drift"].first_step < alarms[0][1]


def test_a_norm_that_rises_and_then_stays_is_no_drift(watched):
    _, alarms = watched(lambda at: {"grad_norm": 0.4 if at < 20 else 1.2}, steps=200)
    assert alarms == []


def test_a_learning_rate_that_jumps_is_named_in_the_step_and_before_what_it_breaks(watched):
    def sick(at):
        found = {"learning_rate": 1e-4 if at == 60 else 1e-6}
        return found | ({"grad_norm": 90.0, "entropy": 4.0, "reward": 0.0} if at > 60 else {})

    state, alarms = watched(sick)
    assert alarms[0] == ("learning_rate_jump", 60)
    assert ranked(state.findings.values())[0].cause == "learning_rate_jump"


@pytest.mark.parametrize(
    "rate",
    [
        lambda at: 1e-6 * min(1.0, at / 100),  # a long warm-up from 0
        lambda at: 1e-6 * (0.51 + 0.49 * math.cos(math.pi * (at % 50) / 50)),  # warm restarts
        lambda at: 0.0 if at < 3 else 1e-6,
    ],
)
def test_a_schedule_that_warms_up_or_restarts_is_no_jump_of_the_rate(watched, rate):
    assert "learning_rate_jump" not in [cause for cause, _ in watched(lambda at: {"learning_rate": rate(at)})[1]]


def test_most_steps_skipped_is_an_alarm(watched):
    state, alarms = watched(lambda at: {"rlstab/monitor/skipped_frac": min(1.0, at / 40)}, steps=60)
    assert alarms[0][0] == "skipping"
    assert 20 <= alarms[0][1] <= 25
    assert state.findings["skipping"].figures["skipped_frac"] > 0.5


def test_dying_again_after_a_restart_is_named_as_such(watched):
    state, _ = watched(lambda at: {"grad_norm": math.nan} if at == 60 else {}, steps=62)
    state = restarted(state, at_step=50, has_died=True)
    state, alarms = watched(lambda at: {"loss": math.nan} if at == 66 else {}, steps=68, state=state, first=50)
    assert ("restart_death", 66) in alarms
    assert first_cause(state) == "restart_death"


def test_a_restart_that_goes_well_is_silent(watched):
    state, _ = watched(steps=62)
    state = restarted(state, at_step=50, has_died=False)
    _, alarms = watched(steps=160, state=state, first=50)
    assert alarms == []


# ---- entropy, KL, hacking ----------------------------------------------------------------------------------------


def after(at: int, onset: int) -> int:
    return max(0, at - onset)


def test_entropy_that_collapses_while_the_reward_stalls_is_named(watched):
    def sick(at):
        return {"entropy": 1.0 * 0.93 ** after(at, 80), "reward": 0.4 + 0.01 * math.sin(at)}

    state, alarms = watched(sick, steps=160)
    cause, when = alarms[0]
    assert cause == "entropy_collapse"
    assert 80 <= when <= 115
    assert "reward went" in state.findings["entropy_collapse"].rule


def test_entropy_at_two_fifths_on_a_plateau_of_the_reward_is_silent_and_an_alarm_when_the_reward_falls(watched):
    def sure_of_itself(at):
        wave = 0.02 * math.sin(1.7 * at)
        return {"entropy": max(1.2 * 0.98 ** max(0, at - 40), 0.46), "reward": 0.5 + wave}

    def falling(at):
        found = sure_of_itself(at)
        return {**found, "reward": found["reward"] - 0.006 * max(0, at - 60)}

    assert watched(sure_of_itself, steps=140)[1] == []
    assert watched(falling, steps=140)[1][0][0] == "entropy_collapse"


def test_entropy_that_falls_while_the_reward_rises_is_silent(watched):
    def sick(at):
        done = min(at / 200, 1.0)
        return {"entropy": 1.0 - 0.75 * done, "reward": 0.2 + 0.7 * done}

    _, alarms = watched(sick, steps=260)
    assert alarms == []


def test_kl_up_reward_down_entropy_down_is_over_optimisation(watched):
    def sick(at):
        passed = after(at, 80)
        return {"kl": min(3.0, 0.02 * 1.1**passed), "reward": 0.5 * 0.97**passed, "entropy": 1.0 * 0.95**passed}

    state, _ = watched(sick, steps=160)
    assert first_cause(state) == "over_optimised"


def test_kl_up_reward_down_entropy_holds_is_reward_hacking(watched):
    def sick(at):
        passed = after(at, 80)
        return {"kl": min(3.0, 0.02 * 1.1**passed), "reward": 0.5 * 0.97**passed}

    state, alarms = watched(sick, steps=160)
    assert alarms[0][0] == "reward_hacking"
    assert 80 <= alarms[0][1] <= 120
    assert "entropy holds" in state.findings["reward_hacking"].rule


def test_entropy_that_explodes_with_the_kl_is_not_taken_for_reward_hacking(watched):
    def sick(at):
        passed = after(at, 80)
        return {
            "kl": min(3.0, 0.02 * 1.1**passed),
            "reward": 0.5 * 0.97**passed,
            "entropy": min(1.0 * 1.03**passed, 4.0),
        }

    state, _ = watched(sick, steps=160)
    assert first_cause(state) == "entropy_explosion"


def test_fr_043_format_up_answer_down_kl_tenfold_is_one_alarm_that_names_reward_hacking(watched):
    def sick(at):
        passed = after(at, 80)
        return {
            "kl": min(3.0, 0.02 * 10 ** (passed / 20)),
            "reward": 0.5 + 0.01 * math.sin(at),
            "rewards/format/mean": 0.6 + 0.4 * (1 - 0.95**passed),
            "rewards/answer/mean": 0.5 * 0.95**passed,
        }

    _, alarms = watched(sick, steps=140)
    assert [cause for cause, _ in alarms] == ["reward_hacking"]
    assert 80 <= alarms[0][1] <= 120


def test_fr_041_one_token_of_huge_kl_is_no_alarm(watched):
    _, alarms = watched(lambda at: {"kl": 1.6e6} if at == 90 else {}, steps=110)
    assert alarms == []


def test_kl_that_grows_evenly_from_the_start_is_silent_even_in_a_dip_of_the_reward(watched):
    def dip(at):
        return {"kl": 0.004 * (at + 1), "reward": 0.5 - 0.15 * math.exp(-(((at - 70) / 8) ** 2))}

    _, alarms = watched(dip, steps=160)
    assert alarms == []


def test_training_up_held_out_down_is_reward_hacking_with_both_figures(watched):
    def sick(at):
        passed = after(at, 100)
        values = {"reward": 0.4 + 0.4 * (1 - 0.97**passed)}
        if at % 10 == 0:
            values["val/reward"] = 0.4 * (0.4 + 0.6 * 0.97**passed) + 0.01 * math.sin(at)
        return values

    state, alarms = watched(sick, steps=220)
    assert alarms[0][0] == "held_out_gap"
    assert 100 < alarms[0][1] <= 140
    assert state.findings["held_out_gap"].figures.keys() == {"held_out_fall", "training_gain"}


def test_a_noisy_held_out_score_is_silent(watched):
    noise = np.random.default_rng(5).normal(0, 0.05, size=300)
    _, alarms = watched(lambda at: {"val/reward": 0.4 + float(noise[at])} if at % 5 == 0 else {}, steps=300)
    assert alarms == []


def test_a_systematic_gap_of_log_probs_is_named_at_the_start(watched):
    _, alarms = watched(lambda at: {"sampling/sampling_logp_difference/mean": 0.5}, steps=10)
    assert alarms == [("mismatch", 2)]


def test_fr_138_repetition_is_an_alarm_in_the_same_step(watched):
    _, alarms = watched(lambda at: {"rlstab/monitor/repetition": 0.95 if at >= 30 else 0.05}, steps=40)
    assert alarms == [("repetition", 30)]


def test_entropy_that_explodes_is_reported(watched):
    sick = lambda at: {"entropy": min(1.0 + 0.06 * after(at, 80), 5.0), "reward": 0.4}  # noqa: E731
    _, alarms = watched(sick, steps=160)
    assert "entropy_explosion" in [cause for cause, _ in alarms]


def test_a_reward_that_collapses_for_no_known_reason_is_reported(watched):
    _, alarms = watched(lambda at: {"reward": 0.6 if at < 80 else 0.05}, steps=140)
    assert [cause for cause, _ in alarms] == ["reward_collapse"]


# ---- idle --------------------------------------------------------------------------------------------------------


def test_fr_139_ten_steps_without_any_spread_are_named_as_no_learning_signal(watched):
    sick = lambda at: {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "kl": 0.0}  # noqa: E731
    state, alarms = watched(sick, steps=30)
    assert alarms == [("no_signal", 9)]
    assert state.findings["no_signal"].first_step == 0


def test_missing_spread_is_seen_from_the_standard_deviation_alone(watched):
    sick = lambda at: {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": None}  # noqa: E731
    _, alarms = watched(sick, steps=30)
    assert alarms[0] == ("no_signal", 9)


def test_fr_058_a_gradient_of_exactly_zero_is_named(watched):
    state, alarms = watched(lambda at: {"grad_norm": 0.0} if at >= 20 else {}, steps=60)
    assert alarms == [("frozen", 29)]
    assert "trainable parameters" in CAUSES["frozen"].action
    assert state.findings["frozen"].first_step == 20


def test_everything_truncated_is_named_and_ranks_before_the_missing_spread_it_causes(watched):
    sick = lambda at: (  # noqa: E731
        {"completions/clipped_ratio": 1.0, "reward": 0.0, "frac_reward_zero_std": 1.0, "reward_std": 0.0}
        if at >= 60
        else {}
    )
    state, alarms = watched(sick, steps=120)
    assert ("all_truncated", 69) in alarms
    assert first_cause(state) == "all_truncated"


def test_a_few_completions_that_end_at_once_do_not_hide_that_the_rest_is_cut_off(watched):
    share = {"completions/clipped_ratio": 0.97, "reward": 0.0, "frac_reward_zero_std": 1.0}
    state, _ = watched(lambda at: share if at >= 40 else {}, steps=80)
    assert ranked(state.findings.values())[0].cause == "all_truncated"


def test_truncated_completions_whose_reward_still_rises_are_silent(watched):
    _, alarms = watched(lambda at: {"completions/clipped_ratio": 1.0, "reward": 0.1 + 0.005 * at}, steps=120)
    assert [cause for cause, when in alarms if when > 40] == []


def test_fr_003_a_learning_rate_of_zero_says_that_nothing_more_can_be_learned(watched):
    state, alarms = watched(lambda at: {"learning_rate": 0.0} if at >= 50 else {}, steps=100)
    assert alarms == [("stopped_schedule", 59)]
    assert "no further learning can happen" in CAUSES["stopped_schedule"].action
    assert state.findings["stopped_schedule"].first_step == 50


def test_fr_033_equal_lengths_without_truncation_are_a_notice_not_an_alarm(watched):
    equal = lambda at: {"completions/min_length": 20.0, "completions/max_length": 20.0}  # noqa: E731
    state, alarms = watched(equal, steps=30)
    assert alarms == []
    assert state.findings["equal_lengths"].severity == "notice"


def test_weights_that_do_move_are_silent(watched):
    _, alarms = watched(lambda at: {"rlstab/monitor/weights_moved": 1e-6 * at} if at % 10 == 0 else {}, steps=60)
    assert alarms == []


# ---- the engine --------------------------------------------------------------------------------------------------


def test_step_is_pure(quiet_run):
    state = MonitorState()
    for at in range(20):
        state, _ = step(MonitorConfig(), state, Reading(at, quiet_run(at)))
    before = state_to_dict(state)
    sick = Reading(20, {**quiet_run(20), "grad_norm": math.inf})
    first, second = step(MonitorConfig(), state, sick), step(MonitorConfig(), state, sick)
    assert first == second
    assert state_to_dict(state) == before


def test_memory_survives_json_and_goes_on_as_if_nothing_had_happened(watched):
    sick = lambda at: {"grad_norm": 0.5 * 1.03**at, "entropy": 1.0 * 0.97 ** after(at, 60), "reward": 0.4}  # noqa: E731
    whole, alarms = watched(sick, steps=160)
    half, early = watched(sick, steps=77)
    again = state_from_dict(json.loads(json.dumps(state_to_dict(half))))
    assert again == half
    resumed, late = watched(sick, steps=160, state=again, first=77)
    assert resumed == whole
    assert early + late == alarms


def test_a_run_logged_every_tenth_step_is_judged_like_one_logged_at_each(quiet_run):
    state = MonitorState()
    alarms = []
    for index in range(120):
        passed = after(index, 60)
        values = {**quiet_run(index), "entropy": 1.0 * 0.93**passed, "reward": 0.4}
        state, fresh = step(MonitorConfig(), state, Reading(10 * index, values))
        alarms += [(found.cause, found.alarm_step) for found in fresh]
    assert alarms[0][0] == "entropy_collapse"
    assert 600 <= alarms[0][1] <= 950


def test_readings_without_a_signal_leave_its_streak_alone(quiet_run):
    state = MonitorState()
    alarms = []
    for at in range(40):
        values = {"frac_reward_zero_std": 1.0, "reward": 0.0} if at % 2 == 0 else {"loss": 0.0}
        state, fresh = step(MonitorConfig(), state, Reading(at, values))
        alarms += [(found.cause, at) for found in fresh]
    assert alarms == [("no_signal", 18)]


def test_every_rule_reports_a_cause_of_the_table_with_words_and_one_action():
    assert {rule.cause for rule in (*PROMPT_RULES, *TREND_RULES)} == set(CAUSES)
    for cause in CAUSES.values():
        assert cause.title
        assert cause.suspect
        assert cause.action
        assert not cause.action.endswith(".")
        assert set(cause.explains) <= set(CAUSES)


def test_findings_cannot_be_changed(watched):
    state, _ = watched(lambda at: {"loss": math.nan}, steps=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.findings["nan_loss"].cause = "other"


def test_an_outlier_does_not_carry_a_bounded_level_away():
    level = Level()
    for value in [1.0] * 20:
        level = moved(level, value, limit=0.5)
    assert moved(level, 1e9, limit=0.5).level <= 1.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spike_ratio", 1.0),
        ("drift_floor", -1.0),
        ("entropy_ratio", 0.0),
        ("kl_ratio", math.nan),
        ("held_out_drop_frac", 1.5),
        ("idle_readings", 1),
        ("idle_readings", True),
        ("restart_readings", 0),
        ("skipped_frac", "0.5"),
    ],
)
def test_a_senseless_threshold_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"`{field}`"):
        MonitorConfig(**{field: value})
