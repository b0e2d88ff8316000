"""Whatever one rank alone sees, all ranks take the same way, and none waits for ever."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_rlstab.control.protocols import Vote

DISTRIBUTED = ["rlstab_ddp", "rlstab_fsdp"]


class Net(pl.LightningModule):
    """Three layers, one of a single element, on data that differ over ranks."""

    def __init__(self, *, poison=None, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1, bias=False), nn.Linear(1, 1, bias=False))
        self.net.to(dtype)
        self.poison = poison or {}
        self.seen = 0

    def training_step(self, batch, batch_idx):
        x = batch[0][:, self.global_rank % batch[0].shape[1]]
        loss = self.net(x.to(self.net[0].weight.dtype)).float().square().mean()
        loss = loss * self.poison.get((self.global_rank, self.seen), 1.0)
        self.seen += 1
        return loss * self.trainer.accumulate_grad_batches

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watcher(pl.Callback):
    """Votes on one rank by attempt, and keeps verdicts, norms, weights and learning rates."""

    def __init__(self, plan=None, rank=0):
        self.plan, self.rank = plan or {}, rank
        self.attempt = 0
        self.kept = {"verdicts": [], "norms": [], "weights": [], "rates": [], "state": []}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.kept["norms"].append(trainer.strategy.gradient_norms())
        if self.attempt in self.plan and self.rank in (trainer.global_rank, None):
            trainer.strategy.vote(self.plan[self.attempt])
        self.attempt += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        self.kept["verdicts"].append(trainer.strategy.last_verdict)
        self.kept["weights"].append([whole(p) for p in pl_module.parameters()])
        self.kept["rates"].append(optimizer.param_groups[0]["lr"])
        self.kept["state"].append([[whole(v) for v in s.values()] for s in optimizer.state.values()])


class Dropper(pl.Callback):
    """Drops micro-batches by running number, on the given rank or on all."""

    def __init__(self, drop=(), rank=None):
        self.drop, self.rank, self.norms = set(drop), rank, []

    def is_staging_needed(self, trainer):
        return True

    def on_micro_batch_gradient(self, trainer, pl_module, norms):
        self.norms.append(norms)
        return not (len(self.norms) - 1 in self.drop and self.rank in (trainer.global_rank, None))


def whole(tensor):
    tensor = torch.as_tensor(tensor).detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def loader(count, ranks=2):
    data = torch.randn(count, 3, ranks, 4, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.flatten(0, 1)), batch_size=3)


@pytest.fixture
def outcome(run_on_ranks, on_ranks, tmp_path):
    """What every rank saw of a short run."""

    def run(strategy, *, steps=4, make=Net, watcher=Watcher, dropper=None, world_size=2, **flags):
        def work():
            watch = watcher()
            drop = dropper() if dropper else None
            trainer = on_ranks(
                strategy, tmp_path, callbacks=[c for c in (watch, drop) if c], use_distributed_sampler=False, **flags
            )
            module = make()
            trainer.fit(module, loader(steps))
            gate = trainer.strategy
            return {
                **watch.kept,
                "counts": (gate.applied_steps, gate.skipped_steps),
                "micro_norms": drop.norms if drop else [],
                "final": [whole(p) for p in module.parameters()],
                "epochs": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            }

        return run_on_ranks(work, world_size=world_size)

    return run


def all_equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_nan_on_one_rank_makes_both_skip_the_same_step(outcome, strategy):
    ranks = outcome(strategy, make=lambda: Net(poison={(1, 2): float("nan")}))
    for rank in ranks:
        assert [v.action for v in rank["verdicts"]] == ["apply", "apply", "skip", "apply"]
        assert rank["counts"] == (3, 1)
        assert all_equal(rank["weights"][1], rank["weights"][2])
        assert all(w.isfinite().all() for w in rank["final"])
        assert all(v.isfinite().all() for state in rank["state"] for values in state for v in values)
    assert all_equal(ranks[0]["final"], ranks[1]["final"])
    for mine, theirs in zip(ranks[0]["state"][-1], ranks[1]["state"][-1], strict=True):
        assert all_equal(mine, theirs)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_fr_095_one_rank_that_skips_by_its_own_norm_takes_the_other_along(outcome, strategy):
    vote = Vote(source="gepo", action="skip", reason="norm 100 on this rank")
    ranks = outcome(strategy, watcher=lambda: Watcher({1: vote}, rank=0))
    for rank in ranks:
        assert rank["verdicts"][1].action == "skip"
        assert rank["verdicts"][1].reasons == ("norm 100 on this rank",)
        assert all_equal(rank["weights"][0], rank["weights"][1])
        assert rank["counts"] == (3, 1)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_fr_092_the_schedule_stands_still_on_every_rank_after_a_skip(outcome, strategy):
    vote = Vote(source="gepo", action="skip")
    for rank in outcome(strategy, watcher=lambda: Watcher({1: vote}, rank=1)):
        assert rank["epochs"] == 3
        assert rank["rates"] == pytest.approx([0.025, 0.025, 0.0125, 0.00625])


def test_fr_093_returning_none_is_never_needed_because_a_skip_keeps_the_graph(outcome):
    ranks = outcome("rlstab_ddp", steps=3, make=lambda: Net(poison={(0, 0): float("inf"), (0, 1): 0.0}))
    assert [r["counts"] for r in ranks] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_stop_on_one_rank_ends_both_with_the_same_error_and_a_checkpoint(run_on_ranks, on_ranks, tmp_path, strategy):
    def work():
        vote = Vote(source="gepo", action="stop", reason="spent")
        trainer = on_ranks(strategy, tmp_path, callbacks=[Watcher({2: vote}, rank=1)], use_distributed_sampler=False)
        try:
            trainer.fit(Net(), loader(4))
        except RuntimeError as error:
            return type(error).__name__, str(error), error.checkpoint, Path(error.checkpoint).exists()
        return None

    first, second = run_on_ranks(work)
    assert first == second
    assert first[0] == "RunStopped"
    assert "gepo: spent" in first[1]
    assert first[3]


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_fr_098_scales_that_differ_over_ranks_become_one(outcome, strategy):
    vote = Vote(source="opefo", action="apply", scale=0.25)
    alone = outcome(strategy, steps=1, watcher=lambda: Watcher({0: vote}, rank=0))
    everywhere = outcome(strategy, steps=1, watcher=lambda: Watcher({0: vote}, rank=None))
    for rank in (*alone, *everywhere):
        assert rank["verdicts"][0].scale == 0.25
        assert rank["verdicts"][0].sources == ("opefo",)
    assert all_equal(alone[0]["final"], everywhere[1]["final"])


@pytest.mark.parametrize("strategy", ["rlstab", *DISTRIBUTED])
def test_a_dropped_micro_batch_leaves_the_others_exact(outcome, strategy):
    world_size = 1 if strategy == "rlstab" else 2
    common = {"steps": 3, "accumulate_grad_batches": 3, "world_size": world_size}
    dropped = outcome(strategy, dropper=lambda: Dropper({1}), make=lambda: Net(poison={(0, 1): float("nan")}), **common)
    without = outcome(strategy, make=lambda: Net(poison={(r, 1): 0.0 for r in (0, 1)}), **common)
    for ours, theirs in zip(dropped, without, strict=True):
        assert ours["counts"] == (1, 0)
        assert [n.is_finite for n in ours["micro_norms"]] == [True, False, True]
        torch.testing.assert_close(ours["final"], theirs["final"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["rlstab", "rlstab_fsdp"])
def test_keeping_every_staged_micro_batch_changes_no_bit(outcome, strategy):
    common = {"steps": 7, "accumulate_grad_batches": 3, "world_size": 1 if strategy == "rlstab" else 2}
    staged = outcome(strategy, dropper=Dropper, **common)
    plain = outcome(strategy, **common)
    assert all_equal(staged[0]["final"], plain[0]["final"])


def test_keeping_every_staged_micro_batch_under_ddp_differs_by_rounding_only(outcome):
    common = {"steps": 7, "accumulate_grad_batches": 3}
    staged, plain = outcome("rlstab_ddp", dropper=Dropper, **common), outcome("rlstab_ddp", **common)
    torch.testing.assert_close(staged[0]["final"], plain[0]["final"], rtol=1e-5, atol=1e-6)
    views = outcome("rlstab_ddp", dropper=Dropper, options={"gradient_as_bucket_view": True}, **common)
    assert all_equal(staged[0]["final"], views[0]["final"])


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_ranks_that_disagree_about_a_micro_batch_skip_together(outcome, strategy):
    ranks = outcome(strategy, steps=2, accumulate_grad_batches=2, dropper=lambda: Dropper({0}, rank=1))
    for rank in ranks:
        assert rank["verdicts"][-1].action == "skip"
        assert "disagree" in rank["verdicts"][-1].reasons[0]
        assert rank["counts"] == (0, 1)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_a_window_without_survivors_is_skipped(outcome, strategy):
    for rank in outcome(strategy, steps=2, accumulate_grad_batches=2, dropper=lambda: Dropper({0, 1})):
        assert rank["counts"] == (0, 1)
        assert "every micro-batch was dropped" in rank["verdicts"][-1].reasons


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_survivors_are_rescaled_when_asked(outcome, strategy):
    common = {"steps": 3, "accumulate_grad_batches": 3, "dropper": lambda: Dropper({0})}
    kept = outcome(strategy, **common)
    rescaled = outcome(strategy, options={"survivors": "rescale"}, **common)
    for name, norm in kept[0]["norms"][0].per_parameter.items():
        assert rescaled[0]["norms"][0].per_parameter[name] == pytest.approx(1.5 * norm, rel=1e-5)


def joined_net():
    net = Net()
    forward = net.net

    def training_step(batch, batch_idx):
        x = batch[0].transpose(0, 1)
        return forward(x).square().mean() * net.trainer.accumulate_grad_batches

    net.training_step = training_step
    return net


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_fr_106_norms_and_micro_batch_norms_do_not_depend_on_the_number_of_ranks(outcome, strategy):
    common = {"steps": 4, "accumulate_grad_batches": 2, "dropper": Dropper}
    one = outcome("rlstab", make=joined_net, world_size=1, **common)[0]
    for rank in outcome(strategy, **common):
        for key in ("norms", "micro_norms"):
            assert len(rank[key]) == len(one[key])
            for ours, theirs in zip(rank[key], one[key], strict=True):
                assert ours.total == pytest.approx(theirs.total, rel=1e-5)
                assert ours.per_layer == pytest.approx(theirs.per_layer, rel=1e-5)
                assert ours.per_parameter == pytest.approx(theirs.per_parameter, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_both_ranks_read_the_same_norms_and_the_total_is_their_sum(outcome, strategy):
    ranks = outcome(strategy, steps=1)
    mine, theirs = (rank["norms"][0] for rank in ranks)
    assert mine == theirs
    assert mine.total**2 == pytest.approx(sum(n**2 for n in mine.per_parameter.values()))
    assert mine.total**2 == pytest.approx(sum(n**2 for n in mine.per_layer.values()))
    assert set(mine.per_layer) == {"net.0", "net.2", "net.3"}


def test_fr_108_a_layer_of_one_element_leaves_one_rank_empty_and_nothing_breaks(outcome):
    ranks = outcome("rlstab_fsdp", dropper=Dropper, gradient_clip_val=0.1, accumulate_grad_batches=2)
    for rank in ranks:
        assert rank["norms"][0].per_parameter["net.3.weight"] > 0
        assert rank["counts"] == (2, 0)


def test_fr_075_norms_of_bfloat16_gradients_are_formed_in_float32(outcome):
    def make():
        net = Net(dtype=torch.bfloat16)
        with torch.no_grad():
            net.net[0].weight.mul_(1e-3)
        return net

    for rank in outcome("rlstab_fsdp", steps=1, make=make):
        norms = rank["norms"][0]
        assert norms.is_finite
        # bfloat16 has 8 bits: a total formed in it would be off by up to 0.4 %
        assert norms.total**2 == pytest.approx(sum(n**2 for n in norms.per_parameter.values()), rel=1e-6)


def test_fr_010_a_huge_finite_gradient_has_a_finite_norm_on_every_rank(outcome):
    for rank in outcome("rlstab_fsdp", steps=1, make=lambda: Net(poison={(0, 0): 1e22}), gradient_clip_val=1.0):
        assert rank["norms"][0].is_finite
        assert rank["norms"][0].total > 1e20
        assert rank["counts"] == (1, 0)
        assert all(w.isfinite().all() for w in rank["final"])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fr_104_both_kinds_of_clipping_work_under_sharding(outcome, algorithm):
    flags = {"steps": 3, "gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    sharded, plain = outcome("rlstab_fsdp", **flags), outcome("ddp", watcher=Silent, **flags)
    torch.testing.assert_close(sharded[0]["final"], plain[0]["final"], rtol=1e-5, atol=1e-6)


class Silent(Watcher):
    """For Lightning's own strategies, which have no gate."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        trainer.strategy.applied_steps = trainer.strategy.skipped_steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Look at nothing."""
