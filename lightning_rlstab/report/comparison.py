"""Two or more runs in one table: the outcome of an ablation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlstab.report.diagnosis import Diagnosis
from lightning_rlstab.report.run import Run
from lightning_rlstab.report.words import figure

__all__ = ["Row", "ablation_markdown", "compared", "outcome"]

_LAST_SHARE = 0.1


@dataclass(frozen=True)
class Row:
    """One quantity of two runs, as text."""

    name: str
    first: str
    second: str
    change: str


def outcome(run: Run, diagnosis: Diagnosis) -> dict[str, float | str]:
    """What a run came to.

    Args:
        run: The run.
        diagnosis: Its diagnosis.

    Returns:
        Quantity to figure or word. A curve's value is the mean of the last tenth of its finite points.
    """
    found: dict[str, float | str] = {"last step": float(run.last_step)}
    for name, label in (
        ("reward", "reward, last tenth"),
        ("val/reward", "held-out reward, last tenth"),
        ("entropy", "entropy, last tenth"),
        ("kl", "kl, last tenth"),
        ("grad_norm", "grad_norm, last tenth"),
    ):
        if name in run.series:
            found[label] = _late(run.series[name].values)
    for name in ("reward", "val/reward"):
        if name in run.series:
            found[f"best {'held-out ' if name == 'val/reward' else ''}reward"] = _extreme(run.series[name].values)
    if "grad_norm" in run.series:
        norms = run.series["grad_norm"].values
        found["largest grad_norm"] = _extreme(norms)
        found["steps with a non-finite grad_norm"] = float((~np.isfinite(norms)).sum())
    counts = Counter(str(event["event"]) for event in run.events)
    for kind in ("spike", "skip", "rollback", "alarm"):
        found[f"{kind} events"] = float(counts[kind])
    found["first cause"] = diagnosis.alarms[0].cause if diagnosis.alarms else "healthy"
    return found


def compared(first: Run, second: Run, diagnoses: tuple[Diagnosis, Diagnosis]) -> list[Row]:
    """Two runs' outcomes side by side; a quantity that only one has is shown as ``-`` for the other."""
    left, right = outcome(first, diagnoses[0]), outcome(second, diagnoses[1])
    names = [*left, *(name for name in right if name not in left)]
    return [
        Row(name, _text(left.get(name)), _text(right.get(name)), _change(left.get(name), right.get(name)))
        for name in names
    ]


def ablation_markdown(outcomes: Sequence[tuple[str, dict[str, float | str]]]) -> str:
    """Any number of runs as one Markdown table, a row per run.

    Args:
        outcomes: ``(label, outcome)`` of each run.
    """
    names = list(dict.fromkeys(name for _, figures in outcomes for name in figures))
    lines = [f"| run | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {label} | {' | '.join(_text(figures.get(name)) for name in names)} |" for label, figures in outcomes]
    return "\n".join(lines) + "\n"


def _late(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-max(1, math.ceil(_LAST_SHARE * len(finite))) :].mean()) if len(finite) else math.nan


def _extreme(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else math.nan


def _text(value: float | str | None) -> str:
    return value if isinstance(value, str) else figure(value)


def _change(first: float | str | None, second: float | str | None) -> str:
    if isinstance(first, str) or isinstance(second, str) or first is None or second is None:
        return ""
    return f"{second - first:+.4g}"
