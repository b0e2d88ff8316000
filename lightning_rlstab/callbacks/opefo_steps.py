"""OPEFO's look at what an optimizer step did: no healthy Adam state moves a weight further than its formula allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.control.parameters import local
from lightning_rlstab.core.opefo import adam_step_bound

__all__ = ["StepLength"]

_SAMPLE = 256  # weights of each tensor, spread over it


@dataclass(frozen=True)
class _Watched:
    """Weights of one parameter group that Adam has moved before, and what the schedule asks for."""

    parameters: list[Tensor]
    group: Mapping[str, Any]
    rate: float
    states: list[Mapping[str, Any]]
    before: list[Tensor]


class StepLength:
    """Compares how far a sample of the weights has moved with the longest step that Adam can make.

    The learning rate is the schedule's: a rate that something else has raised for the step shows as well. Other
    optimizers than torch's ``Adam`` and ``AdamW`` have no such bound and are left alone.

    Attributes:
        last_frac: Largest movement (root mean square) of a weight tensor in the last applied step, over its bound; of
            this rank's pieces.
    """

    def __init__(self) -> None:
        self.last_frac = 0.0
        self._watched: list[_Watched] = []

    def begin(self, trainer: pl.Trainer) -> None:
        """Remember a sample of the weights and the schedule's rates; before the optimizer moves."""
        self._watched = [
            _Watched(parameters, group, rate, states, [_sample(p) for p in parameters])
            for optimizer in trainer.optimizers
            if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group, rate in zip(optimizer.param_groups, _scheduled_rates(trainer, optimizer), strict=True)
            for parameters, states in [_moved_before(optimizer, group)]
            if parameters
        ]

    def is_too_long(self) -> bool:
        """Whether the step since :meth:`begin` was longer than it can have been."""
        watched, self._watched = self._watched, []
        self.last_frac = max((_largest_frac(each) for each in watched), default=0.0)
        return self.last_frac > 1.0


def _largest_frac(watched: _Watched) -> float:
    counts = [float(piece.numel()) ** 0.5 for piece in watched.before]
    moves = torch._foreach_sub([_sample(p) for p in watched.parameters], watched.before)
    norms = torch.stack([*torch._foreach_norm(moves), *torch._foreach_norm(watched.before)]).tolist()
    beta1, beta2 = (float(beta) for beta in watched.group["betas"])
    # Parameters may have missed steps; the bound of the one with most of them is the widest.
    steps = torch.stack([torch.as_tensor(state["step"], dtype=torch.float32) for state in watched.states])
    moments = torch.finfo(watched.states[0]["exp_avg_sq"].dtype).eps
    slope = watched.rate * adam_step_bound(max(int(steps.max()), 1), beta1, beta2) * (1.01 + 64 * moments)
    decay = watched.rate * float(watched.group["weight_decay"])
    fracs = [0.0]
    for parameter, count, move, size in zip(
        watched.parameters, counts, norms[: len(counts)], norms[len(counts) :], strict=True
    ):
        bound = slope + (decay + torch.finfo(parameter.dtype).eps) * size / count
        fracs.append(move / count / bound if bound > 0 else float(move > 0) * 2.0)
    return max(fracs)


def _moved_before(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[list[Tensor], list[Mapping[str, Any]]]:
    found = [
        (parameter, optimizer.state[parameter])
        for parameter in group["params"]
        if parameter in optimizer.state and "exp_avg_sq" in optimizer.state[parameter] and local(parameter).numel()
    ]
    return [parameter for parameter, _ in found], [state for _, state in found]


def _sample(tensor: Tensor) -> Tensor:
    flat = local(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].to(torch.float32, copy=True)


def _scheduled_rates(trainer: pl.Trainer, optimizer: Optimizer) -> list[float]:
    """The learning rate of each group that the schedule asks for now; without a schedule the one that is set."""
    for config in trainer.lr_scheduler_configs:
        if getattr(config.scheduler, "optimizer", None) is optimizer:
            return [float(rate) for rate in config.scheduler.get_last_lr()]
    return [float(group["lr"]) for group in optimizer.param_groups]
