"""The probe services on plain tensors of one process: what GradLoc falls back on under Lightning's stock strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlstab.control.parameters import named_trainable_parameters
from lightning_rlstab.control.plain_norms import plain_gradient_norms
from lightning_rlstab.control.protocols import GradientNorms, GradientProbe, StepGate

__all__ = ["PlainProbe", "probe_and_norms"]


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
        return cls(named_trainable_parameters(module, optimizers))

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Qualified name to parameter."""
        return self._parameters

    def gradient_norms(self) -> GradientNorms:
        """Norms of ``.grad`` as it stands; see :func:`plain_gradient_norms`."""
        return plain_gradient_norms(self._parameters)

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


def probe_and_norms(trainer: Any, module: nn.Module) -> tuple[GradientProbe, Callable[[], GradientNorms]]:
    """Whoever can move weights and measure gradients in this run: the strategy itself, or a plain probe beside it.

    Args:
        trainer: The Trainer.
        module: The module that trains.
    """
    strategy = trainer.strategy
    if isinstance(strategy, GradientProbe) and isinstance(strategy, StepGate):
        return strategy, strategy.gradient_norms
    plain = PlainProbe.of(module, trainer.optimizers)
    return plain, plain.gradient_norms
