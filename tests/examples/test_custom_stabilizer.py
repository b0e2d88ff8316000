from __future__ import annotations

import json
import math
import sys
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.cli import RLStabCLI
from lightning_rlstab.demo.digits import addition_rows, digit_share
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy


@pytest.fixture
def brake(examples, monkeypatch):
    monkeypatch.syspath_prepend(examples / "custom_stabilizer")
    import mismatch_brake

    yield mismatch_brake
    del sys.modules["mismatch_brake"]


def test_the_formula_adds_up_over_pieces_and_ignores_what_is_behind_the_mask(brake):
    logprobs, behavior = -torch.rand(4, 6), -torch.rand(4, 6)
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 0]).unsqueeze(1)
    whole = brake.mismatch_reading(logprobs, behavior, mask)
    pieces = [brake.mismatch_reading(logprobs[rows], behavior[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(pieces), whole)
    slow = sum(abs(float(logprobs[i, t] - behavior[i, t])) for i in range(4) for t in range(6) if mask[i, t])
    assert whole.tolist() == pytest.approx([slow, 12])
    for poison in (math.nan, math.inf):
        spoilt = brake.mismatch_reading(logprobs.where(mask, poison), behavior.where(mask, poison), mask)
        assert torch.equal(spoilt, whole)


def test_the_memory_is_frozen_pure_and_learns_only_from_what_is_usual(brake):
    config, state = brake.BrakeConfig(warmup_steps=2), brake.BrakeState()
    for _ in range(3):
        state = brake.step(config, state, 0.1)
    assert state == brake.BrakeState(usual=pytest.approx(0.1), steps=3)
    with pytest.raises(FrozenInstanceError):
        state.steps = 0
    assert brake.step(config, state, 3.0) == brake.step(config, state, 3.0)
    assert brake.step(config, state, 3.0) == brake.BrakeState(usual=state.usual, steps=3, skips=1)
    for broken in (math.nan, math.inf):  # also while it learns what is usual
        assert brake.step(config, brake.BrakeState(), broken) == brake.BrakeState(skips=1)
    assert not brake.is_abnormal(config, state, 0.5)  # five times as much, and not more
    assert not brake.is_abnormal(config, brake.BrakeState(usual=1e-7, steps=9), 0.01)  # rounding is no jump
    assert brake.BrakeState(**json.loads(json.dumps(asdict(state)))) == state


@pytest.mark.parametrize(
    ("field", "value"), [("times", 1.0), ("least", math.nan), ("least", True), ("warmup_steps", 0)]
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(brake, field, value):
    with pytest.raises(ValueError, match=f"`{field}` must be"):
        brake.MismatchBrake(**{field: value})


@pytest.mark.slow
def test_the_step_that_is_not_usual_is_skipped_and_the_memory_survives_a_checkpoint(run_example):
    names = run_example("custom_stabilizer/run.py")
    gate, brake = names["trainer"].strategy, names["brake"]
    assert (gate.applied_steps, gate.skipped_steps) == (11, 1)
    assert (brake.state.steps, brake.state.skips) == (11, 1)

    resumed = names["MismatchBrake"](times=7.0)
    module = GRPOModule(
        digit_policy(digit_tokenizer()),
        [digit_share],
        processing_class=digit_tokenizer(),
        per_device_train_batch_size=32,
        max_completion_length=4,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="rlstab",
        callbacks=[resumed],
        max_steps=13,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptDataModule(addition_rows()), ckpt_path="runs/custom_stabilizer/last.ckpt")
    assert (resumed.state.steps, resumed.state.skips) == (12, 1)
    assert resumed.config.times == 7.0  # the settings are those of the new run


def test_the_yaml_fragment_puts_it_into_a_run_by_its_class_path(brake, examples, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rlstab"])
    tokenizer = digit_tokenizer()
    save_policy(digit_policy(tokenizer), tokenizer, tmp_path / "policy")
    arguments = ["fit", "--config", "configs/demo.yaml"]
    arguments += ["--config", str(examples / "custom_stabilizer" / "mismatch_brake.yaml")]
    arguments += [f"--model.model={tmp_path / 'policy'}", f"--trainer.default_root_dir={tmp_path}"]
    arguments += ["--model.per_device_train_batch_size=8", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    cli = RLStabCLI(args=arguments)
    (found,) = [each for each in cli.trainer.callbacks if isinstance(each, brake.MismatchBrake)]
    assert found.state.steps == 2
    assert "mismatch_brake.MismatchBrake" in (Path(cli.trainer.log_dir) / "config.yaml").read_text()
