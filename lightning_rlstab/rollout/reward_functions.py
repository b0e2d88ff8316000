"""One reward function: see what it accepts, call it, and read what it returned.

Imports nothing but the standard library: worker processes start with this file alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "RESERVED",
    "RewardAnswer",
    "RewardError",
    "accepted",
    "answer_of",
    "is_async",
    "failure",
    "missing_parameters",
    "one_row",
    "values_of",
]

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Names of TRL's contract that no dataset column may take."""

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LARGEST_FLOAT32 = 3.4028234663852886e38
_SHOWN_CHARACTERS = 200


class RewardError(ValueError):
    """A reward function broke its contract.

    Attributes:
        function: Name of the function.
        row: Row of the batch, or None when it concerns the whole call.
        value: What was wrong: the returned value, or the completion the function failed on.
    """

    def __init__(self, message: str, *, function: str, row: int | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.function = function
        self.row = row
        self.value = value


@dataclass
class RewardAnswer:
    """What one call of a function gave: values as returned, and what it logged on the way."""

    values: list[Any] = field(default_factory=list)
    extra_columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def is_async(func: Any) -> bool:
    """Whether calling gives a coroutine; also for partials and for objects whose ``__call__`` is async."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def _parameters(func: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(func).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature: they get everything
        return None


def missing_parameters(func: Any, names: Iterable[str]) -> list[str]:
    """Parameters without a default that no keyword of ``names`` can fill.

    Example:
        >>> missing_parameters(lambda prompts, answers: 0, ["prompts", "answer"])
        ['answers']
    """
    offered = set(names)
    kinds = (*_KEYWORD_KINDS, inspect.Parameter.POSITIONAL_ONLY)
    return [
        name
        for name, parameter in (_parameters(func) or {}).items()
        if parameter.kind in kinds and parameter.default is inspect.Parameter.empty and name not in offered
    ]


def accepted(func: Any, kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments cut down to what ``func`` takes, so that narrow signatures work.

    Example:
        >>> accepted(lambda completions: 0, {"prompts": ["a"], "completions": ["b"]})
        ([], {'completions': ['b']})
    """
    parameters = _parameters(func)
    if parameters is None:
        return [], dict(kwargs)
    positional = [
        kwargs[name]
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and name in kwargs
    ]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return positional, {
            name: value for name, value in kwargs.items() if name not in parameters or _by_name(parameters[name])
        }
    return positional, {n: v for n, v in kwargs.items() if n in parameters and _by_name(parameters[n])}


def _by_name(parameter: inspect.Parameter) -> bool:
    # A **kwargs parameter that happens to be called like a keyword takes that keyword too.
    return parameter.kind in (*_KEYWORD_KINDS, inspect.Parameter.VAR_KEYWORD)


def answer_of(func: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` with TRL's keywords plus fresh ``log_extra`` and ``log_metric``.

    Args:
        func: The reward function.
        kwargs: ``prompts``, ``completions``, ``completion_ids``, ``trainer_state`` and the columns.

    Returns:
        A ``RewardAnswer``, or a coroutine of one when the function is async.
    """
    answer = RewardAnswer()

    def log_extra(column: str, values: Sequence[Any]) -> None:
        answer.extra_columns[column].extend(values)

    def log_metric(name: str, value: float) -> None:
        answer.metrics[name].append(float(value))

    positional, keywords = accepted(func, {**kwargs, "log_extra": log_extra, "log_metric": log_metric})
    if is_async(func):
        return _awaited(func, positional, keywords, answer)
    answer.values = func(*positional, **keywords)
    return answer


async def _awaited(func: Any, positional: list[Any], keywords: dict[str, Any], answer: RewardAnswer) -> RewardAnswer:
    answer.values = await func(*positional, **keywords)
    return answer


def values_of(returned: Any, *, function: str, rows: int) -> list[float | None]:
    """The returned rewards as floats, None where there is no value.

    Bools count as 0 and 1; tensors and numpy numbers are read; NaN and infinities come back as they are, and a number
    too large for float32 as an infinity.

    Args:
        returned: What the function returned.
        function: Its name, for the error.
        rows: Number of completions.

    Returns:
        One float or None per completion.

    Raises:
        RewardError: If it is no sequence, has the wrong length, or holds something that is not a number.
    """
    if callable(getattr(returned, "tolist", None)):  # a tensor or a numpy array
        returned = returned.tolist()
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        message = f"`{function}` must return one number or None per completion, got {_shown(returned)}."
        raise RewardError(message, function=function, value=returned)
    values = list(returned)
    if len(values) != rows:
        message = f"`{function}` must return {rows} rewards, one per completion, got {len(values)}."
        raise RewardError(message, function=function, value=len(values))
    return [_number(value, function=function, row=row) for row, value in enumerate(values)]


def _number(value: Any, *, function: str, row: int) -> float | None:
    if value is None:
        return None
    plain = value
    if not isinstance(value, int | float | str | bytes) and callable(getattr(value, "item", None)):
        size = getattr(value, "numel", None)
        count = size() if callable(size) else getattr(value, "size", 1)
        plain = value.item() if count == 1 else value
    if not isinstance(plain, int | float):
        message = f"`{function}` must return numbers or None, got {_shown(value)} for row {row}. Return a float."
        raise RewardError(message, function=function, row=row, value=value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return float(plain)
    if abs(plain) > _LARGEST_FLOAT32:  # a comparison, not float(): Python ints may be larger than any float
        return math.copysign(math.inf, plain if isinstance(plain, float) else (1 if plain > 0 else -1))
    return float(plain)


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return f"{text} ({type(value).__name__})"


def failure(function: str, error: BaseException, *, row: int | None, completion: Any) -> RewardError:
    """The error for a function that raised, ready to be raised from ``error``."""
    where = (
        f"row {row}, completion {_shown(completion)}" if row is not None else "the whole batch, on no single row alone"
    )
    message = f"`{function}` must not raise, got {type(error).__name__}: {error} for {where}. Return None for no value."
    return RewardError(message, function=function, row=row, value=completion)


def one_row(kwargs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The keywords of a call for one completion only."""
    return {name: value if name == "trainer_state" else [value[row]] for name, value in kwargs.items()}
