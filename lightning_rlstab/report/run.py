"""A run as the rules and the charts see it: canonical series, events, lives, and notes about what could not be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlstab.report.names import preference

__all__ = ["Life", "Reading", "Run", "RunReadError", "Series", "canonical_series", "joined"]


class RunReadError(ValueError):
    """A run folder or file that holds nothing readable; the message names it."""


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        steps: (points,) int64, not decreasing within one life of the run.
        values: (points,) float64; NaN and infinities are kept.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Life:
    """One uninterrupted stretch of a run, from a start or restart to its end.

    Attributes:
        series: Logged name to curve.
        source: Name of the file it came from.
    """

    series: Mapping[str, Series]
    source: str = ""

    @property
    def first_step(self) -> int:
        """Smallest logged step; 0 without any."""
        return min((int(curve.steps[0]) for curve in self.series.values() if len(curve)), default=0)

    @property
    def last_step(self) -> int:
        """Largest logged step; 0 without any."""
        return max((int(curve.steps.max()) for curve in self.series.values() if len(curve)), default=0)


@dataclass(frozen=True)
class Reading:
    """Everything logged at one step.

    Attributes:
        step: Optimizer step.
        values: Canonical name to value; absent when not logged at this step.
    """

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """One run, from whatever trainer.

    Attributes:
        path: What the user gave.
        series: Canonical name to curve over all lives; where a restart logged a step again, the later life counts.
        events: Records of ``events.jsonl``, in order.
        lives: The stretches between restarts, oldest first.
        notes: What could not be read, or was chosen among several, one sentence each.
    """

    path: Path
    series: Mapping[str, Series]
    events: tuple[Mapping[str, Any], ...] = ()
    lives: tuple[Life, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def last_step(self) -> int:
        """The last step that anything was logged at."""
        steps = [int(curve.steps[-1]) for curve in self.series.values() if len(curve)]
        return max(steps, default=0)

    def readings(self, names: Iterable[str] | None = None) -> Iterator[Reading]:
        """The curves turned into one reading per step, in step order.

        Args:
            names: Canonical names to take; None for all.
        """
        chosen = [name for name in (names if names is not None else self.series) if name in self.series]
        curves = [self.series[name] for name in chosen if len(self.series[name])]
        chosen = [name for name in chosen if len(self.series[name])]
        if not curves:
            return
        steps = np.unique(np.concatenate([curve.steps for curve in curves]))
        table = np.full((len(steps), len(curves)), np.nan)
        is_present = np.zeros((len(steps), len(curves)), dtype=bool)
        for column, curve in enumerate(curves):
            rows = np.searchsorted(steps, curve.steps)
            table[rows, column] = curve.values
            is_present[rows, column] = True
        for step, values, present in zip(steps.tolist(), table.tolist(), is_present.tolist(), strict=True):
            yield Reading(
                step, {name: value for name, value, is_there in zip(chosen, values, present, strict=True) if is_there}
            )


def canonical_series(series: Mapping[str, Series]) -> dict[str, Series]:
    """Curves under their canonical names; of several for one name, the best source is kept.

    Args:
        series: Logged name to curve.

    Returns:
        Canonical name to curve.
    """
    best: dict[str, tuple[int, str]] = {}
    for name in sorted(series):
        canonical, rank = preference(name)
        if len(series[name]) and (canonical not in best or rank < best[canonical][0]):
            best[canonical] = (rank, name)
    return {canonical: series[name] for canonical, (_, name) in best.items()}


def joined(lives: Iterable[Life]) -> dict[str, Series]:
    """One set of curves over all lives: a later life replaces an earlier one from its first step on.

    Args:
        lives: Oldest first.

    Returns:
        Logged name to curve, strictly increasing in step; of repeated steps the last value is kept.
    """
    stretches = list(lives)
    names = sorted({name for life in stretches for name in life.series})
    return {name: _joined_curve(name, stretches) for name in names}


def _joined_curve(name: str, lives: list[Life]) -> Series:
    steps = np.empty(0, dtype=np.int64)
    values = np.empty(0)
    for life in lives:
        if not life.series:
            continue
        keep = steps < life.first_step
        steps, values = steps[keep], values[keep]
        curve = life.series.get(name)
        if curve is not None:
            steps, values = np.concatenate([steps, curve.steps]), np.concatenate([values, curve.values])
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    is_last = np.append(steps[1:] != steps[:-1], True) if len(steps) else np.empty(0, dtype=bool)
    return Series(steps[is_last], values[is_last])
