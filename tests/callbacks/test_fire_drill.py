"""Every fault is planted where and when it was asked for, and said aloud."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.fire_drill_faults import FAULTS, Fault, fault_from
from lightning_rlstab.control.layers import layer_name

STEP = 2


class Witness(pl.Callback):
    """What the hooks after the drill see."""

    def __init__(self) -> None:
        self.rollouts: dict[int, Any] = {}
        self.inputs: dict[tuple[int, int], Any] = {}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.rates: dict[int, float] = {}
        self.weights: dict[int, bool] = {}

    def on_rollout_scored(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        self.rollouts[trainer.global_step] = rollout
        return rollout

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        self.inputs[trainer.global_step, len(pl_module.window)] = inputs
        return inputs

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step
        named = pl_module.named_parameters()
        self.gradients[step] = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self.rates[step] = optimizer.param_groups[0]["lr"]
        self.weights[step] = all(bool(p.isfinite().all()) for p in pl_module.parameters())
        self.moments = [state["exp_avg_sq"].clone() for state in optimizer.state.values() if "exp_avg_sq" in state]


@pytest.fixture
def drilled(grpo_run: Callable[..., Any]) -> Callable[..., tuple[Any, Witness]]:
    def run(kind: str, *others: pl.Callback, **fields: Any) -> tuple[Any, Witness]:
        witness = Witness()
        drill = FireDrill([{"kind": kind, "step": STEP, **fields}])
        flags = {"max_steps": STEP + 2, "accumulate_grad_batches": 2}
        return grpo_run(drill, *others, witness, settings={"per_device_train_batch_size": 4}, **flags), witness

    return run


def test_every_kind_is_announced_in_the_log_and_as_an_event(
    drilled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_rlstab"):
        run, _ = drilled("token_mismatch", micro_batch=1)
    (event,) = run.events("fire_drill")
    assert (event["step"], event["kind"], event["micro_batch"], event["is_planted"]) == (
        STEP,
        "token_mismatch",
        1,
        True,
    )
    assert caplog.text.count("FIRE DRILL") == 2  # once at the start, once when it happens


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_kind_is_planted_at_its_step_and_nowhere_else(drilled: Callable[..., Any], kind: str) -> None:
    run, witness = drilled(kind)
    events = run.events("fire_drill")
    assert {event["step"] for event in events} == {STEP}
    assert {event["kind"] for event in events} == {kind}
    plain = witness.inputs[STEP - 1, 0]
    assert plain.token_weights is None
    assert plain.logprobs.isfinite().all()
    assert witness.weights[STEP - 1]


@pytest.mark.parametrize(("kind", "value"), [("reward_nan", math.nan), ("reward_outlier", 777.0)])
def test_one_completions_reward_is_spoilt(drilled: Callable[..., Any], kind: str, value: float) -> None:
    _, witness = drilled(kind, sequence=3, magnitude=777.0)
    rewards = witness.rollouts[STEP].rewards
    assert float(rewards[3]) == pytest.approx(value, nan_ok=True)
    assert rewards[torch.arange(len(rewards)) != 3].isfinite().all()
    assert witness.rollouts[STEP - 1].rewards.isfinite().all()


def test_reward_hacking_pays_for_length_as_long_as_it_lasts(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("reward_hacking", last_step=STEP + 1, magnitude=10.0)
    for step, rollout in witness.rollouts.items():
        paid = rollout.rewards - rollout.rewards_per_func[:, 0]
        assert torch.equal(paid, torch.zeros_like(paid))
        honest = torch.tensor([float(len(set(text))) for text in rollout.completions])
        bonus = rollout.rewards - honest
        assert bool((bonus > 0).all()) == (step >= STEP)


def test_repeated_output_repeats_ids_and_text_and_forgets_the_samplers_log_probs(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("repeated_output")
    rollout = witness.rollouts[STEP]
    for row in range(len(rollout)):
        ids = rollout.completion_ids[row][rollout.completion_mask[row].bool()]
        assert len(set(ids.tolist())) == 1
        assert len(set(rollout.completions[row])) <= 1
    assert rollout.behavior_logprobs.isnan().all()


def test_all_truncated_marks_every_completion(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("all_truncated")
    assert witness.rollouts[STEP].is_truncated.all()


class Finisher(pl.Callback):
    """Declares every completion finished."""

    def on_rollout_scored(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        is_finished = torch.zeros_like(rollout.is_truncated)
        return rollout.replace(is_truncated=is_finished, completion_mask=torch.ones_like(rollout.completion_mask))


@pytest.mark.parametrize("is_masked", [False, True])
def test_all_truncated_empties_the_loss_of_a_module_that_leaves_cut_off_completions_out(
    grpo_run: Callable[..., Any], *, is_masked: bool
) -> None:
    witness = Witness()
    drill = FireDrill([{"kind": "all_truncated", "step": STEP}])
    grpo_run(Finisher(), drill, witness, settings={"mask_truncated_completions": is_masked}, max_steps=STEP + 1)
    assert bool(witness.inputs[STEP - 1, 0].completion_mask.all())
    assert bool(witness.inputs[STEP, 0].completion_mask.any()) is not is_masked


@pytest.mark.parametrize(("token", "expected"), [(0, 0), (-1, -1), (99, -1), (None, None)])
def test_the_token_of_a_mismatch_is_counted_among_the_rows_loss_tokens(
    drilled: Callable[..., Any], token: int | None, expected: int | None
) -> None:
    _, witness = drilled("token_mismatch", micro_batch=1, sequence=2, token=token, magnitude=50.0)
    inputs = witness.inputs[STEP, 1]
    (row,), (place,) = [[int(i) for i in part] for part in (inputs.token_weights != 1).nonzero(as_tuple=True)]
    open_places = inputs.completion_mask[2].bool().nonzero().flatten().tolist()
    assert row == 2
    assert place == open_places[len(open_places) // 2 if expected is None else expected]
    assert float(inputs.token_weights[row, place]) == 50.0
    ratio = (inputs.logprobs.detach() - inputs.behavior_logprobs).exp()
    assert float(ratio[row, place]) == pytest.approx(50.0, rel=1e-4)


def test_a_sequence_and_a_systematic_mismatch_cover_what_they_say(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("sequence_mismatch", sequence=1)
    weights = witness.inputs[STEP, 0].token_weights
    assert (weights[1][witness.inputs[STEP, 0].completion_mask[1].bool()] == 20).all()
    assert (weights[[0, 2, 3]] == 1).all()
    _, witness = drilled("systematic_mismatch")
    for micro_batch in (0, 1):
        inputs = witness.inputs[STEP, micro_batch]
        assert (inputs.token_weights[inputs.completion_mask.bool()] == 20).all()


def test_log_probs_and_ratios_take_the_values_asked_for(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("behavior_logprob_neg_inf", sequence=0, token=1)
    assert int((witness.inputs[STEP, 0].behavior_logprobs == -math.inf).sum()) == 1
    _, witness = drilled("log_ratio_overflow", magnitude=100.0)
    inputs = witness.inputs[STEP, 0]
    assert float((inputs.logprobs.detach() - inputs.old_logprobs).max()) == pytest.approx(100.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["gradient_nan", "gradient_inf"])
def test_one_entry_of_the_named_layers_gradient_is_spoilt(drilled: Callable[..., Any], kind: str) -> None:
    _, witness = drilled(kind, layer="layers.1.mlp.down_proj", micro_batch=1)
    spoilt = {name for name, gradient in witness.gradients[STEP].items() if not gradient.isfinite().all()}
    assert spoilt == {"policy.model.layers.1.mlp.down_proj.weight"}


def test_an_exploding_layer_multiplies_its_own_gradient_only(drilled: Callable[..., Any]) -> None:
    _, exploded = drilled("layer_explosion", layer="1", magnitude=100.0)
    _, plain = drilled("lr_spike", magnitude=1e-9)  # the same run up to this gradient
    for name, gradient in exploded.gradients[STEP].items():
        factor = 100.0 if layer_name(name) == "policy.model.layers.1" else 1.0
        torch.testing.assert_close(gradient, factor * plain.gradients[STEP][name], rtol=1e-4, atol=1e-6)


def test_the_learning_rate_spikes_for_one_step(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("lr_spike", magnitude=100.0)
    assert witness.rates[STEP] == pytest.approx(100 * witness.rates[STEP - 1])
    assert witness.rates[STEP + 1] == pytest.approx(witness.rates[STEP - 1])


def test_weights_and_moments_are_spoilt_before_the_forward(drilled: Callable[..., Any]) -> None:
    _, witness = drilled("parameter_nan")
    assert not witness.weights[STEP]
    _, witness = drilled("optimizer_state_nan")
    assert any(not moments.isfinite().all() for moments in witness.moments)
    _, witness = drilled("optimizer_state_underflow")
    assert witness.weights[STEP]


def test_a_drill_leaves_no_hook_behind(drilled: Callable[..., Any]) -> None:
    run, _ = drilled("layer_explosion")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.module.policy.modules())


def test_a_run_without_named_faults_is_refused() -> None:
    with pytest.raises(ValueError, match="`faults` must name at least one fault"):
        FireDrill([])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "token_mismach", "step": 1}, "Did you mean 'token_mismatch'"),
        ({"kind": "loss_nan"}, "name a step"),
        ({"kind": "loss_nan", "step": -1}, "`faults.step` must"),
        ({"kind": "loss_nan", "step": True}, "`faults.step` must"),
        ({"kind": "loss_nan", "step": 5, "last_step": 4}, "`faults.last_step` must"),
        ({"kind": "lr_spike", "step": 5, "magnitude": math.nan}, "`faults.magnitude` must"),
        ({"kind": "loss_nan", "step": 5, "micro_bach": 1}, "Write micro_batch"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_by_name(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FireDrill([fault])


def test_an_address_outside_the_batch_is_refused_when_it_is_met(drilled: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"`faults.sequence` must be below the micro-batch's 4 rows, got 9"):
        drilled("token_mismatch", sequence=9)
    with pytest.raises(ValueError, match=r"`faults.layer` must end a numbered layer's name"):
        drilled("layer_explosion", layer="7")


def test_a_fault_record_is_taken_as_it_is() -> None:
    fault = Fault(kind="loss_nan", step=3)
    assert fault_from(fault) is fault
    assert fault.is_due(3)
    assert not fault.is_due(4)
