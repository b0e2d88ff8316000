"""What a step says about itself: sums kept on the device, reduced over ranks once, named as TRL names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.core.policy_loss import merged_readings
from lightning_rlstab.rollout.metrics import rollout_metrics
from lightning_rlstab.rollout.records import Rollout

__all__ = ["StepReadings", "advantage_readings", "loss_metrics"]

# Metric name -> (numerator, denominator) among the loss readings.
_MEANS = {
    "entropy": ("entropy_sum", "token_count"),
    "kl": ("kl_sum", "token_count"),
    "clip_ratio/low_mean": ("clip_low_sum", "clip_count"),
    "clip_ratio/high_mean": ("clip_high_sum", "clip_count"),
    "cispo_clip_ratio": ("cispo_clip_sum", "cispo_clip_count"),
    "vespo/phi_seq_mean": ("vespo_phi_sum", "vespo_phi_count"),
    "sampling/sampling_logp_difference/mean": ("sampling_logp_difference_sum", "sampling_logp_difference_count"),
    "sampling/importance_sampling_ratio/mean": ("importance_sampling_ratio_sum", "importance_sampling_ratio_count"),
}
# Metric name -> extreme among the loss readings.
_EXTREMES = {
    "clip_ratio/low_min": "clip_low_min",
    "clip_ratio/high_max": "clip_high_max",
    "sampling/sampling_logp_difference/max": "sampling_logp_difference_max",
    "sampling/importance_sampling_ratio/min": "importance_sampling_ratio_min",
    "sampling/importance_sampling_ratio/max": "importance_sampling_ratio_max",
    "rlstab/grpo/kl_max": "kl_max",
}
# Metric name -> count among the loss readings.
_COUNTS = {
    "rlstab/grpo/non_finite_tokens": "non_finite_tokens_count",
    "rlstab/grpo/floored_tokens": "floored_tokens_count",
    "rlstab/grpo/saturated_tokens": "saturated_tokens_count",
    "rlstab/grpo/unscored_tokens": "unscored_tokens_count",
}


def loss_metrics(readings: Mapping[str, Tensor]) -> dict[str, float]:
    """TRL's metrics of one optimizer step.

    Args:
        readings: Merged loss readings of all micro-batches and ranks.

    Returns:
        One finite-or-meaningful number per metric; a metric without a single token behind it is left out.
    """
    values = {name: float(value) for name, value in readings.items()}
    metrics = {
        name: values[total] / values[count]
        for name, (total, count) in _MEANS.items()
        if total in values and values[count] > 0
    }
    if "clip_ratio/low_mean" in metrics:
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    metrics |= {
        name: values[extreme]
        for name, extreme in _EXTREMES.items()
        if extreme in values and not math.isinf(values[extreme])
    }
    return metrics | {name: values[count] for name, count in _COUNTS.items() if count in values}


def advantage_readings(rollout: Rollout) -> dict[str, Tensor]:
    """Sum of absolute advantages and their number: the plain mean is 0 by construction and says nothing.

    Args:
        rollout: This rank's completions, with advantages.
    """
    assert rollout.advantages is not None
    advantages = rollout.advantages.double()
    return {"advantage_abs_sum": advantages.abs().sum(), "advantage_count": torch.ones_like(advantages).sum()}


class StepReadings:
    """Collects the readings of one optimizer step and of the rollouts made for it.

    Nothing is read back from the device before :meth:`metrics`, which costs one collective and one transfer.
    """

    def __init__(self) -> None:
        self.num_tokens = 0.0
        self._loss: dict[str, Tensor] = {}
        self._rollout: dict[str, Tensor] = {}

    def add_loss(self, loss: Tensor, readings: Mapping[str, Tensor]) -> None:
        """One micro-batch's loss and readings.

        Args:
            loss: 0-d.
            readings: From ``policy_loss``.
        """
        self._loss = merged_readings(self._loss, {**readings, "loss_sum": loss.detach()})

    def add_rollout(self, readings: Mapping[str, Tensor]) -> None:
        """One rollout's readings, from ``rollout_readings``."""
        self._rollout = merged_readings(self._rollout, readings)

    def metrics(self, ranks: Ranks) -> tuple[dict[str, float], float]:
        """Reduce what was collected over all ranks and start afresh.

        Args:
            ranks: The ranks to reduce over.

        Returns:
            The metrics by TRL's names, and the mean entropy over the tokens that the entropy bonus acts on, nats.
        """
        merged = ranks.merged({**self._loss, **self._rollout})
        loss = {name: merged[name] for name in self._loss}
        rollout = {name: merged[name] for name in self._rollout}
        self._loss, self._rollout = {}, {}
        metrics = {"loss": float(loss["loss_sum"]) / ranks.replicas, **loss_metrics(loss)}
        if rollout:
            metrics |= rollout_metrics(rollout)
            count = float(rollout["advantage_count"])
            if count:
                metrics["rlstab/grpo/advantage_abs_mean"] = float(rollout["advantage_abs_sum"]) / count
            self.num_tokens += float(rollout["num_tokens_count"])
        metrics["num_tokens"] = self.num_tokens
        active = max(float(loss["bonus_entropy_count"]), 1.0)
        return metrics, float(loss["bonus_entropy_sum"]) / active

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step."""
        return {"num_tokens": self.num_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting.

        Args:
            state: From :meth:`state_dict`.
        """
        self.num_tokens = float(state["num_tokens"])
