"""OPEFO's look at Adam's second moments, over all ranks and parameter groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.run_context import RunContext, parameters_of
from lightning_rlstab.control.opefo import SecondMomentConfig, SecondMomentState, step_second_moment
from lightning_rlstab.control.parameters import local
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.core.histogram import LogHistogram, log_histogram
from lightning_rlstab.core.opefo import lift_, lifted_count, second_moment_floor, tiny_frac

__all__ = ["SecondMomentFloor"]

_MOMENT = "exp_avg_sq"


class SecondMomentFloor:
    """Lifts second moments that have underflowed.

    Args:
        config: The settings.
    """

    def __init__(self, config: SecondMomentConfig) -> None:
        self.config = config
        self.state = SecondMomentState()
        self._is_checked = False

    def refuse_unsuitable(self, trainer: pl.Trainer) -> None:
        """Refuse optimizers that cannot be Adam: without betas and eps there is no second moment to lift.

        Raises:
            ValueError: Naming the optimizer.
        """
        for optimizer in trainer.optimizers:
            if not {"betas", "eps"} <= set(optimizer.defaults):
                raise _unsuitable(optimizer)

    def after_applied_step(self, trainer: pl.Trainer, run: RunContext) -> None:
        """Count the step, and look when it is time; collective then.

        Raises:
            ValueError: After the first step of an optimizer that keeps no ``exp_avg_sq``.
        """
        if not self._is_checked:
            self._is_checked = True
            for optimizer in trainer.optimizers:
                if any(state and _MOMENT not in state for state in optimizer.state.values()):
                    raise _unsuitable(optimizer)
        self.state, is_due = step_second_moment(self.config, self.state)
        if is_due:
            self._look(trainer, run)

    def _look(self, trainer: pl.Trainer, run: RunContext) -> None:
        largest, lifted = 0.0, 0
        # Weights that are not sharded are counted once per rank: shares and percentiles are the same, counts are not.
        copies = 1 if any(hasattr(p, "to_local") for p in parameters_of(trainer)) else trainer.world_size
        for number, (moments, eps) in enumerate(_groups(trainer)):
            histogram = log_histogram(moments)
            if trainer.world_size > 1:
                packed = histogram.packed().to(trainer.strategy.root_device)
                histogram = LogHistogram.unpacked(run.reduced(packed))
            share = float(tiny_frac(histogram, eps))
            largest = max(largest, share)
            if share <= self.config.tiny_fraction:
                continue
            floor = float(second_moment_floor(histogram, eps=eps, percentile=self.config.percentile))
            lift_(moments, floor)
            moved = lifted_count(histogram, floor) // copies
            lifted += moved
            reason = f"{share:.1%} of group {number}'s second moments were under eps^2; {moved} lifted to {floor:.3g}"
            run.event("floor", source="opefo", group=number, tiny_frac=share, floor=floor, lifted=moved, reason=reason)
        self.state = dataclasses.replace(self.state, lifted=self.state.lifted + lifted, tiny_frac=largest)

    def readings(self) -> dict[str, float]:
        """Scalars of the last look."""
        return {"rlstab/opefo/tiny_frac": self.state.tiny_frac, "rlstab/opefo/lifted": float(self.state.lifted)}

    def state_dict(self) -> dict[str, Any]:
        """The memory, in plain types."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved memory."""
        self.state = SecondMomentState(**state)


def _groups(trainer: pl.Trainer) -> Iterator[tuple[list[Tensor], float]]:
    """Local second moments and eps of every parameter group."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            yield [local(state[_MOMENT]) for state in states if _MOMENT in state], float(group["eps"])


def _unsuitable(optimizer: Optimizer) -> ValueError:
    advice = "Use Adam or AdamW, or OPEFO(second_moment=False)"
    return refusal("optimizer", f"keep `{_MOMENT}` for OPEFO(second_moment)", type(optimizer).__name__, advice)
