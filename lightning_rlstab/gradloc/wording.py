"""A finding in words and as the fields of its event line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_rlstab.gradloc.finding import Culprit, Finding
from lightning_rlstab.gradloc.oracle import WindowSignals

__all__ = ["Decoder", "event_fields", "spike_sentence"]

Decoder = Callable[[Sequence[int]], str]
"""Token ids to text."""

_LAYERS_LISTED = 8


def event_fields(
    finding: Finding, signals: WindowSignals, *, action: str, decode: Decoder, context_tokens: int
) -> dict[str, Any]:
    """The fields of a ``spike`` event.

    Args:
        finding: What was found.
        signals: What the forward passes left behind.
        action: What was done.
        decode: Token ids to text.
        context_tokens: Tokens shown on either side of a culprit.

    Returns:
        Plain data: ``grad_norm``, ``threshold``, ``action``, ``tier``, ``completeness``, ``cost_sweeps``, ``verdict``,
        ``culprits`` (each with its address, text, context, share, norm, ratio, cause and layers), and beside these
        ``remaining_norm``, ``effective_tokens``, ``layers`` of the whole spike, ``strip`` (the first culprit's
        sequence: its token texts and each one's weight in the spike), ``notes`` and ``summary``.
    """
    culprits = [_culprit_fields(culprit, signals, decode, context_tokens) for culprit in finding.culprits]
    return {
        "grad_norm": finding.grad_norm,
        "threshold": finding.threshold,
        "action": action,
        "tier": finding.tier,
        "completeness": finding.completeness,
        "shares_of": finding.shares_of,
        "cost_sweeps": round(finding.cost_sweeps, 4),
        "verdict": finding.verdict,
        "culprits": culprits,
        "remaining_norm": finding.remaining_norm,
        "effective_tokens": finding.effective_tokens,
        "backward_probes": finding.backward_probes,
        "is_budget_exhausted": finding.is_budget_exhausted,
        "layers": _layers(finding.layers),
        "strip": _strip(finding, signals, decode),
        "notes": list(finding.notes),
        "summary": spike_sentence(finding, action=action, decode=decode),
    }


def _culprit_fields(culprit: Culprit, signals: WindowSignals, decode: Decoder, context_tokens: int) -> dict[str, Any]:
    address = culprit.address
    return {
        "micro_batch": address.micro_batch,
        "rank": address.rank,
        "sequence": address.sequence,
        "token": address.token,
        "token_id": culprit.token_id,
        "text": decode([culprit.token_id]),
        "context": _context(
            signals.token_ids[address[:3]], signals.mask[address[:3]], address.token, decode, context_tokens
        ),
        "share": culprit.share,
        "grad_norm": culprit.grad_norm,
        "importance_ratio": culprit.importance_ratio,
        "cause": culprit.cause,
        "layers": _layers(culprit.layers),
    }


def _strip(finding: Finding, signals: WindowSignals, decode: Decoder) -> dict[str, Any] | None:
    if not finding.strip:
        return None
    place = finding.culprits[0].address[:3]
    shown = [token for token, is_open in enumerate(signals.mask[place].tolist()) if is_open]
    ids = signals.token_ids[place].tolist()
    return {"texts": [decode([ids[token]]) for token in shown], "weights": [finding.strip[token] for token in shown]}


def _context(token_ids: Tensor, mask: Tensor, token: int, decode: Decoder, width: int) -> str:
    """The culprit in double brackets amid its neighbours."""
    ids, is_open = token_ids.tolist(), mask.tolist()
    before = [ids[i] for i in range(max(0, token - width), token) if is_open[i]]
    after = [ids[i] for i in range(token + 1, min(len(ids), token + 1 + width)) if is_open[i]]
    return f"{decode(before)}[[{decode([ids[token]])}]]{decode(after)}"


def _layers(layers: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"name": name, "share": share} for name, share in layers[:_LAYERS_LISTED]]


def spike_sentence(finding: Finding, *, action: str, decode: Decoder) -> str:
    """What whoever is on call reads first.

    Args:
        finding: What was found.
        action: ``removed``, ``reported``, ``skipped``, ``micro-batch skipped``, ``dropped`` or ``stopped``.
        decode: Token ids to text.
    """
    size = f"gradient norm {_figure(finding.grad_norm)}"
    if math.isfinite(finding.grad_norm) and math.isfinite(finding.threshold):
        size += f" (threshold {_figure(finding.threshold)})"
    return f"{size}: {_blame(finding, decode)}. {_done(finding, action)}"


def _blame(finding: Finding, decode: Decoder) -> str:
    if not finding.culprits:
        return _BLAMELESS[finding.verdict]
    first = finding.culprits[0]
    place = first.address
    where = f"micro-batch {place.micro_batch}, rank {place.rank}, sequence {place.sequence}"
    if finding.verdict == "sequence":
        share = sum(culprit.share or 0.0 for culprit in finding.culprits)
        return f"{where} as a whole (its first {len(finding.culprits)} tokens: {share:.0%} of it); {first.cause}"
    words = [f"{where}, token {place.token} {decode([first.token_id])!r}"]
    if first.share is not None:
        words.append(f"caused {first.share:.0%} of it")
    if first.importance_ratio is not None:
        words.append(f"importance ratio {_figure(first.importance_ratio)}")
    words.append(first.cause)
    if first.layers:
        top = first.layers[:2]
        words.append(f"{' and '.join(name for name, _ in top)} carry {sum(share for _, share in top):.0%}")
    if len(finding.culprits) > 1:
        words.append(f"and {len(finding.culprits) - 1} more")
    return "; ".join(words)


_BLAMELESS = {
    "tokens": "no token named",
    "sequence": "no sequence named",
    "layer": "a few layers exploded on every token",
    "systematic": "training and sampling disagree on every token, so no single one is to blame",
    "diffuse": "no token dominates",
    "numeric": "a non-finite value that comes from no token",
}


def _done(finding: Finding, action: str) -> str:
    if action == "removed":
        count = "token was" if len(finding.culprits) == 1 else "tokens were"
        return f"The {count} removed and the step applied without, at norm {_figure(finding.remaining_norm)}."
    words = {
        "reported": "The step was applied as it was.",
        "skipped": "The step was skipped.",
        "micro-batch skipped": "The step was applied without the micro-batch.",
        "stopped": "The run was stopped.",
        "dropped": "Another guard had dropped the micro-batch, and so it stays.",
    }
    return words[action]


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
