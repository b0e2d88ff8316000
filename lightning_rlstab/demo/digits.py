"""Two-digit additions as prompts, and the rewards that judge the answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from lightning_rlstab.core.checks import choice, integer, refusal

__all__ = ["addition_rows", "digit_share", "exact_sum", "forgetful_sum"]

Split = Literal["train", "held_out"]

_LOWEST, _HIGHEST = 10, 99
_HELD_OUT_STRIDE = 5
_SPLIT_SEED = 20260101


def _pairs(split: Split) -> list[tuple[int, int]]:
    """All ordered pairs of one split, in a fixed order.

    The cut is made on unordered pairs, so that no held-out sum was seen in training with its terms exchanged.
    """
    unordered = [(a, b) for a in range(_LOWEST, _HIGHEST + 1) for b in range(a, _HIGHEST + 1)]
    random.Random(_SPLIT_SEED).shuffle(unordered)
    wants_held_out = split == "held_out"
    chosen = [pair for index, pair in enumerate(unordered) if (index % _HELD_OUT_STRIDE == 0) == wants_held_out]
    return sorted({pair for a, b in chosen for pair in ((a, b), (b, a))})


def addition_rows(count: int | None = None, seed: int = 0, split: Split = "train") -> list[dict[str, str]]:
    """Distinct additions of two numbers between 10 and 99 in a seeded order.

    The train and the held-out split share no pair of terms, in either order, whatever the seeds.

    Args:
        count: Rows wanted, from 1 to the size of the split (6476 for train, 1624 for held_out); None for all.
        seed: Chooses and orders the rows.
        split: ``"train"`` or ``"held_out"``.

    Returns:
        Rows with ``prompt`` and ``answer``.

    Raises:
        ValueError: If the split has fewer pairs than ``count``, or no such split exists.

    Example:
        >>> addition_rows(2, seed=1)[0].keys()
        dict_keys(['prompt', 'answer'])
    """
    choice("split", split, ("train", "held_out"))
    pairs = _pairs(split)
    count = len(pairs) if count is None else integer("count", count, at_least=1)
    if count > len(pairs):
        raise refusal("count", f"be at most {len(pairs)} in split {split!r}", count, "Train for more epochs instead")
    chosen = random.Random(seed).sample(pairs, count)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in chosen]


def forgetful_sum(prompt: str) -> str:
    """The answer of somebody who never carries: each digit is right on its own, the carry is lost.

    Example:
        >>> forgetful_sum("47+85="), forgetful_sum("12+30=")
        ('22', '42')
    """
    first, second = prompt.removesuffix("=").split("+")
    return "".join(str((int(a) + int(b)) % 10) for a, b in zip(first, second, strict=True))


def exact_sum(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 where the completion is the sum to the letter, else 0.0.

    Example:
        >>> exact_sum(["12+30=", "12+30="], ["42", "421"], ["42", "42"])
        [1.0, 0.0]
    """
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def digit_share(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of the answer's digits found at their place, counted from the right; 0.0 when the lengths differ.

    Example:
        >>> digit_share(["12+30="] * 3, ["42", "41", "421"], ["42"] * 3)
        [1.0, 0.5, 0.0]
    """
    shares = []
    for text, right in zip(completions, answer, strict=True):
        hits = sum(given == wanted for given, wanted in zip(text, right, strict=False))
        shares.append(hits / len(right) if len(text) == len(right) else 0.0)
    return shares
