"""Services for localizers: gradients set aside, weights moved along them and put back bit for bit, dropout replayed."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_rlstab.control.parameters import local
from lightning_rlstab.strategies.collectives import Collectives

__all__ = ["ProbeMixin"]


class ProbeMixin(Strategy):
    """The ``GradientProbe`` protocol for a strategy; needs ``trainable_parameters`` and ``collectives``.

    Call the services in ``on_before_optimizer_step`` or later, when no graph of the step is alive: an extra forward
    between a micro-batch's forward and its backward would swap FSDP2's weights under the graph.
    """

    _stashed: list[dict[str, Tensor]]

    @property
    def collectives(self) -> Collectives:
        """Reductions and gathers over all processes of the run."""
        raise AssertionError("the gate provides it")

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Qualified name to parameter, in the optimizer's order."""
        raise AssertionError("the gate provides it")

    def reshard(self) -> None:
        """Give up whole weights where the strategy shards; nothing to do elsewhere."""

    @contextmanager
    def stashed_gradients(self) -> Generator[None, None, None]:
        """Set every ``.grad`` aside and put the same tensors back on exit; what accumulated inside is dropped.

        No gradient is copied. Inside, :meth:`perturbed` still moves along the gradients that lie aside.
        """
        parameters = self.trainable_parameters()
        aside = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        self._stashed.append(aside)
        try:
            yield
        finally:
            self._stashed.pop()
            for name, parameter in parameters.items():
                parameter.grad = aside.get(name)

    @contextmanager
    def perturbed(self, scale: float, directions: Mapping[str, Tensor] | None = None) -> Generator[None, None, None]:
        """Add ``scale * direction`` to every trainable parameter; on exit the old bits are copied back.

        Costs one copy of the local weights while inside. Whole weights that FSDP2 keeps after a forward are given up
        before each change: they would go on answering for the weights they were gathered from.

        Args:
            scale: Factor on the direction, e.g. ``eps / norm`` for a central difference along the gradient.
            directions: Name to a tensor like the parameter, sharded like it; the default is ``.grad``, or the
                gradients set aside by an enclosing :meth:`stashed_gradients`. Parameters without one stay put.
        """
        parameters = self.trainable_parameters()
        if directions is None:
            aside = self._stashed[-1] if self._stashed else {}
            directions = {name: p.grad for name, p in parameters.items() if p.grad is not None} or aside
        self.reshard()
        moved = [name for name in parameters if name in directions]
        with torch.no_grad():
            pieces = [local(parameters[name]) for name in moved]
            saved = [piece.clone() for piece in pieces]
            along = [local(directions[name]).to(piece.dtype) for name, piece in zip(moved, pieces, strict=True)]
            if pieces:
                torch._foreach_add_(pieces, along, alpha=scale)
        try:
            yield
        finally:
            self.reshard()
            with torch.no_grad():
                if pieces:
                    torch._foreach_copy_(pieces, saved)

    def backward_of(self, loss: Tensor) -> None:
        """Backward through the strategy's own path, adding the reduced, unscaled gradient to ``.grad``.

        The loss must come from a forward of the module's own methods (not through the wrapper that DDP puts around it).

        Args:
            loss: Scalar; its gradient is averaged over the data-parallel ranks like that of the training loss.
        """
        loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def replayed_rng(self, rng_state: Mapping[str, Tensor]) -> Generator[None, None, None]:
        """Run with the given generator states; the current ones are put back on exit.

        Args:
            rng_state: ``"cpu"`` and, on a GPU run, ``"cuda"``, as :meth:`captured_rng` returns them. A missing key
                leaves that generator alone (and still puts it back).
        """
        current = self.captured_rng()
        self.restore_rng(rng_state)
        try:
            yield
        finally:
            self.restore_rng(current)

    def captured_rng(self) -> dict[str, Tensor]:
        """States of the generators that a forward may draw from: ``"cpu"``, and ``"cuda"`` for this rank's GPU."""
        states = {"cpu": torch.get_rng_state()}
        if self.root_device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.root_device)
        return states

    def restore_rng(self, states: Mapping[str, Tensor]) -> None:
        """Put torch's generators to the given states; a missing key leaves that generator alone."""
        if "cpu" in states:
            torch.set_rng_state(states["cpu"].cpu())
        if "cuda" in states and self.root_device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"].cpu(), self.root_device)

    def all_gathered(self, value: Tensor) -> Sequence[Tensor]:
        """``value`` of every rank in rank order; shapes must be equal."""
        return self.collectives.gathered_tensors(value)
