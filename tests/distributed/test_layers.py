"""GEPO, OPEFO and QUATRO on two processes: one decision, one memory, and per-rank memories that come back."""

from __future__ import annotations

import dataclasses
import math
import threading
import uuid
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.gepo import GEPO, StepGuardConfig
from lightning_rlstab.callbacks.opefo import OPEFO, SecondMomentConfig, SnapshotConfig
from lightning_rlstab.callbacks.quatro import QUATRO, EntropyFloorConfig, KLAnchorConfig, ReplayConfig
from lightning_rlstab.control.snapshots import snapshots_in
from lightning_rlstab.report.events import read_events
from lightning_rlstab.strategies.background import BackgroundShards

ROWS = [{"prompt": f"{number}+1="} for number in range(40)]
STRATEGIES = [pytest.param("rlstab_ddp", marks=pytest.mark.slow), "rlstab_fsdp"]
GUARD = StepGuardConfig(warmup_steps=3, hard_threshold=1e-6, noise_sigmas=0)


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Weights(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(torch.cat([whole(p).flatten() for p in pl_module.policy.parameters()]))


class Spike(pl.Callback):
    """Multiplies one rank's loss at one step."""

    def __init__(self, step: int, factor: float, rank: int) -> None:
        self.step, self.factor, self.rank = step, factor, rank

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        if trainer.global_step != self.step or trainer.global_rank != self.rank:
            return inputs
        return dataclasses.replace(inputs, advantages=inputs.advantages * self.factor)


class Poison(pl.Callback):
    """Spoils one rank's piece of the weights before one step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            with torch.no_grad():
                weight = next(pl_module.policy.parameters())
                piece = weight.to_local() if isinstance(weight, DTensor) else weight
                piece.view(-1)[0] = math.nan


def layers(**snapshots: Any) -> list[pl.Callback]:
    return [
        GEPO(guard=GUARD),
        OPEFO(
            second_moment=SecondMomentConfig(every_steps=2, tiny_fraction=0.0),
            snapshots=SnapshotConfig(**{"every_steps": 2, "recovery_steps": 2, **snapshots}),
        ),
        QUATRO(
            replay=ReplayConfig(ratio=0.5),
            kl=KLAnchorConfig(every_steps=2),
            entropy=EntropyFloorConfig(baseline_steps=3),
        ),
    ]


def memories(callbacks: list[Any]) -> dict[str, Any]:
    gepo, opefo, quatro = callbacks
    return {
        "guard": gepo.state,
        "moments": opefo.second_moment.state,
        "feedback": opefo.error_feedback.state,
        "recovery": opefo.recovery,
        "kl": quatro.kl_state,
        "entropy": quatro.entropy_state,
        "filter": quatro.screen.state,
    }


@pytest.fixture
def grpo(run_on_ranks: Any, on_ranks: Any, tmp_path: Path, tiny_policy: Any, byte_tokenizer: Any) -> Any:
    def run(
        strategy: str,
        *,
        steps: int,
        before: list[Any] | None = None,
        ckpt_path: Path | None = None,
        save: Path | None = None,
        ranks: int = 2,
    ) -> Any:
        def work() -> Any:
            weights, stack = Weights(), layers()
            trainer = on_ranks(
                strategy,
                tmp_path,
                callbacks=[*(make() for make in before or []), *stack, weights],
                max_steps=steps,
                max_epochs=-1,
                num_sanity_val_steps=0,
                log_every_n_steps=1,
            )
            module = GRPOModule(
                model=tiny_policy(),
                reward_funcs=[letters],
                processing_class=byte_tokenizer,
                num_generations=2,
                per_device_train_batch_size=8,
                max_completion_length=5,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                beta=0.04,
            )
            trainer.fit(module, PromptDataModule(ROWS), ckpt_path=ckpt_path)
            if save is not None:
                trainer.save_checkpoint(save)
            return {
                "weights": weights.seen,
                "memories": memories(stack),
                "replay": stack[2].replay.state,
                "groups": [int(key) for key in stack[2].replay._groups],
                "skipped": trainer.strategy.skipped_steps,
            }

        return run_on_ranks(work, world_size=ranks)

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("factor", [1e5, math.nan])
def test_what_one_rank_alone_sees_is_skipped_by_both_and_remembered_alike(
    grpo: Any, strategy: str, factor: float
) -> None:
    """FR-093, FR-095, FR-106."""
    both = grpo(strategy, steps=7, before=[lambda: Spike(4, factor, rank=1)])
    for rank in both:
        assert rank["skipped"] == 1
        assert torch.equal(rank["weights"][4], rank["weights"][3])
        assert rank["weights"][-1].isfinite().all()
        assert rank["memories"]["guard"].total_skips == 1
        assert rank["memories"]["feedback"].stored == (1 if factor == 1e5 else 0)
    assert both[0]["memories"] == both[1]["memories"]
    assert torch.equal(both[0]["weights"][-1], both[1]["weights"][-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_memory_of_every_rank_survives_a_checkpoint_and_goes_on_bit_for_bit(
    grpo: Any, strategy: str, tmp_path: Path
) -> None:
    """FR-114, FR-115: residual shards and replay buffers differ over the ranks and come back to each."""
    spike = [lambda: Spike(4, 1e5, rank=1)]
    uninterrupted = grpo(strategy, steps=9, before=spike)
    half = grpo(strategy, steps=6, before=spike, save=tmp_path / "half.ckpt")
    assert half[0]["memories"]["feedback"].pending
    rest = grpo(strategy, steps=9, ckpt_path=tmp_path / "half.ckpt")
    for ours, theirs in zip(rest, uninterrupted, strict=True):
        for again, first in zip(ours["weights"], theirs["weights"][6:], strict=True):
            assert torch.equal(again, first)
        now, then = ours["memories"], theirs["memories"]
        now["recovery"], then["recovery"] = (dataclasses.replace(m["recovery"], snapshots=0) for m in (now, then))
        assert now == then
        assert (ours["replay"], ours["groups"]) == (theirs["replay"], theirs["groups"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_spoiled_on_one_rank_are_rolled_back_on_both(grpo: Any, strategy: str, tmp_path: Path) -> None:
    """FR-098, FR-102, FR-087: shards go to disk, at most two snapshots of them."""
    both = grpo(strategy, steps=8, before=[lambda: Poison(5, rank=1)])
    for rank in both:
        assert rank["memories"]["recovery"].rollbacks == 1
        assert rank["weights"][-1].isfinite().all()
        assert rank["memories"]["recovery"].quarantine == ()  # spoilt between two steps: no batch is to blame
    assert torch.equal(both[0]["weights"][-1], both[1]["weights"][-1])
    assert both[0]["memories"] == both[1]["memories"]
    events = [event for event in read_events(next(tmp_path.rglob("events.jsonl"))) if event["event"] == "rollback"]
    assert len(events) == 1
    folder = next(tmp_path.rglob("snapshots"))
    assert len(snapshots_in(folder)) == 2
    assert list(folder.glob("*.partial")) == []


def test_a_sharded_snapshot_is_written_while_training_goes_on(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards reach the disk only after a later step has ended, so a run that waited for them would never end it."""
    begin, has_stepped = BackgroundShards.begin, threading.Event()

    def slow(self: BackgroundShards, *arguments: Any) -> Any:
        finish = begin(self, *arguments)
        has_stepped.clear()

        def finish_late() -> None:
            is_free = has_stepped.wait(timeout=20)
            (tmp_path / f"{uuid.uuid4()}.waited").write_text("ended a step" if is_free else "stood still")
            finish()

        return finish_late

    class Step(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            has_stepped.set()

    monkeypatch.setattr(BackgroundShards, "begin", slow)
    grpo("rlstab_fsdp", steps=3, before=[Step])
    words = [path.read_text() for path in tmp_path.glob("*.waited")]
    assert words == ["ended a step"] * 4  # two snapshots, two ranks
    folder = next(tmp_path.rglob("snapshots"))
    assert list(folder.glob("*.partial")) == []
    assert all((path / ".metadata").is_file() and (path / "meta.pt").is_file() for path in snapshots_in(folder))


def test_a_disk_that_is_full_in_the_background_is_told_on_every_rank(run_on_ranks: Any, tmp_path: Path) -> None:
    def work() -> str:
        dist.init_process_group("gloo")
        shards, folder = BackgroundShards(), tmp_path / "no" / "folder"
        if dist.get_rank() == 1:
            (tmp_path / "no").write_text("a file where a folder should be")
        dist.barrier()
        try:
            shards.begin({"state_dict": {"weight": torch.ones(3)}}, {}, folder, None)()
        except OSError as error:
            return str(error)
        finally:
            dist.destroy_process_group()
        return "written"

    assert all("could not be written" in words for words in run_on_ranks(work, world_size=2))


@pytest.mark.filterwarnings("ignore:The generation batch changed", "ignore:The checkpoint was written by 2 processes")
def test_a_sharded_run_is_resumed_by_one_process_with_the_buffers_dealt_out(grpo: Any, tmp_path: Path) -> None:
    """FR-114."""
    spike = [lambda: Spike(4, 1e5, rank=1)]
    both = grpo("rlstab_fsdp", steps=6, before=spike, save=tmp_path / "half.ckpt")
    (one,) = grpo("rlstab", steps=8, ckpt_path=tmp_path / "half.ckpt", ranks=1)
    assert one["weights"][-1].isfinite().all()
    assert one["memories"]["feedback"].pending == ()  # pieces of two processes fit nowhere: let go, and counted
    assert one["memories"]["feedback"].discarded == both[0]["memories"]["feedback"].discarded + 1
    assert len(one["groups"]) > 0
    assert one["memories"]["guard"].total_skips == 1
