"""The monitor's records: thresholds, findings, and everything it remembers, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_rlstab.core.checks import integer, number
from lightning_rlstab.report.causes import CAUSES
from lightning_rlstab.report.levels import Level

__all__ = ["Finding", "MonitorConfig", "MonitorState", "Snapshot", "state_from_dict", "state_to_dict"]


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Thresholds of the rules. The defaults were set on one half of labelled runs and checked on the other.

    Attributes:
        spike_ratio: A norm this many times its usual level ...
        spike_floor: ... and above this is a spike.
        drift_ratio: Usual norm over its initial level at which a steady climb is reported ...
        drift_floor: ... if it is also above this (the usual clip norm; below it the update is not harmed).
        entropy_ratio: Entropy under this share of its initial level, with a stalled reward, is a collapse.
        kl_ratio: KL this many times what a straight line from the start through an earlier level gives ...
        kl_floor: ... and above this (nats per token) is rising.
        reward_drop_frac: A fall of the reward by this share of its scale counts as falling.
        held_out_drop_frac: A fall of the held-out score by this share of its scale counts as falling.
        idle_readings: Readings in a row without signal before a run counts as not learning.
        mismatch_nats: Mean gap of sampling and training log-probs that is no rounding.
        repetition_frac: Share of repeated n-grams that is no text.
        skipped_frac: Share of skipped steps that is no longer protection.
        restart_readings: Readings after a restart in which a hard failure counts as death after restart.
    """

    spike_ratio: float = 5.0
    spike_floor: float = 5.0
    drift_ratio: float = 4.0
    drift_floor: float = 1.0
    entropy_ratio: float = 0.5
    kl_ratio: float = 2.5
    kl_floor: float = 0.1
    reward_drop_frac: float = 0.2
    held_out_drop_frac: float = 0.1
    idle_readings: int = 10
    mismatch_nats: float = 0.2
    repetition_frac: float = 0.7
    skipped_frac: float = 0.5
    restart_readings: int = 50

    def __post_init__(self) -> None:
        for name in ("spike_ratio", "drift_ratio", "kl_ratio"):
            number(name, getattr(self, name), above=1.0)
        for name in ("spike_floor", "drift_floor", "kl_floor", "mismatch_nats"):
            number(name, getattr(self, name), at_least=0.0)
        for name in ("entropy_ratio", "reward_drop_frac", "held_out_drop_frac", "repetition_frac", "skipped_frac"):
            number(name, getattr(self, name), above=0.0, at_most=1.0)
        integer("idle_readings", self.idle_readings, at_least=2)
        integer("restart_readings", self.restart_readings, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause with its evidence.

    Attributes:
        cause: A key of ``causes.CAUSES``.
        first_step: Where the evidence begins.
        alarm_step: The step at which the rule fired.
        last_step: The last step at which it still held.
        rule: The rule in words, with the figures it was held against.
        figures: The measured figures.
    """

    cause: str
    first_step: int
    alarm_step: int
    last_step: int
    rule: str
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def severity(self) -> str:
        """``"error"``, ``"warning"`` or ``"notice"``."""
        return CAUSES[self.cause].severity

    @property
    def is_alarm(self) -> bool:
        """Whether anybody should be called."""
        return self.severity != "notice"


@dataclass(frozen=True)
class Snapshot:
    """Levels of all signals at one reading: the memory that trends are measured against."""

    step: int
    levels: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class MonitorState:
    """Everything the monitor remembers.

    Attributes:
        readings: Readings so far.
        last_step: Step of the newest reading.
        signals: Canonical name to running level; norms as natural logarithms.
        history: Snapshots, oldest first.
        held_out: ``(step, score, training reward level)`` of the last evaluations, oldest first.
        streaks: Rule to ``(readings in a row that it held, step of the first)``.
        findings: Cause to finding; one per cause and run.
        restart_reading: The reading count at the last restart, None before any.
        has_died: Whether a hard failure was seen before the last restart.
    """

    readings: int = 0
    last_step: int = -1
    signals: Mapping[str, Level] = field(default_factory=dict)
    history: tuple[Snapshot, ...] = ()
    held_out: tuple[tuple[int, float, float], ...] = ()
    streaks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    findings: Mapping[str, Finding] = field(default_factory=dict)
    restart_reading: int | None = None
    has_died: bool = False


def state_to_dict(state: MonitorState) -> dict[str, Any]:
    """The state as plain types, for a checkpoint or JSON."""
    levels = {name: level._asdict() for name, level in state.signals.items()}
    return {**asdict(replace(state, signals={})), "signals": levels}


def state_from_dict(plain: Mapping[str, Any]) -> MonitorState:
    """The state back from ``state_to_dict``, also after a trip through JSON (tuples come back as lists)."""
    return MonitorState(
        readings=plain["readings"],
        last_step=plain["last_step"],
        signals={name: Level(**level) for name, level in plain["signals"].items()},
        history=tuple(Snapshot(**snapshot) for snapshot in plain["history"]),
        held_out=_triples(plain["held_out"]),
        streaks={rule: (int(count), int(since)) for rule, (count, since) in plain["streaks"].items()},
        findings={cause: Finding(**finding) for cause, finding in plain["findings"].items()},
        restart_reading=plain["restart_reading"],
        has_died=plain["has_died"],
    )


def _triples(rows: Iterable[Iterable[Any]]) -> tuple[tuple[int, float, float], ...]:
    found = []
    for at, score, reward in rows:
        found.append((int(at), float(score), float(reward)))
    return tuple(found)
