"""Prompts and held-out scores on two ranks: as on one, and with as many batches on each."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_rlstab.module.data import PromptDataModule, RolloutPlan
from lightning_rlstab.module.evaluation import HeldOutMetrics
from lightning_rlstab.rollout.records import Rollout

GENERATIONS = 2


class Scorer(pl.LightningModule):
    """Takes the row's ``answer`` as the reward of its first completion, and 0 for the second."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.rollout_plan = RolloutPlan(num_generations=GENERATIONS, per_device_train_batch_size=batch_size)
        self.weight = nn.Parameter(torch.zeros(()))
        self.held_out = HeldOutMetrics(GENERATIONS, threshold=1.0)
        self.trained, self.batches = [], 0

    def training_step(self, batch, batch_idx):
        self.trained.append(list(zip(batch.row_ids, batch.prompt_ids, strict=True)))
        return self.weight**2

    def validation_step(self, batch, batch_idx):
        self.batches += 1
        rewards = torch.tensor([[float(row["answer"]), 0.0] for row in batch.rows]).flatten()
        count = rewards.numel()
        lengths = torch.tensor([row["answer"] + 1 for row in batch.rows]).repeat_interleave(GENERATIONS)
        rollout = Rollout(
            prompts=[""] * count,
            completions=[""] * count,
            prompt_ids=torch.zeros(count, 1, dtype=torch.long),
            prompt_mask=torch.ones(count, 1, dtype=torch.bool),
            completion_ids=torch.zeros(count, 1, dtype=torch.long),
            completion_mask=torch.ones(count, 1, dtype=torch.bool),
            is_truncated=lengths > 3,
            group_ids=torch.tensor(batch.prompt_ids).repeat_interleave(GENERATIONS),
            pad_token_id=0,
            rewards=rewards,
            rewards_per_func=rewards.unsqueeze(1),
            completion_lengths=lengths,
        )
        self.held_out.update(rollout, torch.tensor(batch.is_padding).repeat_interleave(GENERATIONS))

    def on_validation_epoch_end(self):
        self.scores = {name: value.item() for name, value in self.held_out.scalars().items()}
        self.held_out.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(on_ranks, root, strategy, batch_size):
    module = Scorer(batch_size)
    data = PromptDataModule(
        [{"prompt": "x", "answer": n} for n in range(9)], [{"prompt": "x", "answer": n % 4} for n in range(7)], seed=3
    )
    on_ranks(strategy, root, num_sanity_val_steps=0).fit(module, data)
    return module.trained, module.batches, module.scores


def test_fr_100_two_ranks_see_the_prompts_of_one_and_end_validation_together(run_on_ranks, on_ranks, tmp_path):
    (whole, _, scores), *_ = run_on_ranks(lambda: fitted(on_ranks, tmp_path, "auto", 8), world_size=1)
    first, second = run_on_ranks(lambda: fitted(on_ranks, tmp_path, "ddp", 4))
    assert [one + two for one, two in zip(first[0], second[0], strict=True)] == whole
    assert first[1] == second[1] == 2  # 7 rows: 4 on each rank, one of them repeated, in batches of 2
    assert first[2] == second[2] == scores
    assert scores["val/completions/mean_length"] == pytest.approx(sum(n % 4 + 1 for n in range(7)) / 7)
