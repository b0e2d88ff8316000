"""GRPO as a LightningModule: TRL's loss and names, Lightning's Trainer, and hooks for the guards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rlstab.control.protocols import (
    PolicyLossHook,
    RolloutReadyHook,
    RolloutScoredHook,
    StepGate,
    WeightLoader,
    WindowEntry,
)
from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.control.stock_gate import skip_by_clearing
from lightning_rlstab.core.checks import number, refusal
from lightning_rlstab.core.policy_loss import LossInputs, LossSettings, PolicyLoss, policy_loss
from lightning_rlstab.module.cycle import RolloutCycle
from lightning_rlstab.module.entropy import EntropyBonus, entropy_threshold_over
from lightning_rlstab.module.evaluation import HeldOutMetrics
from lightning_rlstab.module.export import save_policy
from lightning_rlstab.module.forward import (
    PolicyStatistics,
    attention_mask_of,
    has_dropout,
    policy_statistics,
)
from lightning_rlstab.module.generation import HFSampler
from lightning_rlstab.module.held_out import HeldOutEvaluation
from lightning_rlstab.module.optimizer import clipped_gradient_norm, default_optimizer, default_schedule
from lightning_rlstab.module.plan import RolloutPlan
from lightning_rlstab.module.policy import (
    context_length,
    disable_dropout_,
    empty_policy,
    load_policy,
    load_processing_class,
    with_lora,
)
from lightning_rlstab.module.prompt_loaders import PromptBatch
from lightning_rlstab.module.random_state import device_rng_state, random_state, restore_random_state
from lightning_rlstab.module.readings import StepReadings
from lightning_rlstab.module.reference import reference_of, sync_reference
from lightning_rlstab.module.reward_model import reward_suite
from lightning_rlstab.module.rollouts import AdvantageEstimator, RolloutMaker
from lightning_rlstab.module.settings import GRPOSettings, refuse_unknown_settings, settings_from_trl
from lightning_rlstab.module.token_signals import head_signals, token_signals, without_gradient
from lightning_rlstab.module.training_rollout import training_rollout
from lightning_rlstab.module.trl_inputs import trl_loss
from lightning_rlstab.module.weights import full_state_dict
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.sampler import Sampler

__all__ = ["GRPOModule"]

RewardFuncs = Any
"""A callable, an import path, a model or its id, or a list of these.

``Any`` on purpose: with a Callable in the annotation the command line would turn import paths into functions, and the
saved configuration could not be read back.
"""

_STATE_KEY = "rlstab_grpo"
_PROGRESS_BAR = ("reward", "kl", "entropy", "grad_norm")


class Hooks(NamedTuple):
    """The Trainer's callbacks by what they want to change, each in the Trainer's order."""

    scored: list[RolloutScoredHook]
    ready: list[RolloutReadyHook]
    loss: list[PolicyLossHook]

    @classmethod
    def of(cls, callbacks: Iterable[Any]) -> Hooks:
        """Sort ``callbacks`` by the hook protocols they implement."""
        every = list(callbacks)
        return cls(
            scored=[callback for callback in every if isinstance(callback, RolloutScoredHook)],
            ready=[callback for callback in every if isinstance(callback, RolloutReadyHook)],
            loss=[callback for callback in every if isinstance(callback, PolicyLossHook)],
        )


class GRPOModule(HeldOutEvaluation):
    """Group-relative policy optimization of a causal language model.

    Once per ``steps_per_generation * num_iterations`` micro-batches the policy continues every prompt of the batch
    ``num_generations`` times, the reward functions score the completions, and each completion's advantage is its
    reward against the others of its prompt; every micro-batch then takes one slice of that rollout through the loss.
    Loss, field names and defaults are TRL's.

    Args:
        model: Hugging Face id or local directory of a causal language model, or a module.
        reward_funcs: Functions under TRL's contract, import paths ("package.module.function"), ids or directories of
            sequence classifiers, or classifier modules.
        processing_class: The tokenizer; None loads the one beside ``model``.
        reward_processing_classes: Tokenizers of reward models, one per reward function; None loads the one beside each.
        peft_config: A ``peft.PeftConfig``; trains an adapter, and the base model under it is the reference.
        sampler: Engine that samples completions; None for Hugging Face ``generate``.
        optimizer: Callable from parameters to an optimizer; None for AdamW with ``learning_rate`` and ``weight_decay``.
        lr_scheduler: Callable from an optimizer to a scheduler; None for ``lr_scheduler_type``.
        **settings: Fields of :class:`~lightning_rlstab.module.settings.GRPOSettings`, TRL's names and defaults.

    Raises:
        ValueError: If a setting is unknown or out of range, naming the field, the rule and the value.

    Source:
        GRPO (arXiv 2402.03300) as implemented by TRL 1.16; parity is tested to 1e-5.
    """

    loss_settings: LossSettings

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: RewardFuncs,
        *,
        processing_class: Any = None,
        reward_processing_classes: list[Any] | None = None,
        peft_config: Any = None,
        sampler: Sampler | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        refuse_unknown_settings(settings)
        self.settings = GRPOSettings(**settings)
        self.loss_settings = self.settings.loss_settings(steps_per_generation=self.settings.steps_per_generation or 1)
        self.rewards = reward_suite(reward_funcs, reward_processing_classes, self.settings)
        self.advantage_estimator: AdvantageEstimator | None = None
        self.window: list[WindowEntry] = []
        self.forward_signals: dict[str, Tensor] = {}
        self.entropy_bonus = EntropyBonus(coef=self.settings.entropy_coef)
        self.processing_class = processing_class
        self.sampler = sampler
        self.policy: nn.Module | None = model if isinstance(model, nn.Module) else None
        self.reference: nn.Module | None = None
        self.held_out = HeldOutMetrics(
            self.settings.num_generations_eval or self.settings.num_generations,
            reward_names=self.rewards.names,
            threshold=self.settings.success_threshold,
        )
        self._model = model
        self._peft_config = peft_config
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._cycle = RolloutCycle()
        self._readings = StepReadings()
        self._logged_by_rewards: dict[str, float] = {}
        self._is_configured = False
        self._is_window_over = False
        self._resumed: Mapping[str, Any] | None = None
        self._random_state: Mapping[str, Any] | None = None

    @classmethod
    def from_trl(cls, config: Any, *, model: str | nn.Module, reward_funcs: Any, **arguments: Any) -> GRPOModule:
        """The module that trains as ``trl.GRPOTrainer(model, reward_funcs, config)`` would.

        Args:
            config: A ``trl.GRPOConfig``. What belongs to the Trainer (accumulation, steps, precision) stays with it.
            model: As in the constructor.
            reward_funcs: As in the constructor.
            **arguments: Further arguments of the constructor; settings given here win over the config.

        Returns:
            The module.

        Raises:
            ValueError: If the config switches on something that has no counterpart here.
        """
        return cls(model=model, reward_funcs=reward_funcs, **{**settings_from_trl(config), **arguments})

    @property
    def rollout_plan(self) -> RolloutPlan:
        """How many prompts, completions and micro-batches one rollout has; what the data module cuts by."""
        settings = self.settings
        accumulation = self._trainer.accumulate_grad_batches if self._trainer is not None else 1
        return RolloutPlan(
            num_generations=settings.num_generations,
            per_device_train_batch_size=settings.per_device_train_batch_size,
            steps_per_generation=settings.steps_per_generation or accumulation,
            num_iterations=settings.num_iterations,
            num_generations_eval=settings.num_generations_eval,
            per_device_eval_batch_size=settings.per_device_eval_batch_size,
        )

    # Set-up -----------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy and the reference model; does nothing the second time."""
        if self._is_configured:
            return
        strategy: Any = None if self._trainer is None else self._trainer.strategy
        if isinstance(strategy, WeightLoader) and isinstance(self._model, str) and self._peft_config is None:
            self.policy = strategy.loaded(self._loaded_policy, self._empty_policy)
            if self.settings.beta != 0.0:
                reference = strategy.loaded(self._loaded_policy, self._empty_policy)
                self.reference = reference.requires_grad_(False).eval()
        else:
            policy = self._loaded_policy()
            self.policy = policy if self._peft_config is None else with_lora(policy, self._peft_config)
            self.reference = reference_of(self.policy, self.settings.beta)
        self._is_configured = True

    def _loaded_policy(self) -> nn.Module:
        policy = load_policy(
            self._model,
            model_init_kwargs=self._model_options,
            gradient_checkpointing=self.settings.gradient_checkpointing,
        )
        if self.settings.disable_dropout:
            disable_dropout_(policy)
        return policy

    def _empty_policy(self) -> nn.Module:
        """The structure that :meth:`_loaded_policy` fills, for strategies that shard before any weight is read."""
        structure = empty_policy(cast(str, self._model), model_init_kwargs=self._model_options)
        policy = load_policy(structure, gradient_checkpointing=self.settings.gradient_checkpointing)
        if self.settings.disable_dropout:
            disable_dropout_(policy)
        return policy

    @property
    def _model_options(self) -> dict[str, Any]:
        options = dict(self.settings.model_init_kwargs or {})
        if self.settings.trust_remote_code and not isinstance(self._model, nn.Module):
            options["trust_remote_code"] = True
        return options

    def setup(self, stage: str) -> None:
        """Resolve what needs the Trainer: sizes, tokenizer, hooks.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        clip = self.trainer.gradient_clip_val
        if clip is not None:
            number("gradient_clip_val", clip, above=0, advice="Leave it out, or set `max_grad_norm` to null")
        plan = self.rollout_plan
        self.loss_settings = dataclasses.replace(self.loss_settings, steps_per_generation=plan.steps_per_generation)
        self.processing_class = load_processing_class(
            self._model, self.processing_class, trust_remote_code=self.settings.trust_remote_code
        )
        self.ranks = Ranks(self.trainer)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        self.hooks = Hooks.of(callbacks)
        self._needs_token_signals = any(getattr(hook, "needs_token_signals", False) for hook in callbacks)

    def _begin_run(self) -> None:
        """What needs the policy where it will run; called before the first batch of every run."""
        if self.sampler is None:
            if self.settings.use_vllm:
                raise refusal("use_vllm", "be false without a sampler of its own", True, "Give `sampler` an engine")
            self.sampler = HFSampler(self.processing_class)
        self.maker = RolloutMaker(
            sampler=self.sampler,
            rewards=self.rewards.to(self.device),
            processing_class=self.processing_class,
            settings=self.settings,
            context_length=context_length(self.ready_policy),
        )

    @property
    def ready_policy(self) -> nn.Module:
        """The policy, loaded if it was not."""
        if self.policy is None or not self._is_configured:
            self.configure_model()
        assert self.policy is not None
        return self.policy

    def on_fit_start(self) -> None:
        """Put the policy into training mode: ``from_pretrained`` and Lightning both leave it as it was loaded."""
        self.ready_policy.train()
        self._begin_run()
        self._has_dropout = has_dropout(self.ready_policy)
        rows = getattr(getattr(self.trainer, "datamodule", None), "train_rows", None)
        if rows:
            self.rewards.check([column for column in rows[0] if column != "prompt"])

    def teardown(self, stage: str) -> None:
        """Stop the reward functions' worker processes.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        self.rewards.close()

    def on_validation_start(self) -> None:
        """Make the rollout maker when there is no ``fit`` around this evaluation."""
        if not self.trainer.training:
            self._begin_run()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def configure_optimizers(self) -> Any:
        """AdamW and ``lr_scheduler_type``, or whatever callables the constructor was given."""
        parameters = [parameter for parameter in self.ready_policy.parameters() if parameter.requires_grad]
        if not parameters:
            raise refusal("model", "have trainable parameters", 0, "Unfreeze some, or give a `peft_config`")
        optimizer = self._optimizer(parameters) if self._optimizer else default_optimizer(parameters, self.settings)
        if self._lr_scheduler is not None:
            schedule = {"scheduler": self._lr_scheduler(optimizer), "interval": "step"}
        else:
            schedule = default_schedule(optimizer, self.settings, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    # Loss -------------------------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch; a rollout comes first where the last one is used up.

        Args:
            batch: Prompts of a whole generation batch and the place in its cycle.
            batch_idx: Index in the epoch.

        Returns:
            The loss, 0-d, multiplied by ``accumulate_grad_batches`` to undo Lightning's division.
        """
        if not isinstance(batch, PromptBatch):
            raise TypeError(
                f"`train_dataloaders` must yield PromptBatch, got {type(batch).__name__}. "
                "Give the rows to PromptDataModule."
            )
        if self._cycle.is_missing(batch.cycle_step):
            rollout = training_rollout(self, batch, index=self._cycle.rollouts_made)
            self._readings.add_rollout(rollout.readings)
            self._logged_by_rewards = rollout.logged
            self._cycle.begin(rollout.rows, self.rollout_plan.steps_per_generation)
        position, window_size = self._place_in_window(batch_idx)
        self._is_window_over = position == window_size - 1
        if position == 0:
            self.window.clear()
        entry = WindowEntry(
            micro_batch=position,
            rollout=self._cycle.micro_batch(batch.cycle_step, batch.cycle_length),
            rng_state=device_rng_state(self.device) if self._has_dropout else {},
        )
        loss = self._first_loss(entry, window_size)
        self.window.append(entry)
        return loss * self.trainer.accumulate_grad_batches

    def discard_rollout(self) -> None:
        """Let what is left of the current rollout go; the next training step samples its prompts anew.

        For callbacks that have found the rollout bad; to be called on all ranks, between two optimizer steps.
        """
        self._cycle.discard()

    def _place_in_window(self, batch_idx: int) -> tuple[int, int]:
        """Index of this micro-batch in its optimizer step, and how many the step has; the epoch's last may be short."""
        accumulation = self.trainer.accumulate_grad_batches
        position = batch_idx % accumulation
        left = self.trainer.num_training_batches - (batch_idx - position)
        return position, int(min(accumulation, left))

    def _first_loss(self, entry: WindowEntry, window_size: int) -> Tensor:
        rollout: Rollout = entry.rollout
        statistics = self.token_statistics(rollout)
        inputs = LossInputs(
            logprobs=statistics.logprobs,
            entropy=statistics.entropy,
            completion_mask=rollout.completion_mask,
            advantages=cast(Tensor, rollout.advantages),
            old_logprobs=rollout.old_logprobs,
            behavior_logprobs=rollout.behavior_logprobs,
            reference_logprobs=rollout.reference_logprobs,
            entropy_threshold=self._entropy_threshold(statistics.entropy, rollout.completion_mask),
            num_items=rollout.num_items,
        )
        self.forward_signals = head_signals(statistics)
        for hook in self.hooks.loss:
            inputs = hook.on_policy_loss(self.trainer, self, inputs)
        if inputs.logprobs is not statistics.logprobs:
            entry.constants["held_tokens"] = _held_tokens(statistics.logprobs, inputs.logprobs)
        settings = dataclasses.replace(self.loss_settings, entropy_coef=self._entropy_coef())
        entry.token_weights = inputs.token_weights
        entry.constants |= {"inputs": without_gradient(inputs), "settings": settings, "accumulation": window_size}
        result = self._policy_loss(inputs, entry)
        if self._needs_token_signals:
            entry.constants |= token_signals(statistics.logprobs, statistics, result)
        loss = result.loss
        self._readings.add_loss(loss, result.readings)
        return loss

    def _policy_loss(self, inputs: LossInputs, entry: WindowEntry) -> PolicyLoss:
        return policy_loss(
            inputs,
            entry.constants["settings"],
            accumulation=entry.constants["accumulation"],
            world_size=self.ranks.replicas,
        )

    def token_losses(self, entry: WindowEntry, *, token_mask: Tensor | None = None) -> Tensor:
        """Run a micro-batch of the current optimizer step again and return its token losses.

        Hooks are not asked again: what they put into the loss the first time is used again, also a token whose log-prob
        they held at a bound, so the sum over the window (mean over ranks) has the gradient that the step accumulated.
        The caller replays the generators for dropout.

        Args:
            entry: From ``window``.
            token_mask: (batch, time) bool, the tokens to keep; normalisers stay those of the whole window.

        Returns:
            (batch, time) float32 with gradient.
        """
        statistics = self.token_statistics(entry.rollout)
        first: LossInputs = entry.constants["inputs"]
        held = entry.constants.get("held_tokens")
        logprobs = statistics.logprobs if held is None else torch.where(held, first.logprobs, statistics.logprobs)
        inputs = dataclasses.replace(first, logprobs=logprobs, entropy=statistics.entropy)
        losses = self._policy_loss(inputs, entry).token_loss
        return losses if token_mask is None else torch.where(token_mask, losses, 0.0)

    def token_statistics(self, rollout: Rollout) -> PolicyStatistics:
        """Run the policy's forward on completions, as the loss does; what localizers ask for at moved weights.

        Args:
            rollout: Any rows; only token ids, masks and lengths are read.

        Returns:
            Log-probs and entropies (with gradient where the loss needs it) and what else is known of each token.
        """
        return policy_statistics(
            self.ready_policy,
            rollout.prompt_ids,
            rollout.prompt_mask,
            rollout.completion_ids,
            attention_mask_of(rollout),
            temperature=self.settings.temperature,
            has_entropy_gradient=self._entropy_coef() != 0.0,
            has_hidden_norms=self._needs_token_signals,
        )

    def _entropy_coef(self) -> float:
        """TRL's own coefficient unless a callback has put another one into ``loss_settings``."""
        coef = self.loss_settings.entropy_coef
        return self.entropy_bonus.applied(self.settings) if coef == self.settings.entropy_coef else coef

    def _entropy_threshold(self, entropy: Tensor, mask: Tensor) -> Tensor | None:
        quantile = self.loss_settings.top_entropy_quantile
        return entropy_threshold_over(self.ranks, entropy, mask, quantile) if quantile < 1.0 else None

    def loss_from_trl_inputs(self, inputs: Mapping[str, Any], *, accumulation: int) -> Tensor:
        """The loss of one micro-batch given as TRL's ``GRPOTrainer.compute_loss`` takes it: the door for parity checks.

        Args:
            inputs: ``prompt_ids``, ``prompt_mask``, ``completion_ids``, ``completion_mask``, ``advantages``, and where
                they apply ``num_items_in_batch``, ``old_per_token_logps``, ``ref_per_token_logps``,
                ``sampling_per_token_logps``, ``importance_sampling_ratio``, ``tool_mask``.
            accumulation: Micro-batches in this optimizer step.

        Returns:
            The loss, 0-d with gradient; in evaluation mode (``module.eval()``) without the accumulation factors.
        """
        steps = self.settings.steps_per_generation or accumulation
        return trl_loss(
            self.ready_policy,
            inputs,
            dataclasses.replace(
                self.loss_settings, steps_per_generation=steps, entropy_coef=self.entropy_bonus.applied(self.settings)
            ),
            temperature=self.settings.temperature,
            has_correction=self.settings.vllm_importance_sampling_correction,
            accumulation=accumulation,
            is_training=self.training,
        )

    # Optimizer step ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        """Put the generators where the last training batch left them, whatever was drawn since."""
        if self._random_state is not None:
            restore_random_state(self._random_state, self.device)
            self._random_state = None

    def on_after_backward(self) -> None:
        """After the window's last backward, reduce its readings over ranks and log them before any guard acts."""
        if not self._is_window_over:
            return
        metrics, entropy = self._readings.metrics(self.ranks)
        metrics |= self._logged_by_rewards
        self._logged_by_rewards = {}
        self.entropy_bonus = self.entropy_bonus.after_step(entropy, self.settings)
        metrics["learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        if self.loss_settings.entropy_coef or self.settings.use_adaptive_entropy:
            metrics["entropy_coef"] = self._entropy_coef()
        self._log_step(metrics, step=self.global_step)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to the Trainer's ``gradient_clip_val`` or else to ``max_grad_norm``; log the norm before clipping."""
        bound = self.settings.max_grad_norm if gradient_clip_val is None else gradient_clip_val
        strategy = self.trainer.strategy
        if isinstance(strategy, StepGate):
            norm: Tensor | float | None = strategy.gradient_norms().total
            if bound is not None:
                self.clip_gradients(optimizer, bound, gradient_clip_algorithm or "norm")
        elif gradient_clip_algorithm == "value":
            norm = clipped_gradient_norm(optimizer, None)
            self.clip_gradients(optimizer, bound, gradient_clip_algorithm)
        else:
            norm = clipped_gradient_norm(optimizer, bound)
        if norm is None:
            return
        self._log_step({"grad_norm": float(norm)}, step=self.global_step)
        if not math.isfinite(float(norm)) and not isinstance(strategy, StepGate):
            # Clipping would have turned the whole gradient into NaN. The norm is the same on all ranks.
            skip_by_clearing([optimizer])
            rank_zero_warn(f"Step {self.global_step} was skipped: its gradient norm is {float(norm)}.")

    def _log_step(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand a step's metrics to loggers, callbacks and the progress bar.

        ``self.log`` moves a metric object per name and call (Lightning 2.6.6), which for thirty names costs more than a
        small model's backward; so only the progress bar's names go through it.
        """
        trainer = self.trainer
        if trainer.progress_bar_callback is not None:
            shown = {name: value for name, value in metrics.items() if name in _PROGRESS_BAR}
            self.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        if (step + 1) % trainer.log_every_n_steps == 0 or trainer.should_stop:  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics(dict(metrics), step=step)

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        """Log the norm of a skipped step, and pull the reference towards the policy where asked to."""
        if not self._is_window_over:
            return
        gate, settings = self.trainer.strategy, self.settings
        if isinstance(gate, StepGate) and gate.last_verdict is not None and gate.last_verdict.action == "skip":
            if gate.last_gradient_norm is not None:
                self._log_step({"grad_norm": gate.last_gradient_norm}, step=self.global_step - 1)
            return
        is_due = settings.sync_ref_model and self.global_step % settings.ref_model_sync_steps == 0
        if is_due and self.reference is not None:
            sync_reference(self.ready_policy, self.reference, settings.ref_model_mixup_alpha)

    # Saving -----------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what resuming bit for bit needs beyond weights and optimizer; collective on several ranks."""
        own = {"cycle": self._cycle.state_dict(), "random": random_state(self.device)}
        checkpoint[_STATE_KEY] = {
            "entropy_bonus": dataclasses.asdict(self.entropy_bonus),
            "readings": self._readings.state_dict(),
            "ranks": self.ranks.gathered_objects(own),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the saved state until ``on_train_start``; a checkpoint of another module loads its weights only."""
        self._resumed = checkpoint.get(_STATE_KEY)

    def on_train_start(self) -> None:
        """Continue where the checkpoint stopped: rollout in use, counters, generators."""
        if self._resumed is None:
            return
        state, self._resumed = self._resumed, None
        self.entropy_bonus = EntropyBonus(**state["entropy_bonus"])
        self._readings.load_state_dict(state["readings"])
        if len(state["ranks"]) != self.trainer.world_size:
            rank_zero_warn(
                f"The checkpoint was written by {len(state['ranks'])} processes and is read by "
                f"{self.trainer.world_size}: a rollout in progress is sampled anew and the generators start fresh."
            )
            self._cycle.rollouts_made = state["ranks"][0]["cycle"]["rollouts_made"]
            return
        own = state["ranks"][self.global_rank]
        self._cycle.load_state_dict(own["cycle"], self.device)
        self._random_state = own["random"]

    def save_pretrained(self, directory: str | Path, *, is_merged: bool = False) -> Path:
        """Write the policy and its tokenizer in Hugging Face format, loadable by ``from_pretrained``.

        To be called on all ranks: sharded weights are brought together, and rank 0 writes.

        Args:
            directory: Made or replaced as a whole.
            is_merged: Write the base model with the adapter added in, instead of the adapter alone.

        Returns:
            The directory.
        """
        strategy = None if self._trainer is None else self._trainer.strategy
        weights = full_state_dict(strategy, self.ready_policy)
        if strategy is None or strategy.is_global_zero:
            save_policy(self.ready_policy, self.processing_class, directory, is_merged=is_merged, state_dict=weights)
        return Path(directory)


def _held_tokens(logprobs: Tensor, bounded: Tensor) -> Tensor:
    """(batch, time) bool, tokens whose log-prob a hook has replaced by a constant; NaN is nobody's bound."""
    return (bounded.detach() != logprobs.detach()) & ~logprobs.detach().isnan()
