"""One line of words every few optimizer steps, for a run without a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

__all__ = ["Narrator"]


class Narrator(Callback):
    """Says every ``every_n_steps`` optimizer steps how the run goes: means over the steps since the last line.

    A step of sixteen prompts has a noisy reward. Watches the metrics that the module logs and changes nothing.

    Args:
        say: Takes one line.
        every_n_steps: Optimizer steps between two lines.
    """

    def __init__(self, say: Callable[[str], None], *, every_n_steps: int = 20) -> None:
        self._say = say
        self._every_n_steps = every_n_steps
        self._last_step = 0
        self._since: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say the line where it is due; a step of several micro-batches counts once."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        for name, key in _SAID:
            if key in trainer.callback_metrics:
                self._since.setdefault(name, []).append(float(trainer.callback_metrics[key]))
        if step % self._every_n_steps == 0 or step == 1:
            words = [f"{name} {_said(name, values):.3f}" for name, values in self._since.items()]
            self._say(f"  step {step:4d}   " + "   ".join(words))
            self._since = {}


def _said(name: str, values: list[float]) -> float:
    return values[-1] if name == "held-out" else sum(values) / len(values)


_SAID = (
    ("reward", "reward"),
    ("held-out", "val/reward"),
    ("entropy", "entropy"),
    ("grad norm", "grad_norm"),
)
