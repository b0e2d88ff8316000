"""OPEFO's store of skipped gradients on their way back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_rlstab.callbacks.run_context import RunContext, parameters_of
from lightning_rlstab.control.opefo import (
    ErrorFeedbackConfig,
    ErrorFeedbackState,
    PendingResidual,
    due_feedback,
    step_error_feedback,
    with_residual,
)
from lightning_rlstab.control.parameters import local
from lightning_rlstab.control.protocols import GradientNorms
from lightning_rlstab.core.opefo import add_feedback_, feedback_factor

__all__ = ["ResidualStore"]

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Pieces = list[Tensor | None]


class ResidualStore:
    """Keeps this rank's pieces of skipped gradients and adds their due shares to later ones.

    Args:
        config: The settings.
    """

    def __init__(self, config: ErrorFeedbackConfig) -> None:
        self.config = config
        self.state = ErrorFeedbackState()
        self.last_fed_frac = 0.0
        self._pieces: dict[int, Pieces] = {}
        self._captured: list[tuple[GradientNorms, Pieces]] = []

    def capture(self, trainer: pl.Trainer, norms: GradientNorms) -> None:
        """Copy the gradient that is being left out; what is not finite is only counted."""
        pieces = [self._copied(p.grad) for p in parameters_of(trainer)] if norms.is_finite else []
        if norms.is_finite and all(piece is None for piece in pieces):
            return  # on Lightning's own strategies a vote has taken it away already
        self._captured.append((norms, pieces))

    @property
    def has_captured(self) -> bool:
        """Whether something was left out of the current optimizer step."""
        return bool(self._captured)

    def _copied(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        device = torch.device("cpu") if self.config.offload else gradient.device
        return local(gradient).to(device=device, dtype=_DTYPES[self.config.residual_dtype], copy=True)

    def feed(self, trainer: pl.Trainer, norms: GradientNorms) -> None:
        """Add what is due to the current gradient, rescaled to its norm.

        Args:
            trainer: The Trainer.
            norms: Of the current gradient, judged by the guards already.
        """
        self.last_fed_frac = 0.0
        if not self.state.pending:
            return
        gradients = [None if p.grad is None else local(p.grad) for p in parameters_of(trainer)]
        for item, weight in due_feedback(self.config, self.state):
            add_feedback_(gradients, self._pieces[item.key], feedback_factor(weight, norms.total, item.norm))
            self.last_fed_frac += weight

    def end_step(self, run: RunContext, *, was_applied: bool) -> None:
        """Count a feed when the step was applied, then take up what was left out of it."""
        if was_applied:
            self.state = step_error_feedback(self.config, self.state)
        captured, self._captured = self._captured, []
        for norms, pieces in captured:
            self.state, key = with_residual(self.config, self.state, norm=norms.total, is_finite=norms.is_finite)
            if key is not None:
                self._pieces[key] = pieces
            words = "stored" if key is not None else "let go: it is not finite or zero"
            run.event("error_feedback", source="opefo", norm=norms.total, reason=f"the skipped gradient was {words}")
        self._drop_unheld()

    def clear(self) -> None:
        """Let everything go: after a rollback the gradients belong to weights that are gone."""
        count = len(self.state.pending)
        self.state = dataclasses.replace(self.state, pending=(), discarded=self.state.discarded + count)
        self._captured = []
        self._drop_unheld()

    def _drop_unheld(self) -> None:
        held = {item.key for item in self.state.pending}
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key in held}

    def readings(self) -> dict[str, float]:
        """Scalars of the last step."""
        return {
            "rlstab/opefo/residuals_pending": float(len(self.state.pending)),
            "rlstab/opefo/residuals_discarded": float(self.state.discarded),
            "rlstab/opefo/feedback_frac": self.last_fed_frac,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory and pieces, in plain types and CPU tensors."""
        pieces = {str(key): [None if t is None else t.cpu() for t in kept] for key, kept in self._pieces.items()}
        return {"memory": dataclasses.asdict(self.state), "pieces": pieces}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], trainer: pl.Trainer) -> None:
        """Continue with this rank's memory; pieces of another number of ranks fit nowhere and are let go.

        Args:
            states: One per rank of the saved run.
            trainer: Of the run now.
        """
        own = states[trainer.global_rank] if len(states) == trainer.world_size else states[0]
        pending = tuple(PendingResidual(**item) for item in own["memory"]["pending"])
        self.state = ErrorFeedbackState(**{**own["memory"], "pending": pending})
        self._pieces = {}
        if len(states) != trainer.world_size:
            if pending:
                _log.warning(
                    "OPEFO: %d skipped gradients, saved in pieces by %d processes, are let go by %d.",
                    len(pending),
                    len(states),
                    trainer.world_size,
                )
            self.clear()
            return
        parameters = parameters_of(trainer)
        for key, kept in own["pieces"].items():
            pairs = zip(parameters, kept, strict=True)
            self._pieces[int(key)] = [None if t is None else self._placed(t, p) for p, t in pairs]

    def _placed(self, piece: Tensor, parameter: Tensor) -> Tensor:
        device = torch.device("cpu") if self.config.offload else parameter.device
        return piece.to(device=device, dtype=_DTYPES[self.config.residual_dtype])
