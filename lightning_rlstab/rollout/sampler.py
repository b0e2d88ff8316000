"""How completions are asked for: the knobs, what comes back, and the protocol every sampling engine fulfils."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_rlstab.core.checks import integer, number, refusal

__all__ = ["Sampler", "Samples", "SamplingSettings"]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling knobs under TRL's names and defaults, checked when made.

    Attributes:
        max_completion_length: Most new tokens per completion.
        temperature: Divisor of the logits, above 0.
        top_p: Keep the smallest set of tokens whose probabilities reach this sum, in (0, 1]; 1 keeps all.
        top_k: Keep this many most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this fraction of the most likely one, in [0, 1]; None keeps all.
        repetition_penalty: Divisor for the logits of tokens already seen; 1 changes nothing.
        generation_kwargs: Further fields for the engine's own configuration; they win over the fields above.

    Example:
        >>> SamplingSettings(temperature=0.7).top_p
        1.0
    """

    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse values outside the ranges above."""
        integer("max_completion_length", self.max_completion_length, at_least=1)
        number(
            "temperature", self.temperature, above=0, advice="Use a small value such as 0.01 for near-greedy sampling"
        )
        number("top_p", self.top_p, above=0, at_most=1)
        integer("top_k", self.top_k, at_least=0, advice="Use 0 to keep all tokens")
        if self.min_p is not None:
            number("min_p", self.min_p, at_least=0, at_most=1)
        number("repetition_penalty", self.repetition_penalty, above=0)
        if self.generation_kwargs is not None and not isinstance(self.generation_kwargs, dict):
            raise refusal("generation_kwargs", "be a mapping or null", self.generation_kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """What one call of a sampler gives back; T is the longest completion of the batch.

    Attributes:
        completion_ids: (B, T) int64, right-padded.
        completion_mask: (B, T) bool, True on generated tokens, the end-of-sequence token included.
        is_truncated: (B,) bool, True when the length limit came before an end-of-sequence token.
        behavior_logprobs: (B, T) float32 nats of the sampled tokens under softmax(logits / temperature) over the
            whole vocabulary, whatever top-p, top-k or penalty then did; exactly 0 on padding.
    """

    completion_ids: Tensor
    completion_mask: Tensor
    is_truncated: Tensor
    behavior_logprobs: Tensor


@runtime_checkable
class Sampler(Protocol):
    """An engine that continues prompts with the current weights of a policy."""

    def sample(
        self,
        policy: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        settings: SamplingSettings,
        seed: int | None = None,
    ) -> Samples:
        """Continue every row of ``prompt_ids`` once.

        Args:
            policy: The model to sample from; its weights, modes and configuration are as before afterwards.
            prompt_ids: (B, P) int64, left-padded.
            prompt_mask: (B, P) bool, True on real tokens.
            settings: The knobs.
            seed: Draw from this seed and leave the global generators as they were; None draws from them.

        Returns:
            One completion per row, in order, on the device of ``prompt_ids``.
        """
        ...
