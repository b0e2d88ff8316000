"""Reasoning-gym tasks as prompts, and their own scoring as a reward, for models that answer in words.

Needs the package ``reasoning-gym`` (extra ``examples``).
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lightning_rlstab.core.checks import choice, integer, refusal

__all__ = ["last_number_score", "task_rows"]

Split = Literal["train", "held_out"]
Message = dict[str, str]

_HELD_OUT_STRIDE = 5
_DRAWS_PER_ROW = 50
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def task_rows(
    task: str = "chain_sum",
    count: int = 500,
    seed: int = 0,
    split: Split = "train",
    task_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Distinct questions of one reasoning-gym task as conversational prompts.

    A checksum of the question decides its split, so that no seed and no count brings a held-out question into training.

    Args:
        task: Name of the task, e.g. ``"chain_sum"``.
        count: Rows wanted, at least 1.
        seed: Seed of the task's generator.
        split: ``"train"`` (four fifths of all questions) or ``"held_out"``.
        task_kwargs: The task's own settings, e.g. ``{"max_terms": 3}``.

    Returns:
        Rows with ``prompt`` (messages), ``answer``, ``task`` and ``entry``, the task's own record as JSON.

    Raises:
        ValueError: If no such task or split exists, or the task has too few distinct questions.
    """
    integer("count", count, at_least=1)
    choice("split", split, ("train", "held_out"))
    rows: dict[str, dict[str, Any]] = {}
    for entry in _entries(task, count * _DRAWS_PER_ROW, seed, dict(task_kwargs or {})):
        question = entry["question"]
        is_held_out = zlib.crc32(question.encode()) % _HELD_OUT_STRIDE == 0
        if is_held_out != (split == "held_out") or question in rows:
            continue
        messages: list[Message] = [{"role": "user", "content": question}]
        rows[question] = {"prompt": messages, "answer": entry["answer"], "task": task, "entry": json.dumps(entry)}
        if len(rows) == count:
            return list(rows.values())
    raise refusal("count", f"be at most {len(rows)} for this task and split", count, "Widen `task_kwargs`")


def _entries(task: str, size: int, seed: int, task_kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    choice("task", task, DATASETS)
    yield from reasoning_gym.create_dataset(task, size=size, seed=seed, **task_kwargs)


@functools.lru_cache(maxsize=16)
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0)


def last_number_score(
    completions: Sequence[str | Sequence[Message]], task: Sequence[str], entry: Sequence[str], **_: Any
) -> list[float]:
    """What the task's own ``score_answer`` gives for the last number of each completion; 0.0 where there is none.

    Args:
        completions: Texts, or lists of messages of which the last one counts.
        task: Name of each row's task.
        entry: Each row's own record, as JSON.

    Returns:
        One score in [0, 1] per completion.
    """
    scores = []
    for completion, name, record in zip(completions, task, entry, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = _NUMBER.findall(text)
        answer = numbers[-1].replace(",", "") if numbers else None
        scores.append(float(_scorer(name).score_answer(answer, json.loads(record))) if answer else 0.0)
    return scores
