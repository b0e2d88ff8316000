"""The rollout in use: cut into micro-batches, walked ``num_iterations`` times, saved in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_rlstab.rollout.records import Rollout, rollout_from, state_of

__all__ = ["RolloutCycle"]


class RolloutCycle:
    """Micro-batches of the newest rollout and the place reached in them.

    One rollout serves ``steps_per_generation * num_iterations`` calls of ``training_step``.
    """

    def __init__(self) -> None:
        self.rollouts_made = 0
        self._slices: list[Rollout] = []
        self._next = 0

    def begin(self, rollout: Rollout, steps_per_generation: int) -> None:
        """Take over a new rollout.

        Args:
            rollout: Whole generation batch of this rank.
            steps_per_generation: Number of micro-batches to cut it into; must divide its rows.
        """
        self._slices = rollout.slices(steps_per_generation)
        self._next = 0
        self.rollouts_made += 1

    def is_missing(self, cycle_step: int) -> bool:
        """Whether ``training_step`` number ``cycle_step`` of a cycle needs a new rollout."""
        return cycle_step == 0 or not self._slices

    def micro_batch(self, cycle_step: int, cycle_length: int) -> Rollout:
        """The rows for one ``training_step``.

        Args:
            cycle_step: Position in the cycle, from 0.
            cycle_length: Calls that one rollout serves; after the last one nothing is left to save.
        """
        self._next = cycle_step + 1
        rows = self._slices[cycle_step % len(self._slices)]
        if self._next == cycle_length:
            self._slices = []
        return rows

    def discard(self) -> None:
        """Let go of what has not been trained on; the next ``training_step`` needs a new rollout."""
        self._slices = []

    def state_dict(self) -> dict[str, Any]:
        """Plain types and CPU tensors; the slices only while some of them are still to be trained on."""
        return {"rollouts_made": self.rollouts_made, "slices": [state_of(rows) for rows in self._slices]}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue where a saved cycle stopped.

        Args:
            state: From :meth:`state_dict`.
            device: Where the rows are put.
        """
        self.rollouts_made = int(state["rollouts_made"])
        self._slices = [rollout_from(rows).to(device) for rows in state["slices"]]
