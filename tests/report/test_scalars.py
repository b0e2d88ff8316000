from __future__ import annotations

import dataclasses

import pytest

from lightning_rlstab.report.scalars import SCALARS, Scalar, declared, markdown_table, undeclared

TRL_NAMES = [
    "num_tokens",
    *[f"completions/{which}_length" for which in ("mean", "min", "max")],
    *[f"completions/{which}_terminated_length" for which in ("mean", "min", "max")],
    "completions/clipped_ratio",
    "rewards/accuracy_reward/mean",
    "rewards/accuracy_reward/std",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    *[f"clip_ratio/{which}" for which in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")],
    *[f"sampling/sampling_logp_difference/{which}" for which in ("mean", "max")],
    *[f"sampling/importance_sampling_ratio/{which}" for which in ("min", "mean", "max")],
    "loss",
    "grad_norm",
    "learning_rate",
]


@pytest.mark.parametrize("name", TRL_NAMES)
def test_every_metric_name_of_trl_is_declared(name):
    assert declared(name) is not None


def test_fr_146_every_name_has_one_line_of_meaning_and_a_direction():
    for name, row in SCALARS.items():
        assert name == row.name
        assert row.unit
        assert len(row.meaning) > 10, name
        assert "\n" not in row.meaning, name
        assert not row.meaning.endswith("."), name
        assert row.direction in {"higher", "lower", "range", "context"}, name
        if row.healthy is not None:
            low, high = row.healthy
            assert low is not None or high is not None, name
            assert low is None or high is None or low <= high, name


def test_fr_146_entropy_says_that_it_is_not_a_loss():
    assert "not a loss" in SCALARS["entropy"].meaning


def test_the_documentation_table_holds_every_name_with_meaning_and_direction():
    lines = markdown_table().splitlines()
    assert len(lines) == len(SCALARS) + 2
    for row, line in zip(SCALARS.values(), lines[2:], strict=True):
        assert line.startswith(f"| `{row.name}` |")
        assert row.meaning in line
        assert line.count("|") == 6, line


def test_a_placeholder_stands_for_exactly_one_path_segment():
    assert declared("rewards/format/mean") is SCALARS["rewards/{name}/mean"]
    assert declared("rewards/a/b/mean") is None
    assert declared("rewards//mean") is None
    assert declared("rewards/{name}/mean") is SCALARS["rewards/{name}/mean"]


def test_names_nobody_declared_are_listed_once_and_sorted():
    assert undeclared(["zeta", "reward", "alpha", "zeta"]) == ["alpha", "zeta"]


def test_rows_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SCALARS["reward"].unit = "kg"
    assert Scalar("a", "1", "some quantity", "higher").healthy is None
