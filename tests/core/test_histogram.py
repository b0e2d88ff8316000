from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlstab.core.histogram import LogHistogram, log_histogram

PERCENTILES = (0.0, 5.0, 10.0, 37.5, 50.0, 99.0, 100.0)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(float(np.float32(1.2e-38)), float(np.float32(3e38)), width=32), min_size=1, max_size=60),
    q=st.sampled_from(PERCENTILES),
)
def test_percentiles_are_within_one_percent_of_numpy_s_over_the_whole_range(values, q):
    expected = np.percentile(np.array(values, dtype=np.float64), q)
    assert log_histogram([torch.tensor(values)]).percentile(q).item() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("q", PERCENTILES)
def test_percentiles_of_second_moments_are_within_one_percent(q):
    g = torch.Generator().manual_seed(0)
    values = (torch.randn(20_000, generator=g) * 6 - 25).exp()
    expected = np.percentile(values.double().numpy(), q)
    assert log_histogram([values]).percentile(q).item() == pytest.approx(expected, rel=0.01)


def test_zeros_negatives_and_non_finite_values_stay_out_and_are_counted():
    values = torch.tensor([0.0, -0.0, 2.0, -3.0, math.nan, -math.nan, math.inf, -math.inf])
    made = log_histogram([values])
    assert made.positive_count == 1
    assert made.zero_count == 2
    assert made.negative_count == 1
    assert made.non_finite_count == 4
    assert made.percentile(10).item() == pytest.approx(2.0, rel=0.01)


def test_merging_shards_in_any_order_is_the_histogram_of_the_whole():
    values = torch.rand(3000, generator=torch.Generator().manual_seed(1))
    a, b, c = (log_histogram([part]) for part in values.split(1100))
    whole = log_histogram([values])
    for merged in (a.merged(b).merged(c), c.merged(a.merged(b)), log_histogram(values.split(77))):
        assert torch.equal(merged.packed(), whole.packed())
    summed = LogHistogram.unpacked(a.packed() + b.packed() + c.packed())
    assert torch.equal(summed.percentile(10), whole.percentile(10))


def test_low_precision_values_are_widened():
    values = torch.rand(500, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(log_histogram([values]).counts, log_histogram([values.float()]).counts)


def test_the_share_at_or_under_a_value_follows_the_values():
    values = torch.linspace(1e-3, 1.0, 100_000)
    for limit in (0.01, 0.1, 0.5, 0.9):
        share = (values <= limit).float().mean().item()
        assert log_histogram([values]).frac_at_most(limit).item() == pytest.approx(share, rel=0.01)


def test_nothing_positive_has_no_percentile_and_no_share():
    made = log_histogram([torch.zeros(5)])
    assert made.percentile(10).isnan()
    assert made.frac_at_most(1.0) == 0.0
    assert log_histogram([]).positive_count == 0


def test_the_histogram_is_small():
    assert log_histogram([torch.ones(1)]).packed().nbytes <= 1 << 17
