"""LayerClip: scale down only the layers whose gradient is far above their own usual norm."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_rlstab.callbacks.clip_log import ClipLog
from lightning_rlstab.callbacks.gradloc_oracle import NormReader
from lightning_rlstab.callbacks.run_context import RunContext
from lightning_rlstab.control.clips import LayerClipConfig, LayerClipState, clipped_layers, layer_clip_step
from lightning_rlstab.control.layers import layer_name
from lightning_rlstab.control.plain_probe import probe_and_norms
from lightning_rlstab.control.protocols import GradientProbe, StepGate
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.core.checks import refusal

__all__ = ["LayerClip"]


class LayerClip(pl.Callback):
    """Per layer, scale the gradient to at most ``ratio`` times the layer's usual norm.

    What it watches: the norm of each layer's complete gradient before the optimizer step.

    When it acts: on a layer above ``ratio`` times the running average of its clipped norms; during the first
    ``warmup_steps`` the gradient is clipped as a whole to ``warmup_norm`` instead.

    What it changes: that layer's gradient, not the others'. It mitigates a spike and does not cure its cause.

    What it costs: nothing beside the norms that the step gate measures anyway.

    What survives a resume: the running norms.

    Put it after GradLoc and GEPO in the list of callbacks, so that it learns from what is applied.

    Args:
        ratio: How many times its usual norm a layer may have (lambda), > 0.
        beta: Memory of the usual norm, in (0, 1).
        warmup_steps: Steps under the global clip alone.
        warmup_norm: Global norm of that clip, > 0.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        Layerwise clipping of Tencent Hunyuan, "Stabilizing RLVR via Token-level Gradient Diagnosis and Layerwise
        Clipping" (2026).
    """

    def __init__(
        self, ratio: float = 2.0, beta: float = 0.98, warmup_steps: int = 20, warmup_norm: float = 1.0
    ) -> None:
        self.config = LayerClipConfig(ratio=ratio, beta=beta, warmup_steps=warmup_steps, warmup_norm=warmup_norm)
        self.state = LayerClipState()
        self._pending: tuple[dict[str, float], dict[str, float]] | None = None
        self._probe: GradientProbe | None = None
        self._log: ClipLog | None = None
        self._read_norms: NormReader | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse several processes under a strategy that cannot measure layers across them."""
        if trainer.world_size > 1 and not isinstance(trainer.strategy, StepGate):
            advice = 'Use strategy="rlstab_ddp" or "rlstab_fsdp"'
            rule = "measure layers over processes while LayerClip is on"
            raise refusal("strategy", rule, type(trainer.strategy).__name__, advice)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out who measures norms."""
        self._probe, self._read_norms = probe_and_norms(trainer, pl_module)
        self._log = ClipLog(RunContext(trainer), "LayerClip", "layers")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Scale the layers that are too large."""
        assert self._probe is not None
        assert self._read_norms is not None
        measured = self._read_norms()
        norms = dict(measured.per_layer)
        scales = clipped_layers(self.config, self.state, norms)
        if measured.is_finite:
            with torch.no_grad():
                for name, parameter in self._probe.trainable_parameters().items():
                    scale = scales[layer_name(name)]
                    if parameter.grad is not None and scale != 1.0:
                        parameter.grad.mul_(scale)
        self._pending = (norms, scales)
        assert self._log is not None
        clipped = sum(scale < 1 for scale in scales.values())
        if measured.is_finite and self.state.steps >= self.config.warmup_steps:
            self._log.note(clipped, len(scales))
        readings = {
            "rlstab/clips/layers_clipped": float(clipped),
            "rlstab/clips/smallest_layer_scale": min(scales.values(), default=1.0),
        }
        pl_module.log_dict(readings, on_step=True, on_epoch=False, batch_size=1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Learn from the step, if it was applied."""
        if self._pending is None:
            return
        (norms, scales), self._pending = self._pending, None
        if self._log is not None:
            self._log.close_step(trainer)
        verdict = step_gate(trainer, "LayerClip").last_verdict
        is_applied = verdict is None or verdict.action == "apply"
        if is_applied and math.isfinite(sum(norms.values())):
            self.state = layer_clip_step(self.config, self.state, norms, scales)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return asdict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the memory; the settings stay those of this run.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        sums = tuple((str(name), float(total)) for name, total in state_dict["sums"])
        self.state = LayerClipState(**{**state_dict, "sums": sums})
