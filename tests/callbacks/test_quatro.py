from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.callbacks.quatro import (
    QUATRO,
    EntropyFloorConfig,
    KLAnchorConfig,
    ReplayConfig,
    RolloutFilterConfig,
)
from lightning_rlstab.control.protocols import Vote
from lightning_rlstab.report.scalars import undeclared

OFF: dict[str, Any] = {"replay": False, "kl": False, "entropy": False, "filter": False}


def only(**mechanism: Any) -> QUATRO:
    return QUATRO(**{**OFF, **mechanism})


class Rollouts(pl.Callback):
    """Keeps every rollout as it goes into training, and every micro-batch's loss inputs."""

    def __init__(self) -> None:
        self.ready: list[Any] = []
        self.inputs: list[Any] = []

    def on_rollout_ready(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        self.ready.append(rollout)
        return rollout

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        self.inputs.append(inputs)
        return inputs


class SkipSteps(pl.Callback):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.strategy.vote(Vote(source="test", action="skip"))


def rewarded(*rollouts: list[float]) -> Callable[..., list[float]]:
    source = iter(rollouts)
    return lambda completions, **_: next(source)


# Off ------------------------------------------------------------------------------------------------------------------


def test_with_everything_off_the_run_is_plain_grpo_bit_for_bit(grpo_run: Callable[..., Any]) -> None:
    plain, off = grpo_run(), grpo_run(QUATRO(**OFF))
    assert all(torch.equal(a, b) for a, b in zip(plain.watch.weights, off.watch.weights, strict=True))


def test_a_filter_and_a_floor_that_find_nothing_change_nothing(grpo_run: Callable[..., Any]) -> None:
    plain = grpo_run()
    watched = grpo_run(only(entropy=True, filter=RolloutFilterConfig(no_spread=False)))
    assert torch.equal(plain.weights, watched.weights)
    assert watched.events(source="quatro") == []


# Replay ---------------------------------------------------------------------------------------------------------------


def test_old_groups_come_back_whole_with_their_own_log_probs(grpo_run: Callable[..., Any]) -> None:
    sampled, rollouts = Rollouts(), Rollouts()
    settings = {"per_device_train_batch_size": 16}
    grpo_run(sampled, only(replay=ReplayConfig(ratio=0.5)), rollouts, settings=settings, max_steps=4)
    seen: dict[Any, Any] = {}
    for rollout in sampled.ready:
        for row in range(16):
            length = int(rollout.completion_lengths[row])
            key = rollout.completions[row], int(rollout.policy_steps[row]), int(rollout.group_ids[row])
            seen[key] = rollout.behavior_logprobs[row, :length], rollout.advantages[row]
    replayed = 0
    for step, rollout in enumerate(rollouts.ready):
        assert len(rollout) == 16
        for row in range(16):
            born = int(rollout.policy_steps[row])
            key = rollout.completions[row], born, int(rollout.group_ids[row])
            length = int(rollout.completion_lengths[row])
            behavior = rollout.behavior_logprobs[row, :length]
            if born < step:
                replayed += 1
                assert torch.equal(behavior, seen[key][0])
                assert rollout.advantages[row] == seen[key][1]
                assert torch.equal(rollout.old_logprobs[row, :length], behavior)
            else:
                assert rollout.old_logprobs is None or rollout.old_logprobs[row].isnan().all()
        counts = torch.bincount(rollout.policy_steps)
        assert all(int(count) % 4 == 0 for count in counts)  # whole groups of 4
    assert replayed == 3 * 8


def test_with_replay_every_logged_completion_stands_beside_its_own_reward(grpo_run: Callable[..., Any]) -> None:
    """The table of completions and the reward curves are of what was sampled, not of what is trained on."""

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    settings = {"log_completions": True, "reward_funcs": [letters]}
    run = grpo_run(only(replay=ReplayConfig(ratio=0.5)), max_steps=6, settings=settings)
    rows = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    assert run.curves["rlstab/quatro/replay_groups"][-1][1] > 0
    assert [row["letters"] for row in rows] == [float(len(set(row["completion"]))) for row in rows]
    for step, mean in run.curves["reward"]:
        own = [row["letters"] for row in rows if row["step"] == step]
        assert mean == pytest.approx(sum(own) / len(own))


def test_fresh_rows_keep_a_ratio_of_exactly_one(grpo_run: Callable[..., Any]) -> None:
    rollouts = Rollouts()
    grpo_run(only(replay=ReplayConfig(ratio=0.5)), rollouts, settings={"per_device_train_batch_size": 16}, max_steps=3)
    mixed = [inputs for inputs in rollouts.inputs if inputs.old_logprobs is not None]
    assert mixed
    for inputs in mixed:
        assert not inputs.old_logprobs.isnan().any()
        is_same = (inputs.old_logprobs == inputs.logprobs.detach()).all(dim=1)
        assert int(is_same.sum()) >= 8


def test_the_normaliser_counts_the_mixed_batch(grpo_run: Callable[..., Any]) -> None:
    rollouts = Rollouts()
    grpo_run(only(replay=ReplayConfig(ratio=0.5)), rollouts, settings={"per_device_train_batch_size": 16}, max_steps=4)
    for rollout in rollouts.ready:
        assert rollout.num_items == float(rollout.completion_mask.sum())


def test_the_replay_ratio_is_exact_over_a_hundred_steps(grpo_run: Callable[..., Any]) -> None:
    rollouts = Rollouts()
    settings = {"num_generations": 2, "max_completion_length": 2}
    run = grpo_run(only(replay=True), rollouts, settings=settings, max_steps=100, logger=False)
    old = sum(int((r.policy_steps < step).sum()) // 2 for step, r in enumerate(rollouts.ready))
    assert len(rollouts.ready) == 100
    assert abs(old - 0.3 * 400) < 1
    assert run.trainer.callbacks[0].replay.readings()["rlstab/quatro/replay_frac"] == pytest.approx(0.3, abs=1 / 400)


def test_a_short_buffer_is_told_once_and_not_waited_for(grpo_run: Callable[..., Any]) -> None:
    """FR-103."""
    run = grpo_run(only(replay=True), settings={"per_device_train_batch_size": 16}, max_steps=4)
    (event,) = run.events("replay")
    assert event["step"] == 0
    assert "not in the buffer" in event["reason"]


def test_a_sampler_without_log_probs_is_refused_by_name(grpo_run: Callable[..., Any]) -> None:
    class Forget(pl.Callback):
        def on_rollout_ready(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
            return rollout.replace(behavior_logprobs=None)

    with pytest.raises(ValueError, match="`behavior_logprobs` must be there for replay"):
        grpo_run(Forget(), only(replay=True), max_steps=1)


# KL -------------------------------------------------------------------------------------------------------------------


def test_the_anchor_moves_beta_by_its_factor_and_tells(grpo_run: Callable[..., Any]) -> None:
    quatro = only(kl=KLAnchorConfig(every_steps=2, target=0.02))
    run = grpo_run(quatro, settings={"beta": 0.04}, max_steps=4)
    assert [event["after"] for event in run.events("controller", name="kl")] == pytest.approx([0.032, 0.0256])
    assert quatro.kl_state is not None
    assert quatro.kl_state.coef == pytest.approx(0.0256)
    assert run.module.loss_settings.beta == 0.04  # given back after the run
    assert [value for _, value in run.curves["rlstab/quatro/kl_coef"]] == pytest.approx([0.04, 0.032, 0.032, 0.0256])


def test_a_coefficient_of_one_pulls_harder_than_a_small_one(grpo_run: Callable[..., Any]) -> None:
    """FR-045."""
    weak = grpo_run(only(kl=KLAnchorConfig(every_steps=100)), settings={"beta": 0.001}, max_steps=3)
    strong = grpo_run(only(kl=KLAnchorConfig(every_steps=100, coef_max=1.0)), settings={"beta": 1.0}, max_steps=3)
    assert not torch.equal(weak.weights, strong.weights)


def test_a_skipped_step_leaves_the_coefficient_alone(grpo_run: Callable[..., Any]) -> None:
    """FR-048."""
    quatro = only(kl=KLAnchorConfig(every_steps=1))
    run = grpo_run(SkipSteps(0, 1, 3), quatro, settings={"beta": 0.04}, max_steps=4)
    assert [event["step"] for event in run.events("controller", name="kl")] == [3]


def test_without_a_reference_model_the_default_anchor_is_off_with_one_line(
    grpo_run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """FR-051."""
    with caplog.at_level(logging.INFO, logger="lightning_rlstab"):
        quatro = QUATRO()
        grpo_run(quatro, max_steps=2)
    lines = [record.getMessage() for record in caplog.records if "KL anchor" in record.getMessage()]
    assert lines == ["QUATRO: the KL anchor is off, because `beta` is 0 and there is no reference model."]
    assert quatro.kl is None


@pytest.mark.parametrize("kl", [True, KLAnchorConfig()])
def test_an_anchor_that_was_asked_for_is_refused_without_a_reference_model(
    grpo_run: Callable[..., Any], kl: Any
) -> None:
    """FR-048, FR-051."""
    with pytest.raises(ValueError, match=r"`beta` must be above 0 for QUATRO\(kl\), got 0.0"):
        grpo_run(only(kl=kl), max_steps=1)


def test_the_anchor_may_lie_at_a_recent_policy_instead_of_the_first(grpo_run: Callable[..., Any]) -> None:
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    run = grpo_run(only(kl=KLAnchorConfig()), max_steps=6, settings={"beta": 0.04, **synced})
    kl = [value for _, value in run.curves["kl"]]
    assert kl[::2] == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)  # the reference is the policy itself again
    assert min(kl[1::2]) > 1e-6


def test_a_start_outside_of_the_bounds_is_refused(grpo_run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="`beta` must lie within"):
        grpo_run(only(kl=True), settings={"beta": 0.5}, max_steps=1)


def test_one_token_far_from_the_reference_does_not_raise_the_coefficient(grpo_run: Callable[..., Any]) -> None:
    """FR-041, FR-049."""

    class FarReference(pl.Callback):
        def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
            reference = inputs.logprobs.detach().clone()
            reference[0, 0] += 50.0
            return dataclasses.replace(inputs, reference_logprobs=reference)

    quatro = only(kl=KLAnchorConfig(every_steps=1, target=0.05, dead_band=0.0))
    run = grpo_run(FarReference(), quatro, settings={"beta": 0.04}, max_steps=2)
    assert quatro.kl_state is not None
    assert quatro.kl_state.coef < 0.04
    assert run.curves["rlstab/quatro/kl_tokens_over_cap"][0][1] == 1


# Entropy --------------------------------------------------------------------------------------------------------------


class Entropies(pl.Callback):
    """Shows the floor a made-up entropy per step and keeps the loss settings."""

    def __init__(self, *values: float) -> None:
        self.values, self.settings = values, []

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        self.settings.append(pl_module.loss_settings)
        shown = self.values[min(trainer.global_step, len(self.values) - 1)]
        return dataclasses.replace(inputs, entropy=inputs.entropy * 0 + shown)


def test_under_the_floor_the_loss_gets_a_bonus_and_a_narrower_clip_until_it_is_back(
    grpo_run: Callable[..., Any],
) -> None:
    config = EntropyFloorConfig(baseline_steps=2, window_steps=1)
    entropies = Entropies(1.0, 1.0, 0.5, 0.5, 2.0, 2.0)
    run = grpo_run(entropies, only(entropy=config), max_steps=6)
    assert [s.entropy_coef for s in entropies.settings] == pytest.approx([0, 0, 0, 0.05, 0.07, 0])
    assert [s.epsilon for s in entropies.settings] == [0.2, 0.2, 0.2, 0.1, 0.1, 0.2]
    assert [s.clip_epsilon_high for s in entropies.settings] == [0.2, 0.2, 0.2, 0.1, 0.1, 0.2]
    words = [event["reason"].split(":")[0] for event in run.events("controller", name="entropy")]
    assert words == ["bonus on", "bonus off"]


def test_entropy_that_explodes_is_alarmed(grpo_run: Callable[..., Any]) -> None:
    run = grpo_run(
        Entropies(1.0, 1.0, 5.0, 5.0), only(entropy=EntropyFloorConfig(baseline_steps=2, window_steps=1)), max_steps=4
    )
    assert len(run.events("alarm", name="entropy")) == 1


def test_the_entropy_moves_after_applied_steps_only(grpo_run: Callable[..., Any]) -> None:
    quatro = only(entropy=EntropyFloorConfig(baseline_steps=2))
    grpo_run(SkipSteps(0, 2), quatro, max_steps=3)
    assert quatro.entropy_state.baseline_count == 1


# Filter ---------------------------------------------------------------------------------------------------------------


def test_groups_without_spread_leave_by_mask_and_the_normaliser_counts_the_rest(grpo_run: Callable[..., Any]) -> None:
    """FR-027."""
    rollouts = Rollouts()
    reward = rewarded([1.0] * 4 + [1.0, 0.0, 0.0, 0.0])
    run = grpo_run(only(filter=True), rollouts, settings={"reward_funcs": [reward]}, max_steps=1)
    (rollout,) = rollouts.ready
    assert len(rollout) == 8
    assert rollout.completion_mask.any(dim=1).tolist() == [False] * 4 + [True] * 4
    assert rollout.num_items == float(rollout.completion_mask[4:].sum())
    assert run.curves["rlstab/quatro/effective_groups"][0][1] == 1
    assert run.curves["rlstab/quatro/filtered_no_spread"][0][1] == 4
    assert run.curves["rlstab/quatro/kept_frac"][0][1] == 0.5


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "luspo", "sapo"])
def test_the_gradient_is_a_mean_over_what_is_kept_whatever_the_loss(
    grpo_run: Callable[..., Any], loss_type: str
) -> None:
    """FR-027, FR-063: half of the groups without spread; the gradient is that of the other half alone."""
    settings = {"loss_type": loss_type, "max_grad_norm": None}
    mixed = {"reward_funcs": [rewarded([1.0] * 4 + [1.0, 0.0, 0.0, 0.0])], **settings}
    filtered = grpo_run(only(filter=True), settings=mixed, max_steps=1)
    unfiltered = grpo_run(
        only(filter=RolloutFilterConfig(no_spread=False)),
        settings={**mixed, "reward_funcs": [rewarded([1.0] * 4 + [1.0, 0.0, 0.0, 0.0])]},
        max_steps=1,
    )
    ratio = filtered.curves["grad_norm"][0][1] / unfiltered.curves["grad_norm"][0][1]
    if loss_type == "dapo":  # counts tokens, and the two halves differ in length
        tokens = unfiltered.module.window[0].rollout.completion_mask.sum(dim=1)
        kept = filtered.module.window[0].rollout.completion_mask.any(dim=1)
        assert ratio == pytest.approx(float(tokens.sum() / tokens[kept].sum()), rel=1e-4)
    else:
        assert ratio == pytest.approx(2.0, rel=1e-4)


def test_when_everything_is_filtered_the_step_does_nothing_and_says_so(
    grpo_run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """FR-063, FR-139."""
    rewards = rewarded([1.0, 0.0, 0.0, 1.0] * 2, [1.0] * 8, [1.0] * 8, [0.0, 1.0, 1.0, 0.0] * 2)
    run = grpo_run(only(filter=True), settings={"reward_funcs": [rewards]}, max_steps=4)
    weights = run.watch.weights
    assert torch.equal(weights[1], weights[0])
    assert torch.equal(weights[2], weights[1])
    assert not torch.equal(weights[3], weights[2])
    assert run.trainer.strategy.skipped_steps == 2
    assert [event["step"] for event in run.events("skip", source="quatro")] == [1, 2]
    assert sum("every completion was filtered out" in record.getMessage() for record in caplog.records) == 1


def test_on_a_stock_strategy_an_empty_step_does_nothing_either(grpo_run: Callable[..., Any]) -> None:
    rewards = rewarded([1.0, 0.0, 0.0, 1.0] * 2, [1.0] * 8, [0.0, 1.0, 1.0, 0.0] * 2)
    run = grpo_run(only(filter=True), settings={"reward_funcs": [rewards]}, max_steps=3, strategy="auto")
    weights = run.watch.weights
    assert torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[2], weights[1])


def test_a_run_without_any_signal_is_alarmed_and_stopped(grpo_run: Callable[..., Any]) -> None:
    """FR-139: every answer the same, all rewards 0."""
    config = RolloutFilterConfig(idle_alarm_rollouts=3, max_idle_rollouts=5)
    settings = {"reward_funcs": [lambda completions, **_: [0.0] * len(completions)]}
    with pytest.raises(RuntimeError, match="nothing was left to learn from in 5 rollouts in a row"):
        grpo_run(only(filter=config), settings=settings, max_steps=20)


def test_eight_repetitive_answers_are_left_out_and_told_in_the_same_step(grpo_run: Callable[..., Any]) -> None:
    """FR-138: 'Peeeee...'."""

    class Peee(pl.Callback):
        def on_rollout_scored(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
            ids = rollout.completion_ids.clone()
            ids[:4] = 68
            mask = rollout.completion_mask.clone()
            mask[:4] = True
            return rollout.replace(
                completion_ids=ids,
                completion_mask=mask,
                completion_lengths=torch.where(torch.arange(8) < 4, ids.shape[1], rollout.completion_lengths),
            )

    rollouts = Rollouts()
    settings = {"max_completion_length": 24}
    run = grpo_run(Peee(), only(filter=RolloutFilterConfig(no_spread=False)), rollouts, settings=settings, max_steps=1)
    assert not rollouts.ready[0].completion_mask[:4].any()
    (event,) = run.events("filter")
    assert (event["step"], event["counts"]["repetition"]) == (0, 4)


def test_an_outlying_reward_takes_its_group_along_and_the_rest_trains_on(grpo_run: Callable[..., Any]) -> None:
    usual = [0.0, 1.0, 1.0, 0.0] * 2
    rewards = rewarded(*[usual] * 9, [1e4, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    rollouts = Rollouts()
    run = grpo_run(only(filter=True), rollouts, settings={"reward_funcs": [rewards]}, max_steps=10)
    assert rollouts.ready[-1].completion_mask.any(dim=1).tolist() == [False] * 4 + [True] * 4
    assert run.events("filter")[-1]["counts"]["reward"] == 4


# Saving ---------------------------------------------------------------------------------------------------------------


def everything() -> QUATRO:
    return QUATRO(
        replay=ReplayConfig(ratio=0.5),
        kl=KLAnchorConfig(every_steps=2),
        entropy=EntropyFloorConfig(baseline_steps=3),
        filter=True,
    )


def test_every_memory_survives_a_checkpoint_and_the_run_goes_on_bit_for_bit(
    grpo_run: Callable[..., Any], tmp_path: Any
) -> None:
    """FR-115, FR-117, FR-120: buffer, draws, coefficients, windows."""
    settings = {"beta": 0.04, "per_device_train_batch_size": 16}
    whole = grpo_run(everything(), settings=settings, max_steps=9)
    half = grpo_run(everything(), settings=settings, max_steps=4)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = everything()
    rest = grpo_run(resumed, settings=settings, max_steps=9, ckpt_path=tmp_path / "half.ckpt")
    for uninterrupted, again in zip(whole.watch.weights[4:], rest.watch.weights, strict=True):
        assert torch.equal(uninterrupted, again)
    original = whole.trainer.callbacks[0]
    assert resumed.kl_state == original.kl_state
    assert resumed.entropy_state == original.entropy_state
    assert resumed.screen.state == original.screen.state
    assert resumed.replay.state == original.replay.state


def test_a_restart_with_other_settings_takes_them_and_keeps_the_memory(
    grpo_run: Callable[..., Any], tmp_path: Any
) -> None:
    settings = {"beta": 0.04}
    half = grpo_run(everything(), settings=settings, max_steps=4)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    coef = half.trainer.callbacks[0].kl_state.coef
    changed = QUATRO(kl=KLAnchorConfig(every_steps=100, coef_min=0.03), replay=False, entropy=True, filter=False)
    grpo_run(changed, settings=settings, max_steps=5, ckpt_path=tmp_path / "half.ckpt")
    assert changed.kl_state is not None
    assert changed.kl_state.coef == max(coef, 0.03)
    assert changed.entropy_state.baseline_count == 4  # 3 from before, and the 10 of the new settings not yet reached


def test_every_scalar_is_declared(grpo_run: Callable[..., Any]) -> None:
    run = grpo_run(everything(), settings={"beta": 0.04}, max_steps=5)
    assert [name for name in undeclared(run.curves) if name.startswith("rlstab/quatro")] == []


def test_a_module_without_rollouts_is_refused_by_name(tmp_path: Any) -> None:
    trainer = pl.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="`QUATRO` must run with a module that makes rollouts"):
        QUATRO().setup(trainer, pl.LightningModule(), "fit")


@pytest.mark.parametrize(("field", "value"), [("replay", 0.3), ("kl", "automatic"), ("entropy", 1), ("filter", "z")])
def test_a_setting_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be a "):
        QUATRO(**{field: value})
