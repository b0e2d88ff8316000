"""What the strategies add to a checkpoint: the gate's counters and every rank's generator states, in plain types."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["KEY", "generator_states", "restore_generators", "states_of_rank"]

_log = logging.getLogger(__name__)

KEY = "rlstab_step_gate"
"""The entry in Lightning's checkpoint."""


def generator_states(torch_states: Mapping[str, Tensor]) -> dict[str, Any]:
    """This rank's generators, in types that load with ``weights_only=True``.

    Args:
        torch_states: Torch's own, by device kind.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": dict(torch_states),
        "python": random.getstate(),
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put Python's and NumPy's generators back; torch's are the strategy's business."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def states_of_rank(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any] | None:
    """The states to continue with on this rank, or None when the number of processes has changed.

    Streams of another number of ranks have no meaning here, so such a run goes on with the generators it has.
    """
    if len(saved) != world_size:
        _log.info("Saved with %d processes, resumed with %d: random generators start afresh.", len(saved), world_size)
        return None
    return saved[rank]
