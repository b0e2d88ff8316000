"""QUATRO: four mechanisms around the loop of sampling and learning from oneself."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.quatro_filter import RolloutScreen
from lightning_rlstab.callbacks.quatro_replay import GroupReplay
from lightning_rlstab.callbacks.run_context import RunContext, switched
from lightning_rlstab.control.protocols import StepGate, Vote
from lightning_rlstab.control.quatro import (
    EntropyFloorConfig,
    EntropyFloorState,
    KLAnchorConfig,
    KLAnchorState,
    KLReading,
    entropy_floor,
    entropy_mean,
    step_entropy_floor,
    step_kl_anchor,
)
from lightning_rlstab.control.replay import ReplayConfig
from lightning_rlstab.control.rollout_filter import RolloutFilterConfig
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.core.kl import kl_k3
from lightning_rlstab.core.policy_loss import LossInputs, LossSettings
from lightning_rlstab.core.quatro import replayed_old_logprobs
from lightning_rlstab.rollout.records import Rollout

__all__ = ["QUATRO", "EntropyFloorConfig", "KLAnchorConfig", "ReplayConfig", "RolloutFilterConfig"]

_log = logging.getLogger(__name__)

_READINGS = ("kl_capped_sum", "kl_over_cap", "entropy_sum", "tokens")


class QUATRO(pl.Callback):
    """Replay of recent groups, a KL anchor, an entropy floor and a rollout filter; each can be switched off.

    What it watches: scored rollouts, and the KL and the entropy of every training token.

    When it acts: the filter and replay at every rollout; the anchor every ``every_steps`` applied steps; the floor when
    the rolling mean entropy comes down to it.

    What it changes: completions that cannot be trusted, and groups that teach nothing, leave the loss by mask, and the
    normaliser counts what is kept; about 30 % of the groups are recent old ones with their own sampling log-probs;
    ``beta`` moves within its bounds; under the floor the loss gets an entropy bonus and a narrower clip range. With all
    four off the run is plain GRPO bit for bit.

    What it costs: one small gather per rollout and one per step; the buffer lies on the CPU.

    The KL is measured against the module's reference model: the first policy, or a recent one. With the module's
    ``sync_ref_model=True, ref_model_sync_steps=500, ref_model_mixup_alpha=1.0`` it is at most 500 steps old.

    What survives a resume: buffer and draws of every rank, both coefficients with their averages, the filter's windows.

    Args:
        replay: Replay; True for the defaults, False or None for off.
        kl: The KL anchor; ``"auto"`` is on when the module has a KL term (``beta`` above 0).
        entropy: The entropy floor.
        filter: The rollout filter.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        A field recipe; QUATRO is this package's working name for the layer. Another method carries the name as well:
        arXiv 2602.04620.
    """

    def __init__(
        self,
        replay: ReplayConfig | bool | None = True,
        kl: KLAnchorConfig | bool | Literal["auto"] | None = "auto",
        entropy: EntropyFloorConfig | bool | None = True,
        filter: RolloutFilterConfig | bool | None = True,
    ) -> None:
        replay_config = switched("replay", replay, ReplayConfig)
        filter_config = switched("filter", filter, RolloutFilterConfig)
        self.replay = None if replay_config is None else GroupReplay(replay_config)
        self.screen = None if filter_config is None else RolloutScreen(filter_config)
        self.is_kl_optional = isinstance(kl, str)
        if isinstance(kl, str) and kl != "auto":
            raise refusal("kl", "be a KLAnchorConfig, true, false or 'auto'", kl)
        self.kl = switched("kl", self.is_kl_optional or kl, KLAnchorConfig)
        self.entropy = switched("entropy", entropy, EntropyFloorConfig)
        self.kl_state: KLAnchorState | None = None
        self.entropy_state = EntropyFloorState()
        self._run: RunContext | None = None
        self._gate: StepGate | None = None
        self._base: LossSettings | None = None
        self._sums: dict[str, Tensor] = {}
        self._step: dict[str, float] | None = None
        self._loaded: Mapping[str, Any] | None = None

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts, and a KL anchor without anything to move.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        if stage != "fit":
            return
        settings = getattr(pl_module, "loss_settings", None)
        if not isinstance(settings, LossSettings):
            advice = "Train a GRPOModule"
            raise refusal("QUATRO", "run with a module that makes rollouts", type(pl_module).__name__, advice)
        if self.kl is None:
            return
        if settings.beta == 0.0 and self.is_kl_optional:
            _log.info("QUATRO: the KL anchor is off, because `beta` is 0 and there is no reference model.")
            self.kl = None
        elif settings.beta == 0.0:
            advice = "Set `beta` to 0.04, or switch the anchor off with QUATRO(kl=False)"
            raise refusal("beta", "be above 0 for QUATRO(kl)", settings.beta, advice)
        elif not self.kl.coef_min <= settings.beta <= self.kl.coef_max:
            rule = f"lie within `kl.coef_min` and `kl.coef_max` ({self.kl.coef_min} to {self.kl.coef_max})"
            raise refusal("beta", rule, settings.beta, "Change the bounds or the start")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find gate and run folder, take over a saved memory, put the coefficients into the loss."""
        self._run, self._gate = RunContext(trainer), step_gate(trainer, "QUATRO")
        self._base = pl_module.loss_settings  # type: ignore[assignment]
        assert self._base is not None
        self._sums, self._step = {}, None
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._adopt(trainer, state)
        if self.kl is not None and self.kl_state is None:
            self.kl_state = KLAnchorState(coef=self._base.beta)
        self._apply(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own loss settings back."""
        if stage == "fit" and self._base is not None:
            pl_module.loss_settings = self._base  # type: ignore[assignment]

    def _apply(self, pl_module: pl.LightningModule) -> None:
        """Write the coefficients into the loss; without any change the settings stay the very same object."""
        assert self._base is not None
        changes: dict[str, Any] = {}
        if self.kl is not None and self.kl_state is not None:
            changes["beta"] = self.kl_state.coef
        if self.entropy is not None and self.entropy_state.is_active:
            changes["entropy_coef"] = self._base.entropy_coef + self.entropy_state.coef
            changes["epsilon"] = self._base.epsilon * self.entropy.epsilon_factor
            if self._base.loss_type != "cispo":  # there epsilon_high is the cap itself, not a distance from 1
                changes["epsilon_high"] = self._base.clip_epsilon_high * self.entropy.epsilon_factor
        pl_module.loss_settings = dataclasses.replace(self._base, **changes) if changes else self._base  # type: ignore[assignment]

    # Rollout and loss -------------------------------------------------------------------------------------------------

    def on_rollout_scored(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> Rollout:
        """Leave out what cannot be trusted or teaches nothing."""
        if self.screen is None:
            return rollout
        assert self._run is not None
        return self.screen.screened(self._run, rollout)

    def on_rollout_ready(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> Rollout:
        """Mix old groups in, and correct the normalisers for what was left out or exchanged."""
        assert self._run is not None
        assert self._base is not None
        if self.replay is not None:
            rollout = self.replay.mixed(
                self._run, rollout, step=trainer.global_step, micro_batches=self._base.steps_per_generation
            )
            # Unconditional: whether this rank found old groups to mix in is not known on the others.
            rollout = rollout.replace(num_items=float(self._run.summed(rollout.completion_mask.sum())))
        if self.screen is not None:
            rollout = self.screen.rescaled(self._run, rollout, self._base.loss_type)
        return rollout

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, inputs: LossInputs) -> LossInputs:
        """Give fresh rows of a mixed batch their own log-probs as old ones; add up KL and entropy on the device."""
        if self.replay is not None and inputs.old_logprobs is not None:
            inputs = dataclasses.replace(
                inputs, old_logprobs=replayed_old_logprobs(inputs.old_logprobs, inputs.logprobs)
            )
        if self.kl is None and self.entropy is None and self.screen is None:
            return inputs
        with torch.no_grad():
            mask = inputs.completion_mask.bool()
            found = {"tokens": mask.sum().double()}
            if self.entropy is not None:
                found["entropy_sum"] = torch.where(mask, inputs.entropy.detach().double(), 0.0).sum()
            if self.kl is not None and inputs.reference_logprobs is not None:
                kl = kl_k3(inputs.logprobs.detach(), inputs.reference_logprobs)
                cap = self.kl.token_cap
                found["kl_capped_sum"] = torch.where(mask, kl.double().nan_to_num(nan=cap).clamp(max=cap), 0.0).sum()
                found["kl_over_cap"] = (mask & (kl > cap)).sum().double()
            for name, value in found.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value
        return inputs

    # Step -------------------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Merge the step's readings over ranks; a step without a single token does nothing at all."""
        assert self._run is not None
        assert self._gate is not None
        sums, self._sums = self._sums, {}
        if not sums:
            self._step = {}
            return
        zero = torch.zeros_like(sums["tokens"])
        packed = torch.stack([sums.get(name, zero) for name in _READINGS])
        self._step = dict(zip(_READINGS, self._run.summed(packed).tolist(), strict=True))
        if self.screen is None:
            return
        if self.screen.is_hopeless:
            reason = f"nothing was left to learn from in {self.screen.state.idle_rollouts} rollouts in a row"
            self._run.event("stop", source="quatro", reason=reason)
            self._gate.vote(Vote(source="quatro", action="stop", reason=reason))
        elif self._step["tokens"] == 0:
            reason = "everything in this step was filtered out"
            self._run.event("skip", source="quatro", scope="step", reason=reason)
            self._gate.vote(Vote(source="quatro", action="skip", reason=reason))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the controllers after an applied step, and log."""
        if self._step is None:
            return
        assert self._run is not None
        assert self._gate is not None
        step, self._step = self._step, None
        verdict = self._gate.last_verdict
        if (verdict is None or verdict.action == "apply") and step.get("tokens"):
            self._move_kl(step)
            self._move_entropy(step["entropy_sum"] / step["tokens"])
            self._apply(pl_module)
        if self._run.is_log_due:
            self._run.log(self._readings(step))

    def _move_kl(self, step: Mapping[str, float]) -> None:
        if self.kl is None or self.kl_state is None:
            return
        assert self._run is not None
        before = self.kl_state.coef
        reading = KLReading(capped_sum=step["kl_capped_sum"], tokens=step["tokens"])
        self.kl_state = step_kl_anchor(self.kl, self.kl_state, reading)
        if self.kl_state.coef != before:
            self._run.event(
                "controller",
                source="quatro",
                name="kl",
                before=before,
                after=self.kl_state.coef,
                reason=f"mean KL {self.kl_state.last_kl:.4g} against a target of {self.kl.target:g}",
            )

    def _move_entropy(self, entropy: float) -> None:
        if self.entropy is None:
            return
        assert self._run is not None
        before, after = self.entropy_state, step_entropy_floor(self.entropy, self.entropy_state, entropy)
        self.entropy_state = after
        floor, mean = entropy_floor(self.entropy, after), entropy_mean(after)
        words = f"mean entropy {mean:.4g}, floor {floor:.4g}" if floor is not None else ""
        if after.is_active != before.is_active:
            state = "on" if after.is_active else "off"
            self._run.event("controller", source="quatro", name="entropy", reason=f"bonus {state}: {words}")
        if after.is_exploding and not before.is_exploding:
            reason = f"entropy is above {self.entropy.ceiling_frac:g} times its start: {words}"
            self._run.event("alarm", source="quatro", name="entropy", reason=reason)
            _log.warning("QUATRO: %s", reason)

    def _readings(self, step: Mapping[str, float]) -> dict[str, float]:
        readings: dict[str, float] = {}
        if self.replay is not None:
            readings |= self.replay.readings()
        if self.screen is not None:
            readings |= self.screen.readings()
        if self.kl is not None and self.kl_state is not None and step.get("tokens"):
            readings["rlstab/quatro/kl_coef"] = self.kl_state.coef
            readings["rlstab/quatro/kl_capped"] = step["kl_capped_sum"] / step["tokens"]
            readings["rlstab/quatro/kl_tokens_over_cap"] = step["kl_over_cap"]
        if self.entropy is not None:
            readings["rlstab/quatro/entropy_coef"] = self.entropy_state.coef
            mean, floor = entropy_mean(self.entropy_state), entropy_floor(self.entropy, self.entropy_state)
            if mean is not None:
                readings["rlstab/quatro/entropy_mean"] = mean
            if floor is not None:
                readings["rlstab/quatro/entropy_floor"] = floor
        return readings

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All memories in plain types and CPU tensors; a collective on several ranks, for the buffers differ."""
        if self._run is None:
            return dict(self._loaded or {})
        return {
            "kl": None if self.kl_state is None else dataclasses.asdict(self.kl_state),
            "entropy": dataclasses.asdict(self.entropy_state),
            "filter": None if self.screen is None else self.screen.state_dict(),
            "replay": None if self.replay is None else self._run.per_rank(self.replay.state_dict()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a saved memory until the run starts and its ranks are known."""
        self._loaded = state_dict

    def rewind(self, trainer: pl.Trainer, pl_module: pl.LightningModule, state: Mapping[str, Any]) -> None:
        """Go back to a snapshot's memory, and put its coefficients into the loss."""
        self._adopt(trainer, state)
        self._sums, self._step = {}, None
        self._apply(pl_module)

    def _adopt(self, trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
        if self.kl is not None and state.get("kl") is not None:
            saved = KLAnchorState(**state["kl"])
            coef = min(max(saved.coef, self.kl.coef_min), self.kl.coef_max)  # the bounds of now
            self.kl_state = dataclasses.replace(saved, coef=coef)
        if state.get("entropy") is not None:
            recent = tuple(state["entropy"]["recent"])
            self.entropy_state = EntropyFloorState(**{**state["entropy"], "recent": recent})
        if self.screen is not None and state.get("filter") is not None:
            self.screen.load_state_dict(state["filter"])
        if self.replay is not None and state.get("replay") is not None:
            self.replay.load_state_dict(state["replay"], rank=trainer.global_rank, world_size=trainer.world_size)
