"""TokenClip: take weight from tokens that training and sampling disagree about, or whose gradient is too large."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import asdict
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.clip_log import ClipLog
from lightning_rlstab.callbacks.run_context import RunContext
from lightning_rlstab.control.clips import HeadNormConfig, HeadNormState, head_norm_limit, head_norm_step
from lightning_rlstab.core.checks import choice, number
from lightning_rlstab.core.clips import head_norm_weights, quantile_of, ratio_weights
from lightning_rlstab.core.gradloc import head_gradient_norms
from lightning_rlstab.core.policy_loss import LossInputs, policy_loss

__all__ = ["TokenClip"]


class TokenClip(pl.Callback):
    """Scale the loss of single tokens down, before any backward.

    What it watches: with ``by="ratio"`` the importance ratio of policy in training to policy that sampled; with
    ``by="head_norm"`` the closed-form norm of each token's gradient in the output projection.

    When it acts: a ratio outside [``low``, ``high``]; a head norm above ``times`` the running ``quantile``.

    What it changes: the token's weight in the loss. ``mode="clip"`` brings the ratio (or the norm) back to its bound,
    ``mode="mask"`` takes the token out; normalisers stay. It only ever takes away. By head norm it holds back rare
    tokens, whose gradients are large by nature: watch ``rlstab/clips/token_frac``.

    What it costs: a few operations on (batch, time) tensors per micro-batch, one small sum over ranks per step.

    What survives a resume: the running quantile.

    Args:
        by: ``"ratio"`` or ``"head_norm"``.
        low: Lower bound of the ratio, >= 0; 0 for none.
        high: Upper bound of the ratio, above ``low``.
        mode: ``"clip"`` or ``"mask"``.
        times: How many times the running quantile a head norm may be, > 0.
        quantile: Which quantile of the head norms, in (0, 1).
        warmup_steps: Steps before head norms are clipped.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        Token-level truncated importance ratios as in the train/inference correction of TRL and verl; the head norm
        clip is this package's own.
    """

    def __init__(
        self,
        by: Literal["ratio", "head_norm"] = "ratio",
        low: float = 0.1,
        high: float = 10.0,
        mode: Literal["clip", "mask"] = "clip",
        *,
        times: float = 3.0,
        quantile: float = 0.99,
        warmup_steps: int = 10,
    ) -> None:
        self.by = choice("by", by, ("ratio", "head_norm"))
        self.mode = choice("mode", mode, ("clip", "mask"))
        self.low = number("low", low, at_least=0)
        self.high = number("high", high, above=self.low)
        self.head_norms = HeadNormConfig(times=times, quantile=quantile, warmup_steps=warmup_steps)
        self.needs_token_signals = self.by == "head_norm"
        self.state = HeadNormState()
        self._run: RunContext | None = None
        self._log: ClipLog | None = None
        self._readings: list[Tensor] = []

    @property
    def state_key(self) -> str:
        """Several clips may be stacked; the one that has a memory keeps it when its settings change."""
        return "TokenClip(head_norm)" if self.by == "head_norm" else f"TokenClip({self.low}, {self.high}, {self.mode})"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the run."""
        self._run = RunContext(trainer)
        self._log = ClipLog(self._run, "TokenClip", "tokens", by=self.by, mode=self.mode)

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, inputs: LossInputs) -> LossInputs:
        """Put weights on the tokens of one micro-batch."""
        mask = inputs.completion_mask.bool()
        level = torch.full((), math.nan, device=mask.device)
        if self.by == "ratio":
            if inputs.behavior_logprobs is None:
                return inputs
            log_ratios = inputs.logprobs.detach() - inputs.behavior_logprobs
            weights = ratio_weights(log_ratios, low=self.low, high=self.high, is_masking=self.mode == "mask")
        else:
            norms = self._head_norms(pl_module, inputs)
            level = quantile_of(norms, mask, self.head_norms.quantile).log()
            weights = head_norm_weights(norms, head_norm_limit(self.head_norms, self.state))
            weights = (weights == 1).float() if self.mode == "mask" else weights
        touched, tokens = (mask & (weights < 1)).sum(), mask.sum()
        self._readings.append(
            torch.stack([touched.float(), tokens.float(), level.nan_to_num(), (~level.isnan()).float()])
        )
        before = inputs.token_weights
        return dataclasses.replace(inputs, token_weights=weights if before is None else before * weights)

    def _head_norms(self, pl_module: Any, inputs: LossInputs) -> Tensor:
        """Closed-form norms with the slope of the loss as it would be without this clip."""
        with torch.enable_grad():
            logprobs = inputs.logprobs.detach().requires_grad_()
            free = dataclasses.replace(inputs, logprobs=logprobs, entropy=inputs.entropy.detach())
            # Accumulation and ranks are the same constants for every token: the quantile carries them as well.
            loss = policy_loss(free, pl_module.loss_settings, accumulation=1)
            (slope,) = torch.autograd.grad(loss.token_loss.sum(), logprobs)
        signals = pl_module.forward_signals
        return head_gradient_norms(
            slope,
            inputs.logprobs.detach(),
            signals["sum_squared_probs"],
            signals["hidden_norms"],
            temperature=pl_module.settings.temperature,
        )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the step's readings up over ranks, log them, and move the quantile."""
        assert self._run is not None
        own = torch.stack(self._readings).sum(0) if self._readings else torch.zeros(4, device=pl_module.device)
        self._readings = []
        touched, tokens, levels, count = self._run.summed(own).tolist()
        assert self._log is not None
        self._log.note(touched, tokens)
        readings = {"rlstab/clips/token_frac": touched / max(tokens, 1.0)}
        if self.by == "head_norm":
            limit = head_norm_limit(self.head_norms, self.state)
            if math.isfinite(limit):
                readings["rlstab/clips/token_limit"] = limit
            quantile = math.exp(levels / count) if count else math.nan
            self.state = head_norm_step(self.head_norms, self.state, quantile)
        pl_module.log_dict(readings, on_step=True, on_epoch=False, batch_size=1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write down, now and then, what was held back."""
        if self._log is not None:
            self._log.close_step(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the memory; the settings stay those of this run.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        self.state = HeadNormState(**state_dict)
