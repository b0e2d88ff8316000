"""What a clip did, as event lines: when it first acts, and then summed up once in a while."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_rlstab.callbacks.run_context import RunContext
from lightning_rlstab.control.stock_gate import gate_in_use

__all__ = ["ClipLog"]

_FEWEST_STEPS_BETWEEN = 50


class ClipLog:
    """Sums up the acts of one clip over applied steps and writes a ``clip`` line now and then.

    The first act of the run is written at once, later ones at most every 50 steps, or at the Trainer's logging interval
    where that is longer: a clip that acts at every step leaves a readable file. A step that was not applied counts for
    nothing.

    Args:
        run: The run.
        source: Name of the callback.
        parts: What is counted, e.g. ``"tokens"``.
        **settings: Further fields of every line.
    """

    def __init__(self, run: RunContext, source: str, parts: str, **settings: Any) -> None:
        self._run, self._source, self._parts, self._settings = run, source, parts, settings
        self._pending: tuple[float, float] | None = None
        self._touched, self._of, self._steps = 0.0, 0.0, 0
        self._last: int | None = None

    def note(self, touched: float, of: float) -> None:
        """What the clip did to the gradient of the step that is about to be applied.

        Args:
            touched: Parts that it took weight from.
            of: Parts it looked at.
        """
        self._pending = (touched, of)

    def close_step(self, trainer: pl.Trainer) -> None:
        """Count the step if it was applied, and write a line if one is due; for ``on_train_batch_end``."""
        if self._pending is None:
            return
        (touched, of), self._pending = self._pending, None
        gate = gate_in_use(trainer)
        verdict = None if gate is None else gate.last_verdict
        if touched and (verdict is None or verdict.action == "apply"):
            self._touched, self._of, self._steps = self._touched + touched, self._of + of, self._steps + 1
        at = max(trainer.global_step - 1, 0)
        between = max(_FEWEST_STEPS_BETWEEN, int(trainer.log_every_n_steps))  # type: ignore[attr-defined]
        if not self._steps or (self._last is not None and at - self._last < between):
            return
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        words = f"{self._source} held back {self._touched:.0f} of {self._of:.0f} {self._parts} in {steps}"
        counts = {"touched": int(self._touched), "of": int(self._of), "steps": self._steps}
        self._run.event("clip", at=at, source=self._source, parts=self._parts, text=words, **counts, **self._settings)
        self._touched, self._of, self._steps, self._last = 0.0, 0.0, 0, at
