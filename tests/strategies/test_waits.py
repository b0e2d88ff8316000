"""No guard makes the device wait within a micro-batch: norms are read when the next one is about to run backward."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlstab.strategies import norms as norms_module
from lightning_rlstab.strategies import staging as staging_module


class Scalars(TorchDispatchMode):
    """Counts tensors turned into numbers, each of which waits for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class PerMicroBatch(pl.Callback):
    """Scalars read, and norms read, in every micro-batch."""

    def __init__(self, reads):
        self.reads, self.counts, self.read_at = reads, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.mode = Scalars()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.mode.__exit__(None, None, None)
        self.counts.append(self.mode.count)
        self.read_at.append(list(self.reads))
        self.reads.clear()


@pytest.fixture
def reads(monkeypatch):
    """Order of backwards and of norms read."""
    order = []
    read, before = norms_module.PendingNorms.read, staging_module.MicroBatchStaging.after_backward

    def reading(self):
        order.append("read")
        return read(self)

    def launched(self, pending):
        order.append("launch")
        return before(self, pending)

    monkeypatch.setattr(norms_module.PendingNorms, "read", reading)
    monkeypatch.setattr(staging_module.MicroBatchStaging, "after_backward", launched)
    return order


def test_staging_reads_no_scalar_within_a_micro_batch_and_norms_one_micro_batch_later(small, fit, dropper, reads):
    def counted(strategy, callbacks):
        watch = PerMicroBatch(reads)
        module = small()
        module.losses = type("Discard", (list,), {"append": lambda self, value: None})()
        module.training_step = lambda batch, batch_idx: module.micro_loss(batch[0])
        fit(module, strategy=strategy, callbacks=[*callbacks, watch], micro_batches=4, accumulate_grad_batches=4)
        return watch

    stock, staged = counted("auto", []), counted("rlstab", [dropper()])
    assert staged.counts[:-1] == stock.counts[:-1]
    # the window's end reads its last micro-batch and the whole gradient: the one wait of an optimizer step
    assert staged.read_at == [["launch"], ["read", "launch"], ["read", "launch"], ["read", "launch", "read", "read"]]
