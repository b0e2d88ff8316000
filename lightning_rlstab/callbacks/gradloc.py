"""GradLoc: name the token and the layer that made a gradient spike, remove the cause, go on."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_rlstab.callbacks.gradloc_oracle import NormReader, StepOracle
from lightning_rlstab.callbacks.run_context import RunContext, tell_dropped
from lightning_rlstab.control.gradloc import TriggerConfig, TriggerReading, TriggerState, spike_threshold, trigger_step
from lightning_rlstab.control.plain_probe import probe_and_norms
from lightning_rlstab.control.protocols import GradientProbe, TokenSource, Vote
from lightning_rlstab.control.stock_gate import step_gate
from lightning_rlstab.core.checks import choice, refusal
from lightning_rlstab.gradloc.attribution import layer_shares
from lightning_rlstab.gradloc.finding import Finding
from lightning_rlstab.gradloc.ladder import LadderSettings, localized
from lightning_rlstab.gradloc.wording import event_fields

__all__ = ["GradLoc"]

_log = logging.getLogger(__name__)

_CONTEXT_TOKENS = 8  # shown on either side of a culprit

Action = Literal["remove", "report", "skip", "stop"]


class GradLoc(pl.Callback):
    """Find what made a gradient spike, over all micro-batches and ranks, and take it out of the step.

    What it watches: the complete, reduced gradient before each optimizer step, before clipping.

    When it acts: the norm is above tau_token / sqrt(loss tokens), or not finite. tau_token is given, or learned from
    the run as ``trigger_factor`` times its running median.

    What it changes: with ``action="remove"`` the culprits' gradient is subtracted and the clean rest applied, if that
    is back under the threshold; else the step is skipped. ``"skip"`` drops the culprits' micro-batches, ``"stop"``
    ends the run, ``"report"`` changes nothing, to the bit. A level that stays high with nobody to blame is accepted
    after ``max_unresolved_steps`` skipped steps in a row.

    What it costs: dormant, one look at the norm per step and, in the forward, the length of each last hidden state. On
    a spike of a few tokens one backward of each one's sequence, so less than 0.2 of a forward+backward sweep in a step
    of 32 sequences; on others a forward sweep more. Two more copies of the gradient while it lasts, and one more sweep
    when the culprit dwarfs the rest so much that subtracting it would leave only rounding.

    What survives a resume: the running level, each layer's usual share, and the counts.

    Put it before GEPO and OPEFO in the list of callbacks: then they see the step without the culprits. A micro-batch
    that a guard drops while it is staged is searched all the same, and its clean part is given back to the step.

    Args:
        trigger: Threshold of one token's gradient, tau_token > 0; None learns it from the run.
        search: ``"auto"``: forward flags, masked backwards of the tokens that head norms point to, the shares of all
            tokens where these do not explain the spike, and bisection when their check fails; ``"directional"``: always
            the shares, never bisection; ``"bisect"``: the reference search alone.
        action: ``"remove"``, ``"report"``, ``"skip"`` or ``"stop"``.
        top_k: Culprits named at most.
        probe_budget: Masked backward passes allowed per spike, beside one per micro-batch when it comes to bisection.
        trigger_factor: How many times the running level makes a spike, > 1.
        min_norm: A finite norm at or under this never triggers while the level is learned.
        warmup_steps: Steps before a learned level is trusted.
        max_unresolved_steps: Spikes in a row without a culprit after which the level counts as changed.
        culprit_frac: A token is a culprit when its own gradient reaches this fraction of the threshold, in (0, 1].

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        Gradient Anomaly Localizer, Tencent Hunyuan, "Stabilizing RLVR via Token-level Gradient Diagnosis and Layerwise
        Clipping" (2026): the reference search. The forward tiers and the removal are this package's.
    """

    needs_token_signals = True
    guards_gradient = True

    def __init__(
        self,
        trigger: float | None = None,
        search: Literal["auto", "directional", "bisect"] = "auto",
        action: Action = "remove",
        top_k: int = 8,
        probe_budget: int = 64,
        *,
        trigger_factor: float = 5.0,
        min_norm: float = 1.0,
        warmup_steps: int = 10,
        max_unresolved_steps: int = 5,
        culprit_frac: float = 0.25,
    ) -> None:
        choice("action", action, ("remove", "report", "skip", "stop"))
        self.action: Action = action
        self.config = TriggerConfig(
            tau_token=trigger,
            factor=trigger_factor,
            min_norm=min_norm,
            warmup_steps=warmup_steps,
            max_unresolved_steps=max_unresolved_steps,
        )
        self.ladder = LadderSettings(search=search, top_k=top_k, probe_budget=probe_budget, culprit_frac=culprit_frac)
        self.state = TriggerState()
        self.last_finding: Finding | None = None
        self.has_repaired_step = self.is_step_spoilt = False
        self._run: RunContext | None = None
        self._pending: dict[str, float] | None = None
        self._probe: GradientProbe | None = None
        self._read_norms: NormReader | None = None

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a module or a strategy that the search cannot work with.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        if not isinstance(pl_module, TokenSource):
            advice = "Train a GRPOModule"
            raise refusal("GradLoc", "run with a module that keeps its window", type(pl_module).__name__, advice)
        if not isinstance(trainer.strategy, GradientProbe) and trainer.world_size > 1:
            raise refusal(
                "strategy",
                "offer probes while GradLoc runs on several processes",
                type(trainer.strategy).__name__,
                'Use strategy="rlstab_ddp" or "rlstab_fsdp"',
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the probe and the run folder."""
        self._run = RunContext(trainer)
        self._probe, self._read_norms = probe_and_norms(trainer, pl_module)

    # The step ---------------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at the complete gradient; on a spike, search and act."""
        assert self._read_norms is not None
        self.has_repaired_step = self.is_step_spoilt = False
        policy: Any = pl_module
        tokens = _window_tokens(pl_module, trainer)
        norms = self._read_norms()
        threshold = spike_threshold(self.config, self.state, tokens)
        is_spike = not norms.is_finite or (threshold is not None and norms.total > threshold)
        readings: dict[str, float] = {} if threshold is None else {"rlstab/gradloc/threshold": threshold}
        dropped = [entry.is_dropped for entry in policy.window]
        if not is_spike or all(dropped):
            shares = dict(layer_shares(norms.per_layer))
            reading = TriggerReading(norm=norms.total, window_tokens=tokens, layer_shares=shares)
            self.state = trigger_step(self.config, self.state, reading)
        else:
            readings |= self._answer(trainer, pl_module, tokens, math.inf if threshold is None else threshold)
        if any(dropped):
            readings |= self._answer_dropped(trainer, pl_module, tokens, math.inf if threshold is None else threshold)
        assert self._run is not None
        if len(readings) > 1 or self._run.is_log_due:
            self._pending = {**readings, "rlstab/gradloc/spikes": float(self.state.spikes)}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the curves of the step that ended: at the Trainer's interval, and after every spike."""
        if self._pending is not None:
            assert self._run is not None
            self._run.log(self._pending)
            self._pending = None

    def _answer(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, tokens: float, threshold: float
    ) -> dict[str, float]:
        """Search the step's gradient and act on it."""
        with self._oracle(trainer, pl_module, is_of_dropped=False) as oracle:
            finding = self._found(oracle, tokens, threshold)
            done, norm = self._act(finding, oracle)
        self.has_repaired_step = done in ("removed", "micro-batch skipped")
        self._remember(finding, tokens, norm)
        summary = self._report(trainer, pl_module, finding, oracle, done)
        # A layer that explodes on every token, or a mismatch of all of them, leaves no part that could be fed back.
        self.is_step_spoilt = done == "skipped" and finding.verdict in ("layer", "systematic")
        if done == "skipped" and not self.is_step_spoilt:
            # Whoever keeps skipped gradients may look: the culprits are out of this one where they could be.
            assert self._read_norms is not None
            tell_dropped(trainer, pl_module, self._read_norms())
        self._vote(trainer, done, summary)
        return _readings(finding, self.state)

    def _answer_dropped(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, tokens: float, threshold: float
    ) -> dict[str, float]:
        """Search micro-batches that another guard dropped whole, and give their clean part back to the step."""
        policy: Any = pl_module
        is_step_left = not all(entry.is_dropped for entry in policy.window)
        with self._oracle(trainer, pl_module, is_of_dropped=True) as oracle:
            finding = self._found(oracle, tokens, threshold)
            done = "stopped" if self.action == "stop" else "dropped"
            if self.action == "remove" and finding.is_removal_enough and is_step_left:
                oracle.install_remaining()
                done, self.has_repaired_step = "removed", True
        reading = TriggerReading(norm=None, window_tokens=tokens, layer_shares={}, is_spike=True)
        self.state = trigger_step(self.config, self.state, reading)
        self._vote(trainer, done, self._report(trainer, pl_module, finding, oracle, done))
        return _readings(finding, self.state)

    def _oracle(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, is_of_dropped: bool) -> StepOracle:
        assert self._probe is not None
        assert self._read_norms is not None
        precision, policy = trainer.precision_plugin, cast(Any, pl_module)
        return StepOracle(
            policy,
            self._probe,
            self._read_norms,
            rank=trainer.global_rank,
            temperature=policy.settings.temperature,
            training_context=precision.forward_context,
            is_full_precision=str(precision.precision).startswith(("32", "64")),
            is_of_dropped=is_of_dropped,
        )

    def _found(self, oracle: StepOracle, tokens: float, threshold: float) -> Finding:
        self.last_finding = localized(
            oracle,
            threshold=threshold,
            tau_token=threshold * math.sqrt(max(tokens, 1.0)),
            settings=self.ladder,
            usual_layers=dict(self.state.usual_layers) or None,
        )
        return self.last_finding

    def _act(self, finding: Finding, oracle: StepOracle) -> tuple[str, float | None]:
        """What is done, and the norm of the gradient that will be applied (None when none is)."""
        if self.action == "report":
            return "reported", finding.grad_norm
        if self.action == "stop":
            return "stopped", None
        if self.action == "skip" and finding.culprits:
            spoiled = {culprit.address.micro_batch for culprit in finding.culprits}
            dropped = torch.zeros_like(oracle.signals.mask)
            dropped[sorted(spoiled)] = oracle.signals.mask[sorted(spoiled)]
            if bool((oracle.signals.mask & ~dropped).any()):
                norm = oracle.rebuild_without(dropped)
                if norm <= finding.threshold:
                    oracle.install_remaining()
                    return "micro-batch skipped", norm
        if self.action == "remove" and finding.is_removal_enough:
            oracle.install_remaining()
            return "removed", finding.remaining_norm
        if finding.culprits and finding.remaining_norm is not None and math.isfinite(finding.remaining_norm):
            # The step will be skipped; whoever keeps its gradient for later must not keep the culprits.
            oracle.install_remaining()
        return "skipped", None

    def _remember(self, finding: Finding, tokens: float, norm: float | None) -> None:
        is_unresolved = norm is None and math.isfinite(finding.grad_norm)
        # A reported spike is applied, but it must not raise the bar for the next one.
        level = norm if norm is not None and norm <= finding.threshold else None
        reading = TriggerReading(
            norm=level, window_tokens=tokens, layer_shares={}, is_spike=True, is_unresolved=is_unresolved
        )
        releases = self.state.releases
        self.state = trigger_step(self.config, self.state, reading)
        if self.state.releases > releases:
            _log.warning("GradLoc: the gradient norm stays high with nobody to blame; its level is learned anew.")

    def _report(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, finding: Finding, oracle: StepOracle, done: str
    ) -> str:
        """Write the event on rank 0; the summary in words is the same on every rank."""
        decode = _decoder(pl_module)
        fields = event_fields(finding, oracle.signals, action=done, decode=decode, context_tokens=_CONTEXT_TOKENS)
        summary = str(fields["summary"])
        if not trainer.is_global_zero:
            return summary
        assert self._run is not None
        self._run.event("spike", **fields)
        _log.warning("GradLoc, step %d: %s", trainer.global_step, summary)
        for logger in trainer.loggers:
            writer = getattr(logger, "experiment", None)
            if writer is not None and hasattr(writer, "add_text"):
                writer.add_text("rlstab/gradloc/spike", summary, trainer.global_step)
        return summary

    def _vote(self, trainer: pl.Trainer, done: str, reason: str) -> None:
        actions: dict[str, Literal["skip", "stop"]] = {"skipped": "skip", "stopped": "stop"}
        action = actions.get(done)
        if action is not None:
            step_gate(trainer, "GradLoc").vote(Vote(source="gradloc", action=action, reason=reason))

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return asdict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the memory; the settings stay those of this run.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        layers = tuple((str(name), float(share)) for name, share in state_dict["usual_layers"])
        self.state = TriggerState(**{**state_dict, "levels": tuple(state_dict["levels"]), "usual_layers": layers})


def _window_tokens(pl_module: Any, trainer: pl.Trainer) -> float:
    """Loss tokens of this optimizer step over all ranks, without a collective: the rollout knows its own number."""
    window = pl_module.window
    items = window[0].rollout.num_items
    if items is not None:
        return float(items) * len(window) / float(pl_module.loss_settings.steps_per_generation)
    own = sum(float(entry.rollout.completion_mask.sum()) for entry in window)
    return own * trainer.world_size


def _decoder(pl_module: Any) -> Any:
    return lambda ids: str(pl_module.processing_class.decode(list(ids))) if len(ids) else ""


def _readings(finding: Finding, state: TriggerState) -> dict[str, float]:
    readings = {
        "rlstab/gradloc/culprits": float(len(finding.culprits)),
        "rlstab/gradloc/tier": float(finding.tier),
        "rlstab/gradloc/cost_sweeps": finding.cost_sweeps,
        "rlstab/gradloc/releases": float(state.releases),
    }
    is_check = finding.shares_of == "all tokens"
    if is_check and finding.completeness is not None and math.isfinite(finding.completeness):
        readings["rlstab/gradloc/completeness"] = finding.completeness
    if finding.culprits and finding.culprits[0].share is not None:
        readings["rlstab/gradloc/top_share"] = finding.culprits[0].share
    if finding.remaining_norm is not None and math.isfinite(finding.remaining_norm):
        readings["rlstab/gradloc/remaining_norm"] = finding.remaining_norm
    return readings
