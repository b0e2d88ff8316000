"""SeqClip: take weight from whole sequences that training and sampling disagree about."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.clip_log import ClipLog
from lightning_rlstab.callbacks.run_context import RunContext
from lightning_rlstab.core.checks import choice, number
from lightning_rlstab.core.clips import ratio_weights, sequence_log_ratios
from lightning_rlstab.core.policy_loss import LossInputs

__all__ = ["SeqClip"]


class SeqClip(pl.Callback):
    """Scale the loss of a sequence down when the geometric mean of its importance ratios is far from 1.

    What it watches: exp(mean over a sequence's loss tokens of log pi_train - log pi_behavior). When it acts: outside
    [``low``, ``high``]. What it changes: the weight of all the sequence's tokens; ``mode="clip"`` by bound over mean,
    ``mode="mask"`` to 0; normalisers stay. What it costs: a few operations on (batch, time) tensors per micro-batch and
    one small sum over ranks per step. What survives a resume: nothing, it has no memory.

    Args:
        low: Lower bound of the geometric mean, >= 0; 0 for none.
        high: Upper bound, above ``low``.
        mode: ``"clip"`` or ``"mask"``.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        Sequence-level masking of train/inference mismatch (geometric mean, as in GSPO's ratio); the same name and idea
        as the sequence clip beside the Gradient Anomaly Localizer.
    """

    def __init__(self, low: float = 0.5, high: float = 2.0, mode: Literal["clip", "mask"] = "mask") -> None:
        self.low = number("low", low, at_least=0)
        self.high = number("high", high, above=self.low)
        self.mode = choice("mode", mode, ("clip", "mask"))
        self._run: RunContext | None = None
        self._log: ClipLog | None = None
        self._readings: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the run."""
        self._run = RunContext(trainer)
        self._log = ClipLog(self._run, "SeqClip", "sequences", mode=self.mode)

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, inputs: LossInputs) -> LossInputs:
        """Put one weight on each sequence of a micro-batch."""
        if inputs.behavior_logprobs is None:
            return inputs
        mask = inputs.completion_mask.bool()
        means = sequence_log_ratios(inputs.logprobs.detach() - inputs.behavior_logprobs, mask)
        weights = ratio_weights(means, low=self.low, high=self.high, is_masking=self.mode == "mask")
        is_open = mask.any(dim=1)
        self._readings.append(torch.stack([(is_open & (weights < 1)).sum(), is_open.sum()]).float())
        spread = weights.unsqueeze(1).expand_as(inputs.logprobs)
        before = inputs.token_weights
        return dataclasses.replace(inputs, token_weights=spread if before is None else before * spread)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the step's counts up over ranks and log them."""
        assert self._run is not None
        own = torch.stack(self._readings).sum(0) if self._readings else torch.zeros(2, device=pl_module.device)
        self._readings = []
        touched, sequences = self._run.summed(own).tolist()
        assert self._log is not None
        self._log.note(touched, sequences)
        share = touched / max(sequences, 1.0)
        pl_module.log("rlstab/clips/sequence_frac", share, on_step=True, on_epoch=False, batch_size=1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write down, now and then, what was held back."""
        if self._log is not None:
            self._log.close_step(trainer)
