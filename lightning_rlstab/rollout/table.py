"""The table of completions: one row each, as JSON lines, Parquet and Markdown."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.rewards import RewardTable

__all__ = ["append_jsonl", "completion_rows", "markdown_table", "write_parquet"]

Row = dict[str, Any]


def completion_rows(rollout: Rollout, table: RewardTable, *, step: int) -> list[Row]:
    """Rows with TRL's columns: step, prompt, completion, one per reward function, extra columns, advantage.

    Args:
        rollout: The completions, with advantages when there are any.
        table: Their rewards.
        step: Optimizer step to write in the first column.

    Returns:
        One dict per completion; NaN stands as None.
    """
    rewards = table.per_func.tolist()
    advantages = [None] * len(rollout) if rollout.advantages is None else rollout.advantages.tolist()
    return [
        {
            "step": step,
            "prompt": rollout.prompts[row],
            "completion": rollout.completions[row],
            **dict(zip(table.names, map(_without_nan, rewards[row]), strict=True)),
            **{column: values[row] for column, values in table.extra_columns.items()},
            "advantage": _without_nan(advantages[row]),
        }
        for row in range(len(rollout))
    ]


def _without_nan(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def append_jsonl(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows as strict JSON, one line each; values that JSON does not know are written as text.

    Args:
        path: File to append to; its folder is made.
        rows: From ``completion_rows``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.writelines(f"{_json(row)}\n" for row in rows)


def _json(value: Any) -> str:
    return json.dumps(_strict(value), ensure_ascii=False, allow_nan=False, default=str)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value


def write_parquet(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one Parquet file, whole or not at all.

    Args:
        path: File to write; its folder is made.
        rows: From ``completion_rows``. A column whose values have no common type is written as JSON text.
    """
    import pyarrow
    from pyarrow import parquet

    columns = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            columns[name] = pyarrow.array([_json(value) for value in values])
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    parquet.write_table(pyarrow.table(columns), unfinished)
    unfinished.replace(target)


def markdown_table(rows: Sequence[Mapping[str, Any]], *, max_rows: int = 8, max_characters: int = 400) -> str:
    """Rows as a Markdown table for TensorBoard's text panel.

    Args:
        rows: From ``completion_rows``.
        max_rows: Rows shown; a last line says how many more there are.
        max_characters: Longest cell; longer text loses its middle, since the end holds the answer.

    Returns:
        Markdown; empty for no rows.

    Example:
        >>> print(markdown_table([{"step": 1, "prompt": "2|2=", "reward": 0.5}]))
        | step | prompt | reward |
        | --- | --- | --- |
        | 1 | 2&#124;2= | 0.5 |
    """
    if not rows:
        return ""
    names = list(rows[0])
    lines = [[_cell(name, max_characters) for name in names], ["---"] * len(names)]
    lines += [[_cell(row.get(name), max_characters) for name in names] for row in rows[:max_rows]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text if len(rows) <= max_rows else f"{text}\n\n{len(rows) - max_rows} more rows"


def _cell(value: Any, max_characters: int) -> str:
    text = _spoken(value)
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {text[-half:]}"
    for character, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;"}.items():
        text = text.replace(character, entity)
    return text.replace("\r", "").replace("\n", "<br>")


def _spoken(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    is_messages = (
        isinstance(value, list) and value and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
    )
    if is_messages:
        return "\n".join(f"{turn['role']}: {turn.get('content', '')}" for turn in value)
    return value if isinstance(value, str) else str(value)
