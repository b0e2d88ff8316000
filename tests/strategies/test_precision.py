"""A float16 gradient scaler hears of skips: untouched by a guard's, backed off after an overflow."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_rlstab.control.protocols import Vote
from lightning_rlstab.strategies import RLStabSingleDevice


class Scales(pl.Callback):
    def __init__(self):
        self.scales, self.growth = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = trainer.precision_plugin.scaler.state_dict()
        self.scales.append(state["scale"])
        self.growth.append(state["_growth_tracker"])


def plugin(init_scale=1024.0):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))


def test_a_guards_skip_leaves_scale_and_growth_alone(small, fit, voter):
    scales = Scales()
    guard = voter({1: Vote(source="a", action="skip")})
    trainer = fit(small(), strategy=RLStabSingleDevice(), plugins=[plugin()], callbacks=[guard, scales])
    assert scales.scales == [1024.0] * 4
    assert scales.growth == [1, 1, 2, 3]
    assert trainer.strategy.skipped_steps == 1


def test_an_overflow_is_a_skip_and_the_scaler_backs_off(small, fit):
    module, scales = small(), Scales()
    module.poison = {1: float("inf")}
    trainer = fit(module, strategy=RLStabSingleDevice(), plugins=[plugin()], callbacks=[scales])
    assert scales.scales == [1024.0, 512.0, 512.0, 512.0]
    assert (trainer.strategy.applied_steps, trainer.strategy.skipped_steps) == (3, 1)


def test_an_overflow_in_a_dropped_micro_batch_still_backs_off(small, fit, dropper):
    module, scales = small(), Scales()
    module.poison = {0: float("inf")}
    fit(
        module,
        strategy=RLStabSingleDevice(),
        plugins=[plugin()],
        callbacks=[dropper({0}), scales],
        accumulate_grad_batches=2,
    )
    assert scales.scales == [1024.0, 512.0, 512.0, 512.0]


def test_a_window_of_overflows_alone_is_skipped_and_backs_off(small, fit, dropper):
    module, scales = small(), Scales()
    module.poison = {0: float("inf"), 1: float("nan")}
    trainer = fit(
        module,
        strategy=RLStabSingleDevice(),
        plugins=[plugin()],
        callbacks=[dropper({0, 1}), scales],
        accumulate_grad_batches=2,
    )
    assert scales.scales[1] == 512.0
    assert trainer.strategy.skipped_steps == 1


def test_norms_and_micro_batch_norms_are_unscaled(small, fit, voter, dropper):
    def norms_at(scale):
        seen, staged = voter(), dropper()
        fit(
            small(),
            strategy=RLStabSingleDevice(),
            plugins=[plugin(scale)],
            callbacks=[seen, staged],
            accumulate_grad_batches=2,
        )
        return seen.norms[0].total, [n.total for n in staged.norms[:2]]

    small_scale, large_scale = norms_at(1.0), norms_at(4096.0)
    assert small_scale[0] == pytest.approx(large_scale[0], rel=1e-2)
    assert small_scale[1] == pytest.approx(large_scale[1], rel=1e-2)
