"""TRL's GRPOTrainer as the oracle: one tiny policy, one trainer on CPU, hand-made inputs."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_rlstab.core.logprobs import token_statistics
from lightning_rlstab.core.policy_loss import LossInputs, LossSettings, PolicyLoss, policy_loss

BATCH, PROMPT, TIME = 6, 4, 7
VOCAB = 259
STEPS_PER_GENERATION = 2
MAX_COMPLETION_LENGTH = 16
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Evaluation:
    """A loss and the gradient of every parameter."""

    loss: Tensor
    gradients: list[Tensor]
    metrics: dict[str, float] = field(default_factory=dict)

    def relative_errors(self, other: Evaluation) -> tuple[float, float]:
        """Of the loss and, in L2, of the whole gradient, against ``other``."""
        loss_error = (self.loss - other.loss).abs() / other.loss.abs()
        difference = sum((a - b).double().square().sum() for a, b in zip(self.gradients, other.gradients, strict=True))
        size = sum(b.double().square().sum() for b in other.gradients)
        return float(loss_error), float((difference / size).sqrt())


_STATES: dict[str, dict[str, Any]] = {}


def keep_accelerate_state() -> None:
    """Remember accelerate's global state as the session's trainer has made it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    _STATES.update({s.__name__: dict(s._shared_state) for s in (AcceleratorState, PartialState, GradientState)})


def restore_accelerate_state() -> None:
    """Give the session's trainer its accelerate state back: every ``TrainingArguments`` that a test builds wipes it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.update(_STATES[state.__name__])


@pytest.fixture(autouse=True)
def _accelerate_state(request: pytest.FixtureRequest) -> None:
    if "trl_trainer" in request.fixturenames:
        request.getfixturevalue("trl_trainer")
        restore_accelerate_state()


@pytest.fixture(scope="session")
def policy(byte_tokenizer: Any) -> nn.Module:
    """A 2-layer Qwen2 with weights large enough for uneven distributions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        attention_dropout=0.0,
        pad_token_id=byte_tokenizer.pad_token_id,
        bos_token_id=byte_tokenizer.bos_token_id,
        eos_token_id=byte_tokenizer.eos_token_id,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="session")
def trl_trainer(policy: nn.Module, byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GRPOTrainer that never trains; its fields are set per case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=BATCH,
            num_generations=2,
            max_completion_length=MAX_COMPLETION_LENGTH,
            steps_per_generation=STEPS_PER_GENERATION,
            beta=0.0,
            disable_dropout=True,
            temperature=TEMPERATURE,
        )
        trainer = GRPOTrainer(
            model=copy.deepcopy(policy),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "ab"}] * 12),
            processing_class=byte_tokenizer,
        )
    keep_accelerate_state()
    return trainer


@pytest.fixture(scope="session")
def trl_inputs() -> dict[str, Tensor]:
    """One micro-batch with left-padded prompts, ragged completions, and all four kinds of log-probabilities."""
    g = torch.Generator().manual_seed(7)
    prompt_mask = torch.ones(BATCH, PROMPT, dtype=torch.long)
    prompt_mask[1, :2] = 0
    prompt_mask[4, :1] = 0
    lengths = torch.tensor([7, 3, 5, 1, 7, 2])
    completion_mask = (torch.arange(TIME) < lengths.unsqueeze(1)).long()
    prompt_ids = torch.randint(3, VOCAB, (BATCH, PROMPT), generator=g) * prompt_mask
    completion_ids = torch.randint(3, VOCAB, (BATCH, TIME), generator=g) * completion_mask

    def noise(scale: float) -> Tensor:
        return torch.randn(BATCH, TIME, generator=g) * scale

    old, reference, sampling = noise(0.35), noise(0.5), noise(0.4)
    sampling[1] += 0.45  # a stale sequence of negative advantage, so that the off-policy mask has something to drop
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([0.4, -1.7, 0.0, 0.3, -1.1, -0.9]),
        "num_items_in_batch": torch.tensor(61.0),
        "old_noise": old,
        "reference_noise": reference,
        "sampling_noise": sampling,
    }


@dataclass(frozen=True)
class Case:
    """One cell of the parity grid; field names are TRL's."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    delta: float | None = None
    epsilon_high: float | None = None
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    correction_mode: str | None = None
    clip_min: float | None = None
    entropy_coef: float = 0.0
    has_old: bool = True
    has_sampling: bool = True
    has_token_advantages: bool = False
    accumulation: int = 3
    is_training: bool = True

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return json.dumps(changed)

    def settings(self) -> LossSettings:
        return LossSettings(
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            delta=self.delta,
            epsilon_high=self.epsilon_high,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            top_entropy_quantile=self.top_entropy_quantile,
            entropy_coef=self.entropy_coef,
            vllm_importance_sampling_correction=self.correction_mode is not None,
            vllm_importance_sampling_mode=self.correction_mode or "sequence_mask",
            vllm_importance_sampling_clip_max=1.4,
            vllm_importance_sampling_clip_min=self.clip_min,
            max_completion_length=MAX_COMPLETION_LENGTH,
            steps_per_generation=STEPS_PER_GENERATION,
        )


@pytest.fixture(scope="session")
def policy_logprobs(trl_trainer: Any, trl_inputs: dict[str, Tensor]) -> Tensor:
    """(batch, time) log-probs of the tiny policy, the centre around which the other log-probs are scattered."""
    restore_accelerate_state()  # fixtures of the session are made before those of the test
    with torch.no_grad():
        ids = torch.cat([trl_inputs["prompt_ids"], trl_inputs["completion_ids"]], 1)
        attention = torch.cat([trl_inputs["prompt_mask"], trl_inputs["completion_mask"]], 1)
        logprobs, _, _ = trl_trainer._get_per_token_logps_and_entropies(trl_trainer.model, ids, attention, TIME)
    return logprobs


@pytest.fixture(scope="session")
def case_inputs(trl_inputs: dict[str, Tensor], policy_logprobs: Tensor) -> Callable[[Case], dict[str, Tensor]]:
    """The dict that TRL's ``compute_loss`` takes, for one case."""

    def inputs(case: Case) -> dict[str, Tensor]:
        mask = trl_inputs["completion_mask"]
        made = {name: value for name, value in trl_inputs.items() if not name.endswith("_noise")}
        scattered = {
            name: (policy_logprobs + trl_inputs[f"{name}_noise"]) * mask for name in ("old", "reference", "sampling")
        }
        if case.has_old:
            made["old_per_token_logps"] = scattered["old"]
        if case.has_sampling or case.correction_mode is not None:
            made["sampling_per_token_logps"] = scattered["sampling"]
        if case.beta:
            made["ref_per_token_logps"] = scattered["reference"]
        if case.correction_mode is not None:
            old = scattered["old"] if case.has_old else policy_logprobs
            made["importance_sampling_ratio"] = _trl_ratio(old, scattered["sampling"], mask, case)
        if case.has_token_advantages:
            made["advantages"] = made["advantages"].unsqueeze(1) + 0.3 * trl_inputs["old_noise"]
        return made

    return inputs


def _trl_ratio(old: Tensor, sampling: Tensor, mask: Tensor, case: Case) -> Tensor:
    """The train/inference ratio in the words of TRL's documentation (it forms it while it generates)."""
    gap = (old - sampling) * mask
    if str(case.correction_mode).startswith("sequence"):
        gap = gap.sum(1, keepdim=True)
    ratio = gap.exp()
    if str(case.correction_mode).endswith("truncate"):
        return ratio.clamp(case.clip_min, 1.4)
    return ratio * (ratio <= 1.4) * (ratio >= (case.clip_min or 0.0))


@pytest.fixture(scope="session")
def trl_evaluation(trl_trainer: Any) -> Callable[[Case, dict[str, Tensor]], Evaluation]:
    """TRL's loss and gradient for one case."""

    def evaluate(case: Case, inputs: dict[str, Tensor]) -> Evaluation:
        trainer, model = trl_trainer, trl_trainer.model
        trainer.loss_type = case.loss_type
        trainer.importance_sampling_level = case.importance_sampling_level
        trainer.beta = case.beta
        trainer.epsilon_high = 0.2 if case.epsilon_high is None else case.epsilon_high
        trainer.off_policy_mask_threshold = case.off_policy_mask_threshold
        trainer.top_entropy_quantile = case.top_entropy_quantile
        trainer.entropy_coef = case.entropy_coef
        trainer._entropy_bonus_enabled = case.entropy_coef != 0.0
        trainer.use_vllm = case.correction_mode is not None
        trainer.vllm_importance_sampling_correction = case.correction_mode is not None
        trainer.args.delta = case.delta
        trainer.args.use_bias_correction_kl = case.use_bias_correction_kl
        trainer.current_gradient_accumulation_steps = case.accumulation
        trainer._metrics["train"].clear()
        trainer._metrics["eval"].clear()
        model.train(case.is_training)
        model.zero_grad(set_to_none=True)
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        metrics = trainer._metrics["train" if case.is_training else "eval"]
        return Evaluation(
            loss.detach(), [p.grad.clone() for p in model.parameters()], {name: v[-1] for name, v in metrics.items()}
        )

    return evaluate


def loss_from_inputs(
    model: nn.Module, inputs: dict[str, Tensor], settings: LossSettings, accumulation: int, *, is_training: bool = True
) -> PolicyLoss:
    """TRL's input dict through the pieces of the core alone: forward, whole logits, token statistics, policy loss."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    time = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, -time - 1 : -1]
    stats = token_statistics(
        logits, inputs["completion_ids"], temperature=TEMPERATURE, has_entropy_gradient=settings.entropy_coef > 0
    )
    loss_inputs = LossInputs(
        logprobs=stats.logprobs,
        entropy=stats.entropy,
        completion_mask=inputs["completion_mask"],
        advantages=inputs["advantages"],
        old_logprobs=inputs.get("old_per_token_logps"),
        behavior_logprobs=inputs.get("sampling_per_token_logps"),
        reference_logprobs=inputs.get("ref_per_token_logps"),
        num_items=inputs["num_items_in_batch"],
    )
    return policy_loss(loss_inputs, settings, accumulation=accumulation, is_training=is_training)


@pytest.fixture(scope="session")
def core_evaluation(policy: nn.Module) -> Callable[[Case, dict[str, Tensor]], Evaluation]:
    """Loss, gradient and readings of the core, which forms the train/inference ratio itself."""

    def evaluate(case: Case, inputs: dict[str, Tensor]) -> Evaluation:
        policy.train(case.is_training)
        policy.zero_grad(set_to_none=True)
        made = loss_from_inputs(policy, inputs, case.settings(), case.accumulation, is_training=case.is_training)
        made.loss.backward()
        readings = {name: value.item() for name, value in made.readings.items()}
        return Evaluation(made.loss.detach(), [p.grad.clone() for p in policy.parameters()], readings)

    return evaluate


@pytest.fixture(scope="session")
def module_evaluation(policy: nn.Module, byte_tokenizer: Any) -> Callable[[Case, dict[str, Tensor]], Evaluation]:
    """Loss and gradient through the module's front door; one module whose settings are exchanged."""
    from lightning_rlstab import GRPOModule

    module = GRPOModule(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=byte_tokenizer,
        temperature=TEMPERATURE,
        steps_per_generation=STEPS_PER_GENERATION,
    )

    def evaluate(case: Case, inputs: dict[str, Tensor]) -> Evaluation:
        fields = vars(case.settings()) | {"use_vllm": case.correction_mode is not None}
        module.settings = dataclasses.replace(module.settings, **fields)
        module.loss_settings = module.settings.loss_settings(steps_per_generation=STEPS_PER_GENERATION)
        module.entropy_bonus = dataclasses.replace(module.entropy_bonus, coef=case.entropy_coef)
        module.train(case.is_training)
        policy.train(case.is_training)
        policy.zero_grad(set_to_none=True)
        loss = module.loss_from_trl_inputs(inputs, accumulation=case.accumulation)
        loss.backward()
        return Evaluation(loss.detach(), [p.grad.clone() for p in policy.parameters()])

    return evaluate


@pytest.fixture(scope="session")
def make_case() -> type[Case]:
    """The record of a grid cell (test modules do not import from each other)."""
    return Case
