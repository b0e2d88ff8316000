"""``events.jsonl``: what happened in a run, one JSON line per intervention, spike or alarm.

The file is append-only and every line is flushed, so a run that is killed keeps everything up to its last moment; a
torn last line is passed over on reading. Nothing here knows about ranks: the caller writes on rank 0 only.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from lightning_rlstab.core.checks import choice, integer, refusal

__all__ = ["EVENT_KINDS", "SCHEMA_VERSION", "EventLog", "EventTail", "number_from_json", "read_events"]

SCHEMA_VERSION = 1

EVENT_KINDS: dict[str, str] = {
    "alarm": "The monitor found a sign of sickness: rule, step range, figures, next action",
    "clip": "Tokens, sequences or layers were held back by a clip: its first act, then sums over the steps since",
    "config": "What the run is: its callbacks and their settings, strategy, processes",
    "controller": "A controller moved its coefficient or switched a mode",
    "drift": "The usual level of a quantity moved slowly away from where it began",
    "error_feedback": "A skipped gradient's remainder was stored, fed back or discarded",
    "filter": "Completions or groups were left out of training",
    "fire_drill": "A fault was injected on purpose",
    "floor": "Second moments were lifted to their floor",
    "quarantine": "A batch was set aside",
    "replay": "Old groups were mixed into the batch, or the buffer ran short",
    "reward": "A reward function gave NaN, inf or an error, or ran out of time",
    "rollback": "Weights and optimizer state went back to a snapshot",
    "self_check": "Sampling and training log-probs were compared",
    "skip": "A micro-batch or a whole step was not applied",
    "snapshot": "A healthy state was saved",
    "spike": "A gradient spike was found and, if possible, traced to its tokens",
    "start": "Training started or resumed",
    "stop": "Training was ended by a guard, or by an exception",
}
"""Every event kind and its meaning; ``EventLog.write`` refuses others."""

_RESERVED = ("schema_version", "time", "event", "step")


class EventLog:
    """Append-only writer of ``events.jsonl``.

    The file is opened and closed for each line: events are rare, a run without events leaves no file, and the writer
    holds no handle that a fork, a pickle or a crash could break.

    Args:
        path: The file; missing folders are made.

    Example:
        >>> import tempfile
        >>> log = EventLog(Path(tempfile.mkdtemp()) / "events.jsonl")
        >>> log.write("skip", step=3, norm=float("inf"))
        >>> read_events(log.path)[0]["norm"]
        'inf'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, event: str, *, step: int, **fields: Any) -> None:
        """Append one line; it is with the operating system when this returns.

        Args:
            event: One of ``EVENT_KINDS``.
            step: The optimizer step (``trainer.global_step``) at which it happened.
            **fields: Strings, numbers, bools, None, or lists, tuples, mappings and dataclasses of these. NaN and
                infinities are written as the strings ``"nan"``, ``"inf"``, ``"-inf"``, so that the line stays valid
                JSON; ``number_from_json`` turns them back.

        Raises:
            ValueError: For an unknown kind, a reserved field name, or a value that is not plain data (a tensor).
        """
        choice("event", event, EVENT_KINDS)
        integer("step", step, at_least=0)
        for name, value in fields.items():
            if name in _RESERVED:
                raise refusal(name, "not be used as an event field", value, "Choose another name")
        record = {"schema_version": SCHEMA_VERSION, "time": round(time.time(), 3), "event": event, "step": step}
        record.update({name: _plain(name, value) for name, value in fields.items()})
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A killed run may have left half a line: keep it apart from the first new one.
        torn = "\n" if _ends_without_newline(self.path) else ""
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{torn}{line}\n")


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole events of a file, in order; damaged lines are passed over.

    Args:
        path: An ``events.jsonl``. A missing file is a run without events: the empty list.

    Returns:
        One dict per line that is a JSON object with an ``event`` and a whole-number ``step``.

    Raises:
        ValueError: If the file holds text but not a single event: it is some other file.
    """
    file = Path(path)
    if not file.exists():
        return []
    events: list[dict[str, Any]] = []
    is_text_seen = False
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            is_text_seen = True
            record = _record(line)
            if record is not None:
                events.append(record)
    if is_text_seen and not events:
        raise refusal("events file", "hold one JSON object per line", str(file), "Give a file written by EventLog")
    return events


class EventTail:
    """Reads what was appended since the last look; for whoever shows events while they are written.

    Args:
        path: The file; it need not exist yet.

    Example:
        >>> import tempfile
        >>> log = EventLog(Path(tempfile.mkdtemp()) / "events.jsonl")
        >>> tail = EventTail(log.path)
        >>> log.write("skip", step=3)
        >>> [event["step"] for event in tail.fresh()], tail.fresh()
        ([3], [])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._position = self.path.stat().st_size if self.path.exists() else 0

    def fresh(self) -> list[dict[str, Any]]:
        """Whole events written since the last call; an unfinished line waits for the next one."""
        if not self.path.exists() or self.path.stat().st_size <= self._position:
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        records = (_record(line.decode("utf-8", errors="replace")) for line in whole.splitlines())
        return [record for record in records if record is not None]


def number_from_json(value: Any) -> float | None:
    """A number as written by ``EventLog``, with ``"nan"`` and ``"inf"`` turned back; None for anything else.

    Example:
        >>> number_from_json("-inf"), number_from_json(2), number_from_json("words")
        (-inf, 2.0, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value in {"nan", "inf", "-inf"}:
        return float(value)
    return None


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        return None
    step = record.get("step")
    return record if isinstance(step, int) and not isinstance(step, bool) else None


def _ends_without_newline(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(name, asdict(value))
    raise refusal(
        name,
        "be plain data (text, numbers, lists, mappings)",
        type(value).__name__,
        "Turn tensors into numbers with .item() or .tolist()",
    )
