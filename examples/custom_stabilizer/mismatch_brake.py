"""A stabilizer of one's own: skip a step whose tokens training and sampling disagree about far more than usual.

Formula, memory, callback: the same three parts as every stabilizer of the package, in one file.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_rlstab.control.protocols import Vote
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.core.checks import integer, number

# 1. The formula: tensors in, tensors out. It gives a sum and a count, which add up over micro-batches and ranks.


def mismatch_reading(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of |logprobs - behavior_logprobs| in nats over the open (batch, time) positions, and their number."""
    gap = torch.where(mask, (logprobs - behavior_logprobs).abs(), 0.0)  # select: NaN times a mask of 0 is NaN
    return torch.stack([gap.sum(), mask.sum()]).float()


# 2. The memory: frozen settings, a frozen state of plain numbers, and a pure step from one state to the next.


@dataclass(frozen=True, kw_only=True)
class BrakeConfig:
    """When a step is skipped: above ``times`` the usual mismatch and above ``least`` nats, after ``warmup_steps``."""

    times: float = 5.0
    least: float = 0.05
    warmup_steps: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        number("times", self.times, above=1)
        number("least", self.least, above=0)
        integer("warmup_steps", self.warmup_steps, at_least=1)


@dataclass(frozen=True, kw_only=True)
class BrakeState:
    """The usual mismatch in nats, the steps it was learned from, and the steps that were skipped."""

    usual: float = 0.0
    steps: int = 0
    skips: int = 0


def is_abnormal(config: BrakeConfig, state: BrakeState, mismatch: float) -> bool:
    """Whether a step with this mean mismatch is to be skipped; one that is not finite always is."""
    limit = max(config.times * state.usual, config.least) if state.steps >= config.warmup_steps else math.inf
    return not math.isfinite(mismatch) or mismatch > limit


def step(config: BrakeConfig, state: BrakeState, mismatch: float) -> BrakeState:
    """The memory after one step: what was skipped does not count as usual."""
    if is_abnormal(config, state, mismatch):
        return replace(state, skips=state.skips + 1)
    steps = state.steps + 1
    return replace(state, usual=state.usual + (mismatch - state.usual) / steps, steps=steps)  # a running mean


# 3. The callback: reads in the loss, decides once per step by numbers that are the same on all ranks, votes, remembers.


class MismatchBrake(L.Callback):
    """Watches the mean |log-prob in training - log-prob in sampling|; skips the step when it jumps.

    Args:
        times: How many times the usual mismatch is too much, > 1.
        least: Mismatch in nats at or under which nothing is skipped.
        warmup_steps: Steps before anything is skipped.
    """

    def __init__(self, times: float = 5.0, least: float = 0.05, warmup_steps: int = 5) -> None:
        self.config = BrakeConfig(times=times, least=least, warmup_steps=warmup_steps)
        self.state = BrakeState()
        self._readings: list[Tensor] = []

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        """Of every micro-batch: read, without waiting for the device and without a collective."""
        if inputs.behavior_logprobs is not None:
            mask = inputs.completion_mask.bool()
            self._readings.append(mismatch_reading(inputs.logprobs.detach(), inputs.behavior_logprobs, mask))
        return inputs

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Once per step: add up over ranks, decide, vote, remember, log."""
        own = torch.stack(self._readings).sum(0) if self._readings else torch.zeros(2, device=pl_module.device)
        self._readings = []
        total, tokens = trainer.strategy.reduce(own, reduce_op="sum").tolist()
        mismatch = total / max(tokens, 1.0)
        if is_abnormal(self.config, self.state, mismatch):
            reason = f"mismatch {mismatch:.3g} nats, usually {self.state.usual:.3g}"
            step_gate(trainer, "MismatchBrake").vote(Vote(source="mismatch_brake", action="skip", reason=reason))
        self.state = step(self.config, self.state, mismatch)
        pl_module.log("mismatch_brake/mismatch", mismatch, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers."""
        return asdict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the saved memory under the settings given now."""
        self.state = BrakeState(**state_dict)
