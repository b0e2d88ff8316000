"""From dataset rows to scored completions with advantages: the sampling half of a GRPO step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.core.advantages import GroupAdvantages, combined_rewards
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.module.prompts import is_conversational, prompt_tokens, tokenized_prompts
from lightning_rlstab.module.settings import GRPOSettings
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.rewards import RewardSuite, RewardTable
from lightning_rlstab.rollout.sampler import Sampler, SamplingSettings

__all__ = ["AdvantageEstimator", "RolloutMaker", "loss_tokens", "shuffled", "trainer_state", "with_advantages"]

AdvantageEstimator = Callable[[Tensor, Tensor], GroupAdvantages]
"""Rewards (N,) and group ids (N,) to advantages; replaces the default estimator when a callback sets one."""


@dataclass(frozen=True)
class RolloutMaker:
    """Samples and scores completions for dataset rows.

    Attributes:
        sampler: The engine that continues prompts.
        rewards: The reward functions.
        processing_class: The tokenizer.
        settings: The module's settings.
        context_length: Longest prompt plus completion the model takes, or None when it has no limit.
    """

    sampler: Sampler
    rewards: RewardSuite
    processing_class: Any
    settings: GRPOSettings
    context_length: int | None = None

    def sampled(
        self,
        policy: Any,
        rows: Sequence[dict[str, Any]],
        group_ids: Sequence[int],
        *,
        num_generations: int,
        sampling: SamplingSettings,
        seed: int,
        policy_step: int,
        device: torch.device,
    ) -> Rollout:
        """Continue every row's prompt ``num_generations`` times.

        Args:
            policy: The model to sample from.
            rows: Unique dataset rows; ``prompt`` and any other columns.
            group_ids: One global id per row.
            num_generations: Completions per row, contiguous in the result.
            sampling: The sampling knobs.
            seed: Seed of the draw.
            policy_step: Optimizer step of the policy.
            device: Where the prompts are put.

        Returns:
            A record of ``len(rows) * num_generations`` completions without rewards.

        Raises:
            ValueError: If a prompt and its completion do not fit into the model's context.
        """
        prompts = [row["prompt"] for row in rows]
        ids = prompt_tokens(prompts, self.processing_class, self.settings.chat_template_kwargs)
        self._check_lengths(ids, sampling.max_completion_length)
        repeated = [index for index in range(len(rows)) for _ in range(num_generations)]
        pad_token_id = self.processing_class.pad_token_id
        prompt_ids, prompt_mask = tokenized_prompts(
            [ids[index] for index in repeated], pad_token_id=pad_token_id, device=device
        )
        samples = self.sampler.sample(policy, prompt_ids, prompt_mask, settings=sampling, seed=seed)
        columns = {name: [rows[index][name] for index in repeated] for name in rows[0] if name != "prompt"}
        return Rollout(
            prompts=[prompts[index] for index in repeated],
            completions=self._decoded(samples.completion_ids, samples.completion_mask, prompts[0]),
            columns=columns,
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=samples.completion_ids,
            completion_mask=samples.completion_mask,
            is_truncated=samples.is_truncated,
            group_ids=torch.tensor([group_ids[index] for index in repeated], device=device),
            behavior_logprobs=samples.behavior_logprobs,
            policy_step=policy_step,
            pad_token_id=pad_token_id,
        )

    def _check_lengths(self, ids: Sequence[Sequence[int]], max_completion_length: int) -> None:
        longest = max(range(len(ids)), key=lambda index: len(ids[index]))
        needed = len(ids[longest]) + max_completion_length
        if self.context_length is not None and needed > self.context_length:
            raise ValueError(
                f"`prompt` plus `max_completion_length` must fit into the model's context of {self.context_length} "
                f"tokens, got {len(ids[longest])} + {max_completion_length} = {needed}. "
                "Shorten the prompts or lower `max_completion_length`."
            )

    def _decoded(self, completion_ids: Tensor, completion_mask: Tensor, prompt: Any) -> list[Any]:
        ids = [row[kept].tolist() for row, kept in zip(completion_ids.cpu(), completion_mask.cpu(), strict=True)]
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        if is_conversational(prompt):
            return [[{"role": "assistant", "content": text}] for text in texts]
        return list(texts)

    def scored(self, rollout: Rollout, trainer_state: Any) -> tuple[Rollout, RewardTable]:
        """Ask every reward function about every completion.

        Args:
            rollout: Completions to score.
            trainer_state: Handed to reward functions that ask for it.

        Returns:
            The record with ``rewards_per_func`` and ``rewards``, and the table with counts and extra columns.
        """
        ids = [
            row[:length].tolist()
            for row, length in zip(rollout.completion_ids.cpu(), rollout.completion_lengths.tolist(), strict=True)
        ]
        table = self.rewards.score(
            prompts=rollout.prompts,
            completions=rollout.completions,
            completion_ids=ids,
            columns=rollout.columns,
            trainer_state=trainer_state,
        )
        device = rollout.completion_ids.device
        scored = rollout.replace(rewards_per_func=table.per_func.to(device), rewards=table.weighted.to(device))
        return scored, table


def with_advantages(
    rollout: Rollout,
    *,
    settings: GRPOSettings,
    weights: Tensor,
    ranks: Ranks,
    estimator: AdvantageEstimator | None = None,
) -> tuple[Rollout, GroupAdvantages]:
    """Add advantages; the statistics cover all ranks wherever the estimator looks beyond one group.

    Args:
        rollout: A scored record of whole groups.
        settings: ``scale_rewards`` and ``multi_objective_aggregation``.
        weights: (F,) reward weights.
        ranks: The ranks to gather over.
        estimator: Replaces the default estimator; sees only this rank's groups.

    Returns:
        The record with advantages, and this rank's rows of the estimate.
    """
    assert rollout.rewards_per_func is not None
    assert rollout.rewards is not None
    _check_groups(rollout)
    if estimator is not None:
        estimate = estimator(rollout.rewards, rollout.group_ids)
        return rollout.replace(advantages=estimate.advantages), estimate
    is_local = settings.scale_rewards != "batch" and settings.multi_objective_aggregation == "sum_then_normalize"
    per_func, group_ids = rollout.rewards_per_func, rollout.group_ids
    if not is_local:
        per_func, group_ids = ranks.gathered_rows(per_func), ranks.gathered_rows(group_ids)
    _, estimate = combined_rewards(
        per_func,
        weights.to(per_func.device),
        group_ids,
        aggregation=settings.multi_objective_aggregation,
        scale=settings.scale_rewards,
    )
    if not is_local:
        start = ranks.replica * len(rollout)
        estimate = _own_rows(estimate, slice(start, start + len(rollout)))
    return rollout.replace(advantages=estimate.advantages), estimate


def _check_groups(rollout: Rollout) -> None:
    """A group's completions must answer one prompt, or their rewards cannot be compared."""
    first: dict[int, Any] = {}
    for group, prompt in zip(rollout.group_ids.tolist(), rollout.prompts, strict=True):
        if first.setdefault(group, prompt) != prompt:
            raise refusal(
                "group_ids",
                "be one id per prompt",
                group,
                f"Group {group} holds the prompts {first[group]!r} and {prompt!r}; give each prompt an id of its own",
            )


def _own_rows(estimate: GroupAdvantages, rows: slice) -> GroupAdvantages:
    return replace(
        estimate,
        advantages=estimate.advantages[rows],
        group_std=estimate.group_std[rows],
        scale_std=estimate.scale_std[rows],
        has_spread=estimate.has_spread[rows],
    )


def trainer_state(trainer: Any) -> Any:
    """The Trainer's progress under the names of ``transformers.TrainerState``, which reward functions know from TRL.

    A plain record: it also travels to the worker processes of reward functions with a time limit, and unpickling
    transformers' own class there would import transformers inside the limit.

    Args:
        trainer: The Lightning Trainer.
    """
    return SimpleNamespace(
        global_step=trainer.global_step,
        max_steps=trainer.max_steps,
        epoch=float(trainer.current_epoch),
        num_train_epochs=trainer.max_epochs,
        logging_steps=trainer.log_every_n_steps,
        is_world_process_zero=trainer.is_global_zero,
        is_local_process_zero=trainer.local_rank == 0,
        log_history=[],
    )


def loss_tokens(rollout: Rollout, *, is_truncated_masked: bool) -> Rollout:
    """Close the mask of truncated completions when asked to; their generated length is kept.

    Args:
        rollout: Any record.
        is_truncated_masked: Whether completions without an end token stay out of the loss.
    """
    if not is_truncated_masked:
        return rollout
    return rollout.replace(completion_mask=rollout.completion_mask & ~rollout.is_truncated.unsqueeze(1))


def shuffled(rollout: Rollout, seed: int) -> Rollout:
    """The rows in a seeded random order, so that micro-batches mix groups as in TRL.

    Args:
        rollout: Any record.
        seed: Seed of the order.
    """
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    return rollout.select(torch.randperm(len(rollout), generator=generator))
