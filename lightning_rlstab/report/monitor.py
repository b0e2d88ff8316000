"""One reading in, findings out: the live monitor and the offline diagnosis run this same code.

``step`` is pure: config and state are frozen records, and the state is plain numbers, strings, tuples and mappings.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_rlstab.report.levels import Level, moved
from lightning_rlstab.report.memory import Finding, MonitorConfig, MonitorState, Snapshot
from lightning_rlstab.report.rules import PROMPT_RULES, TREND_READINGS, TREND_RULES, Rule, View
from lightning_rlstab.report.run import Reading

__all__ = ["is_watched", "restarted", "step"]

_HISTORY_LENGTH = 24
_LOG_LIMIT = 0.7  # a norm of 1000 times the usual moves the usual level by at most a factor of 2, once

_WATCHED = frozenset(
    {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "kl",
        "loss",
        "grad_norm",
        "learning_rate",
        "completions/mean_length",
        "completions/min_length",
        "completions/max_length",
        "completions/clipped_ratio",
        "sampling/sampling_logp_difference/mean",
        "rlstab/monitor/repetition",
        "rlstab/monitor/skipped_frac",
        "rlstab/monitor/weights_moved",
        "rlstab/grpo/rewards_nan",
        "rlstab/grpo/rewards_inf",
    }
)


def is_watched(name: str) -> bool:
    """Whether the rules read this canonical name.

    Example:
        >>> is_watched("rewards/format/mean"), is_watched("perf/mfu")
        (True, False)
    """
    return name in _WATCHED or name == "val/reward" or (name.startswith("rewards/") and name.endswith("/mean"))


def restarted(state: MonitorState, *, at_step: int, has_died: bool) -> MonitorState:
    """The state at the start of a new life: what was learned after ``at_step`` is undone, streaks end, findings stay.

    Args:
        state: The state as it was saved or reached.
        at_step: The first step of the new life.
        has_died: Whether the life before ended in a hard failure.
    """
    history = tuple(snapshot for snapshot in state.history if snapshot.step < at_step)
    levels = history[-1].levels if history else {}
    signals = {name: level._replace(level=levels.get(name, level.level)) for name, level in state.signals.items()}
    return replace(
        state,
        signals=signals,
        history=history,
        held_out=tuple(row for row in state.held_out if row[0] < at_step),
        streaks={},
        restart_reading=state.readings,
        has_died=state.has_died or has_died,
    )


def step(config: MonitorConfig, state: MonitorState, reading: Reading) -> tuple[MonitorState, tuple[Finding, ...]]:
    """Take one reading.

    Args:
        config: Thresholds.
        state: Memory so far.
        reading: Canonical names and values of one step; names the rules do not know are passed over.

    Returns:
        The new memory and the findings that are new with this reading, in the order of the cause table.
    """
    from lightning_rlstab.report.rules import View

    broken = {}
    signals = dict(state.signals)
    for name, value in reading.values.items():
        if not is_watched(name):
            continue
        if not math.isfinite(value):
            broken[name] = value
        elif name == "grad_norm":
            signals[name] = _moved_norm(signals.get(name, Level()), value)
        elif name != "val/reward":
            signals[name] = moved(signals.get(name, Level()), value)
    view = View(config, state, reading, signals, broken)
    streaks = dict(state.streaks)
    findings = dict(state.findings)
    fresh = []
    is_trend_due = state.readings % TREND_READINGS == 0
    for rule in (*PROMPT_RULES, *TREND_RULES) if is_trend_due else PROMPT_RULES:
        found = _judged(rule, view, streaks, findings.get(rule.cause))
        if found is not None:
            if rule.cause not in findings:
                fresh.append(found)
            findings[rule.cause] = found
    history = state.history
    if is_trend_due:
        newest = Snapshot(reading.step, {name: level.level for name, level in signals.items()})
        history = (*history[-(_HISTORY_LENGTH - 1) :], newest)
    new_state = MonitorState(
        readings=state.readings + 1,
        last_step=reading.step,
        signals=signals,
        history=history,
        held_out=view.held_out(),
        streaks=streaks,
        findings=findings,
        restart_reading=state.restart_reading,
        has_died=state.has_died,
    )
    return new_state, tuple(fresh)


def _judged(rule: Rule, view: View, streaks: dict[str, tuple[int, int]], known: Finding | None) -> Finding | None:
    """The rule's finding after this reading, new or with its end moved on; None when it does not hold (long enough)."""
    if rule.signal is not None and rule.signal not in view.reading.values:
        return None
    evidence = rule.check(view)
    if evidence is None:
        streaks.pop(rule.cause, None)
        return None
    at = view.reading.step
    if known is not None:
        return replace(known, last_step=at)
    count, since = streaks.get(rule.cause, (0, at))
    streaks[rule.cause] = (count + 1, since)
    if count + 1 < (view.config.idle_readings if rule.patience is None else rule.patience):
        return None
    return Finding(
        cause=rule.cause,
        first_step=since if evidence.since is None else min(evidence.since, since),
        alarm_step=at,
        last_step=at,
        rule=evidence.words,
        figures=evidence.figures,
    )


def _moved_norm(level: Level, value: float) -> Level:
    """Norms live on a log scale; an exact zero has no logarithm, so only the run of zeros is counted."""
    if value <= 0.0:
        return level._replace(zeros=level.zeros + 1)
    return moved(level, math.log(value), _LOG_LIMIT)._replace(zeros=0)
