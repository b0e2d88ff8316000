"""OPEFO: the optimizer's state is not a second trap, and there is always a way back."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.opefo_feedback import ResidualStore
from lightning_rlstab.callbacks.opefo_moments import SecondMomentFloor
from lightning_rlstab.callbacks.opefo_snapshots import (
    SnapshotKeeper,
    are_finite,
    optimizer_tensors,
    weight_versions,
    weights_are_finite,
)
from lightning_rlstab.callbacks.opefo_steps import StepLength
from lightning_rlstab.callbacks.run_context import RunContext, switched
from lightning_rlstab.control.interventions import GradientGuard, GradientRepairer, RolloutOwner, VoteBook
from lightning_rlstab.control.opefo import (
    ErrorFeedbackConfig,
    RecoveryState,
    SecondMomentConfig,
    SnapshotConfig,
    after_rollback,
    learning_rate_factor,
    step_recovery,
)
from lightning_rlstab.control.protocols import GradientNorms, PolicyModule, StepGate, Vote
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.rollout.records import Rollout

__all__ = ["OPEFO", "ErrorFeedbackConfig", "SecondMomentConfig", "SnapshotConfig"]

_log = logging.getLogger(__name__)


class OPEFO(pl.Callback):
    """A floor under Adam's second moments, error feedback of skipped gradients, snapshots with rollback.

    What it watches: the optimizer's state, gradients that guards leave out, and whether weights, state, loss and
    gradient are finite.

    When it acts: the floor every ``every_steps`` applied steps when too many second moments are tiny; feedback in the
    applied steps after a skip; a snapshot every ``every_steps`` applied steps of a healthy run; a rollback when
    something non-finite got past the guards, or when Adam has made a step longer than its formula allows at the
    schedule's learning rate: its second moments were spoilt, or the rate was.

    What it changes: tiny second moments are lifted, which only shortens steps; a skipped gradient is fed back in shares
    of 0.3, 0.3, 0.2, 0.2, rescaled to the gradient it is added to, after the guards have judged that gradient; a
    rollback puts weights, optimizer, schedules and the callbacks' memories back, sets the batch that caused it aside
    for good, and multiplies whatever learning rate the schedule says by 0.3 for 100 applied steps.
    ``trainer.global_step`` and the place in the data go on. With all three off the run is plain GRPO bit for bit.

    What it costs: one pass over the weights per optimizer step and a copy of 256 of each tensor; a pass over the second
    moments per look; one copy of the gradient per pending skip; one copy of the state per snapshot, written in the
    background.

    What survives a resume: residuals of every rank, the reduced learning rate, the prompts set aside, all counts.

    Put it after the guards (GradLoc, GEPO) in the list of callbacks.

    Args:
        second_moment: The floor; True for the defaults, False or None for off.
        error_feedback: Error feedback; likewise.
        snapshots: Snapshots and rollback; likewise.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        A field recipe; OPEFO is this package's working name for the layer (Optimizer-state Protection with Error
        Feedback Optimization).
    """

    def __init__(
        self,
        second_moment: SecondMomentConfig | bool | None = True,
        error_feedback: ErrorFeedbackConfig | bool | None = True,
        snapshots: SnapshotConfig | bool | None = True,
    ) -> None:
        moment_config = switched("second_moment", second_moment, SecondMomentConfig)
        feedback_config = switched("error_feedback", error_feedback, ErrorFeedbackConfig)
        self.second_moment = None if moment_config is None else SecondMomentFloor(moment_config)
        self.error_feedback = None if feedback_config is None else ResidualStore(feedback_config)
        self.snapshots = switched("snapshots", snapshots, SnapshotConfig)
        self.recovery = RecoveryState()
        self.keeper: SnapshotKeeper | None = None
        self.step_length = StepLength() if self.snapshots is not None and self.snapshots.has_length_check else None
        self._run: RunContext | None = None
        self._gate: StepGate | None = None
        self._reduced: list[tuple[dict[str, Any], Any]] = []
        self._hooks: list[Any] = []
        self._loss_is_broken: Tensor | None = None
        self._is_step_finite: bool | None = None
        self._checked_versions: int | None = None
        self._loaded: Mapping[str, Any] | None = None

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move behind every guard of the gradient: a guard must judge it before any is fed back.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        if stage != "fit" or self.error_feedback is None:
            return
        callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
        place = callbacks.index(self)
        guards = [index for index, callback in enumerate(callbacks) if isinstance(callback, GradientGuard)]
        if guards and guards[-1] > place:
            callbacks.insert(guards[-1] + 1, self)
            # A new list: Lightning is walking through the old one.
            trainer.callbacks = callbacks[:place] + callbacks[place + 1 :]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find gate and run folder, take over a saved memory, take the first snapshot."""
        self._run, self._gate = RunContext(trainer), step_gate(trainer, "OPEFO")
        self._loss_is_broken = self._is_step_finite = self._checked_versions = None
        if self.second_moment is not None:
            self.second_moment.refuse_unsuitable(trainer)
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._adopt(trainer, state)
        if self.snapshots is None:
            return
        self._hooks = [o.register_step_post_hook(self._release_learning_rate) for o in trainer.optimizers]
        self.keeper = SnapshotKeeper(self.snapshots, trainer, self._run)
        self.keeper.set_later_aside()
        if self.snapshots.at_start:
            steps = self.recovery.steps
            self._take_snapshot(trainer)
            self.recovery = dataclasses.replace(self.recovery, steps=steps)  # resuming must not move the rhythm

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the snapshot that is being written."""
        if self.keeper is not None:
            self.keeper.finish()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the optimizers; a run that raised still has its last snapshot written."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.keeper is not None:
            self.keeper.finish()
            self.keeper = None

    # Rollout ----------------------------------------------------------------------------------------------------------

    def on_rollout_scored(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> Rollout:
        """Keep prompts that were set aside out of the loss."""
        if not self.recovery.quarantine:
            return rollout
        aside = set(self.recovery.quarantine)
        is_aside = torch.tensor([name in aside for name in _fingerprints(rollout)], device=rollout.group_ids.device)
        if not bool(is_aside.any()):
            return rollout
        assert self._run is not None
        reason = f"{int(is_aside.sum())} completions of prompts set aside after a rollback stay out of the loss"
        self._run.event("quarantine", source="opefo", completions=int(is_aside.sum()), reason=reason)
        return rollout.replace(completion_mask=rollout.completion_mask & ~is_aside.unsqueeze(1))

    # Step -------------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """If anything has written to the weights, make sure that they can still be sampled from."""
        if self.snapshots is None or batch_idx % trainer.accumulate_grad_batches:
            return
        assert self._run is not None
        is_unchanged = self._checked_versions == weight_versions(trainer)
        if not self._run.agreed(is_unchanged or weights_are_finite(trainer)):
            # Nothing was trained since they were: no batch is to blame.
            self._roll_back(trainer, pl_module, "the weights were not finite before the step", has_culprit=False)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Note a loss that is not finite, without waiting for the device."""
        if self.snapshots is not None:
            is_broken = ~loss.detach().isfinite()
            self._loss_is_broken = is_broken if self._loss_is_broken is None else self._loss_is_broken | is_broken

    def on_gradient_dropped(self, trainer: pl.Trainer, pl_module: pl.LightningModule, norms: GradientNorms) -> None:
        """Keep a copy of the gradient that a guard leaves out; of a whole step's, what the first guard left of it."""
        if self.error_feedback is not None and not self._is_voted_down():
            self.error_feedback.capture(trainer, norms)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep what is not finite away from the optimizer; feed back what is due; reduce the learning rate."""
        assert self._gate is not None
        norms = self._gate.gradient_norms()
        broken, self._loss_is_broken = self._loss_is_broken, None
        is_loss_finite = broken is None or not bool(broken) or _is_repaired(trainer)
        self._is_step_finite = norms.is_finite and is_loss_finite
        is_skipped = not self._is_step_finite or self._is_voted_down()
        if self.error_feedback is not None:
            is_left = not self.error_feedback.has_captured and not _is_spoilt(trainer)
            if is_skipped and is_left and is_loss_finite:
                self.error_feedback.capture(trainer, norms)
            elif not is_skipped:
                self.error_feedback.feed(trainer, norms)
        if not self._is_step_finite:
            reason = f"{'the loss' if norms.is_finite else 'the gradient'} is not finite"
            if not self._is_voted_down():
                assert self._run is not None
                self._run.event("skip", source="opefo", scope="step", norm=norms.total, reason=reason)
            self._gate.vote(Vote(source="opefo", action="skip", reason=reason))
        if self.step_length is not None:
            self.step_length.begin(trainer)
        if self.snapshots is not None:
            factor = learning_rate_factor(self.snapshots, self.recovery)
            if factor != 1.0:
                for each in trainer.optimizers:
                    for group in each.param_groups:
                        self._reduced.append((group, group["lr"]))
                        group["lr"] = group["lr"] * factor

    def _is_voted_down(self) -> bool:
        votes: Sequence[Vote] = self._gate.pending_votes if isinstance(self._gate, VoteBook) else ()
        return any(vote.action != "apply" for vote in votes)

    def _release_learning_rate(self, *_: Any) -> None:
        # Before the schedule moves: schedules that go on from the current value must see their own.
        for group, usual in self._reduced:
            group["lr"] = usual
        self._reduced.clear()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step; lift, save or go back where it is time."""
        self._release_learning_rate()  # a skipped step never reached the optimizer's own hook
        if self._is_step_finite is None:
            return
        assert self._gate is not None
        assert self._run is not None
        is_finite, self._is_step_finite = self._run.agreed(self._is_step_finite), None
        verdict = self._gate.last_verdict
        was_applied = verdict is None or verdict.action == "apply"
        if self.error_feedback is not None:
            self.error_feedback.end_step(self._run, was_applied=was_applied)
        if self.second_moment is not None and was_applied:
            self.second_moment.after_applied_step(trainer, self._run)
        if self.snapshots is not None:
            self._after_step(trainer, pl_module, was_applied=was_applied, is_finite=is_finite)
        if self._run.is_log_due:
            self._run.log(self._readings())

    def _after_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, was_applied: bool, is_finite: bool
    ) -> None:
        assert self.snapshots is not None
        assert self._run is not None
        was_recovering = self.recovery.recovery_left > 0
        self.recovery, due = step_recovery(self.snapshots, self.recovery, was_applied=was_applied, is_finite=is_finite)
        if was_recovering and not self.recovery.recovery_left:
            self._run.event("controller", source="opefo", name="learning_rate", reason="released after recovery")
        is_too_long = was_applied and self.step_length is not None and self.step_length.is_too_long()
        are_weights_finite = weights_are_finite(trainer)
        is_healthy = self._run.agreed(are_weights_finite and not is_too_long)
        self._checked_versions = weight_versions(trainer)
        if not is_healthy:
            is_finite = self._run.agreed(are_weights_finite)
            reason = "a step was longer than Adam can make it at the schedule's learning rate"
            self._roll_back(trainer, pl_module, reason if is_finite else "the weights are not finite")
        elif due == "roll back":
            count = self.recovery.nonfinite_steps
            self._roll_back(trainer, pl_module, f"{count} steps in a row had a loss or gradient that is not finite")
        elif due == "snapshot":
            self._take_snapshot(trainer)
        elif not is_finite and not self._run.agreed(are_finite(optimizer_tensors(trainer))):
            self._roll_back(trainer, pl_module, "the optimizer's state is not finite")

    # Snapshots and rollback -------------------------------------------------------------------------------------------

    def _take_snapshot(self, trainer: pl.Trainer) -> None:
        assert self.keeper is not None
        assert self._run is not None
        is_healthy = weights_are_finite(trainer) and are_finite(optimizer_tensors(trainer))
        if not self._run.agreed(is_healthy):
            self.recovery = dataclasses.replace(self.recovery, steps=0, refused=self.recovery.refused + 1)
            reason = "weights or optimizer state are not finite: no snapshot of a sick state"
            self._run.event("snapshot", source="opefo", is_taken=False, reason=reason)
            if trainer.training and trainer.global_step:
                self._roll_back(trainer, trainer.lightning_module, "weights or optimizer state are not finite")
            return
        self.recovery = dataclasses.replace(self.recovery, steps=0, snapshots=self.recovery.snapshots + 1)
        path = self.keeper.take()
        self._run.event("snapshot", source="opefo", is_taken=True, path=str(path), reason="healthy")

    def _roll_back(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, reason: str, *, has_culprit: bool = True
    ) -> None:
        assert self.snapshots is not None
        assert self.keeper is not None
        assert self._run is not None
        if self.recovery.rollbacks >= self.snapshots.max_rollbacks:
            self._give_up(f"{reason}, after {self.recovery.rollbacks} rollbacks (`max_rollbacks`)")
        gate = trainer.strategy if isinstance(trainer.strategy, StepGate) else None
        counts = None if gate is None else (gate.applied_steps, gate.skipped_steps)
        path = self.keeper.restore(pl_module, besides=self)
        if gate is not None and counts is not None:
            gate.applied_steps, gate.skipped_steps = (
                counts  # the checkpoint brought its own: what happened has happened
            )
        if path is None:
            self._give_up(f"{reason}, and there is no snapshot to go back to")
        own = _window_fingerprints(pl_module) if has_culprit else ()
        everyone = tuple(name for names in self._run.per_rank(list(own)) for name in names)
        self.recovery = after_rollback(self.snapshots, self.recovery, everyone)
        if isinstance(pl_module, RolloutOwner):
            pl_module.discard_rollout()
        if self.error_feedback is not None:
            self.error_feedback.clear()
        self._loss_is_broken = self._is_step_finite = None
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        is_over = all(float(rate) == 0.0 for rate in rates)
        note = "; the schedule's learning rate is 0, so no further learning can happen" if is_over else ""
        self._run.event(
            "rollback", source="opefo", path=str(path), number=self.recovery.rollbacks, reason=reason + note
        )
        if everyone:
            self._run.event("quarantine", source="opefo", prompts=len(everyone), reason="their batch went before it")
        if trainer.is_global_zero:
            _log.warning(
                "OPEFO, step %d: %s: rolled back to %s, learning rate x%g for %d steps%s.",
                trainer.global_step,
                reason,
                Path(path or "").name,
                self.snapshots.recovery_factor,
                self.snapshots.recovery_steps,
                note,
            )

    def _give_up(self, reason: str) -> None:
        assert self._run is not None
        assert self.keeper is not None
        self.keeper.finish()
        self._run.event("stop", source="opefo", reason=reason)
        raise RuntimeError(
            f"OPEFO stopped the run: {reason}. Something makes it fail again and again: read events.jsonl, look at the "
            f"batches that were set aside, and resume from {self.keeper.folder} with a lower learning rate."
        )

    def _readings(self) -> dict[str, float]:
        readings: dict[str, float] = {}
        if self.second_moment is not None:
            readings |= self.second_moment.readings()
        if self.error_feedback is not None:
            readings |= self.error_feedback.readings()
        if self.snapshots is not None:
            readings["rlstab/opefo/snapshots"] = float(self.recovery.snapshots)
            readings["rlstab/opefo/snapshots_refused"] = float(self.recovery.refused)
            readings["rlstab/opefo/rollbacks"] = float(self.recovery.rollbacks)
            if self.step_length is not None:
                readings["rlstab/opefo/step_length_frac"] = self.step_length.last_frac
            readings["rlstab/opefo/lr_factor"] = learning_rate_factor(self.snapshots, self.recovery)
            readings["rlstab/opefo/quarantined_prompts"] = float(len(self.recovery.quarantine))
        return readings

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All memories in plain types and CPU tensors; a collective on several ranks, for the pieces differ."""
        if self._run is None:
            return dict(self._loaded or {})
        feedback = self.error_feedback
        return {
            "second_moment": None if self.second_moment is None else self.second_moment.state_dict(),
            "error_feedback": None if feedback is None else self._run.per_rank(feedback.state_dict()),
            "recovery": dataclasses.asdict(self.recovery),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a saved memory until the run starts and its ranks are known."""
        self._loaded = state_dict

    def _adopt(self, trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
        if self.second_moment is not None and state.get("second_moment") is not None:
            self.second_moment.load_state_dict(state["second_moment"])
        if self.error_feedback is not None and state.get("error_feedback") is not None:
            self.error_feedback.load_state_dict(state["error_feedback"], trainer)
        if state.get("recovery") is not None:
            quarantine = tuple(state["recovery"]["quarantine"])
            self.recovery = RecoveryState(**{**state["recovery"], "quarantine": quarantine})


def _repairers(trainer: pl.Trainer) -> list[GradientRepairer]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, GradientRepairer)]


def _is_repaired(trainer: pl.Trainer) -> bool:
    """Whether a callback has taken what spoilt the loss out of this step's gradient."""
    return any(each.has_repaired_step for each in _repairers(trainer))


def _is_spoilt(trainer: pl.Trainer) -> bool:
    """Whether a callback has found this step's gradient bad as a whole."""
    return any(each.is_step_spoilt for each in _repairers(trainer))


def _fingerprints(rollout: Rollout) -> list[str]:
    """One name per completion that depends on nothing but its prompt's tokens."""
    rows = zip(rollout.prompt_ids.cpu(), rollout.prompt_mask.cpu(), strict=True)
    return [hashlib.blake2b(row[mask].numpy().tobytes(), digest_size=12).hexdigest() for row, mask in rows]


def _window_fingerprints(pl_module: pl.LightningModule) -> tuple[str, ...]:
    """The prompts of the optimizer step that is running or has just ended."""
    if not isinstance(pl_module, PolicyModule):
        return ()
    found = (name for entry in pl_module.window for name in _fingerprints(entry.rollout))
    return tuple(dict.fromkeys(found))
