"""The learning-rate schedule counts applied steps only."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

__all__ = ["hold_schedule_on_skip", "release_schedule"]


def hold_schedule_on_skip(strategy: Strategy, module: pl.LightningModule) -> None:
    """Make the module's ``lr_scheduler_step`` a no-op for step-wise schedulers while the last verdict is a skip.

    Lightning asks the module, not the strategy, to advance a schedule, and does so after every optimizer step, applied
    or not. The hook is wrapped on the instance, so a module's own override keeps its meaning. Epoch-wise schedulers
    count epochs and go on.

    Args:
        strategy: A strategy with ``last_verdict``.
        module: The module being fitted.
    """
    release_schedule(module)
    advance = module.lr_scheduler_step

    def advance_unless_skipped(scheduler: Any, metric: Any | None) -> None:
        verdict = strategy.last_verdict  # type: ignore[attr-defined]
        is_stepwise = any(c.scheduler is scheduler and c.interval == "step" for c in strategy.lr_scheduler_configs)
        if verdict is not None and verdict.action != "apply" and is_stepwise:
            return
        advance(scheduler, metric)

    module.lr_scheduler_step = advance_unless_skipped  # type: ignore[method-assign]


def release_schedule(module: pl.LightningModule) -> None:
    """Undo :func:`hold_schedule_on_skip`."""
    vars(module).pop("lr_scheduler_step", None)
