"""GEPO: clean the learning signal before it reaches the optimizer."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.run_context import RunContext, switched, tell_dropped
from lightning_rlstab.control.gepo import (
    GuardReading,
    LogprobBoundsConfig,
    RobustAdvantagesConfig,
    Ruling,
    StepGuardConfig,
    StepGuardState,
    guard_level,
    guard_limit,
    guard_ruling,
    guard_warnings,
    step_guard,
)
from lightning_rlstab.control.protocols import GradientNorms, StepGate, Vote
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.core.advantages import GroupAdvantages
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.core.gepo import bounded_loss_inputs, robust_advantages
from lightning_rlstab.core.policy_loss import LossInputs
from lightning_rlstab.rollout.records import Rollout

__all__ = ["GEPO", "LogprobBoundsConfig", "RobustAdvantagesConfig", "StepGuardConfig"]

_log = logging.getLogger(__name__)


class GEPO(pl.Callback):
    """Robust advantages, a guard on the gradient norm, and bounds on log-ratios; each can be switched off.

    What it watches: rewards per group, the policy's log-probs, the norm of every gradient before clipping, and of every
    micro-batch's own where several make a step.

    When it acts: advantages and bounds always; the guard when a norm is not finite, or above ``ratio`` times its
    running level and above ``hard_threshold``.

    What it changes: A = c tanh(z / c) with a median and MAD scale in place of the module's advantages (and of its
    ``scale_rewards``); completions without a finite reward leave the loss; an abnormal micro-batch is left out of its
    step, an abnormal step is skipped whole; a token further than ``log_ratio`` nats from its old log-prob loses its
    gradient. With all three off the run is plain GRPO bit for bit.

    What it costs: one look at the norm per step, which the strategy has measured anyway. With accumulation one further
    copy of the gradient and one norm per micro-batch, without waiting for the device (``isolate="step"``: none).

    What survives a resume: the guard's running level and counts.

    Put it after GradLoc and before OPEFO in the list of callbacks.

    Args:
        advantages: Robust advantages; True for the defaults, False or None for off.
        guard: The step guard; likewise.
        bounds: Bounds on log-probs and log-ratios; likewise.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        A field recipe; GEPO is this package's working name for the layer (Gradient Engineering for Policy
        Optimization). Other methods carry the name as well: arXiv 2508.17850, 2510.26270.
    """

    guards_gradient = True

    def __init__(
        self,
        advantages: RobustAdvantagesConfig | bool | None = True,
        guard: StepGuardConfig | bool | None = True,
        bounds: LogprobBoundsConfig | bool | None = True,
    ) -> None:
        self.advantages = switched("advantages", advantages, RobustAdvantagesConfig)
        self.guard = switched("guard", guard, StepGuardConfig)
        self.bounds = switched("bounds", bounds, LogprobBoundsConfig)
        self.state = StepGuardState()
        self._run: RunContext | None = None
        self._gate: StepGate | None = None
        self._dropped: list[float] = []
        self._micro_batches = 0
        self._pending: tuple[GradientNorms, Ruling] | None = None
        self._advantage_readings: dict[str, float] = {}
        self._token_counts: dict[str, Tensor] = {}

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the estimator of advantages into the module.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.

        Raises:
            ValueError: If the module takes no estimator.
        """
        if stage != "fit" or self.advantages is None:
            return
        if not hasattr(pl_module, "advantage_estimator"):
            advice = "Train a GRPOModule, or use GEPO(advantages=False)"
            raise refusal("GEPO(advantages)", "run with a module that makes rollouts", type(pl_module).__name__, advice)
        pl_module.advantage_estimator = self._estimated  # type: ignore[assignment]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own advantages back."""
        if stage == "fit" and self.advantages is not None:
            pl_module.advantage_estimator = None  # type: ignore[assignment]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the gate and the run folder."""
        self._run = RunContext(trainer)
        self._gate = step_gate(trainer, "GEPO")
        self._dropped, self._micro_batches, self._pending = [], 0, None

    # Rollout and loss -------------------------------------------------------------------------------------------------

    def on_rollout_scored(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> Rollout:
        """Take completions without a finite reward out of the loss."""
        if self.advantages is None or rollout.rewards is None:
            return rollout
        is_usable = rollout.rewards.isfinite()
        if bool(is_usable.all()):
            return rollout
        return rollout.replace(completion_mask=rollout.completion_mask & is_usable.unsqueeze(1))

    def _estimated(self, rewards: Tensor, group_ids: Tensor) -> GroupAdvantages:
        assert self.advantages is not None
        estimate = robust_advantages(rewards, group_ids, **dataclasses.asdict(self.advantages))
        values = estimate.advantages.double()
        if len(values):
            packed = [
                values.mean(),
                values.std(correction=0),
                values.abs().mean(),
                values.abs().max(),
                1.0 - estimate.has_spread.double().mean(),
                estimate.nan_count.double(),
                estimate.inf_count.double(),
            ]
            names = ("mean", "std", "abs_mean", "abs_max")
            mean, std, abs_mean, abs_max, no_spread, nan, inf = torch.stack(packed).tolist()
            self._advantage_readings = {
                f"rlstab/gepo/advantage_{name}": value
                for name, value in zip(names, (mean, std, abs_mean, abs_max), strict=True)
            } | {
                "rlstab/gepo/zero_spread_frac": no_spread,
                "rlstab/gepo/rewards_nan": nan,
                "rlstab/gepo/rewards_inf": inf,
            }
            if nan or inf:
                assert self._run is not None
                words = f"{nan:.0f} NaN and {inf:.0f} infinite rewards were left out of their groups"
                self._run.event("reward", source="gepo", nan=nan, inf=inf, reason=words)
        return estimate

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, inputs: LossInputs) -> LossInputs:
        """Bound log-probs and log-ratios; count what was not finite or out of bounds, on the device."""
        mask = inputs.completion_mask.bool()
        with torch.no_grad():
            logprobs = inputs.logprobs.detach()
            counts = {"logprobs_non_finite": (mask & ~logprobs.isfinite()).sum()}
            if inputs.old_logprobs is not None:
                log_ratio = logprobs - inputs.old_logprobs
                counts["ratios_non_finite"] = (mask & ~log_ratio.exp().isfinite()).sum()
                if self.bounds is not None:
                    counts["bounded_tokens"] = (mask & (log_ratio.abs() > self.bounds.log_ratio)).sum()
            for name, count in counts.items():
                self._token_counts[name] = self._token_counts.get(name, torch.zeros_like(count)) + count
        if self.bounds is None:
            return inputs
        return bounded_loss_inputs(inputs, log_ratio=self.bounds.log_ratio, floor=self.bounds.floor)

    # Gradient ---------------------------------------------------------------------------------------------------------

    def is_staging_needed(self, trainer: pl.Trainer) -> bool:
        """Stage micro-batches when several make a step and abnormal ones are to be left out singly."""
        return self.guard is not None and self.guard.isolate == "staging" and trainer.accumulate_grad_batches > 1

    def on_micro_batch_gradient(self, trainer: pl.Trainer, pl_module: pl.LightningModule, norms: GradientNorms) -> bool:
        """Leave an abnormal micro-batch out.

        The measure is the level of whole steps: a micro-batch's contribution, with the step's normaliser in it, is
        abnormal when it alone would make the step abnormal. So decisions do not depend on the accumulation.
        """
        index, self._micro_batches = self._micro_batches, self._micro_batches + 1
        if self.guard is None:
            return True
        ruling = guard_ruling(self.guard, self.state, norms.total)
        if ruling.action != "skip":
            return True
        self._dropped.append(norms.total)
        tell_dropped(trainer, pl_module, norms)
        assert self._run is not None
        self._run.event(
            "skip", source="gepo", scope="micro_batch", micro_batch=index, norm=norms.total, reason=ruling.reason
        )
        return False

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge the whole step's gradient and vote."""
        assert self._gate is not None
        assert self._run is not None
        norms = self._gate.gradient_norms()
        if self.guard is None:
            self._pending = (norms, Ruling(action="apply"))
            return
        is_all_dropped = 0 < self._micro_batches == len(self._dropped)
        judged = norms
        if is_all_dropped:  # nothing is left: the step counts as skipped for the worst of its micro-batches
            worst = max(self._dropped, key=lambda norm: norm if math.isfinite(norm) else math.inf)
            judged = dataclasses.replace(norms, total=worst, is_finite=math.isfinite(worst))
        ruling = guard_ruling(self.guard, self.state, judged.total)
        self._pending = (judged, ruling)
        if ruling.action == "apply":
            return
        kind = {"skip": "skip", "stop": "stop", "release": "controller"}[ruling.action]
        self._run.event(kind, source="gepo", scope="step", norm=judged.total, reason=ruling.reason)
        if trainer.is_global_zero:
            _log.warning("GEPO, step %d: %s: %s", trainer.global_step, ruling.action, ruling.reason)
        if ruling.action == "release":
            return
        if not is_all_dropped:
            tell_dropped(trainer, pl_module, norms)
        # Last: Lightning's own strategies take the gradient away, or raise, in the very moment of the vote.
        self._gate.vote(Vote(source="gepo", action=ruling.action, reason=ruling.reason))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Learn from the step that ended, and log."""
        if self._pending is None:
            return
        assert self._gate is not None
        assert self._run is not None
        (norms, _), self._pending = self._pending, None
        verdict = self._gate.last_verdict
        dropped, self._dropped, self._micro_batches = len(self._dropped), [], 0
        if self.guard is not None:
            before = self.state
            was_applied = verdict is None or verdict.action == "apply"
            reading = GuardReading(norm=norms.total, was_applied=was_applied, is_partial=dropped > 0 and was_applied)
            self.state = step_guard(self.guard, before, reading)
            for words in guard_warnings(self.guard, before, self.state):
                self._run.event("drift" if "rose" in words else "alarm", source="gepo", reason=words)
                if trainer.is_global_zero:
                    _log.warning("GEPO, step %d: %s", trainer.global_step, words)
        if self._run.is_log_due:
            self._run.log(self._readings(norms, dropped))

    def _readings(self, norms: GradientNorms, dropped: int) -> dict[str, float]:
        assert self._run is not None
        readings = dict(self._advantage_readings)
        if self._token_counts:
            names = list(self._token_counts)
            totals = self._run.summed(torch.stack([self._token_counts[name].double() for name in names])).tolist()
            readings |= {f"rlstab/gepo/{name}": total for name, total in zip(names, totals, strict=True)}
            self._token_counts = {}
        readings["rlstab/gepo/gradient_is_finite"] = float(norms.is_finite)
        if self.guard is None:
            return readings
        limit = guard_limit(self.guard, self.state)
        readings |= {
            "rlstab/gepo/grad_norm_level": guard_level(self.state),
            "rlstab/gepo/skipped_steps": float(self.state.total_skips),
            "rlstab/gepo/skip_frac": self.state.skip_frac,
            "rlstab/gepo/releases": float(self.state.releases),
            "rlstab/gepo/dropped_micro_batches": float(dropped),
        }
        if math.isfinite(limit):
            readings["rlstab/gepo/grad_norm_limit"] = limit
        return readings

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The guard's memory, in plain types."""
        return {"guard": dataclasses.asdict(self.state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with a saved memory under the settings given now."""
        self.state = StepGuardState(**state_dict["guard"])

    def rewind(self, trainer: pl.Trainer, pl_module: pl.LightningModule, state: Mapping[str, Any]) -> None:
        """Take the running level back to a snapshot; counts of what happened stay."""
        saved, now = StepGuardState(**state["guard"]), self.state
        self.state = dataclasses.replace(
            saved,
            total_skips=now.total_skips,
            total_nonfinite=now.total_nonfinite,
            releases=now.releases,
            drifts=now.drifts,
            skip_frac=now.skip_frac,
            is_alarmed=now.is_alarmed,
        )
