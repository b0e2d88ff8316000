from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.callbacks.gepo import GEPO, LogprobBoundsConfig, RobustAdvantagesConfig, StepGuardConfig
from lightning_rlstab.control.gepo import guard_level
from lightning_rlstab.report.scalars import undeclared

OFF: dict[str, Any] = {"advantages": False, "guard": False, "bounds": False}


class Spike(pl.Callback):
    """Multiplies the gradient of chosen micro-batches (counted over the run) before any guard sees it."""

    def __init__(self, factors: dict[int, float]) -> None:
        self.factors, self.seen = factors, 0

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        factor = self.factors.get(self.seen)
        self.seen += 1
        if factor is not None:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


GUARD = StepGuardConfig(warmup_steps=3, hard_threshold=1e-6, noise_sigmas=0)


def test_with_everything_off_the_run_is_plain_grpo_bit_for_bit(grpo_run: Callable[..., Any]) -> None:
    plain, off = grpo_run(), grpo_run(GEPO(**OFF))
    assert all(torch.equal(a, b) for a, b in zip(plain.watch.weights, off.watch.weights, strict=True))
    assert plain.watch.losses == off.watch.losses


def test_guard_and_bounds_change_nothing_while_nothing_is_wrong(grpo_run: Callable[..., Any]) -> None:
    plain, guarded = grpo_run(), grpo_run(GEPO(advantages=False))
    assert torch.equal(plain.weights, guarded.weights)
    assert guarded.events(source="gepo") == []


def test_the_modules_advantages_become_robust_and_come_back_afterwards(grpo_run: Callable[..., Any]) -> None:
    rewards = iter([[1.0, 0.0, 0.0, 0.0, float("nan"), 1.0, 0.0, 1.0]] * 4)
    run = grpo_run(GEPO(), settings={"reward_funcs": [lambda completions, **_: next(rewards)]}, max_steps=1)
    curve = {name: values[-1][1] for name, values in run.curves.items()}
    assert curve["rlstab/gepo/advantage_abs_max"] == pytest.approx(1.386351, abs=1e-4)
    assert curve["rlstab/gepo/rewards_nan"] == 1
    assert run.module.advantage_estimator is None
    assert run.events("reward")[0]["nan"] == 1


def test_a_completion_without_a_finite_reward_leaves_the_loss(grpo_run: Callable[..., Any]) -> None:
    """FR-121, FR-128: [1, None, 0, 1]."""
    rewards = [1.0, None, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    run = grpo_run(GEPO(), settings={"reward_funcs": [lambda completions, **_: rewards]}, max_steps=1)
    rollout = run.module.window[0].rollout
    missing = rollout.rewards.isnan()
    assert int(missing.sum()) == 1
    assert not rollout.completion_mask[missing].any()
    assert rollout.completion_mask[~missing].any(dim=1).all()
    assert rollout.advantages.isfinite().all()


def test_a_thousandfold_spike_is_skipped_logged_and_leaves_no_trace(grpo_run: Callable[..., Any]) -> None:
    gepo = GEPO(advantages=False, guard=GUARD)
    run = grpo_run(Spike({4: 1000.0}), gepo, max_steps=6)
    weights = run.watch.weights
    assert torch.equal(weights[4], weights[3])
    assert not torch.equal(weights[5], weights[4])
    (event,) = run.events("skip")
    assert (event["step"], event["source"], event["scope"]) == (4, "gepo", "step")
    assert "above the limit" in event["reason"]
    assert gepo.state.total_skips == 1
    assert run.trainer.strategy.skipped_steps == 1


def test_a_nan_gradient_on_the_very_first_step_is_skipped_and_the_schedule_stays(grpo_run: Callable[..., Any]) -> None:
    """FR-078."""
    gepo = GEPO(guard=GUARD)
    run = grpo_run(Spike({0: math.nan}), gepo, max_steps=3, settings={"lr_scheduler_type": "linear"})
    assert run.weights.isfinite().all()
    assert run.trainer.strategy.applied_steps == 2
    assert run.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert gepo.state.total_nonfinite == 1


@pytest.mark.parametrize("factor", [1000.0, math.nan, math.inf])
def test_with_accumulation_only_the_abnormal_micro_batch_is_left_out(
    grpo_run: Callable[..., Any], factor: float
) -> None:
    """FR-112: the third of four micro-batches is named; the others make the step."""
    gepo = GEPO(guard=GUARD)
    flags: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 6}
    run = grpo_run(Spike({4 * 4 + 2: factor}), gepo, **flags)
    (event,) = run.events("skip")
    assert (event["scope"], event["micro_batch"], event["step"]) == ("micro_batch", 2, 4)
    assert run.trainer.strategy.skipped_steps == 0
    assert run.weights.isfinite().all()
    assert gepo.state.total_skips == 1


def test_skips_do_not_depend_on_the_accumulation(grpo_run: Callable[..., Any]) -> None:
    """FR-065: the same rollouts cut into 1, 2 and 4 micro-batches; the level is that of the whole step."""
    levels, skips = [], []
    for accumulation in (1, 2, 4):
        gepo = GEPO(guard=StepGuardConfig(warmup_steps=3, hard_threshold=1e-6, noise_sigmas=0, ratio=4.0))
        grpo_run(
            Spike({accumulation * 5 - 1: 1000.0}),
            gepo,
            accumulate_grad_batches=accumulation,
            settings={"per_device_train_batch_size": 16 // accumulation},
            max_steps=5,
        )
        levels.append(guard_level(gepo.state))
        skips.append(gepo.state.total_skips)
    assert levels == pytest.approx([levels[0]] * 3, rel=1e-3)
    assert skips == [1, 1, 1]


def test_a_window_whose_every_micro_batch_is_abnormal_is_skipped_and_counted_once(grpo_run: Callable[..., Any]) -> None:
    gepo = GEPO(guard=GUARD)
    run = grpo_run(Spike({8: 1e4, 9: 1e4}), gepo, accumulate_grad_batches=2, max_steps=6)
    assert run.trainer.strategy.skipped_steps == 1
    assert (gepo.state.total_skips, gepo.state.consecutive_skips) == (1, 0)


def test_nan_for_ever_stops_with_the_count(grpo_run: Callable[..., Any]) -> None:
    """FR-080."""
    gepo = GEPO(guard=StepGuardConfig(max_nonfinite_skips=3))
    with pytest.raises(RuntimeError, match="3 gradients in a row were not finite"):
        grpo_run(Spike(dict.fromkeys(range(50), math.nan)), gepo, max_steps=20)
    assert gepo.state.total_nonfinite == 3


def test_bounds_keep_an_overflowing_log_ratio_out_of_the_gradient(grpo_run: Callable[..., Any]) -> None:
    class FarOld(pl.Callback):
        def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
            import dataclasses

            old = inputs.logprobs.detach().clone()
            old[0, 0] = -200.0
            return dataclasses.replace(inputs, old_logprobs=old, advantages=-inputs.advantages.abs())

    run = grpo_run(FarOld(), GEPO(advantages=False, guard=False), max_steps=2)
    plain = grpo_run(FarOld(), GEPO(**OFF), max_steps=2)
    assert run.curves["rlstab/gepo/bounded_tokens"][0][1] == 1
    assert run.curves["grad_norm"][0][1] < plain.curves["grad_norm"][0][1]


def test_every_scalar_is_declared_and_the_early_signs_are_there(grpo_run: Callable[..., Any]) -> None:
    run = grpo_run(GEPO(), log_every_n_steps=50, accumulate_grad_batches=2, max_steps=3)
    assert [name for name in undeclared(run.curves) if name.startswith("rlstab/gepo")] == []
    every_step = grpo_run(GEPO(), max_steps=3)
    signs = {"advantage_mean", "advantage_std", "advantage_abs_max", "zero_spread_frac", "gradient_is_finite"}
    assert {f"rlstab/gepo/{name}" for name in signs | {"logprobs_non_finite"}} <= set(every_step.curves)
    assert {"grad_norm", "entropy"} <= set(every_step.curves)


@pytest.mark.parametrize("factor", [1000.0, math.nan])
def test_on_a_stock_strategy_a_skip_leaves_weights_and_optimizer_alone(
    grpo_run: Callable[..., Any], factor: float
) -> None:
    gepo = GEPO(advantages=False, guard=GUARD)
    run = grpo_run(Spike({4: factor}), gepo, max_steps=6, strategy="auto")
    weights = run.watch.weights
    assert torch.equal(weights[4], weights[3])
    assert not torch.equal(weights[5], weights[4])
    assert gepo.state.total_skips == 1
    assert {int(state["step"]) for state in run.trainer.optimizers[0].state.values()} == {5}


def test_its_memory_survives_a_checkpoint_and_goes_on_bit_for_bit(grpo_run: Callable[..., Any], tmp_path: Any) -> None:
    """FR-115, FR-117."""
    whole = GEPO(guard=GUARD)
    grpo_run(Spike({4: 1e4}), whole, max_steps=8)
    first = GEPO(guard=GUARD)
    half = grpo_run(Spike({4: 1e4}), first, max_steps=5)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = GEPO(guard=GUARD)
    grpo_run(second, max_steps=8, ckpt_path=tmp_path / "half.ckpt")
    assert second.state == whole.state


def test_a_restart_with_other_settings_takes_them_and_keeps_the_memory() -> None:
    gepo = GEPO(guard=StepGuardConfig(ratio=4.0))
    gepo.load_state_dict({"guard": {"level": 3.0, "weight": 1.0, "applied": 50}})
    assert gepo.guard is not None
    assert (gepo.guard.ratio, guard_level(gepo.state)) == (4.0, 3.0)


def test_a_module_without_rollouts_is_refused_by_name(tmp_path: Any) -> None:
    module = pl.LightningModule()
    with pytest.raises(ValueError, match=r"`GEPO\(advantages\)` must run with a module that makes rollouts"):
        GEPO().setup(pl.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path), module, "fit")


@pytest.mark.parametrize(("field", "value"), [("advantages", "robust"), ("guard", 5.0), ("bounds", "x")])
def test_a_setting_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be a "):
        GEPO(**{field: value})


def test_settings_may_be_given_as_records_true_or_false() -> None:
    gepo = GEPO(advantages=RobustAdvantagesConfig(bound=2.0), guard=None, bounds=True)
    assert gepo.advantages == RobustAdvantagesConfig(bound=2.0)
    assert gepo.guard is None
    assert gepo.bounds == LogprobBoundsConfig()
