"""Two processes on halves of each batch train like one process on the joined batch."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

ROWS = 4


class Blocks(nn.Module):
    """A tiny tied language model: embedding, two blocks, and the embedding again as head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))  # one element: one of two ranks holds nothing of it
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden * self.scale)


class TinyLM(pl.LightningModule):
    """Mean token loss per micro-batch, summed over a window as in ``GRPOModule``."""

    def __init__(self, rank_rows):
        super().__init__()
        torch.manual_seed(3)
        self.model = Blocks()
        self.rank_rows = rank_rows
        self.losses, self.gradients = [], []

    def micro_loss(self, tokens):
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        tokens = batch[0].reshape(-1, 7)[self.rank_rows(self.global_rank)]
        loss = self.micro_loss(tokens)
        self.losses.append(float(loss.detach()))
        return loss * self.trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append({n: whole(p.grad) for n, p in self.trainer.strategy.trainable_parameters().items()})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def loader(micro_batches):
    tokens = torch.randint(0, 11, (micro_batches, 2 * ROWS, 7), generator=torch.Generator().manual_seed(5))
    # one item per micro-batch, the same on every rank: the module takes its own rows
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=1)


def halves(rank):
    return slice(rank * ROWS, (rank + 1) * ROWS)


def everything(rank):
    return slice(None)


def trained(on_ranks, strategy, root, rank_rows, micro_batches, **flags):
    def run():
        module = TinyLM(rank_rows)
        trainer = on_ranks(strategy, root, use_distributed_sampler=False, **flags)
        trainer.fit(module, loader(micro_batches))
        return {
            "losses": module.losses,
            "gradients": module.gradients,
            "weights": {n: whole(p) for n, p in module.named_parameters()},
            "steps": trainer.strategy.applied_steps,
        }

    return run


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_two_processes_equal_one_on_the_joined_batch(run_on_ranks, on_ranks, tmp_path, accumulate, clip):
    # five steps, the last window short when windows hold three
    flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    count = 5 if accumulate == 1 else 14
    alone = trained(on_ranks, "rlstab", tmp_path, everything, count, **flags)
    one = run_on_ranks(alone, world_size=1)[0]
    for strategy in ("rlstab_ddp", "rlstab_fsdp"):
        both = run_on_ranks(trained(on_ranks, strategy, tmp_path, halves, count, **flags))
        assert one["steps"] == both[0]["steps"] == both[1]["steps"] == 5
        joined = [(a + b) / 2 for a, b in zip(both[0]["losses"], both[1]["losses"], strict=True)]
        torch.testing.assert_close(torch.tensor(joined), torch.tensor(one["losses"]), rtol=1e-5, atol=1e-5)
        for rank in both:
            torch.testing.assert_close(rank["gradients"], one["gradients"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-5, atol=1e-5)
