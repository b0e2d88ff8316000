"""TRL's reward contract, whole: several functions with weights, sync and async, no value, extra columns and metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.core.checks import number, refusal
from lightning_rlstab.rollout.reward_functions import (
    RESERVED,
    RewardAnswer,
    RewardError,
    answer_of,
    failure,
    is_async,
    missing_parameters,
    one_row,
    values_of,
)
from lightning_rlstab.rollout.reward_loading import is_model_spec, load_reward, reward_name
from lightning_rlstab.rollout.reward_process import TimedCalls

__all__ = ["RewardError", "RewardSuite", "RewardTable", "is_model_spec", "load_reward", "reward_name"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardTable:
    """Rewards of N completions from F functions.

    Every NaN of ``per_func`` is counted exactly once: ``missing + nan + inf + timed_out.sum(0)``.

    Attributes:
        per_func: (N, F) float32, NaN = no value.
        weighted: (N,) float32, sum of weight x reward over the functions with a value; NaN where none has one.
        names: Name of each function.
        weights: Weight of each function.
        extra_columns: Columns from ``log_extra``, N entries each.
        metrics: Values from ``log_metric`` in the order they came; TRL logs their mean.
        missing: (F,) int64, rows for which the function returned None.
        nan: (F,) int64, rows for which it returned NaN.
        inf: (F,) int64, rows for which it returned an infinity or a number beyond float32.
        timed_out: (N, F) bool, rows left out because the function did not return in time.
    """

    per_func: Tensor
    weighted: Tensor
    names: tuple[str, ...]
    weights: tuple[float, ...]
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    missing: Tensor
    nan: Tensor
    inf: Tensor
    timed_out: Tensor


class RewardSuite:
    """Scores completions with every reward function of a run.

    Async functions run concurrently with each other and with the sync ones, on one event loop that lives as long as
    the suite (a client session opened in one step still works in the next). With a time limit every function gets a
    worker process of its own; see ``TimedCalls``.

    Args:
        reward_funcs: One callable or import path, or a sequence of them.
        weights: One finite number per function; ones by default.
        time_limit_seconds: Longest time one call may take, or None. Functions must then be importable by a fresh
            process. Models (callables with a true ``runs_in_process``) are always called here.
        names: Names for metrics; by default ``reward_name``. A name that comes twice is numbered.

    Raises:
        ValueError: If a function cannot be found, a weight is no number, or the numbers of entries differ.

    Example:
        >>> def length(completions, **kwargs):
        ...     return [float(len(text)) for text in completions]
        >>> table = RewardSuite(length).score(prompts=["a"], completions=["bcd"], completion_ids=[[1]], columns={})
        >>> table.weighted.tolist()
        [3.0]
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        weights: Sequence[float] | None = None,
        time_limit_seconds: float | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        specs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if not specs:
            raise refusal("reward_funcs", "hold at least one function", reward_funcs)
        self.functions = tuple(load_reward(spec) for spec in specs)
        if names is not None and len(names) != len(specs):
            raise refusal("names", f"have one entry per reward function ({len(specs)})", list(names))
        self.names = _numbered([reward_name(func) for func in self.functions] if names is None else list(names))
        given = [1.0] * len(specs) if weights is None else list(weights)
        if len(given) != len(specs):
            raise refusal("reward_weights", f"have one entry per reward function ({len(specs)})", given)
        self.weights = tuple(number(f"reward_weights[{index}]", weight) for index, weight in enumerate(given))
        self._silent: set[str] = set()
        self._timed: dict[int, TimedCalls] = {}
        if time_limit_seconds is not None:
            limit = number("time_limit_seconds", time_limit_seconds, above=0)
            for index, func in enumerate(self.functions):
                if not getattr(func, "runs_in_process", False):
                    self._timed[index] = TimedCalls(func, name=self.names[index], time_limit_seconds=limit)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_owner = 0

    def check(self, columns: Sequence[str]) -> None:
        """Refuse at set-up what would fail at the first rollout.

        Args:
            columns: Names of the dataset columns besides ``prompt``.

        Raises:
            RewardError: If a function needs a parameter that no column fills, or a column takes a reserved name.
        """
        if taken := sorted(set(columns) & set(RESERVED)):
            message = f"`{taken[0]}` must not be a dataset column, got it beside the reward argument of that name."
            raise RewardError(f"{message} Rename the column.", function="", value=taken[0])
        for name, func in zip(self.names, self.functions, strict=True):
            if missing := missing_parameters(func, [*columns, *RESERVED]):
                offered = ", ".join([*RESERVED, *columns])
                message = f"`{name}` must take only what there is, got a parameter {missing[0]!r}."
                raise RewardError(f"{message} Use one of: {offered}.", function=name, value=missing[0])

    def score(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        trainer_state: Any = None,
    ) -> RewardTable:
        """Call every function on all completions of this process.

        Args:
            prompts: N prompts, text or messages.
            completions: N completions, text or messages.
            completion_ids: N lists of token ids without padding.
            columns: Every other dataset column, N entries each.
            trainer_state: Passed on; plain data when there is a time limit, since it travels to another process.

        Returns:
            The rewards, and what the functions logged.

        Raises:
            RewardError: If a function raises, or returns the wrong number of rewards or something that is no number.
        """
        rows = len(prompts)
        kept = {name: list(values) for name, values in columns.items() if name not in ("prompt", "completion")}
        self.check(list(kept))
        kwargs: dict[str, Any] = {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": list(completion_ids),
            **kept,
            "trainer_state": trainer_state,
        }
        for name, values in kwargs.items():
            if name != "trainer_state" and len(values) != rows:
                raise refusal(name, f"have one entry per prompt ({rows})", len(values))
        answers, timed_out = self._answers(kwargs, rows)
        return self._table(answers, timed_out, rows)

    def to(self, device: torch.device | str) -> RewardSuite:
        """Move every function that has a ``to`` (reward models) to ``device``."""
        for func in self.functions:
            if callable(move := getattr(func, "to", None)):
                move(device)
        return self

    def close(self) -> None:
        """Stop the worker processes and the event loop; the suite starts them again when it is used again."""
        for calls in self._timed.values():
            calls.close()
        if self._loop is not None and self._loop_owner == os.getpid():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _answers(self, kwargs: dict[str, Any], rows: int) -> tuple[list[RewardAnswer], Tensor]:
        timed_out = torch.zeros(rows, len(self.functions), dtype=torch.bool)
        answers: list[RewardAnswer] = [RewardAnswer()] * len(self.functions)
        waiting: dict[int, Any] = {}
        try:
            for calls in self._timed.values():
                calls.launch()  # all at once: a fresh interpreter takes its time to import the functions
            for calls in self._timed.values():
                calls.start(kwargs)
            for index, func in enumerate(self.functions):
                if index not in self._timed and is_async(func):
                    coroutine = answer_of(func, kwargs)
                    waiting[index] = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
            for index in range(len(self.functions)):
                if index not in self._timed and index not in waiting:
                    answers[index] = self._called(index, kwargs)
            for index, future in waiting.items():
                answers[index] = self._called(index, kwargs, future=future)
            for index, calls in self._timed.items():
                answers[index], hanging = calls.finished(kwargs)
                timed_out[hanging, index] = True
        finally:
            for future in waiting.values():
                future.cancel()
            for calls in self._timed.values():
                calls.abandon()
        return answers, timed_out

    def _called(self, index: int, kwargs: dict[str, Any], *, future: Any = None) -> RewardAnswer:
        func = self.functions[index]
        try:
            return future.result() if future is not None else answer_of(func, kwargs)  # type: ignore[no-any-return]
        except Exception as error:  # whatever a user's function, or its packing, raises
            row = self._row_that_fails(func, kwargs)
            completion = None if row is None else kwargs["completions"][row]
            raise failure(self.names[index], error, row=row, completion=completion) from error

    def _row_that_fails(self, func: Any, kwargs: dict[str, Any]) -> int | None:
        rows = range(len(kwargs["prompts"]))
        return next((row for row in rows if self._does_fail(func, one_row(kwargs, row))), None)

    def _does_fail(self, func: Any, kwargs: dict[str, Any]) -> bool:
        try:
            answer = answer_of(func, kwargs)
            if isinstance(answer, Awaitable):
                asyncio.run_coroutine_threadsafe(_resolved(answer), self._running_loop()).result()
        except Exception:  # whatever a user's function, or its packing, raises
            return True
        return False

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop_owner != os.getpid():  # threads do not survive a fork
            self._loop_owner = os.getpid()
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(self._loop,), name="reward-loop", daemon=True).start()
        return self._loop

    def _table(self, answers: list[RewardAnswer], timed_out: Tensor, rows: int) -> RewardTable:
        per_func = torch.full((rows, len(answers)), torch.nan)
        counts = torch.zeros(3, len(answers), dtype=torch.int64)
        extra_columns: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}
        for index, (name, answer) in enumerate(zip(self.names, answers, strict=True)):
            values = values_of(answer.values, function=name, rows=rows)
            returned = torch.tensor([torch.nan if value is None else value for value in values], dtype=torch.float32)
            is_none = torch.tensor([value is None for value in values], dtype=torch.bool)
            late = timed_out[:, index]
            per_func[:, index] = torch.where(returned.isfinite(), returned, torch.nan)
            counts[0, index] = (is_none & ~late).sum()
            counts[1, index] = (returned.isnan() & ~is_none).sum()
            counts[2, index] = returned.isinf().sum()
            _add_columns(extra_columns, answer.extra_columns, function=name, rows=rows)
            for metric, logged in answer.metrics.items():
                metrics.setdefault(metric, []).extend(logged)
        _warn_of_bad_values(self.names, counts)
        for name, missing in zip(self.names, counts[0].tolist(), strict=True):
            if missing == rows and name not in self._silent:
                self._silent.add(name)
                _log.warning("reward function %r returned None for all %d completions: it teaches nothing", name, rows)
        has_value = ~per_func.isnan()
        weighted = torch.where(has_value, per_func, 0.0) @ torch.tensor(self.weights)
        return RewardTable(
            per_func=per_func,
            weighted=torch.where(has_value.any(dim=1), weighted, torch.nan),
            names=self.names,
            weights=self.weights,
            extra_columns=extra_columns,
            metrics=metrics,
            missing=counts[0],
            nan=counts[1],
            inf=counts[2],
            timed_out=timed_out,
        )


async def _resolved(answer: Awaitable[RewardAnswer]) -> RewardAnswer:
    return await answer


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _numbered(names: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(unique)


def _add_columns(columns: dict[str, list[Any]], added: Mapping[str, list[Any]], *, function: str, rows: int) -> None:
    for column, values in added.items():
        if len(values) != rows:
            message = f"`{function}` must log {rows} values in column {column!r}, got {len(values)}."
            raise RewardError(f"{message} Pass one value per completion to log_extra.", function=function, value=column)
        if column in columns:
            message = f"`{function}` must log columns of its own, got {column!r}, which another function logs too."
            raise RewardError(f"{message} Rename it.", function=function, value=column)
        columns[column] = list(values)


def _warn_of_bad_values(names: Sequence[str], counts: Tensor) -> None:
    for index, name in enumerate(names):
        nans, infs = int(counts[1, index]), int(counts[2, index])
        if nans or infs:
            _log.warning(
                "reward function %r returned %d NaN and %d inf; these rows count as no value", name, nans, infs
            )
