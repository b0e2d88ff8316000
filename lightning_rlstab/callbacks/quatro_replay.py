"""QUATRO's replay buffer: whole groups on the CPU, mixed into new rollouts."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.callbacks.run_context import RunContext
from lightning_rlstab.control.replay import ReplayConfig, ReplayEntry, ReplayState, drawn, with_new_groups
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.rollout.records import Rollout, concatenated, rollout_from, state_of, trimmed

__all__ = ["GroupReplay"]

_log = logging.getLogger(__name__)


class GroupReplay:
    """Holds this rank's recent groups and exchanges some groups of each rollout for them.

    A group keeps its advantages, its reference log-probs and the log-probs under which it was sampled, which become its
    old log-probs: importance ratios are taken against the policy that really sampled.

    Args:
        config: The settings.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.state = ReplayState()
        self._groups: dict[int, Rollout] = {}
        self._last_ages: list[int] = []

    def mixed(self, run: RunContext, rollout: Rollout, *, step: int, micro_batches: int) -> Rollout:
        """The rollout with some groups exchanged for old ones; its new groups that teach something enter the buffer.

        Groups that teach nothing (filtered out, or without advantages) are exchanged first, then the last ones. The
        number of rows stays, so shapes and collectives are the same on every rank.

        Args:
            run: The run.
            rollout: With advantages, and ``behavior_logprobs`` of the policy that sampled.
            step: Optimizer step now.
            micro_batches: Micro-batches that the rollout is cut into.

        Returns:
            The mixed rollout; rows of new groups have NaN as old log-probs where they had none.

        Raises:
            ValueError: If the sampler gave no log-probs.
        """
        if rollout.behavior_logprobs is None:
            advice = "Use a sampler that returns log-probs, or QUATRO(replay=False)"
            raise refusal("behavior_logprobs", "be there for replay", None, advice)
        rows_of = _rows_of_groups(rollout.group_ids)
        is_useful = [_is_useful(rollout, rows) for rows in rows_of]
        missing_before = self.state.missing_groups
        self.state, draw = drawn(self.config, self.state, batch_groups=len(rows_of), step=step, replica=run.replica)
        old = [self._groups[key] for key in draw.keys]
        self._last_ages = [step - int(group.policy_steps[0]) for group in old]
        useful = [rows for rows, is_kept in zip(rows_of, is_useful, strict=True) if is_kept]
        fresh = [trimmed(_remembered(rollout.select(rows)).to("cpu")) for rows in useful]
        self._store(fresh, step, capacity=self._capacity(len(rollout), micro_batches, len(rows_of)))
        self._tell(run, draw.missing, missing_before, len(old))
        if not old:
            return rollout
        # False sorts before True: useless groups leave first, then the last ones.
        order = sorted(range(len(rows_of)), key=lambda index: (is_useful[index], -index))
        leaving = set(order[: len(old)])
        staying = [row for index, rows in enumerate(rows_of) if index not in leaving for row in rows]
        return _joined(rollout.select(staying), old)

    def _capacity(self, rows: int, micro_batches: int, groups: int) -> int:
        """Groups in ``capacity_micro_batches`` micro-batches; at least one, where a group spans several of them."""
        rows_kept = self.config.capacity_micro_batches * rows / max(micro_batches, 1)
        return max(math.ceil(rows_kept * groups / max(rows, 1)), 1)

    def _store(self, fresh: Sequence[Rollout], step: int, *, capacity: int) -> None:
        first = self.state.next_key
        self.state = with_new_groups(self.config, self.state, count=len(fresh), step=step, capacity=capacity)
        self._groups |= {first + index: group for index, group in enumerate(fresh)}
        held = {entry.key for entry in self.state.entries}
        self._groups = {key: group for key, group in self._groups.items() if key in held}

    def _tell(self, run: RunContext, missing: int, missing_before: int, found: int) -> None:
        if missing and not missing_before:
            reason = f"{missing} of {missing + found} old groups were not in the buffer; they are made up for later"
            run.event("replay", source="quatro", missing=missing, found=found, reason=reason)

    def readings(self) -> dict[str, float]:
        """Scalars of the last rollout and of the run."""
        readings = {
            "rlstab/quatro/replay_groups": float(len(self._last_ages)),
            "rlstab/quatro/replay_frac": self.state.old_groups / max(self.state.all_groups, 1),
            "rlstab/quatro/replay_missing": float(self.state.missing_groups),
            "rlstab/quatro/replay_buffer": float(len(self._groups)),
        }
        if self._last_ages:
            readings["rlstab/quatro/replay_age_steps"] = sum(self._last_ages) / len(self._last_ages)
        return readings

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory and groups, in plain types and CPU tensors."""
        groups = {str(key): state_of(group) for key, group in self._groups.items()}
        return {"memory": dataclasses.asdict(self.state), "groups": groups}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int) -> None:
        """Continue with the memory of every rank of the saved run.

        With another number of ranks the groups are dealt out anew, oldest first, and the counts are taken from rank 0.

        Args:
            states: One per rank of the saved run.
            rank: This rank.
            world_size: Number of ranks now.
        """
        own = states[rank] if len(states) == world_size else states[0]
        memory = {**own["memory"], "entries": tuple(ReplayEntry(**entry) for entry in own["memory"]["entries"])}
        self.state = ReplayState(**memory)
        self._groups = {int(key): rollout_from(group) for key, group in own["groups"].items()}
        if len(states) == world_size:
            return
        everyone = [
            (entry["step"], saved_rank, state["groups"][str(entry["key"])])
            for saved_rank, state in enumerate(states)
            for entry in state["memory"]["entries"]
        ]
        dealt = sorted(everyone, key=lambda item: item[:2])[rank::world_size]
        _log.warning(
            "QUATRO: the replay buffers of %d processes were dealt out to %d: %d groups here.",
            len(states),
            world_size,
            len(dealt),
        )
        first = max(state["memory"]["next_key"] for state in states)
        entries = tuple(ReplayEntry(key=first + index, step=step) for index, (step, _, _) in enumerate(dealt))
        self._groups = {first + index: rollout_from(group) for index, (_, _, group) in enumerate(dealt)}
        self.state = dataclasses.replace(self.state, entries=entries, next_key=first + len(dealt))


def _rows_of_groups(group_ids: Tensor) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows.setdefault(group, []).append(row)
    return list(rows.values())


def _is_useful(rollout: Rollout, rows: Sequence[int]) -> bool:
    assert rollout.advantages is not None
    index = torch.tensor(rows, device=rollout.advantages.device)
    has_tokens = rollout.completion_mask[index].any(dim=1)
    return bool((has_tokens & (rollout.advantages[index] != 0)).any())


def _remembered(group: Rollout) -> Rollout:
    """The group as it is kept: what it is compared with later is the policy that sampled it."""
    old = group.behavior_logprobs if group.old_logprobs is None else group.old_logprobs
    return group.replace(old_logprobs=old, num_items=None)


def _joined(fresh: Rollout, old: Sequence[Rollout]) -> Rollout:
    if fresh.old_logprobs is None:
        assert fresh.behavior_logprobs is not None
        fresh = fresh.replace(old_logprobs=torch.full_like(fresh.behavior_logprobs, torch.nan))
    if fresh.reference_logprobs is None:  # saved under a setting with a reference model
        old = [group.replace(reference_logprobs=None) for group in old]
    fresh = fresh.replace(num_items=None)
    return concatenated([fresh, *old])
