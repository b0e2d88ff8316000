"""Checks of user-given values: every refusal names the field, the rule and the value.

Message form: **`name` must <rule>, got <value>. <what to do>.**
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

__all__ = ["choice", "flag", "integer", "nearest_name", "number", "refusal"]


def refusal(name: str, rule: str, value: object, advice: str = "") -> ValueError:
    """The error for one refused value, ready to raise.

    Args:
        name: The field as the user wrote it.
        rule: What the value must do or be, in words that follow "must".
        value: The refused value.
        advice: One imperative sentence without a full stop; empty for none.

    Returns:
        A ``ValueError`` in the house's message form.

    Example:
        >>> str(refusal("epsilon", "be above 0", -1.0, "Use 0.2"))
        '`epsilon` must be above 0, got -1.0. Use 0.2.'
    """
    tail = f" {advice}." if advice else ""
    return ValueError(f"`{name}` must {rule}, got {value!r}.{tail}")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The closest of ``names`` to a misspelt ``name``, or None when nothing is close.

    Example:
        >>> nearest_name("dapoo", ["grpo", "dapo"])
        'dapo'
    """
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return close[0] if close else None


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    advice: str = "",
) -> float:
    """A finite float within the given bounds.

    Bools, strings, NaN and infinities are refused, so that ``.nan``, ``true`` or ``"1.0"`` from a YAML file never
    becomes a threshold.

    Args:
        name: The field as the user wrote it.
        value: The value to check.
        above: Exclusive lower bound.
        at_least: Inclusive lower bound.
        below: Exclusive upper bound.
        at_most: Inclusive upper bound.
        advice: What to do instead, one sentence without a full stop.

    Returns:
        ``value`` as a float.

    Raises:
        ValueError: If the value is not a finite number within the bounds.

    Example:
        >>> number("epsilon", 0.2, above=0)
        0.2
    """
    bounds = [
        (f"above {above}", above is not None and not _holds(value, lambda v: v > above)),
        (f"at least {at_least}", at_least is not None and not _holds(value, lambda v: v >= at_least)),
        (f"below {below}", below is not None and not _holds(value, lambda v: v < below)),
        (f"at most {at_most}", at_most is not None and not _holds(value, lambda v: v <= at_most)),
    ]
    stated = [
        text
        for text, given in zip((b[0] for b in bounds), (above, at_least, below, at_most), strict=True)
        if given is not None
    ]
    rule = " and ".join(["be a finite number", *stated]) if stated else "be a finite number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or any(broken for _, broken in bounds):
        raise refusal(name, rule, value, advice)
    return float(value)


def _holds(value: Any, rule: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(rule(value))


def integer(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None, advice: str = "") -> int:
    """A whole number within the given inclusive bounds; bools and floats are refused.

    Args:
        name: The field as the user wrote it.
        value: The value to check.
        at_least: Inclusive lower bound.
        at_most: Inclusive upper bound.
        advice: What to do instead, one sentence without a full stop.

    Returns:
        ``value`` unchanged.

    Raises:
        ValueError: If the value is not a whole number within the bounds.

    Example:
        >>> integer("num_generations", 8, at_least=2)
        8
    """
    stated = []
    if at_least is not None:
        stated.append(f"at least {at_least}")
    if at_most is not None:
        stated.append(f"at most {at_most}")
    rule = "be a whole number" + (f" of {' and '.join(stated)}" if stated else "")
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (at_least is not None and value < at_least) or (at_most is not None and value > at_most):
        raise refusal(name, rule, value, advice)
    return int(value)


def choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """One of the given strings; a near miss is answered with the nearest name.

    Args:
        name: The field as the user wrote it.
        value: The value to check.
        choices: The allowed strings.

    Returns:
        ``value`` unchanged.

    Raises:
        ValueError: If the value is not among the choices.

    Example:
        >>> choice("loss_type", "dapo", ["grpo", "dapo"])
        'dapo'
    """
    allowed = list(choices)
    if not isinstance(value, str) or value not in allowed:
        close = nearest_name(value, allowed) if isinstance(value, str) else None
        advice = f"Did you mean {close!r}" if close else ""
        error = refusal(name, f"be one of {', '.join(map(repr, allowed))}", value)
        raise ValueError(f"{error} {advice}?" if advice else str(error))
    return value


def flag(name: str, value: Any) -> bool:
    """True or False; numbers and strings are refused.

    Args:
        name: The field as the user wrote it.
        value: The value to check.

    Returns:
        ``value`` unchanged.

    Raises:
        ValueError: If the value is not a bool.

    Example:
        >>> flag("shuffle", True)
        True
    """
    if not isinstance(value, bool):
        raise refusal(name, "be true or false", value)
    return value
