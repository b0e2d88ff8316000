"""The stabilizers that go through the ordeal, and a small GRPO run to put them through.

To add a stabilizer, append a row to ``STABILIZERS``; its controllers go into ``CONTROLLERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.gepo import GEPO, StepGuardConfig
from lightning_rlstab.callbacks.gradloc import GradLoc
from lightning_rlstab.callbacks.layer_clip import LayerClip
from lightning_rlstab.callbacks.opefo import OPEFO, SecondMomentConfig, SnapshotConfig
from lightning_rlstab.callbacks.quatro import QUATRO, EntropyFloorConfig, KLAnchorConfig, ReplayConfig
from lightning_rlstab.callbacks.seq_clip import SeqClip
from lightning_rlstab.callbacks.token_clip import TokenClip
from lightning_rlstab.control import clips, gepo, gradloc, opefo, quatro, replay, rollout_filter
from lightning_rlstab.strategies import RLStabSingleDevice


@dataclass(frozen=True)
class Stabilizer:
    """One callback in the ordeal.

    Attributes:
        name: Of the callback.
        active: Makes it with everything on and short rhythms, so that a run of ten steps meets all of it.
        neutral: Makes it with everything off.
        counts_micro_batches: Whether what it does depends by definition on how a step is cut into micro-batches.
    """

    name: str
    active: Callable[[], pl.Callback]
    neutral: Callable[[], pl.Callback]
    counts_micro_batches: bool = False


STABILIZERS = [
    Stabilizer(
        "gradloc",
        lambda: GradLoc(warmup_steps=2, trigger_factor=1.2, min_norm=0.0),
        lambda: GradLoc(action="report", warmup_steps=2, trigger_factor=1.2, min_norm=0.0),
    ),
    Stabilizer("token_clip", lambda: TokenClip(low=0.999999, high=1.000001), lambda: TokenClip(low=0.0, high=1e30)),
    Stabilizer(
        "token_clip by head norm",
        lambda: TokenClip(by="head_norm", times=1.01, quantile=0.5, warmup_steps=1),
        lambda: TokenClip(by="head_norm", times=1e6),
        counts_micro_batches=True,  # the quantile is a mean over them
    ),
    Stabilizer("seq_clip", lambda: SeqClip(low=0.999999, high=1.000001), lambda: SeqClip(low=0.0, high=1e30)),
    Stabilizer(
        "gepo",
        lambda: GEPO(guard=StepGuardConfig(warmup_steps=2)),
        lambda: GEPO(advantages=False, guard=False, bounds=False),
    ),
    Stabilizer(
        "opefo",
        lambda: OPEFO(
            second_moment=SecondMomentConfig(every_steps=2, tiny_fraction=0.0),
            snapshots=SnapshotConfig(every_steps=3),
        ),
        lambda: OPEFO(second_moment=False, error_feedback=False, snapshots=False),
    ),
    Stabilizer(
        "quatro",
        lambda: QUATRO(
            replay=ReplayConfig(ratio=0.5),
            kl=KLAnchorConfig(every_steps=2),
            entropy=EntropyFloorConfig(baseline_steps=2, floor_frac=0.99),
        ),
        lambda: QUATRO(replay=False, kl=False, entropy=False, filter=False),
        counts_micro_batches=True,  # its buffer is so many of them
    ),
    Stabilizer(
        "layer_clip",
        lambda: LayerClip(ratio=0.9, beta=0.5, warmup_steps=2, warmup_norm=0.01),
        lambda: LayerClip(ratio=1e6, warmup_norm=1e6),
    ),
    Stabilizer(
        "quatro without replay",
        lambda: QUATRO(
            replay=False,
            kl=KLAnchorConfig(every_steps=2),
            entropy=EntropyFloorConfig(baseline_steps=2, floor_frac=0.99),
        ),
        lambda: QUATRO(replay=False, kl=False, entropy=False, filter=False),
    ),
]


@dataclass(frozen=True)
class Controller:
    """A pure step of a memory.

    Attributes:
        name: Of the controller.
        states: Some memories to start from.
        step: From a memory to the next.
    """

    name: str
    states: Sequence[Any]
    step: Callable[[Any], Any]


_GUARD, _ANCHOR, _FLOOR = gepo.StepGuardConfig(), quatro.KLAnchorConfig(every_steps=1), quatro.EntropyFloorConfig()
CONTROLLERS = [
    Controller(
        "step guard",
        [gepo.StepGuardState(), gepo.StepGuardState(level=2.0, weight=1.0, applied=20, log_level=0.7, log_square=0.5)],
        lambda state: gepo.step_guard(_GUARD, state, gepo.GuardReading(norm=30.0, was_applied=False)),
    ),
    Controller(
        "spike trigger",
        [gradloc.TriggerState(), gradloc.TriggerState(levels=(1.0, 1.1))],
        lambda state: gradloc.trigger_step(
            gradloc.TriggerConfig(),
            state,
            gradloc.TriggerReading(norm=1.0, window_tokens=64.0, layer_shares={"a": 1.0}),
        ),
    ),
    Controller(
        "layer clip",
        [clips.LayerClipState(), clips.LayerClipState(sums=(("a", 0.5),), weight=0.5, steps=30)],
        lambda state: clips.layer_clip_step(clips.LayerClipConfig(), state, {"a": 3.0}, {"a": 0.5}),
    ),
    Controller(
        "head norms",
        [clips.HeadNormState(), clips.head_norm_step(clips.HeadNormConfig(), clips.HeadNormState(), 0.3)],
        lambda state: clips.head_norm_step(clips.HeadNormConfig(), state, 0.5),
    ),
    Controller(
        "KL anchor",
        [quatro.KLAnchorState(coef=0.04), quatro.KLAnchorState(coef=0.1, direction=-1, stride=0.5)],
        lambda state: quatro.step_kl_anchor(_ANCHOR, state, quatro.KLReading(capped_sum=5.0, tokens=100)),
    ),
    Controller(
        "entropy floor",
        [quatro.EntropyFloorState(), quatro.EntropyFloorState(baseline_sum=10, baseline_count=10, recent=(0.5,))],
        lambda state: quatro.step_entropy_floor(_FLOOR, state, 0.4),
    ),
    Controller(
        "replay",
        [replay.ReplayState(), replay.ReplayState(entries=(replay.ReplayEntry(key=0, step=3),), next_key=1)],
        lambda state: replay.drawn(replay.ReplayConfig(), state, batch_groups=8, step=4),
    ),
    Controller(
        "rollout filter",
        [rollout_filter.FilterState(), rollout_filter.FilterState(rewards=(1.0,), log_lengths=(2.0,))],
        lambda state: rollout_filter.step_filter(
            rollout_filter.RolloutFilterConfig(),
            state,
            rollout_filter.FilterReading(rewards=[0.0, 1.0], lengths=[3, 4], dropped=[2, 0, 0, 0, 0, 0]),
        ),
    ),
    Controller(
        "second moments",
        [opefo.SecondMomentState(), opefo.SecondMomentState(steps=99)],
        lambda state: opefo.step_second_moment(opefo.SecondMomentConfig(), state),
    ),
    Controller(
        "error feedback",
        [opefo.ErrorFeedbackState(), opefo.ErrorFeedbackState(pending=(opefo.PendingResidual(key=0, norm=1.0),))],
        lambda state: opefo.step_error_feedback(opefo.ErrorFeedbackConfig(), state),
    ),
    Controller(
        "recovery",
        [opefo.RecoveryState(), opefo.RecoveryState(recovery_left=3, steps=499)],
        lambda state: opefo.step_recovery(opefo.SnapshotConfig(), state, was_applied=True, is_finite=True),
    ),
]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in pl_module.policy.parameters()]))


@dataclass
class Run:
    trainer: pl.Trainer
    module: GRPOModule
    weights: list[torch.Tensor]


@pytest.fixture
def train(tiny_policy: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path) -> Callable[..., Run]:
    """``train(*callbacks, steps=5, settings={...}, **trainer_flags)``."""

    def run(*callbacks: pl.Callback, steps: int = 5, settings: dict[str, Any] | None = None, **flags: Any) -> Run:
        ckpt_path = flags.pop("ckpt_path", None)
        defaults: dict[str, Any] = {
            "num_generations": 4,
            "per_device_train_batch_size": 16,
            "max_completion_length": 4,
            "beta": 0.04,
            # A large eps, so that rounding in a tiny gradient is not blown up to a whole step.
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2),
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            "processing_class": byte_tokenizer,
        }
        module = GRPOModule(tiny_policy(), [letters], **{**defaults, **(settings or {})})
        watch = Watch()
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            strategy=RLStabSingleDevice(),
            callbacks=[*callbacks, watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            inference_mode=False,
            default_root_dir=tmp_path,
            **flags,
        )
        trainer.fit(module, PromptDataModule([{"prompt": f"{i}+1="} for i in range(24)]), ckpt_path=ckpt_path)
        return Run(trainer, module, watch.weights)

    return run


@pytest.fixture(params=STABILIZERS, ids=lambda row: row.name)
def stabilizer(request: pytest.FixtureRequest) -> Stabilizer:
    return request.param


@pytest.fixture(params=CONTROLLERS, ids=lambda row: row.name)
def controller(request: pytest.FixtureRequest) -> Controller:
    return request.param


@pytest.fixture
def stabilizers() -> list[Stabilizer]:
    """One row per callback: those that go into one list of callbacks together."""
    return [row for row in STABILIZERS if " " not in row.name]
