"""Find a run's files and read them: TensorBoard, CSV, JSON lines, ``trainer_state.json``, and our ``events.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlstab.report.event_files import read_event_file
from lightning_rlstab.report.events import read_events
from lightning_rlstab.report.run import Life, Run, RunReadError, Series, canonical_series, joined
from lightning_rlstab.report.tables import read_csv, read_json_lines, read_trainer_state

__all__ = ["read_run"]

EVENTS_FILE = "events.jsonl"
_READABLE = "TensorBoard event files, metrics.csv, a metrics .jsonl or trainer_state.json"


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read one run from a folder or a single file.

    A folder's TensorBoard files come first, else its CSV, JSON lines or ``trainer_state.json``. When the folder itself
    holds none of these, the newest folder below it that does is taken, and a note says so. Trainers open a new folder
    when they resume: if the newest one begins in the middle, the folders that it continues are read before it.

    Args:
        path: The run folder, or one metrics file.

    Returns:
        The run under canonical names. Damaged files are read as far as they go and noted.

    Raises:
        RunReadError: If the path is missing, holds no metrics, or only empty or unknown files; the message names them.
    """
    given = Path(path)
    if not given.exists():
        raise RunReadError(f"{given}: no such file or folder. Give a run folder.")
    notes: list[str] = []
    if given.is_file():
        lives = _lives_of([given], notes)
        folder = given.parent
        folders = [folder]
    else:
        folders, lives = _run_folders(given, notes)
        folder = folders[-1]
    events = _events(folders, given, notes)
    curves = canonical_series(joined(lives))
    if not curves and not events:
        raise RunReadError(_nothing_found(given, folder, notes))
    return Run(given, curves, events, tuple(lives), tuple(notes))


def _is_event_file(path: Path) -> bool:
    return "tfevents" in path.name and path.suffix not in {".json", ".csv", ".jsonl"}


def _metric_files(folder: Path) -> list[Path]:
    """The files of the best kind that a folder holds, oldest first; empty when it holds none."""
    files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    event_files = [file for file in files if _is_event_file(file)]
    if event_files:
        return sorted(event_files, key=_start_time)
    for kind in (
        [file for file in files if file.name == "trainer_state.json"],
        [file for file in files if file.suffix == ".csv"],
        [file for file in files if file.suffix == ".jsonl" and file.name != EVENTS_FILE],
    ):
        if kind:
            named = [file for file in kind if file.stem in {"metrics", "log", "train", "trainer_state"}]
            return (named or kind)[:1]
    return []


def _start_time(path: Path) -> tuple[int, str]:
    """Writers put the start time, whole seconds, after ``tfevents.``; other names sort by name."""
    stamp = path.name.partition("tfevents.")[2].split(".")[0]
    return (int(stamp) if stamp.isdigit() else 0, path.name)


def _run_folders(given: Path, notes: list[str]) -> tuple[list[Path], list[Life]]:
    """The folders of one run, oldest first, and their lives."""
    if _metric_files(given):
        return [given], _lives_of(_metric_files(given), notes)
    found: list[Path] = []
    for root, folders, _ in os.walk(given):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        folder = Path(root)
        if folder != given and _metric_files(folder):
            found.append(folder)
            folders.clear()  # what lies below a run's folder (hyper-parameter sub-runs) belongs to it
    if not found:
        return [given], []
    found.sort(key=_newest_change)
    taken = [found.pop()]
    lives = _lives_of(_metric_files(taken[0]), notes)
    while found and lives and _is_resumed(lives[0]):
        earlier = _lives_of(_metric_files(found[-1]), [])
        if not earlier or not earlier[0].first_step < lives[0].first_step <= earlier[-1].last_step + 1:
            break
        taken.insert(0, found.pop())
        lives = [*earlier, *lives]
    names = [str(folder.relative_to(given)) for folder in taken]
    if len(taken) > 1:
        notes.append(f"Resumed in new folders below {given}: read {', '.join(names)} as one run")
    if found:
        others = ", ".join(str(folder.relative_to(given)) for folder in found)
        notes.append(f"Several runs below {given}: read {names[-1]}, the newest; others: {others}")
    return taken, lives


def _is_resumed(life: Life) -> bool:
    """Whether its first step lies further from 0 than its steps lie apart."""
    steps = np.unique(np.concatenate([curve.steps for curve in life.series.values()]))
    return len(steps) > 1 and int(steps[0]) > int(np.diff(steps).min())


def _newest_change(folder: Path) -> tuple[int, float]:
    checkpoint = folder.name.rpartition("-")[2]
    number = int(checkpoint) if folder.name.startswith("checkpoint-") and checkpoint.isdigit() else 0
    return number, max(file.stat().st_mtime for file in _metric_files(folder))


def _lives_of(files: list[Path], notes: list[str]) -> list[Life]:
    lives: list[Life] = []
    for file in files:
        if file.stat().st_size == 0:
            notes.append(f"{file.name} is empty")
            continue
        life, note = _reader(file)(file)
        if note:
            notes.append(note)
        if life.series:
            lives.append(life)
    if len(files) == 1 and not lives and not notes:
        notes.append(f"{files[0].name} holds no scalar")
    return lives


def _reader(file: Path) -> Callable[[Path], tuple[Life, str]]:
    if _is_event_file(file):
        return _read_tensorboard
    readers: Mapping[str, Callable[[Path], tuple[Life, str]]] = {
        ".csv": read_csv,
        ".jsonl": read_json_lines,
        ".ndjson": read_json_lines,
        ".json": read_trainer_state,
    }
    reader = readers.get(file.suffix)
    if reader is None:
        raise RunReadError(f"{file}: unknown kind of file. Give {_READABLE}.")
    return reader


def _read_tensorboard(file: Path) -> tuple[Life, str]:
    found = read_event_file(file)
    series = {tag: Series(steps, values) for tag, (steps, values) in found.columns.items()}
    return Life(series, file.name), f"{file.name} {found.damage}" if found.damage else ""


def _events(folders: list[Path], given: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Of each folder, the first ``events.jsonl`` in it, in the folder given, or between the two; each file once."""
    files: list[Path] = []
    for folder in folders:
        places = [folder]
        while places[-1] != given and given in places[-1].parents:
            places.append(places[-1].parent)
        file = next((place / EVENTS_FILE for place in places if (place / EVENTS_FILE).exists()), None)
        if file is not None and file not in files:
            files.append(file)
    return tuple(event for file in files for event in _events_of(file, notes))


def _events_of(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return read_events(file)
    except ValueError as error:
        notes.append(str(error))
        return []


def _nothing_found(given: Path, folder: Path, notes: list[str]) -> str:
    if notes:
        return f"{given}: nothing to read: {'; '.join(notes)}."
    names = sorted(entry.name for entry in folder.iterdir())[:6] if folder.is_dir() else []
    held = f"it holds {', '.join(names)}" if names else "it is empty"
    return f"{given}: no metrics found ({held}). Give a folder with {_READABLE}."
