"""The gate on one device: what a skip, a scale and a stop do, and what they leave alone."""

from __future__ import annotations

import copy
import logging

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.control.protocols import GradientProbe, StepGate, Vote
from lightning_rlstab.strategies import RLStabSingleDevice, RunStopped

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def skip(reason="because"):
    return Vote(source="guard", action="skip", reason=reason)


class Recorder(pl.Callback):
    """Keeps weights, optimizer state and learning rate after every batch."""

    def __init__(self):
        self.weights, self.states, self.rates = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights.append(weights(pl_module))
        self.states.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_open_gate_trains_like_stock_lightning(small, fit, accumulate, clip):
    stock, gated = small(step_size=1), small(step_size=1)
    fit(stock, strategy="auto", micro_batches=7, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    trainer = fit(gated, strategy="rlstab", micro_batches=7, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    for expected, got in zip(stock.parameters(), gated.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0 if clip is None else 1e-6)
    assert trainer.strategy.applied_steps == -(-7 // accumulate)
    assert trainer.strategy.skipped_steps == 0


def test_the_strategy_is_a_step_gate_and_a_gradient_probe():
    strategy = RLStabSingleDevice()
    assert isinstance(strategy, StepGate)
    assert isinstance(strategy, GradientProbe)


def test_a_skip_leaves_weights_optimizer_state_decay_and_schedule_alone(small, fit, voter):
    module, recorder = small(step_size=1), Recorder()
    trainer = fit(module, strategy="rlstab", micro_batches=4, callbacks=[voter({2: skip()}), recorder])
    assert same(recorder.weights[1], recorder.weights[2])
    assert not same(recorder.weights[2], recorder.weights[3])
    for before, after in zip(recorder.states[1].values(), recorder.states[2].values(), strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert recorder.rates == pytest.approx([0.05, 0.025, 0.025, 0.0125])
    assert (trainer.strategy.applied_steps, trainer.strategy.skipped_steps) == (3, 1)


def test_a_skip_forgets_the_gradient_so_that_the_next_window_starts_from_nothing(small, fit, voter):
    skipping, never_saw = small(optimizer="sgd"), small(optimizer="sgd")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2)
    fit(skipping, strategy="rlstab", loader=loader, callbacks=[voter({0: skip()})], accumulate_grad_batches=2)
    half = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=2)
    fit(never_saw, strategy="rlstab", loader=half, accumulate_grad_batches=2)
    assert same(weights(skipping), weights(never_saw))


def test_fr_092_the_schedule_counts_applied_steps_only(small, fit, voter):
    module, recorder = small(step_size=1), Recorder()
    plan = {1: skip(), 4: skip(), 5: skip()}
    trainer = fit(module, strategy="rlstab", micro_batches=10, callbacks=[voter(plan), recorder])
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 7
    assert recorder.rates[-1] == pytest.approx(0.1 * 0.5**7)


def test_an_epoch_wise_schedule_goes_on_after_a_skip(small, fit, voter):
    module = small(step_size=1)
    configure = module.configure_optimizers

    def epoch_wise():
        made = configure()
        made["lr_scheduler"]["interval"] = "epoch"
        return made

    module.configure_optimizers = epoch_wise
    trainer = fit(module, strategy="rlstab", micro_batches=2, callbacks=[voter({1: skip()})])
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_a_modules_own_scheduler_hook_keeps_its_meaning(small, fit, voter):
    module = small(step_size=1)
    calls = []

    class Own(type(module)):
        def lr_scheduler_step(self, scheduler, metric):
            calls.append(metric)
            scheduler.step()

    module.__class__ = Own
    fit(module, strategy="rlstab", micro_batches=3, callbacks=[voter({1: skip()})])
    assert calls == [None, None]


def test_scales_of_several_guards_multiply(small, fit, voter):
    scaled, plain = small(optimizer="sgd"), small(optimizer="sgd")
    start = weights(plain)
    halve = Vote(source="a", action="apply", scale=0.5)
    quarter = Vote(source="b", action="apply", scale=0.25)
    first, second = voter({0: halve}), voter({0: quarter})
    fit(scaled, strategy="rlstab", micro_batches=1, callbacks=[first, second])
    fit(plain, strategy="rlstab", micro_batches=1)
    for origin, full, small_step in zip(start, plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close((small_step - origin) * 8, full - origin, rtol=1e-4, atol=1e-6)
    assert first.verdicts[0].scale == 0.125
    assert first.verdicts[0].sources == ("a", "b")


def test_clipping_comes_after_scaling(small, fit, voter):
    module = small(optimizer="sgd", lr=1.0)
    start = weights(module)
    vote = Vote(source="a", action="apply", scale=1e-3)
    seen = voter({0: vote})
    fit(module, strategy="rlstab", micro_batches=1, callbacks=[seen], gradient_clip_val=0.5)
    moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(start, module.parameters(), strict=True)]).norm()
    assert float(moved) == pytest.approx(1e-3 * seen.norms[0].total, rel=1e-4)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_scale_that_is_no_positive_number_is_refused(small, fit, voter, scale):
    with pytest.raises(ValueError, match="`scale` must be a finite number and above 0"):
        fit(small(), strategy="rlstab", callbacks=[voter({0: Vote(source="a", action="apply", scale=scale)})])


def test_an_unknown_action_is_refused(small, fit, voter):
    with pytest.raises(ValueError, match="`action` must be one of 'apply', 'skip', 'stop', got 'skp'"):
        fit(small(), strategy="rlstab", callbacks=[voter({0: Vote(source="a", action="skp")})])


def test_a_vote_outside_of_the_optimizer_step_is_refused():
    with pytest.raises(RuntimeError, match="`vote` must be called inside"):
        RLStabSingleDevice().vote(skip())


def test_the_strongest_vote_wins_and_names_its_guards(small, fit, voter):
    one = voter({0: Vote(source="a", action="skip", reason="x")})
    two = voter({0: Vote(source="b", action="apply", scale=0.5)})
    fit(small(), strategy="rlstab", micro_batches=1, callbacks=[one, two])
    verdict = one.verdicts[0]
    assert (verdict.action, verdict.sources, verdict.reasons) == ("skip", ("a",), ("x",))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_fr_078_a_non_finite_first_step_is_skipped_without_any_guard(small, fit, voter, poison):
    module, recorder, seen = small(step_size=1), Recorder(), voter()
    module.poison = {0: poison}
    start = weights(module)
    trainer = fit(module, strategy="rlstab", micro_batches=2, callbacks=[seen, recorder])
    assert same(start, recorder.weights[0])
    assert recorder.states[0] == {}
    assert recorder.rates[0] == 0.1
    assert seen.verdicts[0].reasons == ("the gradient is not finite",)
    assert not seen.norms[0].is_finite
    assert trainer.strategy.applied_steps == 1
    assert all(p.isfinite().all() for p in module.parameters())


def test_non_finite_steps_pass_when_told_to(small, fit):
    module = small()
    module.poison = {0: float("nan")}
    fit(module, strategy=RLStabSingleDevice(skip_non_finite=False), micro_batches=1)
    assert any(p.isnan().any() for p in module.parameters())


def test_a_stop_saves_a_checkpoint_and_says_who_and_why(small, fit, voter, tmp_path):
    module = small()
    vote = Vote(source="gepo", action="stop", reason="budget of skips is spent")
    with pytest.raises(RunStopped, match="stopped by gepo: budget of skips is spent") as stopped:
        fit(module, strategy="rlstab", micro_batches=4, callbacks=[voter({2: vote})])
    saved = torch.load(stopped.value.checkpoint, weights_only=True)
    assert saved["global_step"] == 2
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value)


def test_counters_survive_a_checkpoint(small, fit, voter, tmp_path):
    path = tmp_path / "run.ckpt"
    trainer = fit(small(), strategy="rlstab", micro_batches=5, callbacks=[voter({1: skip()})])
    trainer.save_checkpoint(path)
    resumed = fit(small(), strategy="rlstab", micro_batches=5, ckpt_path=path, max_epochs=2)
    assert (resumed.strategy.applied_steps, resumed.strategy.skipped_steps) == (9, 1)


def test_counters_are_logged(small, fit, voter):
    trainer = fit(small(), strategy="rlstab", micro_batches=4, callbacks=[voter({0: skip()})])
    assert float(trainer.callback_metrics["rlstab/strategy/applied_steps"]) == 3
    assert float(trainer.callback_metrics["rlstab/strategy/skipped_steps"]) == 1


def test_fit_leaves_trainer_and_module_as_they_were(small, fit):
    module = small(step_size=1)
    trainer = fit(module, strategy="rlstab", micro_batches=1)
    assert trainer.callbacks == []
    assert "lr_scheduler_step" not in vars(module)


def test_more_than_one_device_is_refused_with_the_strategies_to_use():
    with pytest.raises(ValueError, match='`devices` must be 1 with strategy "rlstab", got 2'):
        pl.Trainer(strategy="rlstab", accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize(
    ("option", "value"), [("skip_non_finite", 1), ("skip_non_finite", "yes"), ("survivors", "drop")]
)
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must be"):
        RLStabSingleDevice(**{option: value})


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_fr_012_clipping_limits_that_freeze_or_spoil_the_weights_are_refused(small, fit, value):
    with pytest.raises(ValueError, match="`gradient_clip_val` must be a finite number and above 0"):
        fit(small(), strategy="rlstab", gradient_clip_val=value)


@pytest.mark.parametrize("value", [True, "1.0"])
def test_fr_012_clipping_limits_that_are_no_numbers_are_refused(small, fit, value):
    with pytest.raises((ValueError, TypeError), match="gradient_clip_val"):
        fit(small(), strategy="rlstab", gradient_clip_val=value)


def test_fr_010_a_huge_finite_gradient_is_clipped_and_not_zeroed(small, fit, voter):
    module, seen = small(optimizer="sgd", lr=1.0), voter()
    module.poison = {0: 1e24}
    start = weights(module)
    fit(module, strategy="rlstab", micro_batches=1, callbacks=[seen], gradient_clip_val=1.0)
    moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(start, module.parameters(), strict=True)]).norm()
    assert seen.norms[0].total > 1e20
    assert seen.norms[0].is_finite
    assert float(moved) == pytest.approx(1.0, rel=1e-3)


def test_fr_112_guards_see_the_complete_gradient_once_per_step_and_the_third_micro_batch_by_itself(
    small, fit, voter, dropper
):
    module, seen, staged = small(), voter(), dropper()
    module.poison = {2: 1e6}
    fit(module, strategy="rlstab", micro_batches=4, callbacks=[seen, staged], accumulate_grad_batches=4)
    assert len(seen.norms) == 1
    totals = [norms.total for norms in staged.norms]
    assert totals.index(max(totals)) == 2
    assert totals[2] > 1e3 * sum(totals[:2])
    assert seen.norms[0].total == pytest.approx(totals[2], rel=1e-2)


def test_fr_152_clipping_with_manual_optimization_is_answered_with_what_to_change(small, fit):
    module = small()
    module.automatic_optimization = False
    with pytest.raises(Exception, match="Automatic gradient clipping is not supported for manual optimization"):
        fit(module, strategy="rlstab", gradient_clip_val=1.0)


def test_the_norm_of_a_freed_gradient_is_not_taken_for_that_of_the_next():
    """The next gradient often lies where the freed one lay, with the same ``id``."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    gate = RLStabSingleDevice()
    gate.trainable_parameters = lambda: {"weight": parameter}
    for number in range(200):
        parameter.grad = None
        parameter.grad = torch.full((3,), float(number))
        assert gate.gradient_norms().total == pytest.approx(number * 3**0.5)


def test_norms_are_measured_once_until_a_gradient_changes(small, fit, monkeypatch):
    from lightning_rlstab.strategies import gate

    calls = []
    real = gate.gradient_norms
    monkeypatch.setattr(gate, "gradient_norms", lambda *args: calls.append(1) or real(*args))

    class Several(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            first = trainer.strategy.gradient_norms()
            assert trainer.strategy.gradient_norms() is first
            optimizer.param_groups[0]["params"][0].grad.mul_(2)
            assert trainer.strategy.gradient_norms().total > first.total

    fit(small(), strategy="rlstab", micro_batches=1, callbacks=[Several()], gradient_clip_val=1.0)
    assert len(calls) == 2


def test_nothing_is_staged_and_no_gradient_copied_unless_a_callback_asks(small, fit, dropper):
    asked, silent = dropper(), dropper(is_needed=False)
    identities = []

    class Watch(pl.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            identities.append([p.grad is not None for p in pl_module.parameters()])

    fit(small(), strategy="rlstab", micro_batches=3, callbacks=[silent, Watch()], accumulate_grad_batches=3)
    assert silent.norms == []
    assert identities == [[False] * 4, [True] * 4, [True] * 4]
    identities.clear()
    fit(small(), strategy="rlstab", micro_batches=3, callbacks=[asked, Watch()], accumulate_grad_batches=3)
    assert len(asked.norms) == 3
    assert identities == [[False] * 4] * 3
