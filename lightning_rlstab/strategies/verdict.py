"""From the votes of all guards on all ranks to one verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from lightning_rlstab.control.protocols import Verdict, Vote
from lightning_rlstab.core.checks import choice, number
from lightning_rlstab.strategies.collectives import Collectives

__all__ = ["RunStopped", "StepWithheld", "checked_vote", "merged_verdict"]

_ACTIONS: tuple[Literal["apply", "skip", "stop"], ...] = ("apply", "skip", "stop")


class StepWithheld(Exception):  # noqa: N818 - control flow between the last callback and the strategy, never an error
    """Leaves the optimizer's closure before clipping and update; raised on all ranks and caught by the strategy."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.action)
        self.verdict = verdict


class RunStopped(RuntimeError):  # noqa: N818 - a decision of the guards
    """The guards stopped the run; every rank raises it with the same words.

    Attributes:
        verdict: What was decided and by whom.
        checkpoint: Where the state at the stop was saved, or None.
    """

    def __init__(self, verdict: Verdict, checkpoint: str | None = None) -> None:
        causes = "; ".join(f"{s}: {r}" for s, r in zip(verdict.sources, verdict.reasons, strict=True))
        saved = f" The state was saved to {checkpoint}." if checkpoint else ""
        super().__init__(f"The run was stopped by {causes}.{saved}")
        self.verdict = verdict
        self.checkpoint = checkpoint


def checked_vote(vote: Vote) -> Vote:
    """The vote, refused when its action or scale makes no sense.

    A scale of 0 is refused because a step on zero gradients still decays and moves the weights.

    Raises:
        ValueError: If the action is unknown, or the scale is not a finite number above 0.
    """
    choice("action", vote.action, _ACTIONS)
    if vote.action == "apply":
        number("scale", vote.scale, above=0, advice='Vote "skip" to leave the weights alone')
    return vote


def merged_verdict(votes: Sequence[Vote], collectives: Collectives, *, fingerprint: int = 0) -> Verdict:
    """One verdict for all ranks, from one all-reduce of four numbers.

    The strongest action wins (stop over skip over apply). Scales of one rank multiply; over ranks the smallest product
    holds, so that a guard that votes the same on every rank counts once. Words are gathered only when the verdict
    is not a plain apply, which by then all ranks know.

    Args:
        votes: This rank's votes.
        collectives: Over all ranks.
        fingerprint: A number in [0, 2**52) that must be equal on all ranks, e.g. which micro-batches were dropped;
            ranks that differ skip the step together.

    Returns:
        The same verdict on every rank.
    """
    strength = max((_ACTIONS.index(vote.action) for vote in votes), default=0)
    scale = math.prod(vote.scale for vote in votes if vote.action == "apply")
    if collectives.world_size > 1:
        packed = torch.tensor([strength, -scale, fingerprint, -fingerprint], dtype=torch.float64)
        strongest, negative_scale, highest, negative_lowest = collectives.reduced(packed, "max").tolist()
        strength, scale = int(strongest), -negative_scale
        if highest != -negative_lowest:
            strength = max(strength, 1)
            reason = "ranks disagree about which micro-batches were dropped"
            votes = [*votes, Vote(source="gate", action="skip", reason=reason)]
    action = _ACTIONS[strength]
    if action == "apply" and scale == 1.0:
        return Verdict(action=action)
    words = collectives.gathered_objects([(v.source, v.reason) for v in votes if _carries(v, action)])
    causes = _unique(cause for rank in words for cause in rank)
    return Verdict(
        action=action,
        scale=scale,
        sources=tuple(source for source, _ in causes),
        reasons=tuple(reason for _, reason in causes),
    )


def _carries(vote: Vote, action: str) -> bool:
    return vote.action == action and (action != "apply" or vote.scale != 1.0)


def _unique(causes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(causes))
