"""Reward calls with a time limit: a hanging, crashing or chatty verifier in a process of its own."""

from __future__ import annotations

import os
import select
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlstab.rollout.rewards import RewardError, RewardSuite, RewardTable

VERIFIERS = """
    import os, subprocess, sys, threading

    def patient(completions, log_extra, log_metric, **kwargs):
        print("prints must not disturb the replies")
        if any(text == "hang" for text in completions):
            threading.Event().wait()
        log_extra("pid", [os.getpid()] * len(completions))
        log_metric("calls", 1.0)
        return [float(len(text)) for text in completions]

    async def patient_async(completions, **kwargs):
        return [2.0] * len(completions)

    def environment(completions, **kwargs):
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LOCAL_RANK")
        return [float(sum(name in os.environ for name in names)) + 10 * ("KEPT" in os.environ)] * len(completions)

    def alone_only(completions, **kwargs):
        if len(completions) > 1:
            threading.Event().wait()
        return [1.0]

    def fragile(completions, **kwargs):
        if "bad" in completions:
            raise LookupError("no such answer")
        if "exit" in completions:
            os._exit(3)
        return [0.0] * len(completions)

    def wordy(completions, **kwargs):
        return ["1"] * len(completions)

    def outer():
        def inner(completions, **kwargs):
            return [0.0] * len(completions)
        return inner

    def leaving_a_child(completions, **kwargs):
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        with open(kwargs["path"][0], "a") as file:
            file.write(f"{child.pid} ")
        threading.Event().wait()
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through Linux's pidfd")


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import importlib

    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "timed_verifiers.py").write_text(textwrap.dedent(VERIFIERS))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("timed_verifiers")
    sys.path.remove(str(folder))
    del sys.modules["timed_verifiers"]


def scored(suite: RewardSuite, completions: list[str], **columns: list[Any]) -> RewardTable:
    return suite.score(
        prompts=["p"] * len(completions),
        completions=completions,
        completion_ids=[[0]] * len(completions),
        columns=columns,
    )


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, giving the kernel five seconds to carry out a kill."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 5)[0])
    finally:
        os.close(handle)


def test_fr_123_a_hanging_sample_is_named_and_left_out_and_the_step_goes_on(
    verifiers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    suite = RewardSuite([verifiers.patient, verifiers.patient_async], time_limit_seconds=1.5)
    quick = scored(suite, ["a", "bb"])
    assert quick.weighted.tolist() == [3.0, 4.0]
    worker = quick.extra_columns["pid"][0]
    assert worker != os.getpid()
    assert scored(suite, ["a"]).extra_columns["pid"] == [worker]  # the process persists

    table = scored(suite, ["a", "hang", "ccc"])
    assert table.timed_out[:, 0].tolist() == [False, True, False]
    assert table.per_func[:, 0].isnan().tolist() == [False, True, False]
    assert table.weighted.tolist() == [3.0, 2.0, 5.0]
    assert table.missing.tolist() == [0, 0]
    assert table.extra_columns["pid"][1] is None
    assert "'patient' did not return within 1.5 s on row 1" in caplog.text
    assert "hang" in caplog.text
    assert _has_ended(worker)

    last = table.extra_columns["pid"][2]
    suite.close()
    assert _has_ended(last)
    with pytest.raises(ChildProcessError):  # nothing is left to be collected
        os.waitpid(-1, os.WNOHANG)


def test_a_failing_worker_names_the_row_and_the_cause(verifiers: Any) -> None:
    suite = RewardSuite(verifiers.fragile, time_limit_seconds=5.0)
    with pytest.raises(
        RewardError, match=r"`fragile` must not raise, got LookupError.*row 1, completion 'bad'"
    ) as caught:
        scored(suite, ["fine", "bad"])
    assert isinstance(caught.value.__cause__, LookupError)
    assert "timed_verifiers.py" in str(caught.value.__cause__.__cause__)
    with pytest.raises(RewardError, match="exit code 3 for row 0"):
        scored(suite, ["exit", "fine"])
    assert scored(suite, ["fine"]).weighted.tolist() == [0.0]
    suite.close()


def test_a_worker_sees_nothing_of_the_distributed_environment(verifiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "KEPT"):
        monkeypatch.setenv(name, "1")
    suite = RewardSuite([verifiers.environment, verifiers.wordy], time_limit_seconds=5.0)
    with pytest.raises(RewardError, match="`wordy` must return numbers or None, got '1'"):
        scored(suite, ["a"])
    suite = RewardSuite(verifiers.environment, time_limit_seconds=5.0)
    assert scored(suite, ["a"]).weighted.tolist() == [10.0]
    suite.close()


def test_what_a_hanging_verifier_started_is_killed_with_it(verifiers: Any, tmp_path: Path) -> None:
    suite = RewardSuite(verifiers.leaving_a_child, time_limit_seconds=1.0)
    path = tmp_path / "pids"
    table = scored(suite, ["a"], path=[str(path)])
    assert table.timed_out.tolist() == [[True]]
    children = [int(pid) for pid in path.read_text().split()]
    assert children
    assert all(_has_ended(pid) for pid in children)


def test_a_search_for_hanging_rows_ends_when_its_time_is_used_up(
    verifiers: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlstab.rollout.reward_process._SEARCH_LIMITS", 1)
    suite = RewardSuite(verifiers.patient, time_limit_seconds=1.0)
    table = scored(suite, ["a", "hang", "hang", "bb"])
    assert table.timed_out[:, 0].tolist() == [False, True, True, True]
    assert "3 of 4 rows are left out, the untried ones among them" in caplog.text
    suite.close()


def test_a_batch_that_is_slow_only_as_a_whole_keeps_all_its_values(
    verifiers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    suite = RewardSuite(verifiers.alone_only, time_limit_seconds=1.0)
    table = scored(suite, ["a", "b"])
    assert table.weighted.tolist() == [1.0, 1.0]
    assert not table.timed_out.any()
    assert "raise the time limit" in caplog.text
    suite.close()


def test_functions_that_another_process_cannot_import_are_refused(verifiers: Any) -> None:
    for func in (lambda completions: [0.0], verifiers.outer()):
        with pytest.raises(ValueError, match="must be importable by a worker process when there is a time limit"):
            RewardSuite(func, time_limit_seconds=1.0)


def test_a_function_of_the_running_script_is_refused(monkeypatch: pytest.MonkeyPatch, verifiers: Any) -> None:
    monkeypatch.setattr(verifiers.fragile, "__module__", "__main__")
    with pytest.raises(ValueError, match="Move it to the top level of a module of its own"):
        RewardSuite(verifiers.fragile, time_limit_seconds=1.0)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "5", True])
def test_a_time_limit_that_is_none_is_refused(verifiers: Any, limit: Any) -> None:
    with pytest.raises(ValueError, match="`time_limit_seconds` must"):
        RewardSuite(verifiers.fragile, time_limit_seconds=limit)


def test_a_column_that_cannot_travel_is_named(verifiers: Any) -> None:
    suite = RewardSuite(verifiers.fragile, time_limit_seconds=1.0)
    with pytest.raises(RewardError, match="`answer` must be plain data to reach `fragile`"):
        scored(suite, ["a"], answer=[lambda: None])
    suite.close()


def test_models_are_never_sent_to_a_worker() -> None:
    class Model:
        runs_in_process = True
        __name__ = "model"

        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [float(os.getpid())] * len(completions)

    table = scored(RewardSuite(Model(), time_limit_seconds=1.0), ["a"])
    assert table.weighted.tolist() == [float(os.getpid())]
