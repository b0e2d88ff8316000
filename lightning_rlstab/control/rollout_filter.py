"""QUATRO's filter: the windows of usual rewards and lengths that a rollout is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rlstab.core.checks import flag, integer, number
from lightning_rlstab.core.quatro import drop_reasons, outliers

__all__ = ["FilterReading", "FilterState", "RolloutFilterConfig", "judged", "step_filter"]


@dataclass(frozen=True, kw_only=True)
class RolloutFilterConfig:
    """What is left out of training.

    Args:
        reward_z: Robust |z| of a reward over the running window above which its group is left out; sensible 3 to 4.
        length_z: The same for the logarithm of a completion's length.
        repetition_max: Largest share of repeated n-grams within a completion, in (0, 1].
        prompt_overlap_max: Largest share of a completion's n-grams that are copied from its prompt, in (0, 1].
        similarity_max: Largest similarity (self-BLEU) to the other completions of its group, in (0, 1]; None for off:
            where answers are short, equal right answers are no sign of sickness.
        ngram: Tokens per n-gram.
        no_spread: Whether groups whose rewards are all equal are left out. Their KL term goes with them.
        window: Completions remembered, over all ranks.
        min_window: Completions seen before rewards and lengths are judged at all.
        level_frac: A reward or length that this share of the window has seen is a level, never an outlier.
        idle_alarm_rollouts: Rollouts in a row with nothing left to train on that are worth an alarm.
        max_idle_rollouts: Rollouts in a row with nothing left after which the run stops.
    """

    reward_z: float = 3.5
    length_z: float = 3.5
    repetition_max: float = 0.6
    prompt_overlap_max: float = 0.9
    similarity_max: float | None = None
    ngram: int = 4
    no_spread: bool = True
    window: int = 512
    min_window: int = 64
    level_frac: float = 0.01
    idle_alarm_rollouts: int = 10
    max_idle_rollouts: int = 100

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("filter.reward_z", self.reward_z, above=0, advice="Use 3 to 4")
        number("filter.length_z", self.length_z, above=0, advice="Use 3 to 4")
        number("filter.repetition_max", self.repetition_max, above=0, at_most=1)
        number("filter.prompt_overlap_max", self.prompt_overlap_max, above=0, at_most=1)
        if self.similarity_max is not None:
            number("filter.similarity_max", self.similarity_max, above=0, at_most=1)
        integer("filter.ngram", self.ngram, at_least=1)
        flag("filter.no_spread", self.no_spread)
        integer("filter.window", self.window, at_least=8)
        integer("filter.min_window", self.min_window, at_least=8, at_most=self.window)
        number("filter.level_frac", self.level_frac, at_least=0, below=0.5)
        integer("filter.idle_alarm_rollouts", self.idle_alarm_rollouts, at_least=1)
        integer("filter.max_idle_rollouts", self.max_idle_rollouts, at_least=self.idle_alarm_rollouts)


@dataclass(frozen=True, kw_only=True)
class FilterState:
    """What the filter remembers; the same on every rank.

    Attributes:
        rewards: Newest finite rewards of all ranks, oldest first; those that were judged outliers as well, so that a
            level that keeps coming back is accepted in the end.
        log_lengths: Logarithms of the newest lengths in tokens.
        idle_rollouts: Rollouts in a row with nothing left.
        dropped: Completions left out so far, per reason.
        seen: Completions judged so far.
    """

    rewards: tuple[float, ...] = ()
    log_lengths: tuple[float, ...] = ()
    idle_rollouts: int = 0
    dropped: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    seen: int = 0


@dataclass(frozen=True, kw_only=True)
class FilterReading:
    """One rollout, over all ranks in replica order.

    Attributes:
        rewards: Rewards of all completions; non-finite ones do not enter the window.
        lengths: Their lengths in tokens.
        dropped: Completions per reason, in the order of ``DROP_REASONS``.
    """

    rewards: Sequence[float]
    lengths: Sequence[float]
    dropped: Sequence[int]


def judged(
    config: RolloutFilterConfig,
    state: FilterState,
    *,
    rewards: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    repetition: Tensor,
    prompt_overlap: Tensor,
) -> Tensor:
    """Why each completion of this rank's rollout is left out, as an index into ``DROP_REASONS``.

    Args:
        config: The settings.
        state: The memory before this rollout.
        rewards: (N,) non-finite where there is none.
        lengths: (N,) tokens.
        group_ids: (N,) integers.
        repetition: (N,) share of repeated n-grams within the completion.
        prompt_overlap: (N,) share of its n-grams copied from the prompt.

    Returns:
        (N,) int64; 0 for kept.
    """
    nobody = torch.zeros(len(rewards), dtype=torch.bool)
    is_outlier = is_odd_length = nobody
    if len(state.rewards) >= config.min_window:
        window = torch.tensor(state.rewards, dtype=torch.float64)
        is_outlier = outliers(rewards, window, z_limit=config.reward_z, level_frac=config.level_frac)
    if len(state.log_lengths) >= config.min_window:
        window = torch.tensor(state.log_lengths, dtype=torch.float64)
        logs = lengths.double().clamp(min=1).log()
        is_odd_length = outliers(logs, window, z_limit=config.length_z, level_frac=config.level_frac)
    return drop_reasons(
        rewards,
        group_ids,
        is_outlier=is_outlier,
        is_odd_length=is_odd_length,
        is_repetitive=(repetition > config.repetition_max) | (prompt_overlap > config.prompt_overlap_max),
        drops_no_spread=config.no_spread,
    )


def step_filter(config: RolloutFilterConfig, state: FilterState, reading: FilterReading) -> FilterState:
    """The memory after one rollout.

    Args:
        config: The settings.
        state: The memory before.
        reading: The rollout of all ranks.

    Returns:
        The memory after.
    """
    rewards = torch.tensor(list(reading.rewards), dtype=torch.float64)
    logs = torch.tensor(list(reading.lengths), dtype=torch.float64).clamp(min=1).log()
    kept = reading.dropped[0]
    return replace(
        state,
        rewards=(*state.rewards, *rewards[rewards.isfinite()].tolist())[-config.window :],
        log_lengths=(*state.log_lengths, *logs.tolist())[-config.window :],
        idle_rollouts=0 if kept else state.idle_rollouts + 1,
        dropped=tuple(before + now for before, now in zip(state.dropped, reading.dropped, strict=True)),
        seen=state.seen + len(rewards),
    )
