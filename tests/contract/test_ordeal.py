"""One ordeal for every stabilizer: what each of them has to keep, whatever it does."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.core.policy_loss import LossInputs, LossSettings, policy_loss


class BehindTheMask(pl.Callback):
    """Puts a value into every masked position of everything the loss is given."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: LossInputs) -> LossInputs:
        closed = ~inputs.completion_mask.bool()
        names = ("logprobs", "entropy", "old_logprobs", "behavior_logprobs", "reference_logprobs")
        spoiled = {
            name: torch.where(closed, self.value, tensor)
            for name in names
            if (tensor := getattr(inputs, name)) is not None
        }
        return dataclasses.replace(inputs, **spoiled)


def loss_hook(stabilizer: Any) -> Callable[..., LossInputs]:
    callback = stabilizer.active()
    if not hasattr(callback, "on_policy_loss"):
        pytest.skip("does not touch the loss")
    if getattr(callback, "needs_token_signals", False):
        pytest.skip("reads what a forward knows")
    return callback.on_policy_loss


def test_neutral_settings_are_plain_grpo_bit_for_bit(train: Callable[..., Any], stabilizer: Any) -> None:
    plain, neutral = train(), train(stabilizer.neutral())
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, neutral.weights, strict=True))


def test_all_neutral_together_are_plain_grpo_bit_for_bit(train: Callable[..., Any], stabilizers: Any) -> None:
    plain, neutral = train(), train(*(row.neutral() for row in stabilizers))
    assert torch.equal(plain.weights[-1], neutral.weights[-1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_behind_the_mask_changes_nothing(train: Callable[..., Any], stabilizer: Any, value: float) -> None:
    usual, spoiled = train(stabilizer.active()), train(BehindTheMask(value), stabilizer.active())
    assert all(torch.equal(a, b) for a, b in zip(usual.weights, spoiled.weights, strict=True))


def test_cutting_a_step_into_micro_batches_changes_nothing(train: Callable[..., Any], stabilizer: Any) -> None:
    if stabilizer.counts_micro_batches:
        pytest.skip("depends on them by definition")
    whole = train(stabilizer.active(), steps=4)
    halves = train(stabilizer.active(), steps=4, settings={"per_device_train_batch_size": 8}, accumulate_grad_batches=2)
    torch.testing.assert_close(whole.weights[-1], halves.weights[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_in_is_fine(stabilizer: Any, dtype: torch.dtype) -> None:
    hook = loss_hook(stabilizer)
    source = torch.Generator().manual_seed(0)
    leaf = (-torch.rand(3, 5, generator=source)).to(dtype).requires_grad_()
    inputs = LossInputs(
        logprobs=leaf * 1.0,
        entropy=torch.ones(3, 5, dtype=dtype),
        completion_mask=torch.ones(3, 5, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0, 0.5], dtype=dtype),
        old_logprobs=(-torch.rand(3, 5, generator=source)).to(dtype),
        behavior_logprobs=(-torch.rand(3, 5, generator=source)).to(dtype),
        reference_logprobs=(-torch.rand(3, 5, generator=source)).to(dtype),
        num_items=15,
    )
    result = policy_loss(hook(None, None, inputs), LossSettings(beta=0.04), accumulation=1)
    result.loss.backward()
    assert result.token_loss.dtype == torch.float32
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_the_hook_on_the_loss_passes_gradcheck(stabilizer: Any) -> None:
    hook = loss_hook(stabilizer)
    source = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return -torch.rand(2, 4, generator=source, dtype=torch.float64)

    entropy, old, reference = draw().abs(), draw(), draw()

    def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            completion_mask=torch.tensor([[True] * 4, [True, True, False, False]]),
            advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
            old_logprobs=old,
            reference_logprobs=reference,
            num_items=6,
        )
        settings = LossSettings(beta=0.04, epsilon=5.0)
        return policy_loss(hook(None, None, inputs), settings, accumulation=1).token_loss.double()

    assert torch.autograd.gradcheck(loss_of, (draw().requires_grad_(),), atol=1e-4, rtol=1e-3, eps=1e-4)


def test_its_memory_is_plain_types_and_tensors(train: Callable[..., Any], stabilizer: Any) -> None:
    """FR-117."""
    callback = stabilizer.active()
    train(callback)

    def check(value: Any) -> None:
        if type(value) in (dict, list, tuple):
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                assert type(key) in (str, int)
                check(entry)
            return
        assert value is None or type(value) in (int, float, str, bool, torch.Tensor), type(value)

    check(callback.state_dict())


def test_it_survives_a_checkpoint_and_takes_the_same_next_five_steps(
    train: Callable[..., Any], stabilizer: Any, tmp_path: Path
) -> None:
    whole = train(stabilizer.active(), steps=10)
    half = train(stabilizer.active(), steps=5)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = train(stabilizer.active(), steps=10, ckpt_path=tmp_path / "half.ckpt")
    assert len(rest.weights) == 5
    assert all(torch.equal(a, b) for a, b in zip(whole.weights[5:], rest.weights, strict=True))


def test_a_step_of_a_controller_is_pure(controller: Any) -> None:
    for state in controller.states:
        before = copy.deepcopy(state)
        first, second = controller.step(state), controller.step(state)
        assert first == second
        assert state == before


def test_a_controllers_memory_is_frozen_and_survives_json(controller: Any) -> None:
    for state in controller.states:
        field = dataclasses.fields(state)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, field, None)
        plain = dataclasses.asdict(state)
        assert json.loads(json.dumps(plain)) == json.loads(json.dumps(plain))
        assert set(json.loads(json.dumps(plain))) == {f.name for f in dataclasses.fields(state)}


@pytest.mark.slow
def test_every_pair_and_all_but_any_one_compose(train: Callable[..., Any], stabilizers: Any) -> None:
    for count in (2, len(stabilizers) - 1):
        for chosen in itertools.combinations(stabilizers, count):
            run = train(*(row.active() for row in chosen), steps=6)
            assert run.weights[-1].isfinite().all(), [row.name for row in chosen]
            assert run.trainer.global_step == 6


def test_all_of_them_together_train(train: Callable[..., Any], stabilizers: Any) -> None:
    run = train(*(row.active() for row in stabilizers), steps=6)
    assert run.weights[-1].isfinite().all()
    assert not torch.equal(run.weights[-1], run.weights[0])
