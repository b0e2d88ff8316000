"""Random generators of one rank, in types that load with ``weights_only=True``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["generator_states", "restore_generators"]


def generator_states(torch_states: Mapping[str, Tensor]) -> dict[str, Any]:
    """States of torch's, Python's and NumPy's generators.

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
    """Put Python's and NumPy's generators back; torch's are the caller's business."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
