"""Metrics kept as text: CSV, JSON lines, and the ``trainer_state.json`` of Hugging Face trainers."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlstab.report.events import number_from_json
from lightning_rlstab.report.names import STEP_COLUMNS
from lightning_rlstab.report.run import Life, RunReadError, Series

__all__ = ["read_csv", "read_json_lines", "read_trainer_state"]


def read_csv(path: Path) -> tuple[Life, str]:
    """Metrics of a CSV file with a header; empty cells are absent values.

    Args:
        path: The file, e.g. Lightning's ``metrics.csv``.

    Returns:
        The curves, and a note on damage (empty when there is none).

    Raises:
        RunReadError: If it has no header with a step column, or no number.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.DictReader(line.replace("\0", "") for line in file)
        header = list(rows.fieldnames or [])
        if not any(name in STEP_COLUMNS for name in header):
            raise RunReadError(f"{path}: no step column among {header[:8]}. Give a CSV with one of {STEP_COLUMNS}.")
        return _life(path, _csv_records(rows))


def _csv_records(rows: Iterable[Mapping[str | Any, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {name: _cell(text) for name, text in row.items() if isinstance(name, str) and isinstance(text, str)}


def _cell(text: str) -> Any:
    stripped = text.strip()
    if not stripped:
        return None
    try:
        return float(stripped)
    except ValueError:
        return stripped


def read_json_lines(path: Path) -> tuple[Life, str]:
    """Metrics of a JSON-lines file: one object per logged step; nested objects become ``outer/inner``.

    Args:
        path: The file.

    Returns:
        The curves, and a note on damage (empty when there is none).

    Raises:
        RunReadError: If no line is an object with a step and a number.
    """
    broken = 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal broken
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    broken += 1
                    continue
                if isinstance(record, dict):
                    yield dict(_flat(record))

    life, note = _life(path, records())
    return life, note or (f"{path.name}: {broken} damaged line(s) left out" if broken else "")


def read_trainer_state(path: Path) -> tuple[Life, str]:
    """Metrics of a Hugging Face ``trainer_state.json``.

    Args:
        path: The file.

    Returns:
        The curves, and an empty note.

    Raises:
        RunReadError: If it is no JSON or has no ``log_history``.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise RunReadError(
            f"{path}: not whole JSON ({error}). Give a trainer_state.json that was saved whole."
        ) from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise RunReadError(f"{path}: no `log_history` list. Give a trainer_state.json of a Hugging Face trainer.")
    # TRL writes null where the mean has no finite value; any other name may be null because a function abstained.
    rows = (record for record in history if isinstance(record, dict))
    return _life(path, ({**row, "reward": math.nan} if row.get("reward", 0.0) is None else row for row in rows))


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            # A wrapper such as {"step": 3, "data": {...}} adds no name of its own.
            inner = prefix if key in {"data", "metrics", "logs"} else f"{prefix}{key}/"
            yield from _flat(value, inner)
        else:
            yield f"{prefix}{key}", value


def _life(path: Path, records: Iterable[Mapping[str, Any]]) -> tuple[Life, str]:
    steps: dict[str, array[int]] = {}
    values: dict[str, array[float]] = {}
    without_step = 0
    for record in records:
        step = next((number_from_json(record[name]) for name in STEP_COLUMNS if record.get(name) is not None), None)
        if step is None or not step.is_integer():
            without_step += 1
            continue
        for name, value in record.items():
            number = None if name in STEP_COLUMNS else number_from_json(value)
            if number is None:
                continue
            if name not in steps:
                steps[name], values[name] = array("q"), array("d")
            steps[name].append(int(step))
            values[name].append(number)
    if not steps:
        raise RunReadError(f"{path}: no row with a step and a number. Give a metrics file of a training run.")
    series = {
        name: Series(np.array(steps[name], dtype=np.int64), np.array(values[name], dtype=np.float64)) for name in steps
    }
    note = f"{path.name}: {without_step} row(s) without a step left out" if without_step else ""
    return Life(series, path.name), note
