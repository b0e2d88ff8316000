"""The probe services on plain tensors of one process: what GradLoc falls back on under Lightning's stock strategies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_rlstab.control.layers import layer_name
from lightning_rlstab.control.protocols import GradientNorms

__all__ = ["PlainProbe"]


class PlainProbe:
    """Gradients set aside, weights moved and put back, dropout replayed; one process, unsharded tensors.

    Args:
        parameters: Qualified name to trainable parameter, in a fixed order.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._aside: list[dict[str, Tensor]] = []

    @classmethod
    def of(cls, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> PlainProbe:
        """The probe of a module's parameters that these optimizers train.

        Args:
            module: Gives the names.
            optimizers: Give the parameters and their order.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        listed = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        return cls({names[id(parameter)]: parameter for parameter in listed if parameter.requires_grad})

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Qualified name to parameter."""
        return self._parameters

    def gradient_norms(self) -> GradientNorms:
        """Norms of ``.grad`` as it stands, in float64 so that 1e20 has a finite one."""
        present = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norms = torch._foreach_norm(list(present.values()), 2, dtype=torch.float64) if present else []
        measured = torch.stack([norm.cpu() for norm in norms]).tolist() if norms else []
        found = dict(zip(present, measured, strict=True))
        per_parameter = {name: found.get(name, 0.0) for name in self._parameters}
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

    @contextmanager
    def stashed_gradients(self) -> Iterator[None]:
        """Set every ``.grad`` aside and put the same tensors back on exit."""
        aside = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        self._aside.append(aside)
        try:
            yield
        finally:
            self._aside.pop()
            for name, parameter in self._parameters.items():
                parameter.grad = aside.get(name)

    @contextmanager
    def perturbed(self, scale: float, directions: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Add ``scale * direction`` to the parameters; the old bits are copied back on exit.

        Args:
            scale: Factor on the direction.
            directions: By parameter name; default ``.grad``, or the gradients set aside by ``stashed_gradients``.
        """
        if directions is None:
            aside = self._aside[-1] if self._aside else {}
            directions = {name: p.grad for name, p in self._parameters.items() if p.grad is not None} or aside
        moved = [name for name in self._parameters if name in directions]
        with torch.no_grad():
            pieces = [self._parameters[name].detach() for name in moved]
            saved = [piece.clone() for piece in pieces]
            along = [directions[name].to(piece.dtype) for name, piece in zip(moved, pieces, strict=True)]
            if pieces:
                torch._foreach_add_(pieces, along, alpha=scale)
        try:
            yield
        finally:
            with torch.no_grad():
                if pieces:
                    torch._foreach_copy_(pieces, saved)

    def backward_of(self, loss: Tensor) -> None:
        """Plain backward, accumulating into ``.grad``."""
        loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def replayed_rng(self, rng_state: Mapping[str, Tensor]) -> Iterator[None]:
        """Run with the given generator states (``"cpu"``, ``"cuda"``); the current ones are put back on exit."""
        devices = [torch.cuda.current_device()] if "cuda" in rng_state else []
        with torch.random.fork_rng(devices=devices):
            if "cpu" in rng_state:
                torch.set_rng_state(rng_state["cpu"].cpu())
            if devices:
                torch.cuda.set_rng_state(rng_state["cuda"].cpu())
            yield

    def all_gathered(self, value: Tensor) -> Sequence[Tensor]:
        """The value of the only rank."""
        return [value]
