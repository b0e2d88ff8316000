"""Running levels of one signal: what is usual, how noisy it is, where it began, in constant time and memory.

Everything is counted in readings, not in steps: a run logged every tenth step is judged like one logged at each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["BASE_READINGS", "Level", "moved"]

BASE_READINGS = 10
"""Readings that make up a signal's initial level."""

_FAST = 1 / 6
_NOISE = 1 / 20
# The fast average of white noise has this share of the noise's standard deviation; 1.25 turns a mean absolute deviation
# into a standard deviation.
_STANDARD_ERROR = 1.25 * math.sqrt(_FAST / (2 - _FAST))


class Level(NamedTuple):
    """Running figures of one signal.

    Attributes:
        readings: Finite readings so far.
        last: The newest finite reading.
        level: Exponential average over about 6 readings, bias-corrected by counting up.
        noise: Average distance of a reading from the level before it.
        base: Mean of the first ``BASE_READINGS`` readings.
        highest: Highest level since the base was complete.
        lowest: Lowest level since the base was complete.
        zeros: Readings in a row that are exactly 0.
        ones: Readings in a row at 0.999 or more.
    """

    # A named tuple, not a dataclass: one is made per signal and reading, and this is four times cheaper.
    readings: int = 0
    last: float = 0.0
    level: float = 0.0
    noise: float = 0.0
    base: float = 0.0
    highest: float = -math.inf
    lowest: float = math.inf
    zeros: int = 0
    ones: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether the base is complete."""
        return self.readings >= BASE_READINGS

    @property
    def standard_error(self) -> float:
        """Standard error of the level, if the noise is white."""
        return _STANDARD_ERROR * self.noise


def moved(level: Level, value: float, limit: float = math.inf) -> Level:
    """The level after one more finite reading.

    Args:
        level: The figures so far.
        value: The reading, finite.
        limit: Largest distance from the level that one reading may count for: an outlier does not carry it away.

    Returns:
        The new figures.

    Example:
        >>> moved(moved(Level(), 1.0), 3.0).level
        2.0
    """
    count = level.readings + 1
    weight = max(_FAST, 1.0 / count)
    distance = value - level.level if count > 1 else 0.0
    bounded = limit if distance > limit else -limit if distance < -limit else distance
    now = level.level + weight * bounded if count > 1 else value
    noise_weight = max(_NOISE, 1.0 / (count - 1)) if count > 1 else 0.0
    base = level.base + (value - level.base) / count if count <= BASE_READINGS else level.base
    is_settled = count >= BASE_READINGS
    return Level(
        count,
        value,
        now,
        level.noise + noise_weight * (abs(bounded) - level.noise),
        base,
        now if not is_settled or now > level.highest else level.highest,
        now if not is_settled or now < level.lowest else level.lowest,
        level.zeros + 1 if value == 0.0 else 0,
        level.ones + 1 if value >= 0.999 else 0,
    )
