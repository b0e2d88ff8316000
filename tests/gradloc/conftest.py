"""A gradient oracle made of plain vectors: every token has a gradient, and log-probs bend a little along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from lightning_rlstab.gradloc.oracle import Deduction, SubsetGradient, TokenAddress, WindowSignals

LAYERS = ("layers.0", "layers.1", "layers.2", "head")


class VectorOracle:
    """Exact answers from a table of token gradients, with the faults a real probe has."""

    def __init__(
        self,
        gradients: Tensor,
        *,
        mask: Tensor | None = None,
        slope: Tensor | None = None,
        log_ratios: Tensor | None = None,
        logprobs: Tensor | None = None,
        reference_gaps: Tensor | None = None,
        advantages: Tensor | None = None,
        has_head_norms: bool = True,
        curvature: float = 0.0,
        bend: Literal["even", "cubic"] = "even",
        noise: float = 0.0,
        is_base_reusable: bool = True,
        nonfinite: Mapping[str, Tensor] | None = None,
        outside: Tensor | None = None,
    ) -> None:
        shape = gradients.shape[:-1]
        self.gradients = gradients
        mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask
        self.outside = torch.zeros(gradients.shape[-1]) if outside is None else outside
        slope = torch.full(shape, -0.01) if slope is None else slope
        slope = torch.where(mask, slope, torch.zeros_like(slope))
        self.signals = WindowSignals(
            mask=mask,
            slope=slope,
            logprobs=torch.full(shape, -1.0) if logprobs is None else logprobs,
            head_norms=self._part(gradients, "head").norm(dim=-1) if has_head_norms else None,
            log_ratios=torch.zeros(shape) if log_ratios is None else log_ratios,
            reference_gaps=torch.full(shape, math.nan) if reference_gaps is None else reference_gaps,
            token_ids=torch.arange(math.prod(shape)).reshape(shape),
            advantages=torch.ones(shape[:-1]) if advantages is None else advantages,
            nonfinite=nonfinite or {},
        )
        self.whole = self._sum(mask) + self.outside
        self.remaining = self.whole.clone()
        self.last = torch.zeros_like(self.whole)
        self.cost_sweeps = self.norm_of_weights = 0.0
        self.curvature, self.bend = curvature, bend
        self.noise = noise
        self.is_base_reusable = is_base_reusable
        self.generator = torch.Generator().manual_seed(0)
        self.rows_run: list[int] = []
        self.shifts: list[float] = []
        self.origin_of_fault: tuple[int, str] | None = (4, "layers.1")
        self.spoiled_parameters: tuple[str, ...] = ()

    @staticmethod
    def _part(vectors: Tensor, layer: str) -> Tensor:
        size = vectors.shape[-1] // len(LAYERS)
        start = LAYERS.index(layer) * size
        return vectors[..., start : start + size]

    def _sum(self, tokens: Tensor) -> Tensor:
        return self.gradients[tokens].sum(dim=0)

    def _record(self, vector: Tensor, *, is_kept: bool) -> SubsetGradient:
        layers = {layer: float(self._part(vector, layer).norm()) for layer in LAYERS}
        return SubsetGradient(norm=float(vector.norm()), layers=layers, gradient=vector if is_kept else None)

    @property
    def grad_norm(self) -> float:
        return float(self.whole.norm())

    @property
    def layer_norms(self) -> Mapping[str, float]:
        return self._record(self.whole, is_kept=False).layers

    @property
    def base_losses(self) -> Tensor | None:
        return self.signals.slope.double() * self.signals.logprobs.double() if self.is_base_reusable else None

    def linear_losses(self, shift: float, sequences: Tensor | None = None) -> Tensor:
        signals = self.signals
        wanted = torch.ones(signals.mask.shape[:-1], dtype=torch.bool) if sequences is None else sequences
        self.rows_run.append(int(wanted.sum()))
        self.shifts.append(shift)
        self.cost_sweeps += float(wanted.float().mean()) / 3
        direction = (self.whole / self.whole.norm()).double()
        slope = torch.where(signals.slope == 0, torch.ones_like(signals.slope), signals.slope).double()
        step = (self.gradients.double() @ direction) / slope * shift
        power = step.abs() if self.bend == "even" else step.square()
        bent = signals.logprobs.double() + step + self.curvature * step * power
        bent = bent + self.noise * torch.randn(bent.shape, generator=self.generator)
        return torch.where(signals.mask, signals.slope.double() * bent, torch.zeros_like(bent))

    def subset_gradient(self, tokens: Tensor, *, is_kept: bool = False) -> SubsetGradient:
        touched = (tokens & self.signals.mask).flatten(1).any(dim=1)
        self.cost_sweeps += float(touched.float().mean())
        self.last = self._sum(tokens & self.signals.mask)
        return self._record(self.last, is_kept=is_kept)

    def difference(self, parent: SubsetGradient, part: SubsetGradient) -> SubsetGradient:
        return self._record(parent.gradient - part.gradient, is_kept=True)

    def weight_norm(self) -> float:
        return self.norm_of_weights

    def deduct(self, part: SubsetGradient) -> Deduction:
        self.remaining = self.remaining - self.last
        share = float(self.last @ self.whole / self.whole.square().sum())
        return Deduction(remaining_norm=float(self.remaining.norm()), share=share)

    def start_over(self) -> None:
        self.remaining = self.whole.clone()

    def rebuild_without(self, tokens: Tensor) -> float:
        self.cost_sweeps += 1
        self.remaining = self._sum(self.signals.mask & ~tokens)
        return float(self.remaining.norm())

    def first_nonfinite(self, address: TokenAddress) -> tuple[int, str] | None:
        return self.origin_of_fault

    def nonfinite_parameters(self) -> tuple[str, ...]:
        return self.spoiled_parameters

    def nonfinite_gradients(self) -> tuple[str, ...]:
        return tuple(layer for layer in LAYERS if not self._part(self.whole, layer).isfinite().all())


@pytest.fixture
def oracle_of() -> Callable[..., VectorOracle]:
    """Build an oracle: ``shape``, the usual size of one token's gradient, and culprits by address and size."""

    def build(
        culprits: Mapping[tuple[int, int, int, int], float] | None = None,
        *,
        shape: tuple[int, int, int, int] = (4, 1, 4, 16),
        size: float = 0.01,
        seed: int = 0,
        **options: Any,
    ) -> VectorOracle:
        generator = torch.Generator().manual_seed(seed)
        gradients = size * torch.randn((*shape, 64), generator=generator) / 8
        for address, magnitude in (culprits or {}).items():
            direction = torch.randn(64, generator=generator)
            gradients[address] = magnitude * direction / direction.norm()
        return VectorOracle(gradients, **options)

    return build
