"""Seeded 20-step curves: a refactor changes none of them; a change of numbers updates them on purpose.

``RLSTAB_WRITE_GOLDEN=1 pytest tests/golden`` writes the files anew. Completions are fixed, so the curves are smooth
functions of the weights and another processor's rounding stays far under the tolerance.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.rollout.sampler import Samples

HERE = Path(__file__).parent
NAMES = ("loss", "grad_norm", "entropy", "kl", "reward", "clip_ratio/region_mean")
RUNS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
    "cispo_sequence": {"loss_type": "cispo", "epsilon_high": 2.0, "steps_per_generation": 2, "entropy_coef": 0.01},
}


class Alphabet:
    """Completion tokens that depend on the call and the row alone."""

    def __init__(self) -> None:
        self.calls = 0

    def sample(
        self, policy: Any, prompt_ids: Tensor, prompt_mask: Tensor, *, settings: Any, seed: Any = None
    ) -> Samples:
        self.calls += 1
        rows, width = prompt_ids.shape[0], settings.max_completion_length
        lengths = 2 + torch.arange(rows) % (width - 1)
        tokens = (torch.arange(rows).unsqueeze(1) * 31 + torch.arange(width) * 7 + self.calls * 13) % 256
        mask = torch.arange(width) < lengths.unsqueeze(1)
        return Samples(
            completion_ids=torch.where(mask, tokens, 256),
            completion_mask=mask,
            is_truncated=lengths == width,
            behavior_logprobs=torch.full((rows, width), torch.nan),
        )


class Curves(pl.Callback):
    def __init__(self) -> None:
        self.curves: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for name in NAMES:
            if name in trainer.callback_metrics:
                self.curves.setdefault(name, []).append(float(trainer.callback_metrics[name]))


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) + len(ids) / 10 for ids in completion_ids]


@pytest.mark.filterwarnings("ignore:.*NaN or infinite.*")
@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps_follow_the_golden_curve(name: str, tiny_policy: Callable[..., Any], byte_tokenizer: Any) -> None:
    module = GRPOModule(
        model=tiny_policy(),
        reward_funcs=even_tokens,
        processing_class=byte_tokenizer,
        sampler=Alphabet(),
        **{
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 6,
            "learning_rate": 3e-3,
            **RUNS[name],
        },
    )
    curves = Curves()
    pl.Trainer(
        max_steps=20,
        accelerator="cpu",
        logger=False,
        callbacks=[curves],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(module, PromptDataModule([{"prompt": f"{number}+1="} for number in range(16)], shuffle=False))
    file = HERE / f"{name}.json"
    if os.environ.get("RLSTAB_WRITE_GOLDEN"):
        file.write_text(json.dumps(curves.curves, indent=1) + "\n")
    golden = json.loads(file.read_text())
    assert set(golden) == set(curves.curves)
    for curve, values in golden.items():
        assert curves.curves[curve] == pytest.approx(values, rel=1e-3, abs=1e-5), curve
