"""Settings: TRL's defaults, and every odd value refused with its field, the rule and the value."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from lightning_rlstab.module.settings import GRPOSettings, settings_from_trl

LIMITS = [
    "epsilon",
    "epsilon_high",
    "delta",
    "temperature",
    "off_policy_mask_threshold",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "max_grad_norm",
    "reward_time_limit_seconds",
    "ref_model_mixup_alpha",
    "adam_epsilon",
]


@pytest.fixture(scope="module")
def trl_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to="none")


def test_defaults_are_trls(trl_config: Any) -> None:
    ours = GRPOSettings()
    own = {"eval_temperature", "success_threshold", "reward_time_limit_seconds", "per_device_eval_batch_size"}
    resolved = {"steps_per_generation"}  # TRL fills it in from the accumulation
    differing = {"gradient_checkpointing"}  # TRL recomputes activations by default; here memory is asked for first
    for field in dataclasses.fields(GRPOSettings):
        if field.name in own | resolved | differing:
            continue
        theirs = getattr(trl_config, field.name)
        theirs = getattr(theirs, "value", theirs)
        assert getattr(ours, field.name) == theirs, field.name


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "1.0"])
def test_a_limit_is_refused_with_its_name_and_value_fr_012(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number.*got") as caught:
        GRPOSettings(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["beta", "entropy_coef", "learning_rate", "weight_decay", "eval_temperature"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1.0"])
def test_a_coefficient_may_be_zero_and_nothing_odd(name: str, value: Any) -> None:
    GRPOSettings(**{name: 0})
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number"):
        GRPOSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "near", "meant"),
    [
        ("loss_type", "dapoo", "dapo"),
        ("loss_type", "GRPO", None),
        ("importance_sampling_level", "tokens", "token"),
        ("scale_rewards", "groups", "group"),
        ("multi_objective_aggregation", "sum_then_normalise", "sum_then_normalize"),
        ("vllm_importance_sampling_mode", "sequence_masks", "sequence_mask"),
        ("lr_scheduler_type", "linearr", "linear"),
    ],
)
def test_unknown_strings_are_refused_with_the_nearest_one(name: str, near: str, meant: str | None) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be one of") as caught:
        GRPOSettings(**{name: near})
    assert meant is None or f"Did you mean {meant!r}?" in str(caught.value)


@pytest.mark.parametrize("value", [1, 0, -2, 2.0, True, "8"])
def test_a_group_has_at_least_two_completions_fr_008(value: Any) -> None:
    with pytest.raises(ValueError, match="`num_generations` must be a whole number of at least 2"):
        GRPOSettings(num_generations=value)


@pytest.mark.parametrize("name", ["use_bias_correction_kl", "mask_truncated_completions", "use_vllm"])
def test_switches_are_booleans(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be true or false, got 1"):
        GRPOSettings(**{name: 1})


def test_reward_weights_are_numbers() -> None:
    with pytest.raises(ValueError, match=r"`reward_weights\[1\]` must be a finite number, got nan"):
        GRPOSettings(reward_weights=[1.0, math.nan])


def test_a_trl_config_is_taken_over(trl_config: Any) -> None:
    config = copy.copy(trl_config)
    config.beta, config.loss_type, config.max_grad_norm = 0.04, "grpo", 0.0
    settings = GRPOSettings(**settings_from_trl(config))
    assert (settings.beta, settings.loss_type, settings.max_grad_norm) == (0.04, "grpo", None)
    assert settings.lr_scheduler_type == "linear"
    assert settings.steps_per_generation == config.steps_per_generation


def test_a_trl_config_that_has_no_counterpart_is_refused(trl_config: Any) -> None:
    config = copy.copy(trl_config)
    config.use_transformers_continuous_batching = True
    with pytest.raises(ValueError, match="`use_transformers_continuous_batching` must be False"):
        settings_from_trl(config)


@pytest.mark.parametrize(("name", "value"), [("optim", "sgd"), ("lr_scheduler_kwargs", {"num_cycles": 2})])
def test_a_trl_setting_that_would_be_lost_is_refused(trl_config: Any, name: str, value: Any) -> None:
    config = copy.copy(trl_config)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        settings_from_trl(config)
