"""What the step gate can still do on Lightning's own strategies: skip, scale or stop a step at the moment of the vote.

Without a gate of its own a strategy merges no votes. So a vote here acts at once, and each rank acts for itself: guards
must vote by numbers that are the same on all ranks, which the norms of DDP's reduced gradients are. A skip takes every
gradient away (``grad = None``), which leaves weights, optimizer state and weight decay alone; zeros would not. What it
cannot hold back is the learning-rate schedule, which Lightning advances after every attempt.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_rlstab.control.parameters import named_trainable_parameters
from lightning_rlstab.control.plain_norms import plain_gradient_norms
from lightning_rlstab.control.protocols import GradientNorms, StepGate, Verdict, Vote
from lightning_rlstab.core.checks import number, refusal

__all__ = ["StockGate", "gate_in_use", "needs_gate", "skip_by_clearing", "step_gate"]

_SUBSTITUTES = {"SingleDeviceStrategy": "rlstab", "DDPStrategy": "rlstab_ddp"}


def skip_by_clearing(optimizers: Iterable[Optimizer]) -> None:
    """Turn the coming optimizer step into a true skip by taking every gradient away.

    Call it in ``on_before_optimizer_step``. Optimizers pass over parameters without gradient: no update, no decay, no
    step count; clipping finds nothing, and a gradient scaler's step does nothing.

    Args:
        optimizers: Those about to step.

    Example:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.grad = torch.full((1,), float("nan"))
        >>> skip_by_clearing([optimizer])
        >>> optimizer.step(), weight.item(), dict(optimizer.state)
        (None, 1.0, {})
    """
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def needs_gate(feature: str, strategy: Any) -> ValueError:
    """The refusal of a feature that the given strategy cannot carry, with the line to change, ready to raise.

    Args:
        feature: What asked, as the user wrote it, e.g. ``"GradLoc"``.
        strategy: The Trainer's strategy.
    """
    kind = type(strategy).__name__
    better = _SUBSTITUTES.get(kind, "rlstab_fsdp")
    rule = f'be "rlstab", "rlstab_ddp" or "rlstab_fsdp" for {feature}'
    return refusal("strategy", rule, kind, f'Write Trainer(strategy="{better}"), in YAML `trainer.strategy: {better}`')


def step_gate(trainer: Any, feature: str = "guards") -> StepGate:
    """The strategy's own gate, or the stand-in for one of Lightning's strategies; the same object for all callbacks.

    Args:
        trainer: The Trainer.
        feature: What asks, for the refusal.

    Raises:
        ValueError: If the strategy shards gradients and has no gate.
    """
    gate = gate_in_use(trainer)
    if gate is None:
        _gates[trainer] = StockGate(trainer, feature)
        gate = cast(StepGate, _gates[trainer])  # its count of applied steps follows the Trainer's and cannot be set
    return gate


def gate_in_use(trainer: Any) -> StepGate | None:
    """The gate that this run's guards vote through, for those who only read; None where no guard asked for one.

    Args:
        trainer: The Trainer.
    """
    if isinstance(trainer.strategy, StepGate):
        return trainer.strategy
    return cast(StepGate | None, _gates.get(trainer))


class StockGate:
    """The ``StepGate`` protocol on a strategy that keeps whole gradients on every rank.

    Args:
        trainer: The Trainer.
        feature: What asks, for the refusal.

    Attributes:
        skipped_steps: Steps skipped by votes in this process; not saved.

    Raises:
        ValueError: If gradients are sharded: a rank's own piece has no global norm.
    """

    def __init__(self, trainer: Any, feature: str = "guards") -> None:
        self.skipped_steps = 0
        self._first_attempt = int(trainer.global_step)
        # The gate is kept as long as its Trainer: a strong reference from here would keep both for ever.
        self._trainer = weakref.proxy(trainer)
        self._norms: tuple[int, GradientNorms] | None = None
        self._verdict: tuple[int, Verdict] | None = None
        self._votes: tuple[int, list[Vote]] = (-1, [])
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in trainer.lightning_module.modules()):
            raise needs_gate(feature, trainer.strategy)
        if any(hasattr(parameter, "device_mesh") for parameter in self._parameters().values()):
            raise needs_gate(feature, trainer.strategy)

    def vote(self, vote: Vote) -> None:
        """Act on a vote at once; only inside ``on_before_optimizer_step``, by numbers equal on all ranks.

        Raises:
            RuntimeError: On a vote to stop.
            ValueError: On a scale that is not a finite number above 0.
        """
        verdict = Verdict(action=vote.action, scale=vote.scale, sources=(vote.source,), reasons=(vote.reason,))
        before = self._verdict_now()
        self._votes = (self._attempt, [*self.pending_votes, vote])
        if vote.action == "stop":
            raise RuntimeError(f"The run was stopped by {vote.source}: {vote.reason}")
        if vote.action == "apply":
            factor = number("scale", vote.scale, above=0, advice='Vote "skip" to leave the weights alone')
            gradients = [p.grad for p in self._parameters().values() if p.grad is not None]
            if gradients and factor != 1.0:
                torch._foreach_mul_(gradients, factor)
        elif before.action != "skip":
            skip_by_clearing(self._trainer.optimizers)
            self.skipped_steps += 1
        if before.action != "skip":
            self._verdict = (self._attempt, verdict)

    def gradient_norms(self) -> GradientNorms:
        """Norms of the gradient as the first guard of this step found it: after a skip there is none left."""
        if self._norms is None or self._norms[0] != self._attempt:
            self._norms = (self._attempt, plain_gradient_norms(self._parameters()))
        return self._norms[1]

    @property
    def pending_votes(self) -> tuple[Vote, ...]:
        """This rank's votes in the current optimizer step so far; each has been acted on already."""
        return tuple(self._votes[1]) if self._votes[0] == self._attempt else ()

    @property
    def applied_steps(self) -> int:
        """Steps of this process that were not skipped."""
        return self._attempt - self._first_attempt - self.skipped_steps

    @property
    def last_verdict(self) -> Verdict | None:
        """The verdict of the step that ended last, for ``on_train_batch_end``; None before the first."""
        if self._attempt == 0:
            return None
        is_latest = self._verdict is not None and self._verdict[0] == self._attempt - 1
        return self._verdict[1] if is_latest and self._verdict is not None else Verdict(action="apply")

    @property
    def last_gradient_norm(self) -> float | None:
        """Total norm of the step that ended last; None where nobody asked for its norms."""
        if self._norms is None or self._norms[0] != self._attempt - 1:
            return None
        return self._norms[1].total

    @property
    def _attempt(self) -> int:
        return int(self._trainer.global_step)

    def _verdict_now(self) -> Verdict:
        if self._verdict is not None and self._verdict[0] == self._attempt:
            return self._verdict[1]
        return Verdict(action="apply")

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return named_trainable_parameters(self._trainer.lightning_module, self._trainer.optimizers)


_gates: weakref.WeakKeyDictionary[Any, StockGate] = weakref.WeakKeyDictionary()
