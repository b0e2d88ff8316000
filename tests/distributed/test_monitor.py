"""StabilityMonitor on two processes: one memory, one stop, and one file that tells of it."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.stability_monitor import StabilityMonitor
from lightning_rlstab.report.events import read_events
from lightning_rlstab.report.memory import state_to_dict

ROWS = [{"prompt": f"{number}+1="} for number in range(40)]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


class Spoil(pl.Callback):
    """A NaN in the gradient: where it is sharded in rank 1's piece only, else in everybody's copy."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        is_sharded = hasattr(next(pl_module.policy.parameters()), "to_local")
        if trainer.global_step == 2 and (trainer.global_rank == 1 or not is_sharded):
            gradient = next(p.grad for p in pl_module.policy.parameters() if p.grad is not None)
            piece = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if piece.numel():
                piece.view(-1)[0] = math.nan


@pytest.mark.parametrize("strategy", [pytest.param("rlstab_ddp", marks=pytest.mark.slow), "rlstab_fsdp"])
def test_both_ranks_keep_one_memory_and_stop_together(
    strategy, run_on_ranks, on_ranks, tiny_policy, byte_tokenizer, tmp_path
):
    def train() -> tuple[Any, int]:
        module = GRPOModule(
            model=tiny_policy(),
            processing_class=byte_tokenizer,
            reward_funcs=[letters],
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=6,
            learning_rate=1e-3,
        )
        monitor = StabilityMonitor(stop_on="error")
        trainer = on_ranks(strategy, tmp_path, max_steps=12, callbacks=[monitor, Spoil()], inference_mode=False)
        trainer.fit(module, PromptDataModule(ROWS))
        return state_to_dict(monitor.state), trainer.global_step

    (first, steps), (second, other_steps) = run_on_ranks(train)
    assert steps == other_steps == 3
    assert repr(first) == repr(second)
    assert set(first["findings"]) == {"nan_gradient"}
    events = read_events(tmp_path / "events.jsonl")
    assert [event["alarm_step"] for event in events if event["event"] == "alarm"] == [2]
    assert len([event for event in events if event["event"] == "stop"]) == 1
