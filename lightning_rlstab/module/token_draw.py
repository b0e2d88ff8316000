"""What happens to the logits of one decoding step: the log-probs are noted, and a token is drawn.

Both are logits processors for transformers' ``generate``; neither ever keeps more than one step's logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LogprobRecorder", "TokenDraw", "drawn_tokens"]


class LogprobRecorder:
    """Log-probs of the sampled tokens, step by step: one (B, V) tensor is alive at a time, never (B, T, V).

    A forward hook sees the logits before any processor touches them; the logits processor sees, one step later,
    which token was drawn.

    Args:
        temperature: Divisor of the logits.
    """

    def __init__(self, *, temperature: float) -> None:
        self._temperature = temperature
        self._raw: Tensor | None = None
        self._waiting: tuple[Tensor, Tensor] | None = None
        self._columns: list[Tensor] = []

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Listen to the model's forwards inside the block.

        Args:
            model: The module that ``generate`` calls.
        """
        handle = model.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()
            self._raw = None

    def _see(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._raw = output.logits[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the token drawn last and keep the logits of the next one; ``scores`` go through unchanged."""
        self._take(input_ids[:, -1])
        assert self._raw is not None
        logits = self._raw.float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        self._waiting, self._raw = (logits, logits.logsumexp(dim=-1)), None
        return scores

    def _take(self, tokens: Tensor) -> None:
        if self._waiting is not None:
            logits, log_total = self._waiting
            self._columns.append(logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - log_total)

    def logprobs(self, completion_ids: Tensor) -> Tensor:
        """The finished record.

        Args:
            completion_ids: (B, T) tokens that came out, padding included.

        Returns:
            (B, T) float32, nats; meaningless on padding.
        """
        self._take(completion_ids[:, -1])
        self._waiting = None
        return torch.stack(self._columns[: completion_ids.shape[1]], dim=1)


class TokenDraw:
    """Draws the token itself and leaves ``generate`` no choice: the last processor of a greedy decoding.

    ``torch.multinomial``, which ``generate`` would use, makes one random number per vocabulary entry; one per row does.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Raise the score of the drawn token to infinity, in place: the scores are a copy made for this step."""
        return scores.scatter_(1, drawn_tokens(scores), torch.inf)


def drawn_tokens(scores: Tensor) -> Tensor:
    """One token per row from softmax(scores): the first whose cumulative probability exceeds a uniform number.

    Sums in float64 where there is such a type, so that tokens with a probability of 1e-12 keep it. A token with score
    -inf is never drawn. NaN scores give some token instead of an error: the log-probs then are NaN, which the guards
    know how to deal with, while an error here would end the run.

    Args:
        scores: (B, V), any float type.

    Returns:
        (B, 1) int64.
    """
    exact = torch.float32 if scores.device.type == "mps" else torch.float64
    cumulative = scores.float().softmax(dim=-1).cumsum(dim=-1, dtype=exact)
    total = cumulative[:, -1:]
    threshold = torch.rand_like(total) * total
    # Rounding may lift the product to the total itself, which no cumulative probability exceeds.
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[1] - 1)
