"""One training rollout from prompts to rows that are ready for the loss."""

from __future__ import annotations

import functools
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rlstab.core.logprobs import possible_tokens
from lightning_rlstab.module.completions import log_completions
from lightning_rlstab.module.first_rollout import first_rollout_check
from lightning_rlstab.module.forward import policy_logprobs
from lightning_rlstab.module.prompt_loaders import PromptBatch
from lightning_rlstab.module.random_state import sampling_seed
from lightning_rlstab.module.readings import advantage_readings
from lightning_rlstab.module.reference import reference_context
from lightning_rlstab.module.rollouts import loss_tokens, shuffled, trainer_state, with_advantages
from lightning_rlstab.module.weights import generation_ready
from lightning_rlstab.report.events import EventLog
from lightning_rlstab.rollout.metrics import equal_lengths_warning, logged_metrics, rollout_readings
from lightning_rlstab.rollout.records import Rollout

if TYPE_CHECKING:
    from lightning_rlstab.module.grpo import GRPOModule

__all__ = ["TrainingRollout", "training_rollout"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRollout:
    """A rollout and what there is to log about it.

    Attributes:
        rows: Whole generation batch of this rank, shuffled, with everything the loss reads.
        readings: Sums and counts, to be merged over ranks.
        logged: Means of what reward functions passed to ``log_metric``, over all ranks.
    """

    rows: Rollout
    readings: dict[str, Tensor]
    logged: dict[str, float]


def training_rollout(module: GRPOModule, batch: PromptBatch, *, index: int) -> TrainingRollout:
    """Sample and score a generation batch, then add advantages and the log-probs that the loss needs.

    Callbacks see it twice: scored, before advantages, and ready, before it is shuffled and cut.

    Args:
        module: The module that trains.
        batch: Prompts of this rank.
        index: Number of the rollout since the start of training; picks the seeds.

    Returns:
        The rollout and its readings.
    """
    settings, trainer, ranks = module.settings, module.trainer, module.ranks
    with generation_ready(trainer.strategy, module.ready_policy):
        rollout = module.maker.sampled(
            module.ready_policy,
            batch.rows,
            batch.prompt_ids,
            num_generations=settings.num_generations,
            sampling=module.sampling,
            seed=sampling_seed(settings.seed, "train", index, ranks.replica),
            policy_step=module.global_step,
            device=module.device,
        )
    if index == 0:
        _check_first(module, rollout)
    with ranks.failing_together():
        rollout, table = module.maker.scored(rollout, trainer_state(trainer))
    rollout = loss_tokens(rollout, is_truncated_masked=settings.mask_truncated_completions)
    for scored_hook in module.hooks.scored:
        rollout = scored_hook.on_rollout_scored(trainer, module, rollout)
    rollout, estimate = with_advantages(
        rollout,
        settings=settings,
        weights=torch.tensor(module.rewards.weights),
        ranks=ranks,
        estimator=module.advantage_estimator,
    )
    rollout = _without_impossible_tokens(_with_logprobs(module, rollout))
    rollout = rollout.replace(num_items=float(ranks.summed(rollout.completion_mask.sum())))
    # Before the last hooks: a replay exchanges rows, and a row's rewards stand in the table at its place.
    readings = rollout_readings(rollout, table, estimate)
    if index == 0 and (warning := equal_lengths_warning(ranks.merged(readings))):
        _log.warning(warning)
    if settings.log_completions:
        log_completions(trainer, ranks, rollout, table, shown=settings.num_completions_to_print)
    for ready_hook in module.hooks.ready:
        rollout = ready_hook.on_rollout_ready(trainer, module, rollout)
    readings |= advantage_readings(rollout)
    return TrainingRollout(
        rows=shuffled(rollout, sampling_seed(settings.seed, "shuffle", index, ranks.replica)),
        readings=readings,
        logged=logged_metrics(ranks.gathered_objects(table.metrics)),
    )


def _check_first(module: GRPOModule, rollout: Rollout) -> None:
    """Compare the sampler with the training forward before anything was updated."""
    settings, trainer = module.settings, module.trainer
    if rollout.behavior_logprobs is None:
        return
    report = first_rollout_check(
        module.ready_policy,
        rollout,
        temperature=settings.temperature,
        rows=min(len(rollout), settings.per_device_train_batch_size),
    )
    log_dir = trainer.log_dir  # a broadcast: on every rank
    if trainer.is_global_zero and log_dir is not None:
        event = {name: value for name, value in asdict(report).items() if name != "message"}
        events = EventLog(Path(log_dir) / "events.jsonl")
        events.write("self_check", step=module.global_step, text=report.message, **event)


def _with_logprobs(module: GRPOModule, rollout: Rollout) -> Rollout:
    settings, policy = module.settings, module.ready_policy
    forward = functools.partial(
        policy_logprobs,
        rollout=rollout,
        temperature=settings.temperature,
        rows_per_forward=settings.per_device_train_batch_size,
    )
    # A rollout that outlives an optimizer step is trained on by a newer policy than the one it is compared with.
    is_outliving = module.trainer.accumulate_grad_batches % module.rollout_plan.cycle_length != 0
    if is_outliving or module.loss_settings.vllm_importance_sampling_correction:
        rollout = rollout.replace(old_logprobs=forward(policy))
    if settings.beta != 0.0:
        with reference_context(policy, module.reference) as reference:
            rollout = rollout.replace(reference_logprobs=forward(reference))
    return rollout


def _without_impossible_tokens(rollout: Rollout) -> Rollout:
    """Tokens of probability 0 teach nothing and must not stay in the normaliser either."""
    mask = possible_tokens(rollout.completion_mask, rollout.behavior_logprobs, rollout.old_logprobs)
    return rollout.replace(completion_mask=mask)
