"""Advantages and train/inference ratios against TRL's own code for scoring a generation batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lightning_rlstab.core.advantages import combined_rewards
from lightning_rlstab.core.ratio_correction import RATIO_MODES, correction_ratio

# TRL 1.16 asks transformers 5 for an attribute under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

NAN = math.nan
ROWS, GROUP = 12, 4
LENGTHS = [5, 2, 4, 1, 5, 3, 2, 4, 5, 5, 1, 3]


@pytest.fixture
def scored_by_trl(trl_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's output for fixed completions, rewards and sampler log-probabilities."""

    def scored(rewards, weights, *, aggregation="sum_then_normalize", scale="group", sampling=None, **ratio):
        g = torch.Generator().manual_seed(0)
        completions = [torch.randint(0, 250, (length,), generator=g).tolist() for length in LENGTHS]
        prompts = [[10, 11, 12]] * ROWS
        generated = (prompts, completions, None, ["x"] * ROWS, sampling, {}, None, [None] * ROWS)
        monkeypatch.setattr(trl_trainer, "_generate", lambda _: generated)
        monkeypatch.setattr(trl_trainer, "_calculate_rewards", lambda *_: rewards.clone())
        names = [f"reward_{index}" for index in range(rewards.shape[1])]
        fields = {
            "multi_objective_aggregation": aggregation,
            "scale_rewards": scale,
            "reward_weights": weights,
            "reward_funcs": names,
            "reward_func_names": names,
            "num_generations": GROUP,
            "beta": 0.0,
            "use_vllm": sampling is not None,
            "vllm_importance_sampling_correction": True,
            **{f"vllm_importance_sampling_{name}": value for name, value in ratio.items()},
        }
        for name, value in fields.items():
            monkeypatch.setattr(trl_trainer, name, value)
        trl_trainer.model.train()
        return trl_trainer._generate_and_score_completions([{"prompt": "p"}] * ROWS)

    return scored


ORDINARY = torch.tensor(
    [
        [1.0, 0.3], [0.0, -1.2], [0.0, 2.0], [1.0, 0.4],
        [0.5, 7.0], [0.5, 7.0], [0.5, 7.0], [0.5, 7.0],
        [3.0, 0.1], [-2.0, 0.2], [0.0, 0.3], [1.0, -5.0],
    ]
)  # fmt: skip
PARTLY_MISSING = ORDINARY.clone()
PARTLY_MISSING[0, 1] = PARTLY_MISSING[5] = PARTLY_MISSING[8, 0] = PARTLY_MISSING[9] = NAN
ONE_LEFT = ORDINARY.clone()
ONE_LEFT[1:4, 0] = ONE_LEFT[4:7] = NAN


@pytest.mark.parametrize("rewards", [ORDINARY, PARTLY_MISSING, ONE_LEFT, ORDINARY[:, :1]])
@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [*itertools.product(["sum_then_normalize"], ["group", "batch", "none"]), ("normalize_then_sum", "group")],
)
def test_advantages_equal_trl_s_to_a_millionth(scored_by_trl, rewards, aggregation, scale):
    weights = torch.tensor([0.7, 1.9])[: rewards.shape[1]]
    theirs = scored_by_trl(rewards, weights, aggregation=aggregation, scale=scale)["advantages"]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(ROWS) // GROUP
    _, made = combined_rewards(rewards[order], weights, ids[order], aggregation=aggregation, scale=scale)
    ours = torch.empty(ROWS)
    ours[order] = made.advantages
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6), (ours - theirs).abs().max()


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_rewards_and_the_share_of_groups_without_spread_equal_trl_s(trl_trainer, scored_by_trl, aggregation):
    weights = torch.tensor([0.7, 1.9])
    trl_trainer._metrics["train"].clear()
    scored_by_trl(PARTLY_MISSING, weights, aggregation=aggregation)
    metrics = {name: values[-1] for name, values in trl_trainer._metrics["train"].items()}
    rewards, made = combined_rewards(PARTLY_MISSING, weights, torch.arange(ROWS) // GROUP, aggregation=aggregation)
    assert rewards.nanmean().item() == pytest.approx(metrics["reward"], rel=1e-6)
    no_spread = torch.isclose(made.scale_std, torch.zeros(())).float().mean()
    assert no_spread.item() == pytest.approx(metrics["frac_reward_zero_std"])


@pytest.mark.parametrize("bounds", [{"clip_max": 1.3, "clip_min": 0.8}, {"clip_max": 1.3, "clip_min": None}])
@pytest.mark.parametrize("mode", RATIO_MODES)
def test_the_train_inference_ratio_equals_trl_s_in_every_mode(scored_by_trl, mode, bounds):
    g = torch.Generator().manual_seed(2)
    weights = torch.ones(1)
    plain = scored_by_trl(
        ORDINARY[:, :1], weights, sampling=[[0.0] * length for length in LENGTHS], mode=mode, **bounds
    )
    old, mask = plain["old_per_token_logps"], plain["completion_mask"].bool()
    noise = 0.3 * torch.randn(old.shape, generator=g)
    sampling = [row[:length].tolist() for row, length in zip(old + noise, LENGTHS, strict=True)]
    sampling[2][1] = None  # an engine that could not score this token
    theirs = scored_by_trl(ORDINARY[:, :1], weights, sampling=sampling, mode=mode, **bounds)
    behavior = theirs["sampling_per_token_logps"]
    ours = correction_ratio(old, behavior, mask, mode=mode, **bounds)
    assert torch.allclose(ours, theirs["importance_sampling_ratio"], rtol=1e-6, atol=0)
    assert len(ours.unique()) > 4
