"""Gradient norms that are right on every strategy: global, before clipping, one pass and one reduction.

Each rank squares the norm of its local pieces in float64, divides by the number of ranks that hold the same piece, and
one sum over the ranks gives all parameters at once; layers and the total are added up on the host. The pass itself runs
in float32, whose squares overflow from 1e19 on and vanish under 1e-19; only when the reduced result leaves that range
is it repeated in float64 (five times slower on a CPU), and since every rank sees the same result, all repeat it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlstab.control.layers import layer_name
from lightning_rlstab.control.parameters import local
from lightning_rlstab.control.protocols import GradientNorms
from lightning_rlstab.strategies.collectives import Collectives
from lightning_rlstab.strategies.parameters import copies_over_ranks

__all__ = ["PendingNorms", "gradient_norms", "pending_norms"]

_SMALLEST = 1e-15
"""Under this total float32 squares may have vanished."""


@dataclass
class PendingNorms:
    """Squared norms that are still on the device; reading them is the only wait.

    Attributes:
        parameters: Name to parameter, in the order of ``squares``.
        squares: (param,) float64 squared norms, reduced over all ranks.
        unscale: Factor on the norms (the inverse of a gradient scaler's scale), a scalar on the device, or None.
        collectives: Used again when the squares left float32's range.
    """

    parameters: Mapping[str, nn.Parameter]
    squares: Tensor
    unscale: Tensor | None
    collectives: Collectives
    _host: Tensor = field(init=False)
    _copied: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._host = self.squares
        if self.squares.is_cuda:
            # Copied in the background, so that a reader who comes later waits for this point of the stream only.
            self._host = torch.empty(self.squares.shape, dtype=self.squares.dtype, pin_memory=True)
            self._host.copy_(self.squares, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> GradientNorms:
        """Wait for the numbers; the gradients must still be those the squares were taken from."""
        if self._copied is not None:
            self._copied.synchronize()
        squares = self._host.tolist()
        if not _SMALLEST**2 < _sum(squares) < math.inf:
            exact = _reduced_squares(self.parameters, self.unscale, self.collectives, torch.float64)
            squares = exact.tolist()
        return _record(list(self.parameters), squares)


def pending_norms(
    parameters: Mapping[str, nn.Parameter], collectives: Collectives, *, unscale: Tensor | None = None
) -> PendingNorms:
    """Start measuring every gradient; collective where gradients are sharded, never waits for the device.

    Args:
        parameters: Name to parameter; the same on every rank. A missing gradient counts as 0.
        collectives: Over all ranks.
        unscale: Factor on the norms, a scalar tensor, or None for 1.

    Returns:
        The squares, to be read when they are needed.
    """
    squares = _reduced_squares(parameters, unscale, collectives, torch.float32)
    return PendingNorms(parameters, squares, unscale, collectives)


def gradient_norms(parameters: Mapping[str, nn.Parameter], collectives: Collectives) -> GradientNorms:
    """Measure every gradient now; see :func:`pending_norms`."""
    return pending_norms(parameters, collectives).read()


@torch.no_grad()
def _reduced_squares(
    parameters: Mapping[str, nn.Parameter], unscale: Tensor | None, collectives: Collectives, dtype: torch.dtype
) -> Tensor:
    present = [(row, p.grad) for row, p in enumerate(parameters.values()) if p.grad is not None]
    squares = torch.zeros(len(parameters), dtype=torch.float64, device=collectives.device)
    # The branch is the same on all ranks: it asks for the kind of the parameters, not for their gradients.
    is_sharded = collectives.world_size > 1 and any(isinstance(p, DTensor) for p in parameters.values())
    if present:
        found = _norms([local(gradient) for _, gradient in present], dtype).to(collectives.device).square()
        if is_sharded:
            copies = [copies_over_ranks(gradient, collectives.world_size) for _, gradient in present]
            found = found / torch.tensor(copies, dtype=torch.float64).to(collectives.device)
        if len(present) == len(parameters):
            squares = found
        else:
            squares[torch.tensor([row for row, _ in present], device=collectives.device)] = found
    if is_sharded:
        squares = collectives.reduced(squares, "sum")
    return squares if unscale is None else squares * unscale.double().square()


def _norms(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(param,) float64 L2 norms of local pieces, accumulated in ``dtype`` or wider."""
    dense = [piece.coalesce().values() if piece.is_sparse else piece for piece in pieces]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for row, piece in enumerate(dense):
        by_dtype.setdefault(piece.dtype, []).append(row)
    norms = torch.zeros(len(dense), dtype=torch.float64, device=dense[0].device)
    for kind, rows in by_dtype.items():
        wide = torch.promote_types(kind, dtype)
        found = torch._foreach_norm([dense[row] for row in rows], 2, dtype=None if kind == wide else wide)
        values = torch.stack(found).double()
        if len(by_dtype) == 1:
            return values
        norms[torch.tensor(rows, device=norms.device)] = values
    return norms


def _record(names: Sequence[str], squares: Sequence[float]) -> GradientNorms:
    total = math.sqrt(_sum(squares))
    layers: dict[str, list[float]] = {}
    for name, square in zip(names, squares, strict=True):
        layers.setdefault(layer_name(name), []).append(square)
    return GradientNorms(
        total=total,
        is_finite=math.isfinite(total),
        per_parameter={name: math.sqrt(square) for name, square in zip(names, squares, strict=True)},
        per_layer={name: math.sqrt(_sum(own)) for name, own in layers.items()},
    )


def _sum(squares: Sequence[float]) -> float:
    # the exact sum does not depend on the order of the parameters; beside inf or NaN the plain one carries them on
    return math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
