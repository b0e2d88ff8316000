"""Entropy beyond one micro-batch: TRL's adaptive coefficient and the threshold of the top-entropy tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.core.policy_loss import adaptive_entropy_coef, applied_entropy_coef, entropy_threshold
from lightning_rlstab.module.settings import GRPOSettings

__all__ = ["EntropyBonus", "entropy_threshold_over"]


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """TRL's entropy coefficient with its memory; ``asdict`` is the checkpoint.

    Attributes:
        coef: Coefficient after the newest optimizer step.
        last_entropy: Mean token entropy of that step over all ranks, nats; infinite before the first.
    """

    coef: float
    last_entropy: float = float("inf")

    def applied(self, settings: GRPOSettings) -> float:
        """The coefficient for the current optimizer step."""
        if not settings.use_adaptive_entropy:
            return self.coef
        return applied_entropy_coef(self.coef, self.last_entropy, target=settings.entropy_target)

    def after_step(self, entropy: float, settings: GRPOSettings) -> EntropyBonus:
        """The state after an optimizer step whose mean token entropy was ``entropy`` nats."""
        if not settings.use_adaptive_entropy:
            return self
        coef = adaptive_entropy_coef(
            self.coef,
            entropy,
            target=settings.entropy_target,
            delta=settings.entropy_coef_delta,
            minimum=settings.entropy_coef_min,
            maximum=settings.entropy_coef_max,
        )
        return replace(self, coef=coef, last_entropy=entropy)


def entropy_threshold_over(ranks: Ranks, entropy: Tensor, mask: Tensor, top_entropy_quantile: float) -> Tensor:
    """The entropy from which on a token belongs to the top share, over this micro-batch of all ranks.

    Args:
        ranks: The ranks to gather over; widths may differ between them.
        entropy: (batch, time) nats.
        mask: (batch, time) bool.
        top_entropy_quantile: Share of tokens that belong to the top.

    Returns:
        A scalar in nats, without gradient.
    """
    values = torch.where(mask, entropy.detach().float(), -1.0).flatten()  # entropies are never negative
    if ranks.replicas > 1:
        width = int(ranks.gathered(torch.tensor(values.numel(), device=values.device)).max())
        padded = torch.full((width,), -1.0, device=values.device)
        padded[: values.numel()] = values
        values = ranks.gathered_rows(padded.unsqueeze(0)).flatten()
    return entropy_threshold(values, values >= 0, top_entropy_quantile)
