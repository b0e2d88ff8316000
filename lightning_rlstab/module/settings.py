"""Every number and switch of the GRPO module, under TRL's field names, checked at set-up.

Source: field names, meanings and defaults follow ``trl.GRPOConfig`` 1.16. TRL accepts unknown strings and values out of
range; here they are refused with the field's name, the rule and the value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlstab.core.checks import choice, flag, integer, nearest_name, number, refusal
from lightning_rlstab.core.policy_loss import LossSettings

__all__ = ["GRPOSettings", "refuse_unknown_settings", "settings_from_trl"]

_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


@dataclass(frozen=True, kw_only=True)
class GRPOSettings:
    """Numbers and switches of :class:`~lightning_rlstab.GRPOModule`; the names are those of TRL's ``GRPOConfig``.

    Args:
        num_generations: Completions per prompt, G >= 2.
        num_generations_eval: Completions per held-out prompt; None for ``num_generations``.
        per_device_train_batch_size: Completions per micro-batch on one device.
        per_device_eval_batch_size: Completions per held-out batch; None for as many prompts as in training.
        steps_per_generation: Micro-batches that share one rollout; None for ``accumulate_grad_batches``.
        num_iterations: How often each rollout is trained on.
        max_completion_length: Longest completion in tokens.
        temperature: Sampling temperature; training log-probs are taken at the same temperature.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k likeliest tokens; 0 for all.
        min_p: Drop tokens under this share of the likeliest one; None for off.
        repetition_penalty: Factor on repeated tokens' logits; 1 for off.
        generation_kwargs: Further arguments of ``generate``.
        chat_template_kwargs: Further arguments of the chat template.
        eval_temperature: Sampling temperature for held-out prompts; 0 for greedy, None for ``temperature``.
        success_threshold: A held-out completion counts as a success (pass@k) from this reward on.
        beta: KL coefficient; 0 for no reference model.
        use_bias_correction_kl: Weigh the KL by the importance ratio.
        epsilon: Lower clip range.
        epsilon_high: Upper clip range; None for ``epsilon``.
        delta: Upper bound on the unclipped ratio (two-sided clipping); None for off.
        loss_type: grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo.
        importance_sampling_level: "token" or "sequence".
        sapo_temperature_neg: SAPO's temperature for advantages <= 0.
        sapo_temperature_pos: SAPO's temperature for advantages > 0.
        vespo_k_pos: VESPO's exponent for advantages >= 0.
        vespo_lambda_pos: VESPO's decay for advantages >= 0.
        vespo_k_neg: VESPO's exponent for advantages < 0.
        vespo_lambda_neg: VESPO's decay for advantages < 0.
        reward_weights: One weight per reward function; None for ones.
        multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
        scale_rewards: "group", "batch" or "none".
        reward_time_limit_seconds: Longest time one reward call may take; None for no limit.
        mask_truncated_completions: Leave completions without an end token out of the loss.
        sync_ref_model: Pull the reference model towards the policy now and then.
        ref_model_mixup_alpha: Weight of the policy in that pull, in (0, 1].
        ref_model_sync_steps: Optimizer steps between pulls.
        top_entropy_quantile: Share of tokens, those of highest entropy, that the policy loss acts on, in (0, 1].
        entropy_coef: Coefficient of the entropy bonus.
        use_adaptive_entropy: Move ``entropy_coef`` towards ``entropy_target``.
        entropy_coef_min: Lowest adaptive coefficient.
        entropy_coef_max: Highest adaptive coefficient.
        entropy_coef_delta: Change of the adaptive coefficient per optimizer step.
        entropy_target: Entropy in nats that the adaptive coefficient aims at.
        use_vllm: Completions come from an engine other than the training forward, so its log-probs need correction.
        vllm_importance_sampling_correction: Correct for the gap between that engine and the training forward.
        vllm_importance_sampling_mode: token_truncate, token_mask, sequence_truncate or sequence_mask.
        vllm_importance_sampling_clip_max: Upper bound of that ratio; None for none.
        vllm_importance_sampling_clip_min: Lower bound of that ratio; None for none.
        off_policy_mask_threshold: Drop sequences of negative advantage with a mean log-ratio above this; None for off.
        learning_rate: Of the default AdamW.
        weight_decay: Of the default AdamW.
        adam_beta1: Of the default AdamW.
        adam_beta2: Of the default AdamW.
        adam_epsilon: Of the default AdamW.
        lr_scheduler_type: Schedule by its transformers name.
        warmup_steps: Optimizer steps of linear warm-up.
        max_grad_norm: Clip the gradient to this norm unless the Trainer's ``gradient_clip_val`` is set; None for off.
        disable_dropout: Set every dropout to 0.
        gradient_checkpointing: Recompute activations in the backward pass.
        model_init_kwargs: Further arguments of ``from_pretrained``.
        trust_remote_code: Passed to ``from_pretrained``.
        log_completions: Write the table of prompts, completions and rewards.
        num_completions_to_print: Rows of that table shown in TensorBoard per rollout; None for all.
        seed: Base of every sampling seed.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Source:
        ``trl.GRPOConfig`` 1.16; ``eval_temperature``, ``success_threshold`` and ``reward_time_limit_seconds`` are ours.

    Example:
        >>> GRPOSettings(num_generations=4).loss_settings(steps_per_generation=2).loss_type
        'dapo'
    """

    num_generations: int = 8
    num_generations_eval: int | None = None
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    eval_temperature: float | None = None
    success_threshold: float = 1.0
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    reward_time_limit_seconds: float | None = None
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    use_vllm: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    disable_dropout: bool = False
    gradient_checkpointing: bool = False
    model_init_kwargs: dict[str, Any] | None = None
    trust_remote_code: bool = False
    log_completions: bool = False
    num_completions_to_print: int | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Refuse what cannot be meant; the loss fields are checked by :class:`LossSettings`."""
        self._check_batches()
        self._check_rewards()
        self._check_controls()
        self._check_optimizer()
        self.loss_settings(steps_per_generation=self.steps_per_generation or 1)

    def _check_batches(self) -> None:
        advice = "A group of one has no spread to learn from; use 2 or more"
        integer("num_generations", self.num_generations, at_least=2, advice=advice)
        if self.num_generations_eval is not None:
            integer("num_generations_eval", self.num_generations_eval, at_least=1)
        integer("per_device_train_batch_size", self.per_device_train_batch_size, at_least=1)
        if self.steps_per_generation is not None:
            integer("steps_per_generation", self.steps_per_generation, at_least=1)
        integer("num_iterations", self.num_iterations, at_least=1)
        if self.eval_temperature is not None:
            number("eval_temperature", self.eval_temperature, at_least=0)
        number("success_threshold", self.success_threshold)
        number("temperature", self.temperature, above=0, advice="Greedy evaluation is `eval_temperature: 0`")
        integer("seed", self.seed, at_least=0)

    def _check_rewards(self) -> None:
        if self.reward_weights is not None:
            if not isinstance(self.reward_weights, list | tuple):
                raise refusal("reward_weights", "be a list of numbers", self.reward_weights)
            for index, weight in enumerate(self.reward_weights):
                number(f"reward_weights[{index}]", weight)
        choice(
            "multi_objective_aggregation",
            self.multi_objective_aggregation,
            ("sum_then_normalize", "normalize_then_sum"),
        )
        choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        if self.reward_time_limit_seconds is not None:
            number("reward_time_limit_seconds", self.reward_time_limit_seconds, above=0)

    def _check_controls(self) -> None:
        for name in (
            "mask_truncated_completions",
            "sync_ref_model",
            "use_adaptive_entropy",
            "use_vllm",
            "vllm_importance_sampling_correction",
            "disable_dropout",
            "gradient_checkpointing",
            "trust_remote_code",
            "log_completions",
        ):
            flag(name, getattr(self, name))
        number("ref_model_mixup_alpha", self.ref_model_mixup_alpha, above=0, at_most=1)
        integer("ref_model_sync_steps", self.ref_model_sync_steps, at_least=1)
        number("entropy_coef_min", self.entropy_coef_min, at_least=0)
        number("entropy_coef_max", self.entropy_coef_max, at_least=self.entropy_coef_min)
        number("entropy_coef_delta", self.entropy_coef_delta, at_least=0)
        number("entropy_target", self.entropy_target, at_least=0)
        if self.num_completions_to_print is not None:
            integer("num_completions_to_print", self.num_completions_to_print, at_least=1)

    def _check_optimizer(self) -> None:
        number("learning_rate", self.learning_rate, at_least=0)
        number("weight_decay", self.weight_decay, at_least=0)
        number("adam_beta1", self.adam_beta1, at_least=0, below=1)
        number("adam_beta2", self.adam_beta2, at_least=0, below=1)
        number("adam_epsilon", self.adam_epsilon, above=0)
        choice("lr_scheduler_type", self.lr_scheduler_type, _SCHEDULES)
        integer("warmup_steps", self.warmup_steps, at_least=0)
        if self.max_grad_norm is not None:
            number("max_grad_norm", self.max_grad_norm, above=0, advice="Use null to switch clipping off")

    def loss_settings(self, *, steps_per_generation: int) -> LossSettings:
        """The record that the loss reads.

        Args:
            steps_per_generation: Micro-batches that share one rollout, with the default resolved.

        Returns:
            The fields of :class:`LossSettings`, checked.
        """
        names = {field.name for field in dataclasses.fields(LossSettings)}
        values = {name: value for name, value in vars(self).items() if name in names}
        values["steps_per_generation"] = steps_per_generation
        # TRL's True acts only together with use_vllm; completions of our own forward need no correction.
        values["vllm_importance_sampling_correction"] = self.use_vllm and self.vllm_importance_sampling_correction
        return LossSettings(**values)


def refuse_unknown_settings(settings: Mapping[str, Any]) -> None:
    """Answer a misspelt setting with the nearest one.

    Args:
        settings: Keyword arguments meant for :class:`GRPOSettings`.

    Raises:
        ValueError: Naming the field, the rule and the value.
    """
    known = [field.name for field in dataclasses.fields(GRPOSettings)]
    for name, value in settings.items():
        if name not in known:
            close = nearest_name(name, known)
            raise refusal(name, "be a setting of GRPOModule", value, f"Did you mean `{close}`" if close else "")


# Fields of GRPOConfig that change what a run does and that have no counterpart here, with the only value we can honour.
_UNSUPPORTED: dict[str, Any] = {
    "router_aux_loss_coef": None,
    "cast_lm_head_to_fp32": False,
    "use_transformers_continuous_batching": False,
    "use_transformers_paged": False,
    "max_tool_calling_iterations": None,
    "use_liger_kernel": False,
    "cache_implementation": None,
    "torch_compile": False,
    "neftune_noise_alpha": None,
    "label_smoothing_factor": 0.0,
    "lr_scheduler_kwargs": None,
    "fp16": False,
}


def settings_from_trl(config: Any) -> dict[str, Any]:
    """The keyword arguments of :class:`GRPOSettings` that a TRL config asks for.

    Args:
        config: A ``trl.GRPOConfig``; any object with its attributes will do. Batch sizes, optimizer, schedule, clip and
            seed are taken over; what belongs to the Trainer (accumulation, steps, precision, logging) is not.

    Returns:
        Keyword arguments for :class:`GRPOSettings`.

    Raises:
        ValueError: If the config switches on something that has no counterpart here.
    """
    for name, neutral in _UNSUPPORTED.items():
        value = getattr(config, name, neutral)
        if value not in (neutral, None, False, {}):
            raise refusal(name, f"be {neutral!r}", value, "It has no counterpart in GRPOModule")
    if not str(_plain(getattr(config, "optim", "adamw_torch"))).startswith("adamw_torch"):
        raise refusal("optim", "be an adamw_torch variant", _plain(config.optim), "Give GRPOModule an `optimizer`")
    own = {field.name for field in dataclasses.fields(GRPOSettings)}
    values = {name: getattr(config, name) for name in own if hasattr(config, name)}
    values["lr_scheduler_type"] = _plain(values.get("lr_scheduler_type", "linear"))
    values["warmup_steps"] = _warmup_steps(config)
    if str(_plain(getattr(config, "eval_strategy", "no"))) == "no":
        values["per_device_eval_batch_size"] = None  # TRL leaves it unchecked, and mostly unset, without evaluation
    if values.get("max_grad_norm") == 0:
        values["max_grad_norm"] = None  # transformers reads 0 as "do not clip"
    return values


def _plain(value: Any) -> Any:
    """The string behind a transformers enum."""
    return getattr(value, "value", value)


def _warmup_steps(config: Any) -> int:
    steps = getattr(config, "warmup_steps", 0) or 0
    if isinstance(steps, float) and steps < 1 and steps > 0:
        raise refusal("warmup_steps", "be a number of steps", steps, "A share of the run is not supported here")
    return int(steps)
