"""Held-out evaluation: sample, score and count; the same steps for validate, test and predict."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.module.evaluation import HeldOutMetrics
from lightning_rlstab.module.plan import RolloutPlan
from lightning_rlstab.module.prompt_loaders import PromptBatch
from lightning_rlstab.module.random_state import sampling_seed
from lightning_rlstab.module.rollouts import RolloutMaker, trainer_state
from lightning_rlstab.module.settings import GRPOSettings
from lightning_rlstab.module.weights import generation_ready
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.sampler import SamplingSettings

__all__ = ["HeldOutEvaluation"]


class HeldOutEvaluation(pl.LightningModule):
    """The evaluation half of a GRPO module: completions for held-out prompts, scored and counted.

    Attributes:
        settings: The module's settings.
        held_out: The metrics, added up over the batches of one evaluation.
        maker: Samples and scores completions.
        ranks: The ranks of the run.
    """

    settings: GRPOSettings
    held_out: HeldOutMetrics
    maker: RolloutMaker
    ranks: Ranks

    @property
    @abstractmethod
    def ready_policy(self) -> nn.Module:
        """The policy, loaded if it was not."""

    @property
    @abstractmethod
    def rollout_plan(self) -> RolloutPlan:
        """How many prompts and completions a batch has."""

    @property
    def sampling(self) -> SamplingSettings:
        """How training completions are sampled."""
        names = [field.name for field in dataclasses.fields(SamplingSettings)]
        return SamplingSettings(**{name: getattr(self.settings, name) for name in names})

    @property
    def held_out_sampling(self) -> SamplingSettings:
        """How held-out completions are sampled; ``eval_temperature`` 0 is greedy."""
        temperature, sampling = self.settings.eval_temperature, self.sampling
        if temperature is None:
            return sampling
        if temperature == 0:
            greedy = {**(sampling.generation_kwargs or {}), "do_sample": False}
            return dataclasses.replace(
                sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=None, generation_kwargs=greedy
            )
        return dataclasses.replace(sampling, temperature=temperature)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Sample and score held-out prompts.

        Args:
            batch: Held-out prompts of this rank.
            batch_idx: Index of the batch.
        """
        self._evaluate(batch, batch_idx)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """As :meth:`validation_step`, on the test prompts."""
        self._evaluate(batch, batch_idx)

    def _evaluate(self, batch: PromptBatch, batch_idx: int) -> None:
        rollout = self._held_out_completions(batch, batch_idx)
        with self.ranks.failing_together():
            rollout, _ = self.maker.scored(rollout, trainer_state(self.trainer))
        repeats = self.rollout_plan.eval_generations
        is_padding = torch.tensor(batch.is_padding, device=self.device).repeat_interleave(repeats)
        self.held_out.update(rollout, is_padding)

    def on_validation_epoch_end(self) -> None:
        """Log the held-out scores as ``val/...``."""
        self._log_held_out("val/")

    def on_test_epoch_end(self) -> None:
        """Log the held-out scores as ``test/...``."""
        self._log_held_out("test/")

    def _log_held_out(self, prefix: str) -> None:
        scores = {name.replace("val/", prefix, 1): value for name, value in self.held_out.scalars().items()}
        self.log_dict(scores, prog_bar=False, batch_size=1)
        self.held_out.reset()

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Completions for prompts.

        Args:
            batch: Prompts.
            batch_idx: Index of the batch.

        Returns:
            One record per completion: ``prompt``, ``completion``, and the row's other columns.
        """
        rollout = self._held_out_completions(batch, batch_idx)
        return [
            {
                "prompt": prompt,
                "completion": completion,
                **{name: rollout.columns[name][row] for name in rollout.columns},
            }
            for row, (prompt, completion) in enumerate(zip(rollout.prompts, rollout.completions, strict=True))
        ]

    def _held_out_completions(self, batch: PromptBatch, batch_idx: int) -> Rollout:
        settings = self.settings
        with generation_ready(self.trainer.strategy, self.ready_policy):
            return self.maker.sampled(
                self.ready_policy,
                batch.rows,
                batch.prompt_ids,
                num_generations=self.rollout_plan.eval_generations,
                sampling=self.held_out_sampling,
                seed=sampling_seed(settings.seed, "held-out", batch_idx, self.ranks.replica),
                policy_step=self.global_step,
                device=self.device,
            )
