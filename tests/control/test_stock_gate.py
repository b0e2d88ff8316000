"""On Lightning's own strategies a vote acts at once, and what cannot be done is refused with the line to change."""

from __future__ import annotations

import logging
import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_rlstab.strategies  # noqa: F401
from lightning_rlstab.control.protocols import StepGate, Vote
from lightning_rlstab.control.stock_gate import StockGate, needs_gate, step_gate

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.factors: dict[int, float] = {}

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean() * self.factors.get(batch_idx, 1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


class Guard(pl.Callback):
    """Votes by attempt, and keeps what it saw."""

    def __init__(self, plan=None):
        self.plan = plan or {}
        self.norms, self.verdicts, self.weights = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gate = step_gate(trainer)
        self.norms.append(gate.gradient_norms())
        for vote in self.plan.get(len(self.norms) - 1, ()):
            gate.vote(vote)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.verdicts.append(step_gate(trainer).last_verdict)
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])


def fit(module, *guards, strategy="auto", batches=3, **flags):
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=list(guards),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    rows = torch.randn(batches, 5, 3, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(list(rows), batch_size=None))
    return trainer


def skip(reason="because"):
    return Vote(source="gepo", action="skip", reason=reason)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_skip_leaves_weights_and_optimizer_alone(clip):
    guard = Guard({1: [skip()]})
    module = Small()
    module.factors = {1: math.nan}
    trainer = fit(module, guard, gradient_clip_val=clip)
    gate = step_gate(trainer)
    assert same(guard.weights[0], guard.weights[1])
    assert not same(guard.weights[1], guard.weights[2])
    assert [v.action for v in guard.verdicts] == ["apply", "skip", "apply"]
    assert gate.last_gradient_norm == guard.norms[2].total
    assert guard.verdicts[1].reasons == ("because",)
    assert (gate.applied_steps, gate.skipped_steps) == (2, 1)
    assert all(p.isfinite().all() for p in module.parameters())


def test_every_callback_gets_the_same_gate_and_the_norms_from_before_a_skip():
    first, second = Guard({0: [skip(), skip()]}), Guard({0: [skip()]})
    trainer = fit(Small(), first, second, batches=1)
    assert first.norms == second.norms
    assert first.norms[0].total > 0
    assert step_gate(trainer).skipped_steps == 1
    assert isinstance(step_gate(trainer), StepGate)


def test_norms_are_exact_where_float32_squares_overflow():
    module = Small()
    module.factors = {0: 1e22}
    guard = Guard({0: [skip()]})
    fit(module, guard, batches=1)
    norms = guard.norms[0]
    assert norms.is_finite
    assert norms.total == pytest.approx(math.sqrt(sum(n**2 for n in norms.per_layer.values())))
    assert set(norms.per_layer) == {"net.0", "net.1"}


def test_a_scale_acts_on_the_gradient():
    half = Vote(source="a", action="apply", scale=0.5)
    module, plain = Small(), Small()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), lr=0.1)
    start = [p.detach().clone() for p in plain.parameters()]
    fit(module, Guard({0: [half]}), batches=1)
    fit(plain, batches=1)
    for origin, halved, full in zip(start, module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close((halved - origin) * 2, full - origin, rtol=1e-4, atol=1e-6)


def test_a_stop_ends_the_run_with_its_reason():
    with pytest.raises(RuntimeError, match="stopped by gepo: spent"):
        fit(Small(), Guard({0: [Vote(source="gepo", action="stop", reason="spent")]}))


@pytest.mark.parametrize("scale", [0.0, math.nan, -1.0])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(ValueError, match="`scale` must be"):
        fit(Small(), Guard({0: [Vote(source="a", action="apply", scale=scale)]}))


def test_a_strategy_with_a_gate_of_its_own_is_used_as_it_is():
    guard = Guard({0: [skip()]})
    trainer = fit(Small(), guard, strategy="rlstab", batches=1)
    assert step_gate(trainer) is trainer.strategy
    assert trainer.strategy.skipped_steps == 1


def test_sharded_gradients_without_a_gate_are_refused_with_the_line_to_change():
    class FullyShardedDataParallel(nn.Module):
        pass

    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    module = Small()
    module.net = FullyShardedDataParallel()
    trainer.strategy.connect(module)
    with pytest.raises(ValueError, match=r'`strategy` must be "rlstab", .* for GEPO, got .*Write Trainer'):
        StockGate(trainer, "GEPO")


@pytest.mark.parametrize(
    ("kind", "better"),
    [("SingleDeviceStrategy", "rlstab"), ("DDPStrategy", "rlstab_ddp"), ("FSDPStrategy", "rlstab_fsdp")],
)
def test_a_refusal_names_the_nearest_strategy(kind, better):
    strategy = type(kind, (), {})()
    assert f'Trainer(strategy="{better}")' in str(needs_gate("GradLoc", strategy))
