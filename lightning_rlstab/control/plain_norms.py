"""Gradient norms of whole tensors, by parameter and by layer: for strategies that have no gate of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from lightning_rlstab.control.layers import layer_name
from lightning_rlstab.control.protocols import GradientNorms
from lightning_rlstab.core.norms import tensor_norms

__all__ = ["plain_gradient_norms"]


def plain_gradient_norms(parameters: Mapping[str, nn.Parameter]) -> GradientNorms:
    """Norms of ``.grad`` as it stands, in float64 so that an entry of 1e20 has a finite one.

    Args:
        parameters: Qualified name to parameter, unsharded; a parameter without gradient counts as 0.
    """
    gradients: list[Tensor] = [p.grad for p in parameters.values() if p.grad is not None]
    names = [name for name, p in parameters.items() if p.grad is not None]
    measured = dict(zip(names, tensor_norms(gradients).per_tensor.tolist(), strict=True))
    per_parameter = {name: measured.get(name, 0.0) for name in parameters}
    squares: dict[str, float] = {}
    for name, norm in per_parameter.items():
        layer = layer_name(name)
        squares[layer] = squares.get(layer, 0.0) + norm**2
    total = math.sqrt(sum(squares.values()))
    return GradientNorms(
        total=total,
        is_finite=math.isfinite(total),
        per_parameter=per_parameter,
        per_layer={layer: math.sqrt(square) for layer, square in squares.items()},
    )
