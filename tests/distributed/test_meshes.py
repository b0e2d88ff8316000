"""Replicated, tensor-parallel and low-precision sharding train like one process; layouts that would not are refused."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """An up and a down projection around a non-linearity."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks and a head."""

    def __init__(self, *, is_checkpointing=False):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)
        self.is_checkpointing = is_checkpointing

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointing else layer(x)
        return self.head(x)


class Net(pl.LightningModule):
    """Each data-parallel rank takes its rows."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.net = Stack(**options)
        self.norms, self.dtypes = [], set()

    def training_step(self, batch, batch_idx):
        sampler = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        rows = len(batch) // sampler["num_replicas"]
        out = self.net(batch[sampler["rank"] * rows : (sampler["rank"] + 1) * rows])
        self.dtypes.add(out.dtype)
        return out.float().square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(self.trainer.strategy.gradient_norms())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TensorParallel(Net):
    """Both projections of each block over the tensor-parallel ranks; norms and head whole."""

    def configure_model(self):
        if any(isinstance(p, DTensor) for p in self.net.parameters()):
            return
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in self.net.layers:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)


class Own(Net):
    """Shards by itself."""

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def loader(count=3):
    rows = torch.randn(count, 8, 4, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(list(rows), batch_size=None)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.fixture
def outcome(run_on_ranks, on_ranks, tmp_path):
    """Weights, norms and layout after three steps."""

    def run(strategy, *, ranks, make=Net, **flags):
        def work():
            module = make()
            trainer = on_ranks(strategy, tmp_path, use_distributed_sampler=False, **flags)
            trainer.fit(module, loader())
            placements = {n: tuple(p.placements) for n, p in module.named_parameters() if isinstance(p, DTensor)}
            return {
                "weights": {n: whole(p) for n, p in module.named_parameters()},
                "norms": module.norms,
                "sharded": {n for n, kinds in placements.items() if any(isinstance(k, Shard) for k in kinds)},
                "dtypes": {str(dtype) for dtype in module.dtypes},
                "sampler": getattr(trainer.strategy, "distributed_sampler_kwargs", None),
                "kinds": {p.dtype for p in module.parameters()},
            }

        return run_on_ranks(work, world_size=ranks)

    return run


def assert_equal_runs(ranks, one, *, tolerance=1e-5):
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(rank["norms"], one["norms"], strict=True):
            assert ours.total == pytest.approx(theirs.total, rel=tolerance)
            assert ours.per_parameter == pytest.approx(theirs.per_parameter, rel=10 * tolerance, abs=1e-7)


def test_four_processes_in_two_copies_of_two_shards_equal_one(outcome):
    one = outcome("rlstab", ranks=1)[0]
    ranks = outcome("rlstab_fsdp", ranks=4, options={"replicate_size": 2}, gradient_clip_val=0.1)
    clipped = outcome("rlstab", ranks=1, gradient_clip_val=0.1)[0]
    assert_equal_runs(ranks, clipped)
    assert [rank["sampler"] for rank in ranks] == [{"num_replicas": 4, "rank": index} for index in range(4)]
    assert all(rank["sharded"] == set(one["weights"]) for rank in ranks)


def test_tensor_parallel_ranks_share_rows_and_norms_count_every_weight_once(outcome):
    options = {"tensor_parallel_size": 2}
    one = outcome("rlstab", ranks=1, gradient_clip_val=0.1)[0]
    two = outcome("rlstab_fsdp", ranks=2, make=TensorParallel, options=options, gradient_clip_val=0.1)
    assert_equal_runs(two, one)
    assert [rank["sampler"] for rank in two] == [{"num_replicas": 1, "rank": 0}] * 2
    four = outcome("rlstab_fsdp", ranks=4, make=TensorParallel, options=options, gradient_clip_val=0.1)
    assert_equal_runs(four, one)


def test_compute_in_bfloat16_keeps_float32_weights_and_reduces_in_float32(outcome):
    one = outcome("rlstab", ranks=1)[0]
    ranks = outcome("rlstab_fsdp", ranks=2, options={"compute_dtype": "bfloat16"})
    assert_equal_runs(ranks, one, tolerance=2e-2)
    assert all(rank["dtypes"] == {"torch.bfloat16"} for rank in ranks)
    assert all(rank["kinds"] == {torch.float32} for rank in ranks)


def test_activation_checkpointing_changes_nothing(outcome):
    plain = outcome("rlstab_fsdp", ranks=2)
    recomputed = outcome("rlstab_fsdp", ranks=2, make=lambda: Net(is_checkpointing=True))
    assert_equal_runs(recomputed, plain[0], tolerance=1e-6)


def test_a_sharded_run_never_evaluates_in_inference_mode(run_on_ranks, on_ranks, tmp_path):
    """With gloo Lightning avoids it by itself; with NCCL a first forward under it spoils later training."""

    def work():
        trainer = on_ranks("rlstab_fsdp", tmp_path, use_distributed_sampler=False, inference_mode=True)
        trainer.fit(Net(), loader())
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        return [loop.inference_mode for loop in loops]

    assert run_on_ranks(work, world_size=2) == [[False] * 4] * 2


def test_a_module_that_shards_itself_is_left_alone(outcome):
    one = outcome("rlstab", ranks=1)[0]
    assert_equal_runs(outcome("rlstab_fsdp", ranks=2, make=Own), one)


def refused(run_on_ranks, on_ranks, tmp_path, make=Net, fit=loader, **flags):
    """The same words from every rank, raised and not waited for."""

    def work():
        try:
            on_ranks("rlstab_fsdp", tmp_path, **flags).fit(make(), *([fit()] if fit else []))
        except ValueError as error:
            return str(error)
        return None

    first, second = run_on_ranks(work)
    assert first == second
    return first


def test_tensor_parallelism_without_a_plan_is_refused(run_on_ranks, on_ranks, tmp_path):
    words = refused(run_on_ranks, on_ranks, tmp_path, options={"tensor_parallel_size": 2})
    assert "`tensor_parallel_size` must be 1 without a tensor-parallel plan" in words


def test_a_data_parallel_size_that_leaves_ranks_over_is_refused(run_on_ranks, on_ranks, tmp_path):
    words = refused(run_on_ranks, on_ranks, tmp_path, options={"data_parallel_size": 1})
    assert "`data_parallel_size` must be 2" in words


def test_fsdp1_is_refused_by_name(run_on_ranks, on_ranks, tmp_path):
    class Old(Net):
        def configure_model(self):
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"))

    words = refused(run_on_ranks, on_ranks, tmp_path, make=Old)
    assert "`net` must not be wrapped in FSDP1" in words


class Uneven(Net):
    """One batch more on rank 1, in training or in validation."""

    def __init__(self, *, stage):
        super().__init__()
        self.stage = stage

    def train_dataloader(self):
        return loader(3 + (self.stage == "training") * self.global_rank)

    def val_dataloader(self):
        return loader(3 + (self.stage == "validation") * self.global_rank)

    def validation_step(self, batch, batch_idx):
        self.net(batch)


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_fr_100_ranks_with_unequal_numbers_of_batches_are_refused_under_sharding(
    run_on_ranks, on_ranks, tmp_path, stage
):
    flags = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    words = refused(run_on_ranks, on_ranks, tmp_path, make=lambda: Uneven(stage=stage), fit=None, **flags)
    assert f"the same number of {stage} batches on every rank, got [3, 4]" in words


def test_fr_100_unequal_validation_ends_where_no_forward_is_a_collective(run_on_ranks, on_ranks, tmp_path):
    def work():
        module = Uneven(stage="validation")
        trainer = on_ranks("rlstab_ddp", tmp_path, use_distributed_sampler=False, num_sanity_val_steps=0)
        trainer.fit(module)
        return trainer.strategy.applied_steps

    assert run_on_ranks(work) == [3, 3]
