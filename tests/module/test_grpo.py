"""GRPOModule on a real Trainer: the loop, the window, evaluation, logging, saving."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.gepo import GEPO
from lightning_rlstab.report.scalars import undeclared

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(24)]


def distinct_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


@pytest.fixture
def module(tiny_policy: Callable[..., Any], byte_tokenizer: Any) -> Callable[..., GRPOModule]:
    def build(**changes: Any) -> GRPOModule:
        settings = {
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-2,
            "reward_funcs": [distinct_letters],
            "processing_class": byte_tokenizer,
            "model": tiny_policy(),
        }
        return GRPOModule(**{**settings, **changes})

    return build


class Losses(pl.Callback):
    """Every optimizer step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trainer(tmp_path: Path, **changes: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "logger": TensorBoardLogger(tmp_path, name=None),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "inference_mode": False,
    }
    return pl.Trainer(**{**settings, **changes})


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_training_moves_the_weights_and_raises_an_easy_reward(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    policy_module = module(max_completion_length=8)
    losses = Losses()
    trainer(tmp_path, max_steps=40, callbacks=[losses]).fit(policy_module, PromptDataModule(ROWS))
    rewards = [step["reward"] for step in losses.steps]
    assert sum(rewards[-8:]) > sum(rewards[:8])


def test_every_logged_scalar_is_declared_and_the_event_file_holds_every_step(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    run = trainer(tmp_path, accumulate_grad_batches=2)
    run.fit(module(beta=0.04, num_iterations=2), PromptDataModule(ROWS, validation_size=4))
    curves = scalars(Path(run.log_dir))
    assert not undeclared(curves)
    assert [step for step, _ in curves["loss"]] == [0, 1, 2, 3]
    names = {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "kl",
        "grad_norm",
        "learning_rate",
        "num_tokens",
    }
    assert names <= set(curves)


def test_the_default_schedule_is_linear_to_zero_over_the_run(module: Callable[..., GRPOModule], tmp_path: Path) -> None:
    losses = Losses()
    trainer(tmp_path, callbacks=[losses]).fit(module(), PromptDataModule(ROWS))
    assert [step["learning_rate"] for step in losses.steps] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"])
def test_running_a_window_again_gives_the_accumulated_gradient(
    module: Callable[..., GRPOModule], tmp_path: Path, loss_type: str
) -> None:
    class Replay(pl.Callback):
        worst = 0.0

        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            seen = [parameter.grad.clone() for parameter in parameters]
            losses = [pl_module.token_losses(entry).sum() for entry in pl_module.window]
            again = torch.autograd.grad(sum(losses), parameters)
            size = max(float(gradient.abs().max()) for gradient in seen)
            gap = max(float((a - b).abs().max()) for a, b in zip(seen, again, strict=True))
            self.worst = max(self.worst, gap / size)

    replay = Replay()
    run = trainer(tmp_path, accumulate_grad_batches=3, callbacks=[replay], logger=False)
    # 8 prompts make windows of 3, 3 and 2 micro-batches: the last one is short.
    policy_module = module(loss_type=loss_type, beta=0.04, entropy_coef=0.01, steps_per_generation=1)
    run.fit(policy_module, PromptDataModule(ROWS[:8]))
    assert replay.worst < 1e-5


def test_running_a_window_again_keeps_what_a_guard_has_bounded(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    """A token 40 nats off its old log-prob is held at GEPO's bound and has no gradient, the second time as well."""

    class Far(pl.Callback):
        def on_policy_loss(self, trainer: pl.Trainer, pl_module: Any, inputs: Any) -> Any:
            old = inputs.logprobs.detach().clone()
            old[0, 0] -= 40.0
            return dataclasses.replace(inputs, old_logprobs=old)

    class Replay(pl.Callback):
        gap = 0.0

        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            seen = [parameter.grad.clone() for parameter in parameters]
            again = torch.autograd.grad(pl_module.token_losses(pl_module.window[0]).sum(), parameters)
            size = max(float(gradient.abs().max()) for gradient in seen)
            self.gap = max(float((a - b).abs().max()) for a, b in zip(seen, again, strict=True)) / size

    replay = Replay()
    callbacks = [Far(), GEPO(advantages=False, guard=False), replay]
    run = trainer(tmp_path, callbacks=callbacks, logger=False, max_steps=1)
    run.fit(module(loss_type="cispo"), PromptDataModule(ROWS))  # cispo's gradient goes on beyond its clip
    assert replay.gap < 1e-5


def test_token_losses_of_a_mask_keep_only_its_tokens(module: Callable[..., GRPOModule], tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Mask(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            entry = pl_module.window[0]
            kept = entry.rollout.completion_mask.clone()
            kept[:, 1:] = False
            seen.append((pl_module.token_losses(entry), pl_module.token_losses(entry, token_mask=kept)))

    trainer(tmp_path, callbacks=[Mask()], logger=False, max_steps=1).fit(module(), PromptDataModule(ROWS))
    whole, masked = seen[0]
    assert torch.equal(masked[:, 0], whole[:, 0])
    assert not masked[:, 1:].any()


def test_one_rollout_serves_several_iterations_and_old_logprobs_come_with_it(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    rollouts = []

    class Watch(pl.Callback):
        def on_rollout_ready(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
            rollouts.append(rollout)
            return rollout

    trainer(tmp_path, callbacks=[Watch()], logger=False, max_steps=8).fit(
        module(num_iterations=2, steps_per_generation=2), PromptDataModule(ROWS)
    )
    assert len(rollouts) == 2
    assert all(rollout.old_logprobs is not None for rollout in rollouts)


def test_aligned_rollouts_need_no_old_logprobs(module: Callable[..., GRPOModule], tmp_path: Path) -> None:
    rollouts = []

    class Watch(pl.Callback):
        def on_rollout_ready(self, trainer: pl.Trainer, pl_module: Any, rollout: Any) -> Any:
            rollouts.append(rollout)
            return rollout

    trainer(tmp_path, callbacks=[Watch()], logger=False, accumulate_grad_batches=2).fit(
        module(), PromptDataModule(ROWS)
    )
    assert len(rollouts) == 4
    assert all(rollout.old_logprobs is None for rollout in rollouts)


def test_validation_runs_inside_fit_and_leaves_the_training_run_as_it_was(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    def losses_of(**changes: Any) -> list[float]:
        losses = Losses()
        run = trainer(tmp_path, max_steps=6, callbacks=[losses], logger=False, **changes)
        torch.manual_seed(3)
        run.fit(module(), PromptDataModule(ROWS, validation=ROWS[:5]))
        return [step["loss"] for step in losses.steps]

    assert losses_of(val_check_interval=2, check_val_every_n_epoch=None) == losses_of(limit_val_batches=0)


def test_held_out_scores_are_those_of_the_completions(module: Callable[..., GRPOModule], tmp_path: Path) -> None:
    def always_right(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    (scores,) = trainer(tmp_path, logger=False).validate(
        module(reward_funcs=always_right, num_generations_eval=3), PromptDataModule(validation=ROWS[:5]), verbose=False
    )
    assert scores["val/reward"] == scores["val/pass@1"] == scores["val/pass@3"] == 1.0
    assert 1.0 <= scores["val/completions/mean_length"] <= 6.0


def test_greedy_evaluation_gives_the_same_completion_every_time(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    batches = trainer(tmp_path, logger=False).predict(
        module(eval_temperature=0, num_generations_eval=2), PromptDataModule(predict=ROWS[:4])
    )
    records = [record for batch in batches for record in batch]
    assert len(records) == 8
    assert records[0]["answer"] == "1"
    assert all(records[i]["completion"] == records[i + 1]["completion"] for i in range(0, 8, 2))


def test_the_table_of_completions_is_written_line_by_line(module: Callable[..., GRPOModule], tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2)
    run.fit(module(log_completions=True), PromptDataModule(ROWS))
    lines = [json.loads(line) for line in (Path(run.log_dir) / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert set(lines[0]) == {"step", "prompt", "completion", "distinct_letters", "advantage"}
    assert [line["step"] for line in lines] == [0] * 4 + [1] * 4


def test_the_first_rollout_is_checked_and_the_check_is_an_event(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.fit(module(), PromptDataModule(ROWS))
    events = [json.loads(line) for line in (Path(run.log_dir) / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["self_check"]
    assert events[0]["is_ok"]


def test_exported_weights_load_in_transformers(module: Callable[..., GRPOModule], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy_module = module()
    trainer(tmp_path, logger=False, max_steps=2).fit(policy_module, PromptDataModule(ROWS))
    folder = policy_module.save_pretrained(tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    for name, weight in policy_module.policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).pad_token == "<pad>"


def test_the_policy_trains_in_training_mode_and_the_reference_stays_frozen(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    policy_module = module(beta=0.1)
    policy_module.policy.eval()
    modes = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            modes.append((pl_module.policy.training, pl_module.reference.training))

    before = {name: weight.clone() for name, weight in policy_module.policy.state_dict().items()}
    trainer(tmp_path, logger=False, callbacks=[Watch()]).fit(policy_module, PromptDataModule(ROWS))
    assert set(modes) == {(True, False)}
    assert all(torch.equal(weight, before[name]) for name, weight in policy_module.reference.state_dict().items())
    assert any(not torch.equal(weight, before[name]) for name, weight in policy_module.policy.state_dict().items())


def test_evaluating_before_and_between_fits_is_fine_with_the_trainers_defaults(
    module: Callable[..., GRPOModule], tmp_path: Path
) -> None:
    policy_module, data = module(), PromptDataModule(ROWS, validation=ROWS[:4])
    options = {"logger": False, "inference_mode": True, "max_steps": 2}
    trainer(tmp_path, **options).validate(policy_module, data, verbose=False)
    trainer(tmp_path, val_check_interval=1, check_val_every_n_epoch=None, **options).fit(policy_module, data)
    trainer(tmp_path, **options).validate(policy_module, data, verbose=False)
    trainer(tmp_path, **options).fit(policy_module, data)


def test_a_misspelt_setting_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="`num_generation` must be a setting of GRPOModule, got 4"):
        GRPOModule(model="anything", reward_funcs=distinct_letters, num_generation=4)


def test_the_strategy_names_are_known_once_the_module_is(tmp_path: Path) -> None:
    assert type(trainer(tmp_path, strategy="rlstab").strategy).__name__ == "RLStabSingleDevice"


def test_a_reward_model_that_does_not_exist_is_refused_by_field() -> None:
    with pytest.raises(ValueError, match="`reward_funcs` must name"):
        GRPOModule(model="anything", reward_funcs="./not/a-model")
