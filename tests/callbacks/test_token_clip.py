from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gradloc import GradLoc
from lightning_rlstab.callbacks.token_clip import TokenClip


class Inputs(pl.Callback):
    """The loss inputs as the hooks before this one left them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.norms: list[float] = []

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        self.seen.append(inputs)
        return inputs

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(trainer.strategy.gradient_norms().total)


class Mismatch(pl.Callback):
    """Shifts the sampler's log-prob of one token per micro-batch."""

    def __init__(self, shift: float, place: tuple[int, int] = (1, 2)) -> None:
        self.shift, self.place = shift, place

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        behavior = inputs.logprobs.detach().clone()
        behavior[self.place] -= self.shift
        return dataclasses.replace(inputs, behavior_logprobs=behavior)


@pytest.mark.parametrize(("mode", "weight"), [("clip", 4.0 / math.exp(3.0)), ("mask", 0.0)])
def test_a_token_off_the_sampler_loses_its_weight_and_no_other_does(
    grpo_run: Callable[..., Any], mode: Any, weight: float
) -> None:
    inputs = Inputs()
    run = grpo_run(Mismatch(3.0), TokenClip(low=0.25, high=4.0, mode=mode), inputs, max_steps=1)
    weights = inputs.seen[0].token_weights
    assert float(weights[1, 2]) == pytest.approx(weight, rel=1e-5)
    assert (weights.flatten().sort().values[1:] == 1).all()
    tokens = int(inputs.seen[0].completion_mask.sum())
    assert run.curves["rlstab/clips/token_frac"][0][1] == pytest.approx(1 / tokens)


def test_with_ratios_inside_the_bounds_the_run_is_plain_grpo_bit_for_bit(grpo_run: Callable[..., Any]) -> None:
    plain, clipped = grpo_run(), grpo_run(TokenClip(low=0.1, high=10.0))
    assert torch.equal(plain.weights, clipped.weights)


def test_clips_compose_by_multiplying_their_weights(grpo_run: Callable[..., Any]) -> None:
    inputs = Inputs()
    clips = [TokenClip(high=2.0, mode="clip"), TokenClip(high=4.0, mode="clip")]
    grpo_run(Mismatch(3.0), *clips[:1], clips[1], inputs, max_steps=1)
    expected = (2.0 / math.exp(3.0)) * (4.0 / math.exp(3.0))
    assert float(inputs.seen[0].token_weights[1, 2]) == pytest.approx(expected, rel=1e-4)


class Heavy(pl.Callback):
    """Multiplies one token's advantage at one step, so that its gradient towers over the others'."""

    def __init__(self, step: int, factor: float) -> None:
        self.step, self.factor = step, factor

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        if trainer.global_step != self.step:
            return inputs
        advantages = inputs.advantages.unsqueeze(1).expand_as(inputs.logprobs).clone()
        row = int(inputs.advantages.abs().argmax())
        advantages[row, 0] *= self.factor
        return dataclasses.replace(inputs, advantages=advantages)


def test_a_token_whose_gradient_would_be_too_large_is_scaled_before_any_backward(grpo_run: Callable[..., Any]) -> None:
    norms = []
    for clips in ([], [TokenClip(by="head_norm", times=2.0, quantile=0.9, warmup_steps=3)]):
        inputs = Inputs()
        run = grpo_run(Heavy(5, 1000.0), *clips, inputs, max_steps=6)
        norms.append(inputs.norms[5])
    assert norms[0] > 20 * norms[1]
    assert run.curves["rlstab/clips/token_frac"][5][1] > 0
    assert run.curves["rlstab/clips/token_limit"][-1][1] > 0


def test_head_norms_leave_every_token_alone_during_the_warm_up(grpo_run: Callable[..., Any]) -> None:
    plain, clipped = grpo_run(), grpo_run(TokenClip(by="head_norm", warmup_steps=50))
    assert torch.equal(plain.weights, clipped.weights)


def test_the_running_quantile_survives_a_checkpoint_with_new_settings(
    grpo_run: Callable[..., Any], tmp_path: Any
) -> None:
    first = TokenClip(by="head_norm")
    run = grpo_run(first, max_steps=2)
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, whole = TokenClip(by="head_norm", times=7.0), TokenClip(by="head_norm")
    grpo_run(resumed, max_steps=3, ckpt_path=str(tmp_path / "two.ckpt"))
    grpo_run(whole, max_steps=3)
    assert resumed.state == whole.state
    assert resumed.head_norms.times == 7.0


def test_what_a_clip_did_is_part_of_the_step_that_gradloc_sees(grpo_run: Callable[..., Any]) -> None:
    drill = FireDrill([{"kind": "token_mismatch", "step": 4, "magnitude": 400.0, "token": 1}])
    guards = [drill, TokenClip(high=5.0), GradLoc(warmup_steps=3, min_norm=0.1)]
    run = grpo_run(*guards, max_steps=5)
    alone = grpo_run(drill, GradLoc(warmup_steps=3, min_norm=0.1), max_steps=5)
    assert alone.events("spike")
    assert not run.events("spike")


@pytest.mark.parametrize(
    ("field", "value"),
    [("by", "norm"), ("mode", "drop"), ("low", -0.1), ("high", 0.05), ("high", math.nan), ("times", 0.0)],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must"):
        TokenClip(**{field: value})


def test_what_was_held_back_is_written_down_with_how(grpo_run: Callable[..., Any]) -> None:
    drill = FireDrill([{"kind": "token_mismatch", "step": 1}])
    (line,) = grpo_run(drill, TokenClip(mode="mask"), max_steps=3).events("clip")
    assert (line["step"], line["touched"], line["parts"]) == (1, 1, "tokens")
    assert (line["by"], line["mode"]) == ("ratio", "mask")
