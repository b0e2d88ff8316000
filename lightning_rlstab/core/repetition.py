"""How much a text repeats itself, its prompt, or the other completions of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["copied_frac", "group_similarity", "ngram_repetition_frac", "text_repetition_frac"]

WORD_ORDER = 4
CHARACTER_ORDER = 12


def ngram_repetition_frac(items: Sequence[Hashable], order: int = WORD_ORDER) -> float:
    """1 - distinct n-grams / n-grams: 0 when nothing repeats, near 1 when all is one loop.

    Args:
        items: Token ids, words, or a string (then its characters).
        order: n, at least 1.

    Returns:
        In [0, 1); 0 for fewer than two n-grams.

    Example:
        >>> ngram_repetition_frac([1, 2, 1, 2, 1, 2], order=2)
        0.6
    """
    grams = _ngrams(items, order)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def text_repetition_frac(text: str) -> float:
    """The larger of word and character n-gram repetition.

    Words catch looping sentences; characters catch what has no spaces ("Peeeee", "!!!!"). The character order of 12 is
    long enough that ordinary prose stays near 0.

    Args:
        text: Any text.

    Returns:
        In [0, 1).

    Example:
        >>> text_repetition_frac("The quick brown fox jumps over the lazy dog."), text_repetition_frac("!" * 100) > 0.9
        (0.0, True)
    """
    return max(ngram_repetition_frac(text.split(), WORD_ORDER), ngram_repetition_frac(text, CHARACTER_ORDER))


def copied_frac(completion: Sequence[Hashable], prompt: Sequence[Hashable], order: int = WORD_ORDER) -> float:
    """Share of the completion's n-grams that stand in the prompt.

    Args:
        completion: Token ids, words, or a string (then its characters).
        prompt: Of the same kind.
        order: n, at least 1.

    Returns:
        In [0, 1]; 0 for a completion shorter than n.

    Example:
        >>> copied_frac("add two and three now".split(), "please add two and three".split(), order=2)
        0.75
    """
    grams = _ngrams(completion, order)
    known = set(_ngrams(prompt, order))
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


def group_similarity(completions: Sequence[Sequence[Hashable]], max_order: int = WORD_ORDER) -> list[float]:
    """Self-BLEU without a brevity penalty: how much of each completion is found in one of the others.

    For every order from 1 to ``max_order`` the share of the completion's n-grams that another completion holds, counted
    at most as often as that completion holds them; then the mean over the orders the completion is long enough for.

    Args:
        completions: The group; token ids, words, or strings (then their characters).
        max_order: Largest n.

    Returns:
        One score in [0, 1] per completion; 0 for an empty one or a group of one. Linear in the group's length.

    Source:
        Self-BLEU (arXiv 1802.01886); the arithmetic mean over orders keeps short texts comparable.

    Example:
        >>> group_similarity(["a b c".split(), "a b c".split(), "x y z".split()], max_order=2)
        [1.0, 1.0, 0.0]
    """
    scores: list[list[float]] = [[] for _ in completions]
    for order in range(1, max_order + 1):
        counted = [Counter(_ngrams(items, order)) for items in completions]
        leaders = _two_largest(counted)
        for row, counts in enumerate(counted):
            total = sum(counts.values())
            if total:
                matched = sum(min(count, _largest_elsewhere(leaders[gram], row)) for gram, count in counts.items())
                scores[row].append(matched / total)
    return [sum(row) / len(row) if row else 0.0 for row in scores]


def _ngrams(items: Sequence[Hashable], order: int) -> list[tuple[Hashable, ...]]:
    return list(zip(*(items[start:] for start in range(order)), strict=False))


_Leaders = tuple[tuple[int, int], int]


def _two_largest(counted: Sequence[Counter[tuple[Hashable, ...]]]) -> dict[tuple[Hashable, ...], _Leaders]:
    """For every n-gram: (largest count, its row) and the second largest count."""
    leaders: dict[tuple[Hashable, ...], _Leaders] = {}
    for row, counts in enumerate(counted):
        for gram, count in counts.items():
            first, second = leaders.get(gram, ((0, -1), 0))
            leaders[gram] = ((count, row), first[0]) if count > first[0] else (first, max(second, count))
    return leaders


def _largest_elsewhere(leaders: _Leaders, row: int) -> int:
    (count, owner), second = leaders
    return second if owner == row else count
