"""StabilityMonitor: read the run's own curves while it trains, and say what is wrong, once, with evidence."""

from __future__ import annotations

import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_rlstab.callbacks.run_context import RunContext, parameters_of
from lightning_rlstab.callbacks.run_description import hyper_parameters, run_description
from lightning_rlstab.callbacks.stability_monitor_board import MonitorBoard
from lightning_rlstab.control.parameters import local
from lightning_rlstab.control.plain_probe import probe_and_norms
from lightning_rlstab.control.protocols import GradientNorms, StepGate
from lightning_rlstab.core.checks import choice, flag, integer, refusal
from lightning_rlstab.core.policy_loss import LossInputs
from lightning_rlstab.core.repetition import text_repetition_frac
from lightning_rlstab.report.diagnosis import HARD_CAUSES, Diagnosis, finding_as_dict, ranked
from lightning_rlstab.report.events import EventLog, read_events
from lightning_rlstab.report.memory import Finding, MonitorConfig, MonitorState, state_from_dict, state_to_dict
from lightning_rlstab.report.monitor import is_watched, restarted, step
from lightning_rlstab.report.run import Reading
from lightning_rlstab.report.words import alarm_sentence, diagnosis_markdown
from lightning_rlstab.rollout.records import Rollout

__all__ = ["AlarmHook", "StabilityMonitor"]

_log = logging.getLogger(__name__)

AlarmHook = Callable[[Finding], None]
"""Called with each new finding, on rank 0."""

_ROLLOUT_NAMES = ("reward", "frac_reward_zero_std", "completions/", "rlstab/monitor/repetition", "rlstab/grpo/rewards_")
_RECENT_STEPS = 50
_WEIGHT_SAMPLE = 32
_WEIGHT_TENSORS = 16


class StabilityMonitor(pl.Callback):
    """Reads the run's curves by the rules of ``rlstab-report`` and raises each alarm once.

    What it watches: the metrics that the module logs after each optimizer step, the gradient norm before anybody
    touched it, held-out scores, repetition in completions, skipped steps, and whether weights move at all.

    When it acts: never on training, unless ``stop_on`` says so. A finding becomes a line in the log, an ``alarm``
    event, and a call of ``on_alarm``. Spikes that GradLoc found become pictures in TensorBoard.

    What it changes: nothing. An exception on its way out is not caught: it leaves a ``diagnosis.md`` that names
    non-finite gradients, weights and rewards, and a ``stop`` event.

    What it costs: one transfer from the device per optimizer step; histograms, rollout tables and pictures at their
    intervals, on rank 0. Repetition is measured on at most ``repetition_samples`` completions per rollout.

    What survives a resume: everything it has learned about the run, and which alarms were raised.

    Put it first in the list of callbacks (after FireDrill), so that it sees norms before guards clean them.

    Args:
        thresholds: Thresholds of the rules; None for the vetted ones.
        stop_on: End the run after the step with a finding at least this severe.
        on_alarm: Called with each new finding on rank 0; a function or its import path, ``package.module.name``.
        rollouts_every_n_steps: Best and worst rollouts side by side, every so many steps; 0 for never.
        shown_rollouts: Rollouts on each side.
        histograms_every_n_steps: Histograms of advantages, ratios and entropies; 0 for never.
        layer_norms_every_n_steps: Gradient norms per layer (with an ``rlstab`` strategy); 0 for never.
        repetition_samples: Completions per rollout whose repetition is measured; 0 for none.
        has_pictures: Whether spikes are drawn.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Example:
        >>> StabilityMonitor(stop_on="error").state.readings
        0
    """

    def __init__(
        self,
        thresholds: MonitorConfig | None = None,
        stop_on: Literal["never", "error", "warning"] = "never",
        on_alarm: AlarmHook | str | None = None,
        rollouts_every_n_steps: int = 50,
        shown_rollouts: int = 3,
        histograms_every_n_steps: int = 25,
        layer_norms_every_n_steps: int = 10,
        repetition_samples: int = 16,
        has_pictures: bool = True,
    ) -> None:
        self.config = thresholds or MonitorConfig()
        self.stop_on = choice("stop_on", stop_on, ("never", "error", "warning"))
        self.on_alarm = _hook(on_alarm)
        self.rollouts_every_n_steps = integer("rollouts_every_n_steps", rollouts_every_n_steps, at_least=0)
        self.shown_rollouts = integer("shown_rollouts", shown_rollouts, at_least=1)
        self.histograms_every_n_steps = integer("histograms_every_n_steps", histograms_every_n_steps, at_least=0)
        self.layer_norms_every_n_steps = integer("layer_norms_every_n_steps", layer_norms_every_n_steps, at_least=0)
        self.repetition_samples = integer("repetition_samples", repetition_samples, at_least=0)
        self.has_pictures = flag("has_pictures", has_pictures)
        self.state = MonitorState()
        self._recent_skips: list[int] = []
        self._folder = ""
        self._previous_folder = ""
        self._events: EventLog | None = None
        self._board: MonitorBoard | None = None
        self._weights: list[Tensor] = []
        self._seen_step = 0
        self._seen_tokens = -1.0
        self._norm: float | None = None
        self._layer_norms: dict[str, float] = {}
        self._without_gradient: list[str] = []
        self._repetition: float | None = None
        self._valueless: Tensor | None = None
        self._run: RunContext | None = None
        self._read_norms: Callable[[], GradientNorms] | None = None
        self._applied, self._skipped = 0, 0
        self._best_held_out = -math.inf
        self._is_over = False

    # Set-up -----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the run folder; on a resume, look whether the life before ended badly."""
        self._folder = str(trainer.log_dir or trainer.default_root_dir)  # a broadcast: on every rank
        self._seen_step, self._seen_tokens, self._is_over = trainer.global_step, -1.0, False
        self._weights = self._weight_samples(trainer)
        self._run, self._valueless = RunContext(trainer), None
        # Not by a stock strategy's stand-in gate: that one remembers what it measured for the guards to come. Where
        # gradients are sharded and nobody adds the pieces up, there is no norm before the guards.
        has_norms = isinstance(trainer.strategy, StepGate | SingleDeviceStrategy | DDPStrategy)
        self._read_norms = probe_and_norms(trainer, pl_module)[1] if has_norms else None
        if self.state.readings:
            has_died = trainer.strategy.broadcast(self._has_died())
            self.state = restarted(self.state, at_step=trainer.global_step, has_died=bool(has_died))
        self._events = EventLog(Path(self._folder) / "events.jsonl") if trainer.is_global_zero else None
        if self._events is not None:
            self._events.write("start", step=trainer.global_step, is_resumed=self.state.readings > 0)
            self._events.write("config", step=trainer.global_step, **run_description(trainer))
            self._board = MonitorBoard.of(trainer, self._events.path, has_pictures=self.has_pictures)
            self._board.hyper_parameters(hyper_parameters(trainer, pl_module))

    def _has_died(self) -> bool:
        """Whether the events of this folder, or of the one that the checkpoint came from, tell of a hard failure."""
        for folder in {self._folder, self._previous_folder} - {""}:
            for event in read_events(Path(folder) / "events.jsonl"):
                is_hard = event["event"] == "alarm" and event.get("cause") in HARD_CAUSES
                if is_hard or (event["event"] == "stop" and event.get("is_exception")):
                    return True
        return False

    @staticmethod
    def _weight_samples(trainer: pl.Trainer) -> list[Tensor]:
        """A few numbers of some of the trainable weights; the biggest gradients move them first, any move counts."""
        chosen = parameters_of(trainer)
        stride = max(1, len(chosen) // _WEIGHT_TENSORS)
        return [local(one).reshape(-1)[:_WEIGHT_SAMPLE].float().clone() for one in chosen[::stride]]

    # Rollout and loss -------------------------------------------------------------------------------------------------

    def on_rollout_scored(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> Rollout:
        """Count rewards without a value; more than the reward functions left out were lost after scoring."""
        if rollout.rewards_per_func is not None:
            rewards = rollout.rewards_per_func
            counts = torch.stack([rewards.isnan().sum(), rewards.isinf().sum()]).double()
            self._valueless = counts if self._valueless is None else self._valueless + counts
        return rollout

    def on_rollout_ready(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> Rollout:
        """Measure repetition; keep the best and worst rollouts when they are due."""
        if self.repetition_samples:
            texts = [_text(completion) for completion in rollout.completions[: self.repetition_samples]]
            shares = [text_repetition_frac(text) for text in texts]
            mean = torch.tensor(sum(shares) / max(len(shares), 1), device=trainer.strategy.root_device)
            self._repetition = float(trainer.strategy.reduce(mean, reduce_op="mean"))
        if self._board is not None:
            if _is_due(self.rollouts_every_n_steps, trainer.global_step):
                self._board.rollouts(trainer.global_step, rollout, shown=self.shown_rollouts)
            if _is_due(self.histograms_every_n_steps, trainer.global_step) and rollout.advantages is not None:
                self._board.histogram("advantages", rollout.advantages, trainer.global_step)
        return rollout

    def on_policy_loss(self, trainer: pl.Trainer, pl_module: pl.LightningModule, inputs: LossInputs) -> LossInputs:
        """Draw ratios and entropies of one micro-batch when they are due."""
        is_first = not getattr(pl_module, "window", None)
        if self._board is not None and is_first and _is_due(self.histograms_every_n_steps, trainer.global_step):
            self._board.token_histograms(inputs, trainer.global_step)
        return inputs

    # The step ---------------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take the norm of the gradient as it came, and the names of weights that got none."""
        named = [(name, one) for name, one in pl_module.named_parameters() if one.requires_grad]
        self._without_gradient = [name for name, one in named if one.grad is None]
        if self._read_norms is not None:
            norms = self._read_norms()
            self._norm = norms.total
            if _is_due(self.layer_norms_every_n_steps, trainer.global_step):
                self._layer_norms = {f"rlstab/layer_norm/{name}": norm for name, norm in norms.per_layer.items()}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once per optimizer step: read, judge, report."""
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        at = trainer.global_step - 1  # the step that has just ended, as Lightning numbers its curves
        own = self._own_readings(trainer)
        values = {**self._fresh(_numbers(trainer.callback_metrics)), **own}
        values |= self._rewards_lost(values)
        if self._norm is not None:
            values["grad_norm"] = self._norm
        self._take(trainer, at, values)
        own |= {"rlstab/monitor/alarms": float(sum(found.is_alarm for found in self.state.findings.values()))}
        base = self.state.signals.get("grad_norm")
        if base is not None and base.is_settled:
            own["rlstab/monitor/grad_norm_drift"] = math.exp(base.level - base.base)
        own |= self._layer_norms
        if (at + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics(own, step=at)
        if self._board is not None:
            self._board.after_step(at, {**values, **own})
        self._norm, self._layer_norms, self._repetition = None, {}, None

    def _rewards_lost(self, values: Mapping[str, float]) -> dict[str, float]:
        """The counts of NaN and infinite rewards with those in them that came after the reward functions."""
        if self._valueless is None:
            return {}
        assert self._run is not None
        nan, inf = self._run.summed(self._valueless).tolist()
        self._valueless = None
        counted = "rlstab/grpo/rewards_nan", "rlstab/grpo/rewards_inf"
        left_out = values.get("rlstab/grpo/rewards_missing", math.inf)  # the suite counts all of its own there, inf too
        return {
            name: values.get(name, 0.0) + more
            for name, more in zip(counted, (nan - left_out, inf), strict=True)
            if more > 0
        }

    def _own_readings(self, trainer: pl.Trainer) -> dict[str, float]:
        own: dict[str, float] = {}
        if self._repetition is not None:
            own["rlstab/monitor/repetition"] = self._repetition
        strategy = trainer.strategy
        self._applied += 1
        if isinstance(strategy, StepGate):
            verdict = strategy.last_verdict
            is_skipped = verdict is not None and verdict.action != "apply"
            self._skipped += is_skipped
            self._recent_skips = [*self._recent_skips[-(_RECENT_STEPS - 1) :], int(is_skipped)]
            own["rlstab/monitor/skipped_frac"] = sum(self._recent_skips) / len(self._recent_skips)
            if verdict is not None and is_skipped and set(verdict.sources) <= {"strategy", "gate"}:
                # The strategy skips by itself and keeps no log.
                self._event("skip", trainer.global_step - 1, sources=verdict.sources, reason="; ".join(verdict.reasons))
        if trainer.global_step % 10 == 0:
            own["rlstab/monitor/weights_moved"] = self._weights_moved(trainer)
        return own

    def _weights_moved(self, trainer: pl.Trainer) -> float:
        now = self._weight_samples(trainer)
        changes = [(new - old).abs().max() for new, old in zip(now, self._weights, strict=True) if new.numel()]
        largest = torch.stack(changes).max() if changes else torch.zeros((), device=trainer.strategy.root_device)
        return float(trainer.strategy.reduce(largest, reduce_op="max"))

    def _fresh(self, metrics: dict[str, float]) -> dict[str, float]:
        """Without held-out scores, and without rollout metrics that were logged at an earlier step and still stand."""
        tokens = metrics.get("num_tokens")
        is_new = tokens is None or tokens != self._seen_tokens
        self._seen_tokens = tokens if tokens is not None else -1.0
        return {
            name: value
            for name, value in metrics.items()
            if not name.startswith("val/") and (is_new or not name.startswith(_ROLLOUT_NAMES))
        }

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the held-out scores and compare them with training."""
        if trainer.sanity_checking or (not trainer.training and trainer.state.fn != "fit"):
            return
        values = {name: value for name, value in _numbers(trainer.callback_metrics).items() if name.startswith("val/")}
        at = max(trainer.global_step - 1, 0)
        self._take(trainer, at, values)
        score = values.get("val/reward", math.nan)
        self._best_held_out = score if score > self._best_held_out else self._best_held_out
        gap = _held_out_gap(self.state)
        if self._board is not None and gap is not None:
            self._board.scalars({"rlstab/monitor/held_out_gap": gap}, at)

    def _take(self, trainer: pl.Trainer, at: int, values: Mapping[str, float]) -> None:
        watched = {name: value for name, value in values.items() if is_watched(name)}
        if not watched:
            return
        fresh = self._judged(at, watched)
        wanted = {"error": ("error",), "warning": ("error", "warning"), "never": ()}[self.stop_on]
        stopping = [finding for finding in fresh if finding.severity in wanted]
        if stopping:  # the readings are reduced over ranks, so all ranks come to the same end
            trainer.should_stop = True
            self._event("stop", at, reason=alarm_sentence(stopping[0]), is_exception=False)

    def _judged(self, at: int, values: Mapping[str, float]) -> tuple[Finding, ...]:
        """Ask the rules about one reading, and announce what is new."""
        self.state, fresh = step(self.config, self.state, Reading(at, values))
        for finding in fresh:
            self._announce(finding)
        return fresh

    def _announce(self, finding: Finding) -> None:
        if self._events is None:
            return
        level = logging.WARNING if finding.is_alarm else logging.INFO
        _log.log(level, "StabilityMonitor, step %d: %s", finding.alarm_step, alarm_sentence(finding))
        if finding.is_alarm:
            fields = finding_as_dict(finding)
            if finding.cause == "frozen" and self._without_gradient:
                fields["without_gradient"] = self._without_gradient[:50]
                _log.warning("Trainable weights without any gradient: %s", ", ".join(self._without_gradient[:20]))
            self._event("alarm", finding.alarm_step, **fields)
        if self._board is not None:
            self._board.alarm(finding)
        if self.on_alarm is not None:
            self.on_alarm(finding)

    def _event(self, kind: str, at: int, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(kind, step=at, **fields)

    # The end ----------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write down what was seen, before the exception goes on its way.

        One rank may die alone, so nothing here waits for the others.
        """
        if not self._folder or self._is_over:
            return
        at = trainer.global_step
        values = {name: value for name, value in _numbers(trainer.callback_metrics).items() if not math.isfinite(value)}
        broken = _non_finite_names(pl_module)
        if broken["gradient"] or (self._norm is not None and not math.isfinite(self._norm)):
            values["grad_norm"] = math.nan
        self._judged(at, values)
        words = [f"The run ended at step {at} with {type(exception).__name__}: {exception}"]
        for what, names in broken.items():
            if names:
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                words.append(f"Non-finite {what} in {', '.join(names[:8])}{more}.")
        self._event("stop", at, reason=" ".join(words), is_exception=True, **broken_fields(broken))
        self._finish(trainer)
        self._write_diagnosis("\n\n".join(words), rank=trainer.global_rank)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the diagnosis of the whole run, and the final score beside the hyper-parameters."""
        self._finish(trainer)
        self._write_diagnosis(f"The run ended at step {trainer.global_step} as planned.", rank=trainer.global_rank)

    def _finish(self, trainer: pl.Trainer) -> None:
        """Put what the run came to beside its hyper-parameters, on rank 0."""
        if self._board is None or self._events is None:
            return
        metrics = _numbers(trainer.callback_metrics)
        kinds = Counter(str(event["event"]) for event in read_events(self._events.path))
        scores = {
            "held_out_reward": metrics.get("val/reward"),
            "best_held_out_reward": self._best_held_out,
            "reward": metrics.get("reward"),
            "steps_applied": float(self._applied - self._skipped),
            "steps_skipped": float(self._skipped),
            "spikes": float(kinds["spike"]),
            "rollbacks": float(kinds["rollback"]),
            "alarms": float(kinds["alarm"]),
        }
        self._board.finish(trainer.global_step, scores)

    def _write_diagnosis(self, ending: str, *, rank: int) -> None:
        self._is_over = True
        name = "diagnosis.md" if rank == 0 else f"diagnosis.rank{rank}.md"
        diagnosis = Diagnosis(ranked(self.state.findings.values()), self.state.readings)
        if rank == 0 or "Non-finite" in ending:
            path = Path(self._folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(diagnosis_markdown(diagnosis, ending=ending), encoding="utf-8")

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, text and lists."""
        return {
            "monitor": state_to_dict(self.state),
            "recent_skips": list(self._recent_skips),
            "steps": [self._applied, self._skipped],
            "best_held_out": self._best_held_out,
            "folder": self._folder,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the memory; the thresholds stay those of this run.

        Args:
            state_dict: From :meth:`state_dict`.
        """
        self.state = state_from_dict(state_dict["monitor"])
        self._recent_skips = [int(value) for value in state_dict["recent_skips"]]
        self._applied, self._skipped = (int(count) for count in state_dict["steps"])
        self._best_held_out = float(state_dict["best_held_out"])
        self._previous_folder = str(state_dict["folder"])


def broken_fields(broken: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The ``stop`` event's fields for what is not finite, the first 20 names of each kind."""
    return {f"non_finite_{what}s": names[:20] for what, names in broken.items() if names}


def _non_finite_names(pl_module: pl.LightningModule) -> dict[str, list[str]]:
    """Names of trainable weights with a NaN or inf in themselves or in their gradient, on this rank."""
    found: dict[str, list[str]] = {"gradient": [], "weight": []}
    for name, parameter in pl_module.named_parameters():
        if not parameter.requires_grad:
            continue
        if not bool(local(parameter).isfinite().all()):
            found["weight"].append(name)
        if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
            found["gradient"].append(name)
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats, in one transfer from the device."""
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor) and value.numel() == 1}
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    if tensors:
        values = torch.stack([value.detach().reshape(()).double() for value in tensors.values()]).tolist()
        found |= dict(zip(tensors, values, strict=True))
    return found


def _held_out_gap(state: MonitorState) -> float | None:
    """How much more the training reward rose than the held-out score, since the first remembered evaluation."""
    if len(state.held_out) < 2:
        return None
    (_, first_score, first_reward), (_, score, reward) = state.held_out[0], state.held_out[-1]
    return (reward - first_reward) - (score - first_score)


def _text(completion: Any) -> str:
    """A completion's text, plain or conversational."""
    if isinstance(completion, str):
        return completion
    return " ".join(str(message.get("content", "")) for message in completion)


def _is_due(interval: int, at: int) -> bool:
    return interval > 0 and at % interval == 0


def _hook(given: AlarmHook | str | None) -> AlarmHook | None:
    if given is None or callable(given):
        return given
    module, _, name = str(given).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise refusal("on_alarm", "be a function or its import path", given, f"{error}") from None
    if not callable(found):
        raise refusal("on_alarm", "name a function", given)
    hook: AlarmHook = found
    return hook
