"""What StabilityMonitor draws in TensorBoard: layout, markers, histograms, spike cards and pictures, rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_rlstab.core.policy_loss import LossInputs
from lightning_rlstab.core.repetition import text_repetition_frac
from lightning_rlstab.report.events import EventTail
from lightning_rlstab.report.heat import layer_token_image, strip_image, strip_of
from lightning_rlstab.report.layout import custom_scalars
from lightning_rlstab.report.memory import Finding
from lightning_rlstab.report.scalars import SCALARS
from lightning_rlstab.report.words import alarm_sentence, rollouts_markdown, spike_card
from lightning_rlstab.rollout.records import Rollout

__all__ = ["FINAL_SCORES", "MonitorBoard"]

FINAL_SCORES = tuple(name for name in SCALARS if name.startswith("final/"))
"""Scores beside the hyper-parameters, in the order of their columns."""

_MARKED = frozenset({"spike", "skip", "rollback", "alarm", "quarantine", "filter", "fire_drill", "clip"})
_LAYOUT_STEPS = 2
_WEIGHTS_EVERY_STEPS = 10  # as StabilityMonitor looks at them
_MOST_VALUES = 100_000


class MonitorBoard:
    """Rank 0's view of the run in TensorBoard; without a TensorBoard logger it does nothing.

    Args:
        writers: TensorBoard writers.
        events: The run's ``events.jsonl``, which other callbacks write too.
        extra_names: Scalars that will be logged later (held-out scores), for the layout.
        has_pictures: Whether spikes are drawn.
    """

    def __init__(self, writers: list[Any], events: Path, *, extra_names: set[str], has_pictures: bool) -> None:
        self._writers = writers
        self._tail = EventTail(events)
        self._names = set(extra_names)
        self._has_pictures = has_pictures
        self._steps = 0
        self._marked: set[str] = set()

    @classmethod
    def of(cls, trainer: pl.Trainer, events: Path, *, has_pictures: bool) -> MonitorBoard:
        """The board of a Trainer.

        Args:
            trainer: The Trainer; every logger whose ``experiment`` takes custom scalars is used.
            events: The run's ``events.jsonl``.
            has_pictures: Whether spikes are drawn.
        """
        experiments = [getattr(logger, "experiment", None) for logger in trainer.loggers]
        writers = [one for one in experiments if hasattr(one, "add_custom_scalars") and hasattr(one, "add_image")]
        is_evaluated = trainer.enable_validation and trainer.limit_val_batches != 0
        extra = {"val/reward", "rlstab/monitor/held_out_gap"} if is_evaluated else set()
        if trainer.max_steps < 0 or trainer.max_steps >= _WEIGHTS_EVERY_STEPS:
            extra.add("rlstab/monitor/weights_moved")
        return cls(writers, events, extra_names=extra, has_pictures=has_pictures)

    def hyper_parameters(self, values: Mapping[str, int | float | str]) -> None:
        """Open the run's row in TensorBoard's table of hyper-parameters; :meth:`finish` fills in its scores.

        Args:
            values: The columns. TensorBoard believes only the first set of score names, so they are declared here.
        """
        from torch.utils.tensorboard.summary import hparams

        opening = hparams(dict(values), dict.fromkeys(FINAL_SCORES, 0.0))  # type: ignore[no-untyped-call]
        for writer in self._writers:
            for summary in opening:
                writer._get_file_writer().add_summary(summary)

    def scalars(self, values: Mapping[str, float], at: int) -> None:
        """Write scalars outside of Lightning's own logging."""
        for writer in self._writers:
            for name, value in values.items():
                writer.add_scalar(name, value, at)

    def after_step(self, at: int, values: Mapping[str, float]) -> None:
        """Show what happened in the step that has ended, and lay the charts out once it is known what is logged.

        Args:
            at: The step.
            values: Everything logged in it.
        """
        if not self._writers:
            return
        happened = self._tail.fresh()
        kinds = {str(event["event"]) for event in happened} & _MARKED
        norm = values.get("grad_norm", 1.0)
        height = norm if math.isfinite(norm) and norm > 0 else 1.0
        for kind in kinds - self._marked:
            if at:
                self.scalars({f"rlstab/events/{kind}": 0.0}, at - 1)
        self._marked |= kinds
        # From the first event of a kind on, a point per step: TensorBoard's smoothing would bend sparse needles.
        self.scalars({f"rlstab/events/{kind}": height if kind in kinds else 0.0 for kind in self._marked}, at)
        for event in happened:
            if event["event"] == "spike":
                self._spike(event)
        self._names |= values.keys()
        self._steps += 1
        if self._steps == _LAYOUT_STEPS:
            self._lay_out()

    def _lay_out(self) -> None:
        # TensorBoard reads the first layout of a run only, so it is written once.
        for writer in self._writers:
            writer.add_custom_scalars(custom_scalars(self._names))

    def _spike(self, event: Mapping[str, Any]) -> None:
        at = int(event["step"])
        strip = strip_of(event) if self._has_pictures else None
        layers = layer_token_image(event) if self._has_pictures else None
        for writer in self._writers:
            writer.add_text("spike/card", spike_card(event), at)
            if strip is not None:
                writer.add_image("spike/tokens", strip_image(strip), at, dataformats="HWC")
            if layers is not None:
                writer.add_image("spike/layers_and_tokens", layers, at, dataformats="HWC")

    def alarm(self, finding: Finding) -> None:
        """An alarm as text."""
        for writer in self._writers:
            writer.add_text("alarms", alarm_sentence(finding), finding.alarm_step)

    def histogram(self, name: str, values: Tensor, at: int) -> None:
        """A histogram of the finite values.

        Args:
            name: Tag.
            values: Any shape.
            at: Step.
        """
        finite = values.detach().float().reshape(-1)
        finite = finite[finite.isfinite()][:_MOST_VALUES].cpu()
        if finite.numel():
            for writer in self._writers:
                writer.add_histogram(f"histogram/{name}", finite, at)

    def token_histograms(self, inputs: LossInputs, at: int) -> None:
        """Histograms of token entropies and of log importance ratios.

        Args:
            inputs: One micro-batch's.
            at: Step.
        """
        mask = inputs.completion_mask.bool()
        self.histogram("token_entropy", inputs.entropy[mask], at)
        before = inputs.behavior_logprobs if inputs.behavior_logprobs is not None else inputs.old_logprobs
        if before is not None:
            self.histogram("log_importance_ratio", (inputs.logprobs.detach() - before)[mask], at)

    def rollouts(self, at: int, rollout: Rollout, *, shown: int) -> None:
        """Best and worst rollouts of this rank side by side.

        Args:
            at: Step.
            rollout: Scored.
            shown: Rows on each side.
        """
        if rollout.rewards is None or not self._writers:
            return
        scored = torch.nonzero(rollout.rewards.isfinite()).reshape(-1)
        if not scored.numel():
            return
        order = scored[rollout.rewards[scored].argsort(descending=True, stable=True)].tolist()
        shown = min(shown, max(1, len(order) // 2))
        best, worst = order[:shown], order[::-1][:shown]
        rows = [[_row(rollout, index) for index in indices] for indices in (best, worst)]
        for writer in self._writers:
            writer.add_text("rollouts/best_and_worst", rollouts_markdown(at, *rows), at)

    def finish(self, at: int, scores: Mapping[str, float | None]) -> None:
        """Lay out a run that was too short for it, and put its scores beside the hyper-parameters.

        Args:
            at: Last step.
            scores: By the last parts of ``FINAL_SCORES``; None, NaN and infinities are left out.
        """
        if self._steps and self._steps < _LAYOUT_STEPS:
            self._lay_out()
        known = {name: score for name, score in scores.items() if score is not None and math.isfinite(score)}
        self.scalars({f"final/{name}": score for name, score in known.items()}, at)
        headline = known.get("held_out_reward", known.get("reward"))
        if headline is not None:
            self.scalars({"hp_metric": headline}, at)
        for writer in self._writers:
            writer.flush()


def _row(rollout: Rollout, index: int) -> dict[str, Any]:
    assert rollout.rewards is not None
    completion = _shown(rollout.completions[index])
    return {
        "prompt": _shown(rollout.prompts[index]),
        "completion": completion,
        "reward": float(rollout.rewards[index]),
        "length": int(rollout.completion_lengths[index]),
        "repetition": text_repetition_frac(completion),
    }


def _shown(text: Any) -> str:
    """Plain text as it is, messages one per line."""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in text)
