"""Reward calls with a time limit, in a process of their own: a hanging verifier is no hanging network."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

from lightning_rlstab.core.checks import refusal
from lightning_rlstab.rollout.reward_functions import RewardAnswer, RewardError, failure, one_row
from lightning_rlstab.rollout.worker_process import RewardWorker

__all__ = ["TimedCalls"]

_log = logging.getLogger(__name__)

_SEARCH_LIMITS = 10  # time limits that a search for hanging rows may use up


class TimedCalls:
    """Calls of one reward function in a persistent worker process.

    The worker is a fresh interpreter in a session of its own (not a fork: the parent has threads, and not
    ``multiprocessing``: that would run the user's script again). It sees nothing of ``torch.distributed``'s
    environment. When a call does not return in time the worker and everything it started are killed, and the
    completions are scored one by one under the same limit to find the ones that hang. A function that looks at the
    whole batch at once therefore sees single rows in that case.

    Args:
        func: A function that a fresh process can import, or an object that pickle can pack.
        name: Its name, for errors and warnings.
        time_limit_seconds: Longest time of one call; starting the worker does not count.

    Raises:
        ValueError: If the function cannot be handed to another process.
    """

    def __init__(self, func: Any, *, name: str, time_limit_seconds: float) -> None:
        self.name = name
        self.time_limit_seconds = time_limit_seconds
        self._pickled = _pickled(func, name)
        self._worker: RewardWorker | None = None
        self._deadline: float | None = None

    def launch(self) -> None:
        """Start the worker process if none is running, without waiting for it."""
        if self._worker is None or not self._worker.is_ours():
            self._worker = RewardWorker(self._pickled, name=self.name, time_limit_seconds=self.time_limit_seconds)

    def start(self, kwargs: dict[str, Any]) -> None:
        """Hand the whole batch to the worker and start the clock."""
        self._send(kwargs)

    def finished(self, kwargs: dict[str, Any]) -> tuple[RewardAnswer, list[int]]:
        """Wait for the call begun by ``start``.

        Args:
            kwargs: The same keywords.

        Returns:
            The answer, and the rows that got no value because the function did not return in time on them.

        Raises:
            RewardError: If the function raised, broke the contract, or ended its process.
        """
        reply = self._reply()
        if reply is not None and reply[0] == "answer":
            return RewardAnswer(*reply[1:]), []
        if reply is not None and reply[0] == "broken":
            raise self._broken(reply, kwargs, row=None)
        return self._row_by_row(kwargs, reply)

    def abandon(self) -> None:
        """Give up a call that is still running."""
        if self._deadline is not None:
            self.close()

    def close(self) -> None:
        """Kill the worker, with everything it started."""
        self._deadline = None
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _send(self, kwargs: dict[str, Any]) -> None:
        request = _packed(kwargs, self.name)
        self.launch()
        assert self._worker is not None
        try:
            self._worker.wait_until_ready()
            self._worker.requests.send_bytes(request)
        except BaseException:  # whatever a user's function, or its packing, raises
            self.close()
            raise
        self._deadline = time.monotonic() + self.time_limit_seconds

    def _reply(self) -> tuple[Any, ...] | None:
        """The worker's reply; None when the time is over, after killing it."""
        assert self._worker is not None
        assert self._deadline is not None
        replies, deadline = self._worker.replies, self._deadline
        try:
            if replies.poll(max(0.0, deadline - time.monotonic())):
                reply: tuple[Any, ...] = replies.recv()
                self._deadline = None
                return reply
        except (EOFError, ConnectionError):
            worker = self._worker
            self.close()
            return "died", worker.exit_code
        self.close()
        return None

    def _row_by_row(self, kwargs: dict[str, Any], reply: tuple[Any, ...] | None) -> tuple[RewardAnswer, list[int]]:
        """Call on single completions: after a time-out to keep what can be scored, after a failure to name the row."""
        rows = len(kwargs["prompts"])
        joined = RewardAnswer()
        hanging: list[int] = []
        extra_of_row: list[dict[str, list[Any]]] = []
        left = _SEARCH_LIMITS * self.time_limit_seconds
        for row in range(rows):
            values: list[Any] = [None]
            extra: dict[str, list[Any]] = {}
            if left > 0:
                single = one_row(kwargs, row)
                self._send(single)
                began = time.monotonic()
                answer = self._reply()
                left -= time.monotonic() - began
                if answer is None:
                    hanging.append(row)
                    self._warn_of(row, kwargs)
                elif answer[0] == "answer":
                    _, values, extra, metrics = answer
                    for name, logged in metrics.items():
                        joined.metrics[name].extend(logged)
                else:
                    raise self._failed(answer, kwargs, row)
            else:
                hanging.append(row)
            joined.values.extend(values)
            extra_of_row.append(extra)
        if reply is not None:  # it failed on the batch, on no single row
            raise self._failed(reply, kwargs, None)
        self._warn_of_all(hanging, rows, is_cut_short=left <= 0)
        for column in sorted({name for extra in extra_of_row for name in extra}):
            joined.extra_columns[column] = [(extra.get(column) or [None])[0] for extra in extra_of_row]
        return joined, hanging

    def _failed(self, reply: tuple[Any, ...], kwargs: dict[str, Any], row: int | None) -> RewardError:
        completion = None if row is None else kwargs["completions"][row]
        if reply[0] == "broken":
            return self._broken(reply, kwargs, row=row)
        if reply[0] == "died":
            cause: BaseException = RuntimeError(f"its process ended with exit code {reply[1]}")
        else:
            cause = pickle.loads(reply[1]) if reply[1] is not None else RuntimeError(reply[2].strip().splitlines()[-1])
            cause.__cause__ = _WorkerTraceback(f"\n{reply[2]}")
        error = failure(self.name, cause, row=row, completion=completion)
        error.__cause__ = cause
        return error

    def _broken(self, reply: tuple[Any, ...], kwargs: dict[str, Any], *, row: int | None) -> RewardError:
        message, told_row, value = reply[1:]
        return RewardError(message, function=self.name, row=told_row if row is None else row, value=value)

    def _warn_of(self, row: int, kwargs: dict[str, Any]) -> None:
        text = repr(kwargs["completions"][row])
        _log.warning(
            "reward function %r did not return within %g s on row %d, left out; prompt %.200r; completion %.500s",
            self.name,
            self.time_limit_seconds,
            row,
            kwargs["prompts"][row],
            text,
        )

    def _warn_of_all(self, hanging: list[int], rows: int, *, is_cut_short: bool) -> None:
        if is_cut_short:
            words = (
                "%r used up %d time limits of %g s row by row; %d of %d rows are left out, the untried ones among them"
            )
            _log.warning(words, self.name, _SEARCH_LIMITS, self.time_limit_seconds, len(hanging), rows)
        elif not hanging:
            words = "%r did not return within %g s on %d rows at once, yet did on each alone; raise the time limit"
            _log.warning(words, self.name, self.time_limit_seconds, rows)


class _WorkerTraceback(Exception):  # noqa: N818  # shown as a cause, never raised
    def __init__(self, text: str) -> None:
        super().__init__(text)


def _pickled(func: Any, name: str) -> bytes:
    advice = "Move it to the top level of a module of its own, or drop the time limit"
    rule = "be importable by a worker process when there is a time limit"
    inner = func
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    home = getattr(inner, "__module__", None)
    if home == "__main__" or type(inner).__module__ == "__main__":
        raise refusal(name, rule, "a function of the script that is being run", advice)
    try:
        return pickle.dumps(func)
    except Exception as error:  # whatever a user's function, or its packing, raises
        raise refusal(name, rule, func, advice) from error


def _packed(kwargs: dict[str, Any], name: str) -> bytes:
    try:
        return pickle.dumps(kwargs)
    except Exception as error:  # whatever a user's function, or its packing, raises
        key = next((key for key, value in kwargs.items() if not _can_be_packed(value)), "columns")
        message = f"`{key}` must be plain data to reach `{name}` in its worker process, got {error}."
        raise RewardError(f"{message} Drop the time limit or the column.", function=name, value=key) from error


def _can_be_packed(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a user's function, or its packing, raises
        return False
    return True
