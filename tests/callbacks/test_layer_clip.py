from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gepo import GEPO, StepGuardConfig
from lightning_rlstab.callbacks.layer_clip import LayerClip
from lightning_rlstab.control.layers import layer_name
from lightning_rlstab.strategies import RLStabSingleDevice

EXPLOSION = {"kind": "layer_explosion", "step": 4, "layer": "1", "magnitude": 1000.0}


class Layers(pl.Callback):
    """Gradient norm of every layer, at every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        squares: dict[str, float] = {}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                layer = layer_name(name)
                squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.double().square().sum())
        self.steps.append({layer: square**0.5 for layer, square in squares.items()})


@pytest.mark.parametrize("strategy", [RLStabSingleDevice, lambda: SingleDeviceStrategy("cpu")], ids=["ours", "stock"])
def test_an_exploding_layer_is_brought_to_its_bound_and_the_others_keep_theirs(
    grpo_run: Callable[..., Any], strategy: Callable[[], Any]
) -> None:
    before, after = Layers(), Layers()
    clip = LayerClip(ratio=2.0, beta=0.5, warmup_steps=3, warmup_norm=1e6)
    run = grpo_run(FireDrill([EXPLOSION]), before, clip, after, max_steps=5, strategy=strategy())
    exploded = "policy.model.layers.1"
    usual = {name: total / clip.state.weight for name, total in clip.state.sums}
    assert before.steps[4][exploded] > 100 * after.steps[4][exploded]
    assert after.steps[4][exploded] < 3 * usual[exploded]
    for layer, norm in before.steps[4].items():
        if layer != exploded:
            assert after.steps[4][layer] <= norm
            assert after.steps[4][layer] > 0.2 * norm
    assert run.curves["rlstab/clips/layers_clipped"][4][1] >= 1
    acts = {event["step"]: event["touched"] for event in run.events("clip", source="LayerClip")}
    assert min(acts) >= 3  # the global clip of the warm-up is no act
    assert sum(acts.values()) >= 1
    assert run.curves["rlstab/clips/smallest_layer_scale"][4][1] < 0.1


def test_the_warm_up_clips_globally(grpo_run: Callable[..., Any]) -> None:
    after = Layers()
    grpo_run(LayerClip(warmup_norm=1e-3), after, max_steps=2)
    for step in after.steps:
        assert sum(norm**2 for norm in step.values()) ** 0.5 <= 1.001e-3


def test_a_step_that_is_not_applied_teaches_nothing(grpo_run: Callable[..., Any]) -> None:
    guard = GEPO(advantages=False, bounds=False, guard=StepGuardConfig(warmup_steps=2, hard_threshold=0.1))
    clip = LayerClip(warmup_steps=50, warmup_norm=1e6)
    run = grpo_run(FireDrill([EXPLOSION]), guard, clip, max_steps=5)
    assert run.trainer.strategy.skipped_steps == 1
    assert clip.state.steps == 4


def test_a_non_finite_gradient_is_left_to_the_guards(grpo_run: Callable[..., Any]) -> None:
    clip = LayerClip(warmup_steps=1)
    run = grpo_run(FireDrill([{"kind": "gradient_nan", "step": 2}]), clip, max_steps=4)
    assert run.trainer.strategy.skipped_steps == 1
    assert run.weights.isfinite().all()
    assert clip.state.steps == 3


def test_running_norms_survive_a_checkpoint(grpo_run: Callable[..., Any], tmp_path: Any) -> None:
    run = grpo_run(LayerClip(warmup_steps=1), max_steps=2)
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, whole = LayerClip(warmup_steps=1), LayerClip(warmup_steps=1)
    second = grpo_run(resumed, max_steps=4, ckpt_path=str(tmp_path / "two.ckpt"))
    third = grpo_run(whole, max_steps=4)
    assert resumed.state == whole.state
    assert torch.equal(second.weights, third.weights)


def test_several_processes_need_a_strategy_that_measures_across_them() -> None:
    class Two:
        world_size = 2
        strategy = SingleDeviceStrategy("cpu")

    with pytest.raises(ValueError, match=r"`strategy` must measure layers over processes"):
        LayerClip().setup(Two(), pl.LightningModule(), "fit")  # type: ignore[arg-type]
