"""Public failures of other systems that the module itself must survive, each on a real Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.rollout.sampler import Samples

ROWS = [{"prompt": f"{number}+1="} for number in range(16)]


class FixedSampler:
    """Completions and lengths that do not depend on the policy; row by row from a list."""

    def __init__(self, lengths: list[int], eos: int, *, ended: bool = True) -> None:
        self.lengths, self.eos, self.ended = lengths, eos, ended

    def sample(
        self, policy: Any, prompt_ids: Tensor, prompt_mask: Tensor, *, settings: Any, seed: Any = None
    ) -> Samples:
        rows, width = prompt_ids.shape[0], max(self.lengths)
        lengths = torch.tensor([self.lengths[row % len(self.lengths)] for row in range(rows)])
        mask = torch.arange(width) < lengths.unsqueeze(1)
        tokens = torch.randint(0, 256, (rows, width), generator=torch.Generator().manual_seed(rows))
        if self.ended:
            tokens[torch.arange(rows), lengths - 1] = self.eos
        return Samples(
            completion_ids=torch.where(mask, tokens, 256),
            completion_mask=mask,
            is_truncated=torch.full((rows,), not self.ended),
            behavior_logprobs=torch.full((rows, width), math.nan),
        )


class Gradients(pl.Callback):
    """Gradients of every optimizer step, before clipping."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.steps.append([parameter.grad.clone() for parameter in pl_module.policy.parameters()])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def norms(self) -> list[float]:
        return [float(torch.stack([gradient.norm() for gradient in step]).norm()) for step in self.steps]


def by_position(values: list[float | None]) -> Callable[..., list[float | None]]:
    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [values[row % len(values)] for row in range(len(completions))]

    return reward


@pytest.fixture
def fit(tiny_policy: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path) -> Callable[..., Gradients]:
    def run(
        rewards: Any,
        *,
        steps: int = 1,
        trainer: dict[str, Any] | None = None,
        callbacks: Sequence[pl.Callback] = (),
        **settings: Any,
    ) -> Gradients:
        module = GRPOModule(
            **{
                "model": tiny_policy(),
                "reward_funcs": rewards if callable(rewards) else by_position(rewards),
                "processing_class": byte_tokenizer,
                "num_generations": 4,
                "per_device_train_batch_size": 4,
                "max_completion_length": 6,
                "learning_rate": 1e-3,
                **settings,
            }
        )
        gradients = Gradients()
        options = {"logger": False, "accelerator": "cpu", "log_every_n_steps": 1, **(trainer or {})}
        pl.Trainer(
            max_steps=steps,
            callbacks=[gradients, *callbacks],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            **options,
        ).fit(module, PromptDataModule(ROWS, shuffle=False))
        return gradients

    return run


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_fr_006_the_same_rollouts_give_the_same_gradient_however_they_are_split(
    fit: Callable[..., Gradients], byte_tokenizer: Any, loss_type: str
) -> None:
    def gradient(batch_size: int, accumulation: int) -> Tensor:
        seen = fit(
            [1.0, 0.0, 0.0, 2.0, 0.5, 0.0, 0.25, 0.0],
            sampler=FixedSampler([6, 3, 5, 2, 6, 6, 1, 4], byte_tokenizer.eos_token_id),
            num_generations=8,
            per_device_train_batch_size=batch_size,
            loss_type=loss_type,
            trainer={"accumulate_grad_batches": accumulation},
        )
        return torch.cat([part.flatten() for part in seen.steps[0]])

    whole = gradient(16, 1)
    assert whole.isfinite().all()
    for batch_size, accumulation in ((8, 2), (4, 4)):
        torch.testing.assert_close(
            gradient(batch_size, accumulation), whole, rtol=1e-5, atol=1e-5 * float(whole.norm())
        )


def test_fr_019_groups_without_spread_keep_their_kl_and_are_decided_one_by_one(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    flat = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    options = {
        "sampler": FixedSampler([3], byte_tokenizer.eos_token_id),
        "per_device_train_batch_size": 8,
        "num_iterations": 2,
        "steps": 2,
    }
    plain, anchored = fit(flat, **options), fit(flat, beta=0.5, **options)
    assert plain.metrics[0]["frac_reward_zero_std"] == anchored.metrics[0]["frac_reward_zero_std"] == 0.5
    assert plain.norms()[1] != anchored.norms()[1]


def test_fr_020_a_step_with_mean_advantage_zero_shows_its_absolute_mean(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    seen = fit([1.0, 0.0, 0.0, 0.0], sampler=FixedSampler([3], byte_tokenizer.eos_token_id))
    assert seen.metrics[0]["rlstab/grpo/advantage_abs_mean"] == pytest.approx(0.75, abs=1e-3)
    assert seen.metrics[0]["frac_reward_zero_std"] == 0.0


def test_fr_027_groups_without_spread_are_counted_and_stay_in_the_normaliser(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    sampler = FixedSampler([3], byte_tokenizer.eos_token_id)
    two_of_eight = [1.0, 0.0, 0.0, 0.0] + [0.0, 1.0, 0.0, 0.0] + [1.0] * 24
    seen = fit(two_of_eight, sampler=sampler, per_device_train_batch_size=32)
    assert seen.metrics[0]["frac_reward_zero_std"] == 0.75
    # dapo divides by all loss tokens: the six idle groups dilute the step by their share, as documented.
    alone = fit(two_of_eight[:8], sampler=FixedSampler([3], byte_tokenizer.eos_token_id), per_device_train_batch_size=8)
    assert seen.norms()[0] < alone.norms()[0]


def test_fr_033_equal_lengths_without_truncation_are_worth_a_warning(
    fit: Callable[..., Gradients], byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit([1.0, 0.0], sampler=FixedSampler([5], byte_tokenizer.eos_token_id))
    assert "have exactly 5 tokens" in caplog.text
    caplog.clear()
    seen = fit([1.0, 0.0], sampler=FixedSampler([5, 2], byte_tokenizer.eos_token_id))
    assert "exactly" not in caplog.text
    assert (seen.metrics[0]["completions/min_length"], seen.metrics[0]["completions/max_length"]) == (2, 5)


def test_fr_045_a_kl_coefficient_changes_the_gradient(fit: Callable[..., Gradients], byte_tokenizer: Any) -> None:
    options = {"sampler": FixedSampler([4, 3], byte_tokenizer.eos_token_id), "num_iterations": 2, "steps": 2}
    without, strong = fit([1.0, 0.0], **options), fit([1.0, 0.0], beta=1.0, **options)
    assert without.norms()[0] == pytest.approx(strong.norms()[0], rel=1e-4)  # policy and reference agree at first
    assert abs(without.norms()[1] - strong.norms()[1]) > 1e-3 * without.norms()[1]
    assert strong.metrics[1]["kl"] > 0


def test_fr_051_without_a_reference_everything_else_works(fit: Callable[..., Gradients], byte_tokenizer: Any) -> None:
    seen = fit([1.0, 0.0], beta=0.0, sampler=FixedSampler([4, 3], byte_tokenizer.eos_token_id))
    assert "kl" not in seen.metrics[0]
    assert seen.norms()[0] > 0


def test_fr_053_without_a_coefficient_the_entropy_bonus_has_no_gradient(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    flat = fit([1.0, 1.0], sampler=FixedSampler([4, 3], byte_tokenizer.eos_token_id))
    assert flat.norms() == [0.0]
    bonus = fit([1.0, 1.0], entropy_coef=0.1, sampler=FixedSampler([4, 3], byte_tokenizer.eos_token_id))
    assert bonus.norms()[0] > 0


def test_fr_056_a_loss_of_zero_on_policy_still_has_a_gradient(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    seen = fit([1.0, 0.0, 0.0, 0.0], sampler=FixedSampler([3], byte_tokenizer.eos_token_id))
    assert abs(seen.metrics[0]["loss"]) < 1e-6
    assert seen.metrics[0]["grad_norm"] > 0


def test_fr_058_the_norm_is_taken_over_trainable_weights_only(
    tiny_policy: Callable[..., Any], byte_tokenizer: Any
) -> None:
    policy = tiny_policy().requires_grad_(False)
    module = GRPOModule(model=policy, reward_funcs=by_position([1.0, 0.0]), processing_class=byte_tokenizer)
    with pytest.raises(ValueError, match="`model` must have trainable parameters, got 0"):
        module.configure_optimizers()


def test_fr_063_a_truncated_answer_leaves_numerator_and_denominator(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    class HalfTruncated(FixedSampler):
        def sample(self, *arguments: Any, **options: Any) -> Samples:
            samples = super().sample(*arguments, **options)
            samples.is_truncated[::2] = True
            return samples

    rewards = [5.0, 1.0, 5.0, 0.0]
    seen: list[Any] = []

    class Watch(pl.Callback):
        def on_rollout_ready(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
            seen.append(rollout)
            return rollout

    sampler = HalfTruncated([6], byte_tokenizer.eos_token_id)
    watch = Watch()
    gradients = fit(rewards, mask_truncated_completions=True, sampler=sampler, callbacks=[watch])
    assert gradients.norms()[0] > 0
    # num_items counts the two whole answers only.
    assert seen[0].num_items == 12


def test_fr_131_a_batch_in_which_everything_is_truncated_and_masked_is_finite(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    sampler = FixedSampler([6], byte_tokenizer.eos_token_id, ended=False)
    seen = fit([1.0, 0.0], mask_truncated_completions=True, sampler=sampler)
    assert seen.norms() == [0.0]
    assert all(math.isfinite(value) for value in seen.metrics[0].values())
    assert seen.metrics[0]["completions/clipped_ratio"] == 1.0


def test_fr_121_a_missing_reward_leaves_three_finite_advantages(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    seen = fit([1.0, None, 0.0, 1.0], sampler=FixedSampler([3], byte_tokenizer.eos_token_id))
    assert seen.metrics[0]["rlstab/grpo/rewards_missing"] == 1
    assert seen.metrics[0]["reward"] == pytest.approx(2 / 3)
    assert math.isfinite(seen.norms()[0])


def test_fr_140_the_logged_reward_follows_the_weights(fit: Callable[..., Gradients], byte_tokenizer: Any) -> None:
    seen = fit(
        lambda completions, **_: [1.0] * len(completions),
        reward_funcs=[by_position([1.0]), by_position([0.0])],
        reward_weights=[0.7, 0.3],
        sampler=FixedSampler([3], byte_tokenizer.eos_token_id),
    )
    assert seen.metrics[0]["reward"] == pytest.approx(0.7)


def test_fr_143_a_function_that_abstains_leaves_no_nan_in_the_curves(
    fit: Callable[..., Gradients], byte_tokenizer: Any, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name=None)
    fit(
        lambda completions, **_: [1.0] * len(completions),
        reward_funcs=[by_position([1.0, 0.0]), by_position([None])],
        sampler=FixedSampler([3], byte_tokenizer.eos_token_id),
        trainer={"logger": logger},
    )
    reader = EventAccumulator(logger.log_dir)
    reader.Reload()
    values = {tag: reader.Scalars(tag)[0].value for tag in reader.Tags()["scalars"]}
    assert all(math.isfinite(value) for value in values.values())
    assert values["rlstab/grpo/rewards_missing"] == 4


def test_fr_152_a_clip_value_on_the_trainer_is_honoured(fit: Callable[..., Gradients], byte_tokenizer: Any) -> None:
    class Clipped(pl.Callback):
        norm = math.inf

        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            gradients = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
            if gradients:
                self.norm = float(torch.nn.utils.get_total_norm(gradients))

    clipped = Clipped()
    options = {"sampler": FixedSampler([3], byte_tokenizer.eos_token_id), "steps": 2}
    options["trainer"] = {"gradient_clip_val": 1e-3}
    fit([1.0, 0.0], callbacks=[clipped], **options)
    assert clipped.norm == pytest.approx(1e-3, rel=1e-3)


def test_a_group_of_rows_of_different_prompts_is_refused(tiny_policy: Callable[..., Any], byte_tokenizer: Any) -> None:
    class Mixer(pl.Callback):
        def on_rollout_scored(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
            return rollout.replace(group_ids=torch.zeros_like(rollout.group_ids))

    module = GRPOModule(
        model=tiny_policy(),
        reward_funcs=by_position([1.0, 0.0]),
        processing_class=byte_tokenizer,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=3,
    )
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", logger=False, callbacks=[Mixer()], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="`group_ids` must be one id per prompt, got 0"):
        trainer.fit(module, PromptDataModule(ROWS, shuffle=False))


def test_a_prompt_longer_than_the_context_is_refused_before_sampling(
    tiny_policy: Callable[..., Any], byte_tokenizer: Any
) -> None:
    module = GRPOModule(
        model=tiny_policy(max_position_embeddings=16),
        reward_funcs=by_position([1.0, 0.0]),
        processing_class=byte_tokenizer,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=8,
    )
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"context of 16 tokens, got 20 \+ 8 = 28"):
        trainer.fit(module, PromptDataModule([{"prompt": "x" * 20}] * 4))


def test_fr_037_a_token_of_probability_zero_leaves_the_denominator(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    class OneImpossible(FixedSampler):
        def sample(self, *arguments: Any, **options: Any) -> Samples:
            samples = super().sample(*arguments, **options)
            samples.behavior_logprobs[0, 1] = -math.inf
            return samples

    seen: list[float] = []

    class Watch(pl.Callback):
        def on_rollout_ready(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
            seen.append(rollout.num_items)
            return rollout

    sampler = OneImpossible([5], byte_tokenizer.eos_token_id)
    gradients = fit([1.0, 0.0], sampler=sampler, callbacks=[Watch()])
    assert seen == [19]
    assert math.isfinite(gradients.norms()[0])


def test_fr_030_a_gradient_with_a_nan_never_reaches_the_weights_on_a_stock_strategy(
    fit: Callable[..., Gradients], byte_tokenizer: Any
) -> None:
    class OneNaN(pl.Callback):
        def __init__(self) -> None:
            self.weights: list[Tensor] = []

        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            weight = pl_module.policy.get_output_embeddings().weight
            if trainer.global_step == 1:
                weight.grad[0, 0] = math.nan

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            self.weights.append(pl_module.policy.get_output_embeddings().weight.detach().clone())

    spoiler = OneNaN()
    with pytest.warns(UserWarning, match="Step 1 was skipped: its gradient norm is nan"):
        fit([1.0, 0.0], sampler=FixedSampler([4, 3], byte_tokenizer.eos_token_id), steps=3, callbacks=[spoiler])
    before, skipped, after = spoiler.weights
    assert torch.equal(before, skipped)
    assert after.isfinite().all()
    assert not torch.equal(skipped, after)


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_fr_012_a_clip_value_that_would_freeze_or_flip_the_weights_is_refused(
    fit: Callable[..., Gradients], byte_tokenizer: Any, value: float
) -> None:
    with pytest.raises(ValueError, match="`gradient_clip_val` must be a finite number and above 0"):
        fit([1.0, 0.0], trainer={"gradient_clip_val": value})


def test_fr_123_a_short_time_limit_leaves_quick_functions_alone(
    fit: Callable[..., Gradients], byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timed_reward.py").write_text(
        "def score(completions, trainer_state, **kwargs):\n"
        "    return [float(len(text)) + trainer_state.global_step for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = fit([], reward_funcs=["timed_reward.score"], reward_time_limit_seconds=2.0, steps=2,
               sampler=FixedSampler([4, 3], byte_tokenizer.eos_token_id))  # fmt: skip
    assert seen.metrics[-1]["rlstab/grpo/rewards_timed_out"] == 0
    assert seen.metrics[-1]["reward"] > 1
