"""One line of words every few optimizer steps, for a run without a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

__all__ = ["Narrator"]


class Narrator(Callback):
    """Says every ``every_n_steps`` optimizer steps how the run goes.

    Watches the metrics that the module logs; changes nothing, keeps nothing, costs nothing.

    Args:
        say: Takes one line.
        every_n_steps: Optimizer steps between two lines.
    """

    def __init__(self, say: Callable[[str], None], *, every_n_steps: int = 20) -> None:
        self._say = say
        self._every_n_steps = every_n_steps
        self._last_step = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say the line where it is due; a step of several micro-batches is said once."""
        step = trainer.global_step
        is_due = step % self._every_n_steps == 0 or step == 1
        if not is_due or step == self._last_step:
            return
        self._last_step = step
        metrics = trainer.callback_metrics
        words = [f"{name.replace('_', ' ')} {float(metrics[key]):.3f}" for name, key in _SAID if key in metrics]
        self._say(f"  step {step:4d}   " + "   ".join(words))


_SAID = (
    ("reward", "reward"),
    ("held-out", "val/reward"),
    ("entropy", "entropy"),
    ("grad_norm", "grad_norm"),
)
