"""Snapshot files: written by a background thread, whole or absent, the newest few kept."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "SNAPSHOTS",
    "SnapshotWriter",
    "cloned_to_cpu",
    "newest_of_runs",
    "newest_snapshot",
    "snapshot_name",
    "snapshots_in",
]

_NAME = re.compile(r"step=(\d+)\.ckpt")
SNAPSHOTS = "snapshots"
"""Name of the folder inside a run folder."""

_UNFINISHED = ".partial"


def snapshot_name(step: int) -> str:
    """File name of the snapshot after ``step`` optimizer steps; names sort by step.

    Example:
        >>> snapshot_name(500)
        'step=000000500.ckpt'
    """
    return f"step={step:09d}.ckpt"


def snapshots_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Whole snapshots of a folder, newest first; unfinished ones have another name and are not seen.

    Args:
        folder: May be missing.
    """
    place = Path(folder)
    found = [path for path in place.iterdir() if _NAME.fullmatch(path.name)] if place.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest_of_runs(root: str | os.PathLike[str]) -> Path | None:
    """The snapshot that was written last in any run folder under ``root``; None when there is none.

    A restarted run logs to a new folder and its snapshots lie there, so the number of steps alone does not tell.

    Args:
        root: Searched for folders named ``snapshots``; may be missing.
    """
    found = [path for folder in Path(root).rglob(SNAPSHOTS) if folder.is_dir() for path in snapshots_in(folder)]
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def newest_snapshot(folder: str | os.PathLike[str]) -> Path | None:
    """The snapshot to resume from, ``Trainer.fit(ckpt_path=...)``, or None when there is none.

    Args:
        folder: The snapshots' folder; may be missing.
    """
    return next(iter(snapshots_in(folder)), None)


def cloned_to_cpu(value: Any) -> Any:
    """A deep copy whose tensors lie on the CPU and share no memory with the originals.

    A ``state_dict`` holds references to the live tensors: without the copy, a snapshot written in the background would
    be a mixture of several steps.

    Args:
        value: Nested dicts, lists and tuples of tensors and plain values.

    Returns:
        The same structure. Tensors that were one object stay one object, so tied weights stay tied.
    """
    return _cloned(value, {})


def _cloned(value: Any, seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.detach().to("cpu", copy=True)
        return seen[id(value)]
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps the type and attributes of a state dict, such as its metadata
        for key, entry in value.items():
            made[key] = _cloned(entry, seen)
        return made
    if isinstance(value, tuple):
        parts = [_cloned(entry, seen) for entry in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_cloned(entry, seen) for entry in value]
    return value


class SnapshotWriter:
    """Writes one snapshot at a time in a background thread.

    A snapshot appears under its name in one ``rename`` after its bytes have reached the disk, so that a kill, a full
    disk or an out-of-memory in the middle leaves the earlier ones valid.

    Args:
        folder: Made when the first snapshot is written.
        keep: Newest snapshots kept.
        save: Writes an object to a path; ``torch.save`` by default.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int, save: Callable[[Any, Path], None] | None = None
    ) -> None:
        self.folder = Path(folder)
        self._keep = keep
        self._save = save or torch.save
        self._thread: threading.Thread | None = None
        self._error: OSError | RuntimeError | None = None

    def write(self, snapshot: Any, step: int) -> Path:
        """Begin to write; waits only while the one before is still being written.

        Args:
            snapshot: Already cloned: the caller goes on training.
            step: Optimizer step, for the name.

        Returns:
            The path it will have.

        Raises:
            OSError: If the snapshot before could not be written.
        """
        self.wait()
        target = self.folder / snapshot_name(step)
        self._start(functools.partial(self.write_now, snapshot, target))
        return target

    def write_shards(self, finish: Callable[[], None], step: int, *, is_publishing: bool) -> Path:
        """Wait in the background for shards that several processes write into the unfinished name's folder.

        Args:
            finish: Returns when they are on disk.
            step: Optimizer step, for the name.
            is_publishing: Whether this process gives the folder its name; one of them does.

        Returns:
            The path it will have.

        Raises:
            OSError: If the snapshot before could not be written.
        """
        self.wait()
        target = self.folder / snapshot_name(step)

        def write() -> None:
            finish()
            if is_publishing:
                publish(target.with_name(target.name + _UNFINISHED), target)
                self.discard_old()

        self._start(write)
        return target

    def _start(self, write: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(write,), name="rlstab-snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            OSError: If the last snapshot could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise OSError(f"the snapshot in {self.folder} could not be written: {error}") from error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        # A full disk surfaces as OSError or, from torch's zip writer, as RuntimeError; told to the caller by wait().
        except (OSError, RuntimeError) as error:
            self._error = error

    def write_now(self, snapshot: Any, target: Path) -> None:
        """Write in this thread: temporary name, fsync, rename, fsync of the folder, then let the oldest go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + _UNFINISHED)
        self._save(snapshot, partial)
        publish(partial, target)
        self.discard_old()

    def discard_old(self) -> None:
        """Delete all but the newest ``keep`` snapshots, and what killed runs left unfinished."""
        for path in snapshots_in(self.folder)[self._keep :]:
            _delete(path)
        for path in self.folder.glob(f"*{_UNFINISHED}"):
            _delete(path)


def publish(partial: Path, target: Path) -> None:
    """Give a finished file or folder its real name, after its bytes have reached the disk."""
    for path in [partial, *partial.rglob("*")] if partial.is_dir() else [partial]:
        _fsync(path)
    if target.is_dir():
        shutil.rmtree(target)
    elif partial.is_dir():
        target.unlink(missing_ok=True)  # a single file of another run; a folder cannot replace it
    os.replace(partial, target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    # A snapshot that is being deleted must not look whole: rename first, a kill may come in between.
    if path.is_dir():
        doomed = path.with_name(path.name + _UNFINISHED)
        if path != doomed and not path.name.endswith(_UNFINISHED):
            os.replace(path, doomed)
            path = doomed
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
