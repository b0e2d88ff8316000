"""Diagnosis of a whole run: the live monitor's rules over its curves, ranked by cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlstab.report.causes import CAUSES
from lightning_rlstab.report.events import number_from_json
from lightning_rlstab.report.levels import BASE_READINGS
from lightning_rlstab.report.memory import Finding, MonitorConfig, MonitorState
from lightning_rlstab.report.monitor import is_watched, restarted, step
from lightning_rlstab.report.run import Reading, Run, canonical_series

__all__ = ["FEWEST_READINGS", "HARD_CAUSES", "Diagnosis", "diagnose", "ranked"]

HARD_CAUSES = ("nan_reward", "nan_logprobs", "nan_loss", "nan_gradient", "gradient_spike")
FEWEST_READINGS = 2 * BASE_READINGS
"""Readings from which on a rule about a trend can have found anything: a level to start from, and one after it."""

_GENERIC = "reward_collapse"


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, the first cause first.

    Attributes:
        findings: Ranked by cause.
        readings: Steps that were looked at.
        missing: Signals that rules need and the run never logged.
    """

    findings: tuple[Finding, ...]
    readings: int
    missing: tuple[str, ...] = ()

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Findings that are more than notices."""
        return tuple(finding for finding in self.findings if finding.is_alarm)

    @property
    def is_healthy(self) -> bool:
        """No alarm, and something was looked at."""
        return self.readings > 0 and not self.alarms

    @property
    def is_conclusive(self) -> bool:
        """Something was found, or the run was long enough for trends to show."""
        return bool(self.findings) or self.readings >= FEWEST_READINGS

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            "is_healthy": self.is_healthy,
            "is_conclusive": self.is_conclusive,
            "readings": self.readings,
            "missing": list(self.missing),
            "findings": [finding_as_dict(finding) for finding in self.findings],
        }


def finding_as_dict(finding: Finding) -> dict[str, Any]:
    """One finding with the words of its cause, as plain types; this is also the payload of an ``alarm`` event."""
    cause = CAUSES[finding.cause]
    return {
        "cause": finding.cause,
        "title": cause.title,
        "severity": cause.severity,
        "death": cause.death,
        "first_step": finding.first_step,
        "alarm_step": finding.alarm_step,
        "last_step": finding.last_step,
        "rule": finding.rule,
        "figures": dict(finding.figures),
        "suspect": cause.suspect,
        "action": cause.action,
    }


def diagnose(run: Run, config: MonitorConfig | None = None) -> Diagnosis:
    """Run the monitor's rules over a run, life after life.

    Args:
        run: The run.
        config: Thresholds; None for the defaults.

    Returns:
        The diagnosis. Rules whose signals were not logged stay silent and are listed in ``missing``. Norms that guards
        wrote down before they cleaned or skipped the step count as the step's norm, and what the run's own monitor
        raised counts as found.
    """
    settings = config or MonitorConfig()
    state = MonitorState()
    norms = _norms_of_events(run.events)
    for number, life in enumerate(_lives(run)):
        for index, reading in enumerate(life):
            if number and not index:
                has_died = any(cause in state.findings for cause in HARD_CAUSES)
                state = restarted(state, at_step=reading.step, has_died=has_died)
            norm = norms.get(reading.step)
            seen = reading if norm is None else Reading(reading.step, {**reading.values, "grad_norm": norm})
            state, _ = step(settings, state, seen)
    found = {**_raised_live(run.events), **state.findings}
    return Diagnosis(ranked(found.values()), state.readings, _missing(run.series))


def _norms_of_events(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Step to the norm that a guard saw before it acted; the curve shows what was left."""
    found: dict[int, float] = {}
    for event in events:
        norm = number_from_json(event.get("grad_norm", event.get("norm")))
        if event["event"] in {"spike", "skip"} and norm is not None and event.get("scope", "step") == "step":
            found.setdefault(int(event["step"]), norm)
    return found


def _raised_live(events: Iterable[Mapping[str, Any]]) -> dict[str, Finding]:
    """Cause to the alarm that the run's own monitor raised: it saw signals that no file holds."""
    found: dict[str, Finding] = {}
    for event in events:
        cause = event.get("cause")
        if event["event"] != "alarm" or cause not in CAUSES or cause in found:
            continue
        steps = [event.get(name) for name in ("first_step", "alarm_step", "last_step")]
        first, at, last = (one if isinstance(one, int) else int(event["step"]) for one in steps)
        numbers = {name: number_from_json(value) for name, value in dict(event.get("figures") or {}).items()}
        found[cause] = Finding(
            cause=cause,
            first_step=first,
            alarm_step=at,
            last_step=last,
            rule=str(event.get("rule", "")),
            figures={name: number for name, number in numbers.items() if number is not None},
        )
    return found


def _lives(run: Run) -> Iterable[Iterable[Reading]]:
    if len(run.lives) <= 1:
        yield run.readings(filter(is_watched, run.series))
        return
    for life in run.lives:
        curves = canonical_series(life.series)
        part = Run(run.path, curves)
        yield part.readings(filter(is_watched, curves))


def _missing(series: Mapping[str, Any]) -> tuple[str, ...]:
    wanted = ("reward", "entropy", "kl", "grad_norm", "loss", "frac_reward_zero_std", "completions/clipped_ratio")
    return tuple(name for name in (*wanted, "val/reward") if name not in series)


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in the order of causes: what explains others comes before them, else the earlier first, notices last.

    Args:
        findings: In any order.

    Returns:
        The first cause first.
    """
    rest = sorted(findings, key=lambda finding: (not finding.is_alarm, finding.alarm_step, _place(finding)))
    order: list[Finding] = []
    while rest:
        head = next((one for one in rest if not any(_explains(other, one) for other in rest)), rest[0])
        order.append(head)
        rest.remove(head)
    return tuple(order)


def _place(finding: Finding) -> int:
    return list(CAUSES).index(finding.cause)


def _explains(cause: Finding, effect: Finding) -> bool:
    """Whether one finding accounts for the other: it is known to, and it did not begin after it."""
    if effect.cause == _GENERIC:  # a falling reward follows from everything
        return cause.is_alarm and cause.cause != _GENERIC and cause.first_step <= effect.alarm_step
    if effect.cause not in CAUSES[cause.cause].explains:
        return False
    if cause.cause == "restart_death":
        return True
    if CAUSES[cause.cause].death == "idle":  # dated exactly, but recognised late; trends are dated roughly
        return cause.first_step < min(effect.alarm_step, effect.first_step + 10)
    # What shows in a single step is dated exactly, trends only to within their own length.
    slack = 0 if cause.cause in HARD_CAUSES else max(10, 3 * (effect.alarm_step - effect.first_step))
    return cause.first_step <= effect.first_step + slack
