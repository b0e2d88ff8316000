from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlstab.control.clips import (
    HeadNormConfig,
    HeadNormState,
    LayerClipConfig,
    LayerClipState,
    clipped_layers,
    head_norm_limit,
    head_norm_step,
    layer_clip_step,
)
from lightning_rlstab.core.clips import (
    head_norm_weights,
    layer_scales,
    quantile_of,
    ratio_weights,
    sequence_log_ratios,
)


@given(st.floats(-50, 50))
def test_a_clip_only_ever_takes_away_and_brings_the_ratio_to_its_bound(log_ratio: float) -> None:
    value = torch.tensor([log_ratio])
    weight = float(ratio_weights(value, low=0.5, high=2.0, is_masking=False))
    assert 0 <= weight <= 1
    ratio = math.exp(log_ratio)
    if ratio > 2.0:
        assert weight * ratio == pytest.approx(2.0, rel=1e-4)
    elif ratio < 0.5:
        assert weight == pytest.approx(ratio / 0.5, rel=1e-4, abs=1e-20)
    else:
        assert weight == pytest.approx(1.0, abs=1e-6)


def test_masking_takes_all_or_nothing_and_an_unknown_ratio_stays() -> None:
    values = torch.tensor([0.0, 3.0, -3.0, math.nan])
    assert ratio_weights(values, low=0.5, high=2.0, is_masking=True).tolist() == [1, 0, 0, 1]


def test_a_lower_bound_of_zero_is_none() -> None:
    assert ratio_weights(torch.tensor([-80.0]), low=0.0, high=2.0, is_masking=True).tolist() == [1]


def test_an_infinite_log_ratio_gets_weight_zero_and_no_nan() -> None:
    for is_masking in (True, False):
        assert ratio_weights(
            torch.tensor([math.inf, -math.inf]), low=0.5, high=2.0, is_masking=is_masking
        ).tolist() == [0, 0]


def test_the_geometric_mean_reads_only_known_loss_tokens() -> None:
    values = torch.tensor([[1.0, math.nan, 3.0, math.inf], [math.nan, math.nan, 5.0, 5.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert sequence_log_ratios(values, mask).tolist() == [2.0, 0.0]


def test_head_norm_weights_bring_every_norm_to_the_limit() -> None:
    norms = torch.tensor([0.0, 0.5, 1.0, 8.0, math.inf, math.nan])
    assert head_norm_weights(norms, 2.0).tolist() == pytest.approx([1, 1, 1, 0.25, 0, 0])
    assert head_norm_weights(norms[:4], math.inf).tolist() == [1, 1, 1, 1]


@given(st.integers(1, 200), st.sampled_from([0.5, 0.9, 0.99]), st.integers(0, 100))
def test_the_quantile_is_numpys_without_interpolation(count: int, level: float, seed: int) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.1
    padded = torch.cat([values, torch.tensor([math.nan, math.inf, 0.0, 99.0])])
    mask = torch.ones(count + 4, dtype=torch.bool)
    mask[-1] = False
    expected = np.quantile(values.numpy(), level, method="inverted_cdf")
    assert float(quantile_of(padded, mask, level)) == pytest.approx(float(expected))


def test_the_quantile_of_nothing_is_nan() -> None:
    assert quantile_of(torch.ones(3), torch.zeros(3, dtype=torch.bool), 0.9).isnan()


def test_a_spike_in_one_layer_does_not_shrink_the_others() -> None:
    scales = layer_scales({"a": 100.0, "b": 1.0, "new": 5.0}, {"a": 1.0, "b": 1.0}, ratio=2.0)
    assert scales == {"a": 0.02, "b": 1.0, "new": 1.0}


def test_a_layer_that_is_not_finite_keeps_its_gradient_for_the_guards_to_see() -> None:
    assert layer_scales({"a": math.nan, "b": math.inf}, {"a": 1.0, "b": 1.0}, ratio=2.0) == {"a": 1.0, "b": 1.0}


def test_the_warm_up_clips_the_gradient_as_a_whole() -> None:
    config = LayerClipConfig(warmup_norm=1.0)
    assert clipped_layers(config, LayerClipState(), {"a": 3.0, "b": 4.0}) == {"a": 0.2, "b": 0.2}
    assert clipped_layers(config, LayerClipState(), {"a": 0.3, "b": 0.4}) == {"a": 1.0, "b": 1.0}


def test_the_usual_norm_is_learned_from_clipped_norms_and_corrected_for_its_start() -> None:
    config = LayerClipConfig(ratio=2.0, beta=0.9, warmup_steps=3, warmup_norm=100.0)
    state = LayerClipState()
    for _ in range(3):
        state = layer_clip_step(config, state, {"a": 1.0}, clipped_layers(config, state, {"a": 1.0}))
    assert clipped_layers(config, state, {"a": 10.0})["a"] == pytest.approx(0.2)
    spiked = layer_clip_step(config, state, {"a": 1e6}, clipped_layers(config, state, {"a": 1e6}))
    # The spike enters at its bound of 2, so the level moves by a tenth of 1 at most.
    assert clipped_layers(config, spiked, {"a": 10.0})["a"] == pytest.approx(0.2, rel=0.3)


def test_a_non_finite_step_teaches_layer_clip_nothing() -> None:
    config, state = LayerClipConfig(), LayerClipState()
    assert layer_clip_step(config, state, {"a": math.nan}, {"a": 1.0}) == state


def test_head_norms_are_not_clipped_before_the_warm_up_is_over() -> None:
    config, state = HeadNormConfig(times=3.0, warmup_steps=2, beta=0.5), HeadNormState()
    for quantile in (4.0, math.nan, 0.0, 1.0):
        assert head_norm_limit(config, state) == math.inf
        state = head_norm_step(config, state, quantile)
    assert state.steps == 2
    # Corrected running mean of the logs: (ln 4 / 3 + 2 ln 1 / 3), newest first.
    assert head_norm_limit(config, state) == pytest.approx(3.0 * 4 ** (1 / 3))


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LayerClipConfig, "ratio", 0.0),
        (LayerClipConfig, "beta", 1.0),
        (LayerClipConfig, "warmup_norm", math.inf),
        (LayerClipConfig, "warmup_steps", 0),
        (HeadNormConfig, "times", -1.0),
        (HeadNormConfig, "quantile", 1.0),
        (HeadNormConfig, "warmup_steps", True),
    ],
)
def test_settings_out_of_range_are_refused_by_name(config: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must"):
        config(**{field: value})
