"""What the ladder knows about a step, and what it may ask about the step's gradient.

Every per-token tensor has the shape (micro_batch, rank, sequence, token), padded to the longest, and is equal on all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Deduction", "GradientOracle", "SubsetGradient", "TokenAddress", "WindowSignals"]


class TokenAddress(NamedTuple):
    """Where a completion token is in the whole job.

    Attributes:
        micro_batch: Index within the optimizer step, from 0.
        rank: Process that trained on it.
        sequence: Row within the micro-batch on that rank.
        token: Position in the completion, from 0.
    """

    micro_batch: int
    rank: int
    sequence: int
    token: int


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowSignals:
    """What the forward passes of one optimizer step left behind, gathered from all ranks.

    Attributes:
        mask: Bool, tokens that count in the loss and whose micro-batch was not dropped.
        slope: Float32, dL/dlogprob of each token, L being the mean over ranks of the summed token losses.
        logprobs: Float32 nats, of the policy in training.
        head_norms: Float32 closed-form gradient norms of the output projection, or None when they were not recorded.
        log_ratios: Float32 nats, ``logprobs - behavior_logprobs``, or ``logprobs - old_logprobs`` where that is farther
            from 0 or the sampler's are unknown; NaN where neither is known.
        reference_gaps: Float32 nats, ``reference_logprobs - logprobs``; NaN without a reference.
        token_ids: Int64.
        advantages: (micro_batch, rank, sequence) float32.
        nonfinite: Bool tensors by the place where a non-finite value was seen, in the order of the training path.
    """

    mask: Tensor
    slope: Tensor
    logprobs: Tensor
    head_norms: Tensor | None
    log_ratios: Tensor
    reference_gaps: Tensor
    token_ids: Tensor
    advantages: Tensor
    nonfinite: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def window_tokens(self) -> int:
        """Loss tokens of the step over all micro-batches and ranks."""
        return int(self.mask.sum())

    def addresses(self, tokens: Tensor) -> list[TokenAddress]:
        """The addresses of the True entries of a bool tensor, in order."""
        return [TokenAddress(*place) for place in tokens.nonzero().tolist()]

    def selection(self, *addresses: TokenAddress) -> Tensor:
        """A bool tensor that is True at these addresses only."""
        chosen = torch.zeros_like(self.mask)
        for address in addresses:
            chosen[address] = True
        return chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class SubsetGradient:
    """The gradient of some tokens' losses alone.

    Attributes:
        norm: Its L2 norm over all trainable parameters and ranks; inf or NaN when any entry is.
        layers: Norm per layer by name.
        gradient: The gradient itself when it was asked to be kept; opaque, only the oracle reads it.
    """

    norm: float
    layers: Mapping[str, float] = field(default_factory=dict)
    gradient: Any = None


class Deduction(NamedTuple):
    """What taking some tokens' gradient x away from g did.

    Attributes:
        remaining_norm: Norm of what remains of g after everything deducted so far.
        share: <x, g> / ||g||^2, from norms instead of a finite difference, so to the rounding of 1.
    """

    remaining_norm: float
    share: float


class GradientOracle(Protocol):
    """Answers about the gradient g of the current optimizer step; every method is called by all ranks alike.

    Attributes:
        signals: What the forward passes left behind.
        grad_norm: ||g||; inf or NaN when any entry is.
        layer_norms: Norm of g per layer by name.
        cost_sweeps: Work done so far on this rank, in forward+backward sweeps over its part of the step.
    """

    signals: WindowSignals
    grad_norm: float
    layer_norms: Mapping[str, float]
    cost_sweeps: float

    @property
    def base_losses(self) -> Tensor | None:
        """Linearised token losses at theta, as ``linear_losses``; None if the training forward ran in lower precision.

        Only losses made with the same arithmetic may be subtracted from each other.
        """
        ...

    def weight_norm(self) -> float:
        """Norm of the trainable weights, which says below which distance a move of them drowns in their rounding."""
        ...

    def linear_losses(self, shift: float, sequences: Tensor | None = None) -> Tensor:
        """c_t * logprob_t of every token at theta + shift * g/||g||, without a backward; theta is restored bit for bit.

        Where the loss holds an entropy bonus, its slope times the entropy is added.

        Args:
            shift: Signed distance along the unit gradient.
            sequences: (micro_batch, rank, sequence) bool, the sequences wanted; None for all.

        Returns:
            Float64, the shape of the signals, 0 outside the loss; meaningless where a sequence was not run.
        """
        ...

    def subset_gradient(self, tokens: Tensor, *, is_kept: bool = False) -> SubsetGradient:
        """One masked backward: the gradient of the losses of these tokens, bool in the shape of the signals."""
        ...

    def difference(self, parent: SubsetGradient, part: SubsetGradient) -> SubsetGradient:
        """``parent - part`` of two kept gradients, without a backward."""
        ...

    def deduct(self, part: SubsetGradient) -> Deduction:
        """Take away from what remains of g the answer of the ``subset_gradient`` just asked, which is used up by it."""
        ...

    def start_over(self) -> None:
        """Forget all deductions: what remains is g again."""
        ...

    def rebuild_without(self, tokens: Tensor) -> float:
        """Compute g anew from all tokens of the step but these: the only way when g itself is not finite.

        Returns:
            The norm of the new gradient, which replaces what remains of g.
        """
        ...

    def first_nonfinite(self, address: TokenAddress) -> tuple[int, str] | None:
        """The token of this sequence that brings a non-finite value into the forward, and the first layer to show it.

        None when every layer's output is finite.
        """
        ...

    def nonfinite_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that hold non-finite values themselves."""
        ...

    def nonfinite_gradients(self) -> tuple[str, ...]:
        """Names of the parameters whose entry in g is not finite."""
        ...
