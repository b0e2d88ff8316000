from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gradloc import GradLoc
from lightning_rlstab.callbacks.opefo import OPEFO
from lightning_rlstab.callbacks.seq_clip import SeqClip
from lightning_rlstab.callbacks.stability_monitor import StabilityMonitor
from lightning_rlstab.strategies import RLStabSingleDevice


class Weights(pl.Callback):
    """The token weights of the first micro-batch, and the norm of every step."""

    def __init__(self) -> None:
        self.first: Any = None
        self.norms: list[float] = []

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        self.first = inputs.token_weights if self.first is None else self.first
        return inputs

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(trainer.strategy.gradient_norms().total)


class Shifted(pl.Callback):
    """Moves the sampler's log-probs of some tokens of one row; the loss weighs them by the ratio where asked to."""

    def __init__(
        self, shift: float, *, row: int = 1, tokens: int | None = None, step: int = 0, weigh: bool = False
    ) -> None:
        self.shift, self.row, self.tokens, self.step, self.weigh = shift, row, tokens, step, weigh
        self.place: tuple[int, int] | None = None

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        behavior = inputs.logprobs.detach().clone()
        weights = torch.ones_like(behavior)
        if trainer.global_step >= self.step:
            row = int(inputs.advantages.abs().argmax()) if self.weigh else self.row
            behavior[row, : self.tokens] += self.shift
            weights[row, : self.tokens] = math.exp(abs(self.shift)) if self.weigh else 1.0
            self.place = (len(pl_module.window), row)
        return dataclasses.replace(inputs, behavior_logprobs=behavior, token_weights=weights)


@pytest.mark.parametrize(("mode", "weight"), [("mask", 0.0), ("clip", 2.0 / math.exp(1.0))])
def test_a_sequence_off_the_sampler_is_weighed_down_as_a_whole(
    grpo_run: Callable[..., Any], mode: Any, weight: float
) -> None:
    seen = Weights()
    run = grpo_run(Shifted(-1.0), SeqClip(0.5, 2.0, mode), seen, max_steps=1)
    assert seen.first[1].tolist() == pytest.approx([weight] * seen.first.shape[1], rel=1e-5)
    others = torch.cat([seen.first[:1], seen.first[2:]])
    assert (others == 1).all()
    assert run.curves["rlstab/clips/sequence_frac"][0][1] == pytest.approx(1 / 8)


def test_sequences_inside_the_bounds_leave_the_run_alone_to_the_bit(grpo_run: Callable[..., Any]) -> None:
    plain, clipped = grpo_run(), grpo_run(SeqClip())
    assert torch.equal(plain.weights, clipped.weights)


def test_three_tokens_eight_nats_off_are_found_and_seq_clip_brings_the_norm_back(grpo_run: Callable[..., Any]) -> None:
    """FR-069: one sequence with three tokens at log-ratio -8 and a gradient spike."""
    fault = {"shift": 8.0, "tokens": 3, "step": 4, "weigh": True}
    settings = {"max_completion_length": 8}
    shifted, report = Shifted(**fault), GradLoc(action="report", warmup_steps=3, min_norm=0.1)
    found = grpo_run(shifted, report, max_steps=5, settings=settings)
    (event,) = found.events("spike")
    assert shifted.place is not None
    assert {(c["micro_batch"], c["sequence"]) for c in event["culprits"]} == {shifted.place}
    assert {c["token"] for c in event["culprits"][:3]} <= {0, 1, 2}
    seen = Weights()
    clipped = grpo_run(
        Shifted(**fault), SeqClip(), seen, GradLoc(warmup_steps=3, min_norm=0.1), max_steps=5, settings=settings
    )
    assert not clipped.events("spike")
    assert seen.norms[4] < event["threshold"]


@pytest.mark.parametrize(("field", "value"), [("low", math.nan), ("high", 0.4), ("mode", "scale")])
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must"):
        SeqClip(**{field: value})


def test_a_clip_is_written_down_when_it_first_acts_and_then_summed_up_once_in_a_while(
    grpo_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlstab.callbacks.clip_log._FEWEST_STEPS_BETWEEN", 3)
    run = grpo_run(Shifted(-1.0, step=2), SeqClip(0.5, 2.0), StabilityMonitor(), max_steps=7)
    first, later = run.events("clip")
    assert (first["step"], first["touched"], first["of"], first["steps"]) == (2, 1, 8, 1)
    assert (later["step"], later["touched"], later["of"], later["steps"]) == (5, 3, 24, 3)
    assert first["text"] == "SeqClip held back 1 of 8 sequences in 1 step"
    assert (first["source"], first["mode"]) == ("SeqClip", "mask")
    marked = {step for step, height in run.curves["rlstab/events/clip"] if height > 0}
    assert marked == {2, 5}


def test_a_clip_that_never_acts_leaves_no_line(grpo_run: Callable[..., Any]) -> None:
    assert grpo_run(SeqClip(), max_steps=3).events("clip") == []


@pytest.mark.parametrize("strategy", [RLStabSingleDevice, SingleDeviceStrategy])
def test_a_clip_in_a_step_that_was_skipped_is_not_counted(grpo_run: Callable[..., Any], strategy: Any) -> None:
    drill = FireDrill([{"kind": "gradient_nan", "step": 2}])
    run = grpo_run(
        drill, Shifted(-1.0, step=2), SeqClip(0.5, 2.0), OPEFO(), max_steps=4, strategy=strategy(device="cpu")
    )
    (line,) = run.events("clip")
    assert (line["step"], line["steps"]) == (3, 1)
