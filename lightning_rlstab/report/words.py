"""Findings, spikes and rollouts in words: plain text for the terminal, Markdown for TensorBoard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rlstab.report.causes import CAUSES
from lightning_rlstab.report.diagnosis import FEWEST_READINGS, Diagnosis
from lightning_rlstab.report.events import EVENT_KINDS, number_from_json
from lightning_rlstab.report.memory import Finding
from lightning_rlstab.report.run import Run

__all__ = [
    "alarm_sentence",
    "diagnosis_markdown",
    "diagnosis_text",
    "event_words",
    "figure",
    "interventions",
    "rollouts_markdown",
    "silence",
    "spike_card",
    "steps_words",
]


def figure(value: Any) -> str:
    """A number in four digits, also when it came through JSON as text.

    Example:
        >>> figure(0.123456), figure("nan"), figure(None)
        ('0.1235', 'nan', '-')
    """
    number = number_from_json(value)
    if number is None:
        return "-"
    return f"{number:.4g}"


def steps_words(first: int, last: int) -> str:
    """A step range.

    Example:
        >>> steps_words(3, 3), steps_words(3, 9)
        ('step 3', 'steps 3 to 9')
    """
    return f"step {first}" if first == last else f"steps {first} to {last}"


def alarm_sentence(finding: Finding) -> str:
    """One line: what, since when, by which rule, what to do."""
    cause = CAUSES[finding.cause]
    since = steps_words(finding.first_step, finding.alarm_step)
    return f"{cause.title} ({since}): {finding.rule}. {cause.action}."


def silence(diagnosis: Diagnosis) -> str:
    """What it means that no rule found anything."""
    if diagnosis.is_conclusive:
        return "no rule found anything"
    return (
        f"no rule found anything, but {diagnosis.readings} steps with readings are too few for trends "
        f"(they take {FEWEST_READINGS}): only jumps and values that are not finite were judged"
    )


def diagnosis_text(run: Run, diagnosis: Diagnosis) -> str:
    """The whole diagnosis for a terminal."""
    lines = [f"{run.path}: {diagnosis.readings} steps with readings, last step {run.last_step}"]
    lines += [f"note: {note}" for note in run.notes]
    if not diagnosis.readings:
        lines.append("no metrics to judge")
    elif not diagnosis.findings:
        lines.append(f"healthy: {silence(diagnosis)}" if diagnosis.is_conclusive else silence(diagnosis))
    for number, finding in enumerate(diagnosis.findings, start=1):
        cause = CAUSES[finding.cause]
        lines += [
            "",
            f"{number}. [{cause.severity}] {cause.title}",
            f"   when     {steps_words(finding.first_step, finding.last_step)}, recognised at {finding.alarm_step}",
            f"   rule     {finding.rule}",
            f"   suspect  {cause.suspect}",
            f"   next     {cause.action}",
        ]
    counts = Counter(str(event["event"]) for event in run.events)
    if counts:
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        lines += ["", f"events: {told}"]
    spikes = [event for event in run.events if event["event"] == "spike"]
    lines += [f"  step {event['step']}: {event.get('summary', 'spike')}" for event in spikes[:10]]
    if len(spikes) > 10:
        lines.append(f"  and {len(spikes) - 10} more")
    if diagnosis.missing:
        lines += ["", f"not logged, so not judged: {', '.join(diagnosis.missing)}"]
    return "\n".join(lines)


def diagnosis_markdown(diagnosis: Diagnosis, *, ending: str = "") -> str:
    """The diagnosis as Markdown, for a file in the run folder or a text panel.

    Args:
        diagnosis: The findings.
        ending: How the run ended, if that is known; becomes the first paragraph.
    """
    parts = ["# Diagnosis"]
    if ending:
        parts.append(ending)
    if not diagnosis.findings:
        parts.append(f"{silence(diagnosis).capitalize()}.")
    for number, finding in enumerate(diagnosis.findings, start=1):
        cause = CAUSES[finding.cause]
        parts.append(
            f"## {number}. {cause.title}\n\n"
            f"- severity: {cause.severity}\n"
            f"- when: {steps_words(finding.first_step, finding.last_step)}, recognised at step {finding.alarm_step}\n"
            f"- rule: {finding.rule}\n"
            f"- first suspect: {cause.suspect}\n"
            f"- next: {cause.action}"
        )
    return "\n\n".join(parts) + "\n"


def spike_card(event: Mapping[str, Any]) -> str:
    """A spike as a Markdown card: the sentence, the culprits, the layers.

    Args:
        event: A ``spike`` record of ``events.jsonl``; missing fields are left out.
    """
    parts = [f"**Step {event.get('step', '?')}: {_cell(event.get('summary', 'gradient spike'))}**"]
    facts = [
        f"norm {figure(event.get('grad_norm'))}",
        f"threshold {figure(event.get('threshold'))}",
        f"after {figure(event.get('remaining_norm'))}",
        f"verdict {event.get('verdict', '-')}",
        f"action {event.get('action', '-')}",
        f"tier {event.get('tier', '-')}",
        f"shares of {event.get('shares_of') or 'all tokens'} sum to {figure(event.get('completeness'))}",
        f"cost {figure(event.get('cost_sweeps'))} sweeps",
    ]
    parts.append(" · ".join(facts))
    culprits = [one for one in event.get("culprits") or [] if isinstance(one, Mapping)]
    if culprits:
        parts.append(_culprit_table(culprits))
    layers = [one for one in event.get("layers") or [] if isinstance(one, Mapping)]
    if layers:
        rows = [f"| {_cell(one.get('name'))} | {figure(one.get('share'))} |" for one in layers]
        parts.append("\n".join(["| layer | share |", "|---|---|", *rows]))
    parts += [str(note) for note in event.get("notes") or []]
    return "\n\n".join(parts)


def _culprit_table(culprits: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        ["micro-batch / rank / sequence / token", "text in context", "share", "norm", "ratio", "cause"],
        ["---"] * 6,
    ]
    for one in culprits:
        address = " / ".join(str(one.get(part, "-")) for part in ("micro_batch", "rank", "sequence", "token"))
        text = one.get("context") or one.get("text")
        numbers = [figure(one.get(name)) for name in ("share", "grad_norm", "importance_ratio")]
        lines.append([address, _cell(text), *numbers, _cell(one.get("cause"))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rollouts_markdown(step: int, best: Sequence[Mapping[str, Any]], worst: Sequence[Mapping[str, Any]]) -> str:
    """Best and worst rollouts side by side, with the counts that give hacking away.

    Args:
        step: Optimizer step.
        best: ``prompt``, ``completion``, ``reward``, ``length`` (tokens), ``repetition`` in [0, 1]; the best first.
        worst: The same for the worst, the worst first.
    """
    lines = [f"Step {step}", "", "| | best | worst |", "|---|---|---|"]
    for number in range(max(len(best), len(worst))):
        pair = [rows[number] if number < len(rows) else {} for rows in (best, worst)]
        lines += [
            f"| {name} {number + 1} | {_cell(pair[0].get(name))} | {_cell(pair[1].get(name))} |"
            for name in ("prompt", "completion")
        ]
        told = [
            f"reward {figure(one.get('reward'))}, {one.get('length', '-')} tokens, "
            f"repetition {figure(one.get('repetition'))}, {_format_counts(str(one.get('completion', '')))}"
            if one
            else ""
            for one in pair
        ]
        lines.append(f"| | {told[0]} | {told[1]} |")
    return "\n".join(lines)


def _format_counts(text: str) -> str:
    """How much of a text is digits, tags, code marks and line breaks: the usual coin of a hacked format reward."""
    digits = sum(character.isdigit() for character in text)
    letters = sum(character.isalpha() for character in text)
    return f"{letters} letters, {digits} digits, {text.count('<')} tags, {text.count(chr(10))} line breaks"


def interventions(run: Run) -> list[Mapping[str, Any]]:
    """Events that changed what was trained, or say that something should; everything but starts and bookkeeping."""
    quiet = {"start", "config", "snapshot", "self_check", "replay"}
    return [event for event in run.events if event["event"] not in quiet]


def event_words(event: Mapping[str, Any]) -> str:
    """One event in a few words, whoever wrote it."""
    for name in ("summary", "rule", "text", "reason", "message", "meaning"):
        value = event.get(name)
        if isinstance(value, str) and value:
            return value
    hidden = {"schema_version", "time", "event", "step"}
    told = [f"{name} {_short(value)}" for name, value in event.items() if name not in hidden]
    return ", ".join(told[:6]) or EVENT_KINDS.get(str(event.get("event")), "")


def _short(value: Any) -> str:
    number = number_from_json(value)
    if number is not None:
        return f"{number:g}" if not math.isnan(number) else "nan"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cell(value: Any) -> str:
    """Text that a Markdown table cell shows as it is."""
    text = "-" if value is None else str(value)
    text = text if len(text) <= 400 else f"{text[:397]}..."
    for character in "\\`*_|[]#":
        text = text.replace(character, f"\\{character}")
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("\r", "").replace("\n", " ⏎ ")
