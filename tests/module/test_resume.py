"""A run that is killed and resumed goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlstab import GRPOModule, PromptDataModule

ROWS = [{"prompt": f"{number}+1="} for number in range(12)]


class KilledError(Exception):
    """Stands for a process that is gone."""


class Record(pl.Callback):
    """Losses of every optimizer step; raises at a chosen one, after the checkpoint of the step before."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.kill_at = kill_at
        self._last = 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > self._last:
            self._last = trainer.global_step
            self.losses[trainer.global_step] = float(trainer.callback_metrics["loss"])

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.kill_at is not None and trainer.global_step == self.kill_at:
            raise KilledError


def distinct_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


@pytest.fixture
def run(tiny_policy: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    def fit(
        folder: str, *, kill_at: int | None = None, resume: str | None = None, accumulate: int = 1, **settings: Any
    ) -> Any:
        module = GRPOModule(
            model=tiny_policy(attention_dropout=0.1),
            reward_funcs=distinct_letters,
            processing_class=byte_tokenizer,
            **{
                "num_generations": 4,
                "per_device_train_batch_size": 4,
                "max_completion_length": 5,
                "learning_rate": 1e-2,
                **settings,
            },
        )
        record = Record(kill_at)
        checkpoint = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = pl.Trainer(
            max_steps=14,
            accumulate_grad_batches=accumulate,
            accelerator="cpu",
            logger=False,
            callbacks=[record, checkpoint],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            val_check_interval=3 * accumulate,
            check_val_every_n_epoch=None,
            inference_mode=False,
        )
        torch.manual_seed(11)
        data = PromptDataModule(ROWS, validation=ROWS[:2])
        if kill_at is None:
            trainer.fit(module, data, ckpt_path=resume)
        else:
            with pytest.raises(KilledError):
                trainer.fit(module, data)
        return record.losses, {name: weight.clone() for name, weight in module.policy.state_dict().items()}

    return fit


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize(
    ("kill_at", "options"),
    [
        (4, {}),
        (7, {"steps_per_generation": 2, "num_iterations": 2}),
        (6, {"accumulate": 2, "beta": 0.05}),
        (9, {"steps_per_generation": 3, "use_adaptive_entropy": True, "entropy_target": 9.0}),
    ],
)
def test_the_next_losses_and_the_final_weights_equal_those_of_the_uninterrupted_run(
    run: Callable[..., Any], tmp_path: Path, kill_at: int, options: dict[str, Any]
) -> None:
    losses, weights = run("whole", **options)
    before, _ = run("killed", kill_at=kill_at, **options)
    checkpoint = str(tmp_path / "killed" / f"step={kill_at}.ckpt")
    after, resumed_weights = run("resumed", resume=checkpoint, **options)
    assert set(before) | set(after) == set(losses)
    assert min(after) == kill_at + 1
    assert {step: losses[step] for step in after} == after
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)


def test_a_checkpoint_holds_plain_types_only(run: Callable[..., Any], tmp_path: Path) -> None:
    run("killed", kill_at=3, steps_per_generation=2, num_iterations=2)
    state = torch.load(tmp_path / "killed" / "step=3.ckpt", weights_only=True)
    assert state["rlstab_grpo"]["ranks"][0]["cycle"]["slices"]
