from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gepo import GEPO, StepGuardConfig
from lightning_rlstab.callbacks.gradloc import GradLoc
from lightning_rlstab.callbacks.opefo import OPEFO, ErrorFeedbackConfig, SecondMomentConfig, SnapshotConfig
from lightning_rlstab.callbacks.opefo_snapshots import are_finite
from lightning_rlstab.callbacks.quatro import QUATRO
from lightning_rlstab.control.protocols import Vote
from lightning_rlstab.control.snapshots import newest_snapshot, snapshot_name, snapshots_in
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.report.scalars import undeclared

OFF: dict[str, Any] = {"second_moment": False, "error_feedback": False, "snapshots": False}
GUARD = StepGuardConfig(warmup_steps=3, hard_threshold=1e-6, noise_sigmas=0)


def only(**mechanism: Any) -> OPEFO:
    return OPEFO(**{**OFF, **mechanism})


class Spike(pl.Callback):
    """Multiplies the gradient of chosen micro-batches (counted over the run)."""

    def __init__(self, factors: dict[int, float]) -> None:
        self.factors, self.seen = factors, 0

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        factor = self.factors.get(self.seen)
        self.seen += 1
        for parameter in pl_module.parameters():
            if factor is not None and parameter.grad is not None:
                parameter.grad.mul_(factor)


class Poison(pl.Callback):
    """Spoils weights, optimizer state or loss at given steps, once each, before the step; put it before OPEFO."""

    def __init__(self, what: str, *steps: int, value: float = math.nan) -> None:
        self.what, self.steps, self.value = what, set(steps), value

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return trainer.global_step in self.steps

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._is_due(trainer) or self.what == "loss":
            return
        self.steps.discard(trainer.global_step)
        parameter = next(pl_module.policy.parameters())
        target = parameter if self.what == "weights" else trainer.optimizers[0].state[parameter]["exp_avg_sq"]
        with torch.no_grad():
            target.view(-1)[0] = self.value

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: Any, inputs: Any) -> Any:
        if self.what != "loss" or not self._is_due(trainer):
            return inputs
        return dataclasses.replace(inputs, advantages=inputs.advantages * math.nan)


class Gradients(pl.Callback):
    """Keeps the gradient as it is when this callback is reached; ``before`` and ``after`` OPEFO tell what it added."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parts = [p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None]
        self.seen.append(torch.cat(parts or [torch.zeros(1)]))


def snapshots(**settings: Any) -> OPEFO:
    return only(snapshots=SnapshotConfig(**{"every_steps": 2, "recovery_steps": 3, **settings}))


def optimizer_state(run: Any) -> dict[str, list[torch.Tensor]]:
    states = run.trainer.optimizers[0].state.values()
    return {name: [s[name].clone() for s in states] for name in ("exp_avg", "exp_avg_sq", "step")}


# Off ------------------------------------------------------------------------------------------------------------------


def test_with_everything_off_the_run_is_plain_grpo_bit_for_bit(grpo_run: Callable[..., Any]) -> None:
    plain, off = grpo_run(), grpo_run(OPEFO(**OFF))
    assert all(torch.equal(a, b) for a, b in zip(plain.watch.weights, off.watch.weights, strict=True))


def test_with_everything_on_and_nothing_wrong_the_weights_are_those_of_plain_grpo(grpo_run: Callable[..., Any]) -> None:
    plain = grpo_run(max_steps=6)
    watched = grpo_run(OPEFO(snapshots=SnapshotConfig(every_steps=2)), max_steps=6)
    assert torch.equal(plain.weights, watched.weights)


# Second moments -------------------------------------------------------------------------------------------------------


def test_underflowed_second_moments_are_lifted_and_unused_embeddings_are_not(grpo_run: Callable[..., Any]) -> None:
    class Underflow(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                for state in trainer.optimizers[0].state.values():
                    moment = state["exp_avg_sq"]
                    moment[moment < moment.median()] *= 1e-12

    opefo = only(second_moment=SecondMomentConfig(every_steps=4))
    run = grpo_run(Underflow(), opefo, max_steps=4)
    (event,) = run.events("floor")
    assert event["lifted"] == opefo.second_moment.state.lifted > 100
    moments = torch.cat([m.flatten() for m in optimizer_state(run)["exp_avg_sq"]])
    assert (moments == 0).any()  # rows of the embedding that no token reached
    assert moments[moments > 0].min() >= event["floor"] * 0.99
    assert run.curves["rlstab/opefo/lifted"][-1][1] == opefo.second_moment.state.lifted


def test_healthy_second_moments_are_left_alone(grpo_run: Callable[..., Any]) -> None:
    plain = grpo_run(max_steps=4)
    looked = grpo_run(only(second_moment=SecondMomentConfig(every_steps=1)), max_steps=4)
    assert torch.equal(plain.weights, looked.weights)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adamax, torch.optim.Adagrad])
def test_an_optimizer_without_second_moments_is_refused_by_name(grpo_run: Callable[..., Any], optimizer: Any) -> None:
    settings = {"optimizer": lambda parameters: optimizer(parameters, lr=1e-3)}
    with pytest.raises(ValueError, match=rf"`optimizer` must keep `exp_avg_sq` .*, got '{optimizer.__name__}'"):
        grpo_run(only(second_moment=True), settings=settings, max_steps=2)


# Error feedback -------------------------------------------------------------------------------------------------------


def fed(
    run_of: Callable[..., Any], *callbacks: Any, **flags: Any
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    before, after = Gradients(), Gradients()
    run = run_of(*callbacks[:-1], before, callbacks[-1], after, **flags)
    return run, before.seen, after.seen


def test_the_whole_rescaled_residual_is_fed_back_over_four_applied_steps(grpo_run: Callable[..., Any]) -> None:
    opefo = only(error_feedback=True)
    run, before, after = fed(grpo_run, Spike({4: 1e4}), GEPO(advantages=False, guard=GUARD), opefo, max_steps=12)
    residual = before[4] / before[4].norm()
    total = torch.zeros_like(residual)
    shares = []
    for raw, mixed in zip(before[5:], after[5:], strict=True):
        added = (mixed - raw) / raw.norm()
        shares.append(float(added.norm()))
        total += added
    assert shares[:4] == pytest.approx([0.3, 0.3, 0.2, 0.2], abs=1e-4)
    assert shares[4:] == [0.0] * len(shares[4:])
    assert torch.allclose(total, residual, atol=1e-5)
    assert (opefo.error_feedback.state.finished, opefo.error_feedback.state.pending) == (1, ())
    assert len(run.events("error_feedback")) == 1


def test_feedback_never_trips_the_guard(grpo_run: Callable[..., Any]) -> None:
    gepo = GEPO(advantages=False, guard=dataclasses.replace(GUARD, ratio=1.5))
    run, before, after = fed(grpo_run, Spike({4: 1e4, 5: 1e4}), gepo, only(error_feedback=True), max_steps=12)
    raw, mixed = (torch.stack([g.norm() for g in seen]) for seen in (before, after))
    assert (mixed[6:8] > raw[6:8] * 1.01).any()
    assert run.trainer.strategy.skipped_steps == 2


def test_a_nan_gradient_never_enters_the_store(grpo_run: Callable[..., Any]) -> None:
    """FR-076."""
    opefo = only(error_feedback=True)
    run, before, after = fed(grpo_run, Spike({2: math.nan, 3: math.inf}), opefo, max_steps=6)
    assert opefo.error_feedback.state.stored == 0
    assert opefo.error_feedback.state.discarded == 2
    assert all(torch.equal(a, b) for a, b in zip(before[4:], after[4:], strict=True))
    assert run.weights.isfinite().all()


def test_a_dropped_micro_batch_comes_back_as_well(grpo_run: Callable[..., Any]) -> None:
    opefo = only(error_feedback=True)
    flags: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 7}
    run, before, after = fed(grpo_run, Spike({9: 1e4}), GEPO(advantages=False, guard=GUARD), opefo, **flags)
    assert run.trainer.strategy.skipped_steps == 0
    assert torch.equal(before[4], after[4])  # not in the very step it was left out of
    assert float((after[5] - before[5]).norm() / before[5].norm()) == pytest.approx(0.3, abs=1e-4)


def test_a_feed_into_a_skipped_step_does_not_count(grpo_run: Callable[..., Any]) -> None:
    class Skip(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step in (5, 6):
                trainer.strategy.vote(Vote(source="test", action="skip"))

    opefo = only(error_feedback=ErrorFeedbackConfig(max_pending=1))
    grpo_run(Spike({4: 1e4}), GEPO(advantages=False, guard=GUARD), opefo, Skip(), max_steps=8)
    (item,) = opefo.error_feedback.state.pending
    assert item.fed == 1


@pytest.mark.parametrize("config", [ErrorFeedbackConfig(residual_dtype="bfloat16"), ErrorFeedbackConfig(offload=True)])
def test_residuals_may_be_small_or_far_away(grpo_run: Callable[..., Any], config: ErrorFeedbackConfig) -> None:
    callbacks = Spike({4: 1e4}), GEPO(advantages=False, guard=GUARD), only(error_feedback=config)
    _, before, after = fed(grpo_run, *callbacks, max_steps=6)
    assert float((after[5] - before[5]).norm() / before[5].norm()) == pytest.approx(0.3, abs=1e-2)


def test_opefo_moves_behind_the_guards_whatever_the_order_given(grpo_run: Callable[..., Any]) -> None:
    run = grpo_run(OPEFO(snapshots=False), GEPO(), max_steps=2)
    assert run.watch.weights
    trainer = pl.Trainer(callbacks=[opefo := OPEFO(), gepo := GEPO(), quatro := QUATRO()], logger=False)
    opefo.setup(trainer, pl.LightningModule(), "fit")
    kept = [callback for callback in trainer.callbacks if callback in (opefo, gepo, quatro)]
    assert kept == [gepo, opefo, quatro]


# Snapshots and rollback -----------------------------------------------------------------------------------------------


def test_a_healthy_run_leaves_its_newest_two_snapshots_and_resumes_from_them(grpo_run: Callable[..., Any]) -> None:
    whole = grpo_run(snapshots(), max_steps=8)
    folder = whole.folder / "snapshots"
    assert [path.name for path in snapshots_in(folder)] == [snapshot_name(8), snapshot_name(6)]
    rest = grpo_run(snapshots(), max_steps=8, ckpt_path=folder / snapshot_name(6))
    for uninterrupted, again in zip(whole.watch.weights[6:], rest.watch.weights, strict=True):
        assert torch.equal(uninterrupted, again)


@pytest.mark.parametrize("what", ["weights", "optimizer state"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_poison_that_got_past_the_guards_is_rolled_back_within_the_run(
    grpo_run: Callable[..., Any], what: str, value: float
) -> None:
    """FR-076: weights, both moments and step counts."""
    opefo = only(snapshots=SnapshotConfig(every_steps=2, recovery_steps=3))
    run = grpo_run(Poison(what, 5, value=value), opefo, max_steps=10)
    if what == "optimizer state" and value == math.inf:  # found before the next snapshot: that coordinate merely stood
        assert opefo.recovery.refused == 1
    (event,) = run.events("rollback")
    assert Path(event["path"]).name == snapshot_name(4)
    assert run.weights.isfinite().all()
    assert all(are_finite(tensors) for tensors in optimizer_state(run).values())
    assert run.trainer.global_step == 10
    assert run.events("stop") == []


def test_a_rollback_puts_back_weights_both_moments_step_counts_and_schedule(grpo_run: Callable[..., Any]) -> None:
    """FR-076, FR-092."""

    class AtStep(pl.Callback):
        def __init__(self) -> None:
            self.seen: dict[str, Any] = {}

        def keep(self, name: str, trainer: Any, pl_module: Any) -> None:
            optimizer = trainer.optimizers[0]
            states = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
            schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
            weights = [p.detach().clone() for p in pl_module.policy.parameters()]
            self.seen[name] = weights, states, schedule, optimizer.param_groups[0]["lr"]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                self.keep("snapshot", trainer, pl_module)
            if trainer.global_step == 6:
                self.keep("rolled back", trainer, pl_module)

    kept = AtStep()
    settings = {"lr_scheduler_type": "linear"}
    run = grpo_run(Poison("optimizer state", 5), snapshots(every_steps=4), kept, max_steps=8, settings=settings)
    assert len(run.events("rollback")) == 1
    (w0, s0, e0, lr0), (w1, s1, e1, lr1) = kept.seen["snapshot"], kept.seen["rolled back"]
    assert all(torch.equal(a, b) for a, b in zip(w0, w1, strict=True))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(s0, s1, strict=True) for name in a)
    assert (e0, lr0) == (e1, lr1)
    assert e0 == 4


def test_the_recovery_multiplies_the_schedule_and_is_released(grpo_run: Callable[..., Any]) -> None:
    class Rates(pl.Callback):
        def __init__(self) -> None:
            self.used: list[float] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers[0].register_step_post_hook(lambda o, *_: self.used.append(o.param_groups[0]["lr"]))

    rates = Rates()
    settings = {"lr_scheduler_type": "linear", "learning_rate": 1e-3}
    # Rates' hook comes first, so it sees the rate that the step used; the poisoned step counts as used.
    run = grpo_run(rates, Poison("optimizer state", 4), snapshots(), max_steps=10, settings=settings)
    scheduled = [1e-3 * (1 - step / 10) for step in (0, 1, 2, 3, 4, 4, 5, 6, 7, 8)]
    factors = [1, 1, 1, 1, 1, 0.3, 0.3, 0.3, 1, 1]
    assert rates.used == pytest.approx([rate * factor for rate, factor in zip(scheduled, factors, strict=True)])
    assert [e["reason"] for e in run.events("controller", name="learning_rate")] == ["released after recovery"]


def test_a_rollback_under_a_learning_rate_of_zero_says_that_nothing_is_learned(
    grpo_run: Callable[..., Any],
) -> None:
    """FR-003."""
    settings = {"learning_rate": 0.0}
    run = grpo_run(Poison("weights", 3), snapshots(), max_steps=5, settings=settings)
    assert "no further learning can happen" in run.events("rollback")[0]["reason"]
    assert run.trainer.optimizers[0].param_groups[0]["lr"] == 0.0


def test_the_batch_that_caused_a_rollback_is_set_aside_for_good(grpo_run: Callable[..., Any]) -> None:
    """FR-013: its prompts come again in the next epoch and spoil nothing any more."""

    class SpoilByPrompt(pl.Callback):
        """Weights go bad whenever this prompt is trained on with an open mask."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            rollout = pl_module.window[0].rollout
            rows = [row for row, prompt in enumerate(rollout.prompts) if prompt == "3+1="]
            if rows and rollout.completion_mask[rows].any():
                with torch.no_grad():
                    next(pl_module.policy.parameters()).view(-1)[0] = math.nan

    opefo = snapshots()
    run = grpo_run(SpoilByPrompt(), opefo, max_steps=20, max_epochs=5, rows=[{"prompt": f"{i}+1="} for i in range(8)])
    assert len(run.events("rollback")) == 1
    assert len(opefo.recovery.quarantine) == 2
    assert any("set aside" in event["reason"] for event in run.events("quarantine"))
    assert run.weights.isfinite().all()


@pytest.mark.parametrize("strategy", [None, "auto"])
def test_a_skip_that_another_guard_voted_for_comes_back_as_well(grpo_run: Callable[..., Any], strategy: Any) -> None:
    """On a stock strategy the vote has taken the gradient away: nothing is stored, and nothing breaks."""

    class Refuse(pl.Callback):
        guards_gradient = True

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 2:
                step_gate(trainer).vote(Vote(source="refuse", action="skip", reason="by hand"))

    opefo = only(error_feedback=True)
    flags = {} if strategy is None else {"strategy": strategy}
    run = grpo_run(Refuse(), opefo, max_steps=8, **flags)
    assert opefo.error_feedback is not None
    assert opefo.error_feedback.state.stored == (1 if strategy is None else 0)
    assert run.weights.isfinite().all()


def test_a_nan_loss_whose_token_gradloc_took_out_is_applied(grpo_run: Callable[..., Any]) -> None:
    """The clean rest counts: a loss of NaN speaks against a gradient only as long as nobody has repaired it."""
    fault = {"kind": "loss_nan", "step": 3}
    run = grpo_run(FireDrill([fault]), GradLoc(), OPEFO(), max_steps=5)
    (spike,) = run.events("spike")
    assert spike["action"] == "removed"
    assert run.trainer.strategy.skipped_steps == 0
    assert run.events("skip") == []
    assert run.weights.isfinite().all()


def test_an_exploding_layer_is_not_fed_back(grpo_run: Callable[..., Any]) -> None:
    """The skipped gradient is bad as a whole: in shares it would explode that layer four times more."""
    fault = {"kind": "layer_explosion", "step": 6, "magnitude": 1e4}
    opefo = only(error_feedback=True)
    gradloc = GradLoc(warmup_steps=3, min_norm=0.0)
    run = grpo_run(FireDrill([fault]), gradloc, GEPO(guard=GUARD), opefo, max_steps=9)
    (spike,) = run.events("spike")
    assert (spike["verdict"], spike["action"]) == ("layer", "skipped")
    assert opefo.error_feedback is not None
    assert opefo.error_feedback.state.stored == 0


def test_weights_spoilt_between_two_steps_are_no_batchs_fault(grpo_run: Callable[..., Any]) -> None:
    opefo = snapshots()
    run = grpo_run(Poison("weights", 5), opefo, max_steps=8)
    assert len(run.events("rollback")) == 1
    assert opefo.recovery.quarantine == ()


def test_a_skip_of_its_own_is_written_down_once(grpo_run: Callable[..., Any]) -> None:
    alone = grpo_run(Poison("loss", 3), OPEFO(), max_steps=5)
    assert [event["source"] for event in alone.events("skip")] == ["opefo"]
    beside = grpo_run(Poison("loss", 3), GEPO(guard=GUARD), OPEFO(), max_steps=5)
    assert [event["source"] for event in beside.events("skip")] == ["gepo"]


def test_a_step_that_two_guards_refuse_is_fed_back_once(grpo_run: Callable[..., Any]) -> None:
    """What the first guard left of the gradient counts: the second sees the same step."""
    opefo = only(error_feedback=True)
    first, second = GEPO(advantages=False, guard=GUARD), GEPO(advantages=False, guard=GUARD)
    second.__class__ = type("Second", (GEPO,), {})  # another state key
    grpo_run(Spike({4: 1e4}), first, second, opefo, max_steps=7)
    assert opefo.error_feedback is not None
    assert opefo.error_feedback.state.stored == 1


def test_what_is_left_of_a_bad_rollout_goes_with_the_rollback(grpo_run: Callable[..., Any]) -> None:
    """Four steps share a rollout; the weights go bad after its second step, and the third samples anew."""

    class Sampled(pl.Callback):
        def __init__(self) -> None:
            self.at_steps: list[int] = []

        def on_rollout_ready(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
            self.at_steps.append(trainer.global_step)
            return rollout

    class SpoilAfter(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                with torch.no_grad():
                    next(pl_module.policy.parameters()).view(-1)[0] = math.nan

    sampled, settings = Sampled(), {"steps_per_generation": 4, "per_device_train_batch_size": 4}
    run = grpo_run(SpoilAfter(), snapshots(), sampled, max_steps=10, settings=settings)
    assert len(run.events("rollback")) == 1
    assert sampled.at_steps == [0, 4, 6, 8]
    assert run.weights.isfinite().all()


def test_the_same_poison_every_time_stops_with_an_explanation(grpo_run: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"after 2 rollbacks .*max_rollbacks.*resume from"):
        grpo_run(Poison("weights", *range(2, 30)), snapshots(max_rollbacks=2), max_steps=30)


@pytest.mark.parametrize(
    ("kind", "size"), [("lr_spike", 100.0), ("optimizer_state_underflow", 1e-16)], ids=["rate", "second moments"]
)
def test_a_step_longer_than_adam_can_make_is_undone(grpo_run: Callable[..., Any], kind: str, size: float) -> None:
    """Finite, and the end of the policy all the same: the weights go back, and the run learns on."""
    fault = {"kind": kind, "step": 25, "magnitude": size}
    run = grpo_run(FireDrill([fault]), snapshots(every_steps=5), max_steps=30)
    (rollback,) = run.events("rollback")
    assert "longer than Adam can make it" in rollback["reason"]
    moves = [float((b - a).abs().max()) for a, b in itertools.pairwise(run.watch.weights)]
    assert max(moves[25:]) < 20 * max(moves[:24])
    spoilt = grpo_run(FireDrill([fault]), snapshots(every_steps=5, has_length_check=False), max_steps=30)
    assert spoilt.events("rollback") == []


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.5),
        lambda weights: torch.optim.Adam(weights, lr=1e-9),
        lambda weights: torch.optim.SGD(weights, lr=10.0),
        lambda weights: torch.optim.RAdam(weights, lr=1e-2),
    ],
    ids=["decay", "rounding", "no bound", "another formula"],
)
def test_no_healthy_step_counts_as_too_long(grpo_run: Callable[..., Any], optimizer: Any) -> None:
    schedule = lambda o: torch.optim.lr_scheduler.LinearLR(o, 1e-3, 1.0, 10)  # noqa: E731
    opefo = snapshots(every_steps=5)
    run = grpo_run(opefo, max_steps=25, settings={"optimizer": optimizer, "lr_scheduler": schedule})
    assert run.events("rollback") == []
    assert opefo.step_length is not None
    assert opefo.step_length.last_frac <= 1.0


def test_one_nan_loss_is_skipped_and_many_in_a_row_roll_back(grpo_run: Callable[..., Any]) -> None:
    """FR-080."""
    once = grpo_run(Poison("loss", 3), snapshots(), max_steps=6)
    assert (once.trainer.strategy.skipped_steps, once.events("rollback")) == (1, [])
    often = grpo_run(Poison("loss", 3, 4, 5), snapshots(max_nonfinite_steps=2), max_steps=8)
    assert len(often.events("rollback")) == 1
    assert "3 steps in a row" in often.events("rollback")[0]["reason"]


def test_a_sick_state_is_never_saved(grpo_run: Callable[..., Any]) -> None:
    """FR-090."""
    run = grpo_run(Poison("optimizer state", 3, value=math.inf), snapshots(), max_steps=4)
    refused = run.events("snapshot", is_taken=False)
    assert len(refused) == 1
    for path in snapshots_in(run.folder / "snapshots"):
        state = torch.load(path)
        assert are_finite(t for s in state["optimizer_states"][0]["state"].values() for t in s.values())


def test_a_snapshot_that_cannot_be_read_is_passed_over_for_the_one_before(grpo_run: Callable[..., Any]) -> None:
    """FR-090."""

    class Damage(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                opefo.keeper.finish()
                newest = newest_snapshot(opefo.keeper.folder)
                assert newest is not None
                newest.write_bytes(newest.read_bytes()[:1000])

    opefo = snapshots()
    run = grpo_run(Damage(), Poison("weights", 5), opefo, max_steps=7)
    assert Path(run.events("rollback")[0]["path"]).name == snapshot_name(2)
    assert run.weights.isfinite().all()


def test_snapshots_of_another_run_are_neither_used_nor_deleted(grpo_run: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    grpo_run(snapshots(folder=str(folder)), max_steps=8)
    run = grpo_run(Poison("weights", 3), snapshots(folder=str(folder)), max_steps=5)
    assert Path(run.events("rollback")[0]["path"]).name == snapshot_name(2)
    assert len(list(folder.glob("*.superseded"))) == 2
    assert snapshots_in(folder)[0].name == snapshot_name(5)


def test_on_a_stock_strategy_feedback_and_rollback_work_as_well(grpo_run: Callable[..., Any]) -> None:
    opefo = OPEFO(second_moment=False, snapshots=SnapshotConfig(every_steps=2, recovery_steps=3))
    guard = GEPO(advantages=False, guard=GUARD)
    run, before, after = fed(
        grpo_run, Spike({4: 1e4}), Poison("weights", 9), guard, opefo, max_steps=12, strategy="auto"
    )
    shares = [float((a - b).norm() / b.norm()) for b, a in zip(before[5:9], after[5:9], strict=True)]
    assert shares == pytest.approx([0.3, 0.3, 0.2, 0.2], abs=1e-4)
    assert len(run.events("rollback")) == 1
    assert run.weights.isfinite().all()


def test_tied_weights_stay_tied_and_modes_stay_after_a_rollback(
    grpo_run: Callable[..., Any], tiny_policy: Callable[..., Any]
) -> None:
    """FR-111, FR-135."""
    policy = tiny_policy(tie_word_embeddings=True)
    policy.model.layers[0].eval()
    modes: list[list[bool]] = []

    class Modes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            modes.append([module.training for module in pl_module.policy.modules()])

    run = grpo_run(Poison("weights", 3), snapshots(), Modes(), max_steps=6, settings={"model": policy})
    assert len(run.events("rollback")) == 1
    model = run.module.policy
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert modes[0] == modes[-1]


def test_the_guards_memory_goes_back_with_the_weights(grpo_run: Callable[..., Any]) -> None:
    gepo = GEPO(advantages=False, guard=GUARD)
    run = grpo_run(Poison("weights", 5), gepo, snapshots(every_steps=4), max_steps=5 + 1)
    assert len(run.events("rollback")) == 1
    assert gepo.state.applied == 4 + 1


# Saving ---------------------------------------------------------------------------------------------------------------


def test_every_memory_survives_a_checkpoint_and_the_run_goes_on_bit_for_bit(
    grpo_run: Callable[..., Any], tmp_path: Path
) -> None:
    """FR-115: residuals on their way back, the reduced learning rate, counts."""

    def callbacks() -> tuple[Any, ...]:
        opefo = OPEFO(
            second_moment=SecondMomentConfig(every_steps=3), snapshots=SnapshotConfig(every_steps=2, recovery_steps=6)
        )
        return Spike({6: 1e4}), Poison("weights", 3), GEPO(advantages=False, guard=GUARD), opefo

    whole = grpo_run(*callbacks(), max_steps=12)
    half = grpo_run(*callbacks(), max_steps=8)
    assert half.trainer.callbacks[3].error_feedback.state.pending
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = grpo_run(*callbacks()[2:], max_steps=12, ckpt_path=tmp_path / "half.ckpt")
    for uninterrupted, again in zip(whole.watch.weights[8:], rest.watch.weights, strict=True):
        assert torch.equal(uninterrupted, again)
    ours, theirs = rest.trainer.callbacks[1], whole.trainer.callbacks[3]
    assert ours.error_feedback.state == theirs.error_feedback.state
    assert ours.second_moment.state == theirs.second_moment.state
    assert dataclasses.replace(ours.recovery, snapshots=0) == dataclasses.replace(theirs.recovery, snapshots=0)


def test_a_restart_with_other_settings_takes_them_and_keeps_the_memory(
    grpo_run: Callable[..., Any], tmp_path: Path
) -> None:
    half = grpo_run(Poison("weights", 3), snapshots(), max_steps=5)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    changed = snapshots(recovery_factor=0.5, max_rollbacks=1)
    grpo_run(changed, max_steps=6, ckpt_path=tmp_path / "half.ckpt")
    assert changed.recovery.rollbacks == 1
    assert changed.snapshots.recovery_factor == 0.5


def test_every_scalar_is_declared(grpo_run: Callable[..., Any]) -> None:
    run = grpo_run(OPEFO(), max_steps=3)
    assert [name for name in undeclared(run.curves) if name.startswith("rlstab/opefo")] == []
    assert "rlstab/opefo/snapshots" in run.curves
