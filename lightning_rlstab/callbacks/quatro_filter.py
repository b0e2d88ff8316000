"""QUATRO's rollout filter on a run: the same windows on every rank, masks instead of smaller batches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.callbacks.run_context import RunContext
from lightning_rlstab.control.rollout_filter import (
    FilterReading,
    FilterState,
    RolloutFilterConfig,
    judged,
    step_filter,
)
from lightning_rlstab.core.quatro import DROP_REASONS, copied_fracs, repetition_fracs
from lightning_rlstab.core.repetition import group_similarity
from lightning_rlstab.rollout.records import Rollout

__all__ = ["RolloutScreen"]

_log = logging.getLogger(__name__)

# Loss types whose normaliser counts sequences: a masked one stays in the denominator and would dilute the others.
_COUNTS_SEQUENCES = frozenset({"grpo", "sapo", "luspo", "dr_grpo"})


class RolloutScreen:
    """Masks completions that cannot be trusted and groups that teach nothing.

    Args:
        config: The settings.
    """

    def __init__(self, config: RolloutFilterConfig) -> None:
        self.config = config
        self.state = FilterState()
        self._last: tuple[int, ...] = (0,) * len(DROP_REASONS)
        self._kept_groups = 0.0
        self._groups = 0.0

    @property
    def is_hopeless(self) -> bool:
        """Whether nothing has been left to train on for too long."""
        return self.state.idle_rollouts >= self.config.max_idle_rollouts

    def screened(self, run: RunContext, rollout: Rollout) -> Rollout:
        """The rollout with left-out completions masked; rewards of single ones leave their group's statistics.

        Args:
            run: The run.
            rollout: Scored, whole groups.

        Returns:
            A rollout of the same shape.
        """
        assert rollout.rewards is not None
        rewards, lengths = rollout.rewards.cpu(), rollout.completion_lengths.cpu()
        group_ids = rollout.group_ids.cpu()
        repetition, overlap = self._text_scores(rollout, group_ids)
        reasons = judged(
            self.config,
            self.state,
            rewards=rewards,
            lengths=lengths,
            group_ids=group_ids,
            repetition=repetition,
            prompt_overlap=overlap,
        )
        is_first = _is_first_kept(reasons, group_ids)
        table = run.gathered(torch.stack([rewards.double(), lengths.double(), reasons.double(), is_first.double()]))
        everyone = table.cpu().transpose(0, 1).flatten(1)
        counts = torch.bincount(everyone[2].long(), minlength=len(DROP_REASONS)).tolist()
        self._last = tuple(counts)
        self._kept_groups = float(everyone[3].sum())
        self._groups = float(len(torch.unique(group_ids)) * run.replicas)
        reading = FilterReading(rewards=everyone[0].tolist(), lengths=everyone[1].tolist(), dropped=counts)
        self.state = step_filter(self.config, self.state, reading)
        self._tell(run, counts)
        return _without(rollout, reasons.to(rollout.completion_mask.device))

    def _text_scores(self, rollout: Rollout, group_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) repetition within each completion (or of the others of its group), and overlap with its prompt."""
        ids, lengths, order = rollout.completion_ids, rollout.completion_lengths, self.config.ngram
        repetition = repetition_fracs(ids, lengths, order).cpu()
        overlap = copied_fracs(ids, lengths, rollout.prompt_ids, rollout.prompt_mask, order).cpu()
        if self.config.similarity_max is not None:
            completions = [row[:length].tolist() for row, length in zip(ids.cpu(), lengths.tolist(), strict=True)]
            for group in torch.unique(group_ids).tolist():
                rows = (group_ids == group).nonzero().flatten().tolist()
                for row, score in zip(rows, group_similarity([completions[r] for r in rows]), strict=True):
                    if score > self.config.similarity_max:
                        repetition[row] = 1.0
        return repetition, overlap

    def _tell(self, run: RunContext, counts: list[int]) -> None:
        named = {name: count for name, count in zip(DROP_REASONS, counts, strict=True) if count}
        untrusted = sum(counts[1:4])
        if untrusted:
            reason = ", ".join(f"{name}: {count}" for name, count in named.items() if name != "kept")
            run.event("filter", source="quatro", counts=named, reason=f"left out of training: {reason}")
            _log.info("QUATRO left completions out of training: %s", reason)
        if counts[0]:
            return
        if self.state.idle_rollouts == 1:
            _log.warning("QUATRO: every completion was filtered out (%s); the step does nothing.", named)
            run.event("filter", source="quatro", counts=named, reason="everything was filtered out")
        if self.state.idle_rollouts == self.config.idle_alarm_rollouts:
            reason = (
                f"no learning signal in {self.state.idle_rollouts} rollouts in a row ({named} in the last one): "
                "look at the reward functions and at the difficulty of the prompts"
            )
            _log.warning("QUATRO: %s", reason)
            run.event("alarm", source="quatro", name="no_signal", reason=reason)

    def rescaled(self, run: RunContext, rollout: Rollout, loss_type: str) -> Rollout:
        """Correct the normaliser of loss types that count sequences: mean over the kept ones, not over all.

        Loss types that count tokens correct themselves, because masked tokens are not counted. Either way the gradient
        is a mean over what is kept, so with 2 of 8 groups left it has the scale of a batch of 2 groups.

        Args:
            run: The run.
            rollout: Ready for the loss.
            loss_type: The module's.
        """
        if loss_type not in _COUNTS_SEQUENCES:
            return rollout
        assert rollout.advantages is not None
        kept = run.summed(rollout.completion_mask.any(dim=1).sum())
        factor = len(rollout) * run.replicas / kept.clamp(min=1).to(rollout.advantages)
        return rollout.replace(advantages=rollout.advantages * factor)

    def readings(self) -> dict[str, float]:
        """Scalars of the last rollout."""
        total = max(sum(self._last), 1)
        readings = {
            f"rlstab/quatro/filtered_{name}": float(count)
            for name, count in zip(DROP_REASONS[1:], self._last[1:], strict=True)
        }
        readings["rlstab/quatro/kept_frac"] = self._last[0] / total
        readings["rlstab/quatro/effective_groups"] = self._kept_groups
        readings["rlstab/quatro/idle_rollouts"] = float(self.state.idle_rollouts)
        return readings

    def state_dict(self) -> dict[str, Any]:
        """The windows and counts, in plain types; the same on every rank."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved windows under the settings given now."""
        windows = {name: tuple(state[name]) for name in ("rewards", "log_lengths", "dropped")}
        self.state = FilterState(**{**state, **windows})


def _is_first_kept(reasons: Tensor, group_ids: Tensor) -> Tensor:
    """(N,) bool, True on one kept row of every group that has any."""
    seen: set[int] = set()
    flags = []
    for reason, group in zip(reasons.tolist(), group_ids.tolist(), strict=True):
        flags.append(reason == 0 and group not in seen)
        if reason == 0:
            seen.add(group)
    return torch.tensor(flags, dtype=torch.bool)


def _without(rollout: Rollout, reasons: Tensor) -> Rollout:
    is_dropped = reasons != 0
    if not bool(is_dropped.any()):
        return rollout
    assert rollout.rewards is not None
    # Whole groups keep their rewards for the curves; single completions must not enter their group's centre and scale.
    is_single = (reasons == DROP_REASONS.index("length")) | (reasons == DROP_REASONS.index("repetition"))
    per_func = rollout.rewards_per_func
    return rollout.replace(
        completion_mask=rollout.completion_mask & ~is_dropped.unsqueeze(1),
        rewards=torch.where(is_single, torch.nan, rollout.rewards),
        rewards_per_func=None if per_func is None else torch.where(is_single.unsqueeze(1), torch.nan, per_func),
    )
