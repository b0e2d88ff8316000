from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlstab.control.snapshots import (
    SnapshotWriter,
    cloned_to_cpu,
    newest_snapshot,
    publish,
    snapshot_name,
    snapshots_in,
)


def steps_in(folder: Path) -> list[str]:
    return [path.name for path in snapshots_in(folder)]


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, keep=2)
    for step in (1, 5, 20):
        writer.write({"step": step}, step)
    writer.wait()
    assert steps_in(tmp_path) == [snapshot_name(20), snapshot_name(5)]
    newest = newest_snapshot(tmp_path)
    assert newest is not None
    assert torch.load(newest)["step"] == 20


def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    may_finish = threading.Event()

    def slow_save(value: Any, path: Path) -> None:
        assert may_finish.wait(10)
        torch.save(value, path)

    writer = SnapshotWriter(tmp_path, keep=2, save=slow_save)
    target = writer.write({"step": 1}, 1)
    assert not target.exists()
    assert newest_snapshot(tmp_path) is None  # not half there
    may_finish.set()
    writer.wait()
    assert target.exists()


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("zip")])
def test_a_failed_write_leaves_the_earlier_snapshot_and_is_told(tmp_path: Path, error: Exception) -> None:
    def save(value: Any, path: Path) -> None:
        torch.save(value, path)
        if value["step"] == 2:
            raise error

    writer = SnapshotWriter(tmp_path, keep=2, save=save)
    writer.write({"step": 1}, 1)
    writer.write({"step": 2}, 2)
    with pytest.raises(OSError, match="could not be written"):
        writer.wait()
    assert steps_in(tmp_path) == [snapshot_name(1)]
    writer.write({"step": 3}, 3)
    writer.wait()
    assert list(tmp_path.glob("*.partial")) == []


def test_a_clone_does_not_move_with_the_live_tensors() -> None:
    """FR-086."""
    module = torch.nn.BatchNorm1d(3)
    state = cloned_to_cpu({"weights": module.state_dict(), "nested": [(module.weight, 1)]})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for value in module.state_dict().values():
            value.add_(1)
    assert all(torch.equal(state["weights"][name], value) for name, value in before.items())
    assert isinstance(state["weights"], OrderedDict)


def test_a_clone_keeps_tied_tensors_tied() -> None:
    """FR-111."""
    weight = torch.ones(2)
    state = cloned_to_cpu({"a": weight, "b": weight})
    assert state["a"] is state["b"] is not weight


def test_a_folder_is_published_whole(tmp_path: Path) -> None:
    partial = tmp_path / "step=000000003.ckpt.partial"
    partial.mkdir()
    (partial / "shard").write_text("x")
    assert newest_snapshot(tmp_path) is None
    publish(partial, tmp_path / snapshot_name(3))
    publish_again = tmp_path / "again.partial"
    publish_again.mkdir()
    publish(publish_again, tmp_path / snapshot_name(3))
    assert steps_in(tmp_path) == [snapshot_name(3)]
    SnapshotWriter(tmp_path, keep=1).write_now({"step": 4}, tmp_path / snapshot_name(4))
    assert steps_in(tmp_path) == [snapshot_name(4)]


def test_a_missing_folder_holds_no_snapshot(tmp_path: Path) -> None:
    assert newest_snapshot(tmp_path / "nowhere") is None


@pytest.mark.parametrize("kill_after_bytes", [0, 1_000, 200_000, 400_000])
def test_a_process_killed_in_the_middle_of_writing_leaves_a_whole_snapshot(
    tmp_path: Path, kill_after_bytes: int
) -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover - the killed process

        def save(value: Any, path: Path) -> None:
            torch.save(value, path)
            if value["step"] == 2:
                os.truncate(path, min(kill_after_bytes, path.stat().st_size))
                os.kill(os.getpid(), signal.SIGKILL)

        writer = SnapshotWriter(tmp_path, keep=2, save=save)
        for step in (1, 2):
            writer.write({"step": step, "weights": torch.ones(100_000)}, step)
        writer.wait()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    newest = newest_snapshot(tmp_path)
    assert newest is not None
    assert torch.load(newest)["step"] == 1
