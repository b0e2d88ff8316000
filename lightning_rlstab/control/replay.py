"""QUATRO's replay: which old groups go into the next training batch, and which stay in the buffer.

Only the plan is here: numbers about groups, no group itself. Whoever holds the groups keeps them under their key.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from lightning_rlstab.core.checks import integer, number

__all__ = ["Draw", "ReplayConfig", "ReplayEntry", "ReplayState", "drawn", "with_new_groups"]


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How much of the past is trained on again.

    Args:
        ratio: Share of old groups in the training batches; sensible 0.2 to 0.5.
        capacity_micro_batches: Newest micro-batches kept; sensible 4 to 16.
        max_age_steps: Optimizer steps after which a group is too stale to use.
        max_ratio: Largest share of old groups in any one batch while a shortfall is made up for.
        seed: Seed of the draws.
    """

    ratio: float = 0.3
    capacity_micro_batches: int = 8
    max_age_steps: int = 32
    max_ratio: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("replay.ratio", self.ratio, above=0, below=1, advice="Use 0.2 to 0.5")
        integer("replay.capacity_micro_batches", self.capacity_micro_batches, at_least=1)
        integer("replay.max_age_steps", self.max_age_steps, at_least=1)
        number("replay.max_ratio", self.max_ratio, at_least=self.ratio, below=1)
        integer("replay.seed", self.seed, at_least=0)


@dataclass(frozen=True, kw_only=True)
class ReplayEntry:
    """One group in the buffer.

    Attributes:
        key: Number under which the group itself is kept; never used twice.
        step: Optimizer step of the policy that sampled it.
    """

    key: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ReplayState:
    """What replay remembers.

    Attributes:
        entries: Groups in the buffer, oldest first.
        credit: Old groups owed to the batches so far, a fraction of one when nothing is short.
        draws: Draws so far; with the seed it determines the next one.
        next_key: Key of the next group.
        old_groups: Old groups trained on so far.
        all_groups: Groups trained on so far.
        missing_groups: Old groups that were due and not there.
    """

    entries: tuple[ReplayEntry, ...] = ()
    credit: float = 0.0
    draws: int = 0
    next_key: int = 0
    old_groups: int = 0
    all_groups: int = 0
    missing_groups: int = 0


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one batch takes from the buffer.

    Attributes:
        keys: Groups to mix in, each at most once.
        missing: Old groups that were due and not there; they are made up for later.
    """

    keys: tuple[int, ...]
    missing: int


def drawn(
    config: ReplayConfig, state: ReplayState, *, batch_groups: int, step: int, replica: int = 0
) -> tuple[ReplayState, Draw]:
    """Choose the old groups of the next batch, without repeats, among those that are not too stale.

    The number is ``ratio * batch_groups`` with the fraction carried over, so that the share is exact over many batches;
    a shortfall is owed, never waited for.

    Args:
        config: The settings.
        state: The memory before.
        batch_groups: Groups in the batch, the same on every rank.
        step: Optimizer step now.
        replica: Data-parallel replica; each draws its own.

    Returns:
        The memory after (stale groups gone), and the draw.

    Example:
        >>> state = with_new_groups(ReplayConfig(), ReplayState(), count=8, step=0, capacity=8)
        >>> drawn(ReplayConfig(), state, batch_groups=8, step=1)[1].missing
        0
    """
    fresh = tuple(entry for entry in state.entries if step - entry.step <= config.max_age_steps)
    credit = state.credit + config.ratio * batch_groups
    due = min(math.floor(credit + 1e-9), math.floor(config.max_ratio * batch_groups + 1e-9))
    count = min(due, len(fresh))
    source = random.Random(f"{config.seed}/{replica}/{state.draws}")
    keys = tuple(entry.key for entry in source.sample(fresh, count))
    # What is owed never exceeds one batch: a long shortfall must not turn into a long run of old batches.
    owed = min(credit - count, float(batch_groups))
    after = replace(
        state,
        entries=fresh,
        credit=owed,
        draws=state.draws + 1,
        old_groups=state.old_groups + count,
        all_groups=state.all_groups + batch_groups,
        missing_groups=state.missing_groups + due - count,
    )
    return after, Draw(keys=keys, missing=due - count)


def with_new_groups(config: ReplayConfig, state: ReplayState, *, count: int, step: int, capacity: int) -> ReplayState:
    """Put newly sampled groups into the buffer; the oldest leave when it is full.

    Args:
        config: The settings.
        state: The memory before.
        count: New groups; they get the keys ``next_key``, ``next_key + 1``, ...
        step: Optimizer step of the policy that sampled them.
        capacity: Groups the buffer holds, at least 1.

    Returns:
        The memory after. Groups whose key is no longer among ``entries`` can be let go.
    """
    added = tuple(ReplayEntry(key=state.next_key + index, step=step) for index in range(count))
    return replace(state, entries=(*state.entries, *added)[-max(capacity, 1) :], next_key=state.next_key + count)
