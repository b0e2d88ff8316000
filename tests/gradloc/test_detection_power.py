"""The formulas of the detection benchmark, and the draws that stand in for millions of gradients."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def power() -> Iterator[Any]:
    path = Path(__file__).parents[2] / "benchmarks" / "detection_power.py"
    spec = importlib.util.spec_from_file_location("benchmark_detection_power", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # where the benchmarks find each other
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


SMALL = (4, 4, 2, 8)


def test_the_chi_square_tail_of_two_dimensions_is_an_exponential(power: Any) -> None:
    assert power.chi_square_tail(3.0, 2.0) == pytest.approx(math.exp(-1.5))
    assert power.chi_median(2.0) == pytest.approx(math.sqrt(2 * math.log(2)))


@pytest.mark.parametrize(("freedom", "noncentrality"), [(3, 70.0), (24, 24.0), (1000, 24_000.0)])
def test_the_noncentral_tail_agrees_with_draws(
    power: Any, rng: np.random.Generator, freedom: int, noncentrality: float
) -> None:
    draws = rng.noncentral_chisquare(freedom, noncentrality, 100_000)
    for quantile in (0.05, 0.5, 0.95):
        limit = float(np.quantile(draws, quantile))
        assert float(power.noncentral_tail(limit, freedom, noncentrality)) == pytest.approx(1 - quantile, abs=0.01)


def test_the_largest_of_many_normals_has_the_median_of_the_formula(power: Any, rng: np.random.Generator) -> None:
    largest = rng.standard_normal((2_000, 1_000)).max(axis=1)
    assert power.largest_normal(1_000) == pytest.approx(float(np.median(largest)), abs=0.05)


@pytest.mark.parametrize("dims", [4, 1000])
def test_trigger_and_largest_share_see_as_many_culprits_as_their_formulas_say(
    power: Any, rng: np.random.Generator, dims: int
) -> None:
    tokens, trials = 10_000, 5_000
    states = power.trained_states(dims, 1_000 if dims == 4 else 200, rng)
    half = power.half_power_ratios(tokens, dims, 4)
    for part in (0.9, 1.0, 1.1):
        ratio = part * half["trigger"]
        rate = power.trigger_rate(states, ratio, tokens, dims, trials, rng)
        assert power.trigger_power(ratio, tokens, dims) == pytest.approx(rate, abs=0.05)
        ratio = part * half["top_share"]
        rate = power.top_share_rate(ratio, tokens, dims, trials, rng)
        assert power.top_share_power(ratio, tokens, dims) == pytest.approx(rate, abs=0.05)


def test_a_culprit_has_the_largest_share_for_sure_only_beyond_the_pull_of_the_others(power: Any) -> None:
    sure = power.top_share_ratio(0.95, 1_000_000, 1000)
    assert power.top_share_power(sure, 1_000_000, 1000) == pytest.approx(0.95, abs=0.005)
    assert 1.5 < sure / math.sqrt(1_000_000 / 1000) < 2.5


def test_false_alarms_need_few_dimensions_or_a_low_factor(power: Any, rng: np.random.Generator) -> None:
    states = power.trained_states(2, 1_000, rng)
    rate = power.trigger_rate(states, 0.0, 1_000, 2, 50_000, rng, factor=2.0)
    assert power.trigger_false_alarm(2, factor=2.0) == pytest.approx(rate, rel=0.1)
    assert power.trigger_false_alarm(10) < 1e-30


def test_the_trigger_needs_a_culprit_that_grows_with_the_root_of_n(power: Any) -> None:
    small, large = (power.half_power_ratios(tokens, 1000, 4) for tokens in (10_000, 1_000_000))
    assert large["trigger"] / small["trigger"] == pytest.approx(10)
    assert large["top_share"] / small["top_share"] < 4
    assert large["head_norm"] == small["head_norm"]
    assert small["trigger"] == pytest.approx(math.sqrt(24 * 10_000), rel=1e-2)


def test_a_part_that_all_tokens_share_raises_the_bar_in_proportion_to_n(power: Any) -> None:
    without = power.trigger_ratio_with_common(10_000, 0.0)
    assert power.trigger_ratio_with_common(10_000, 0.1) == pytest.approx(without * math.sqrt(1 + 10_000 * 0.01))


def test_drawn_inner_products_sum_to_the_norm(power: Any, rng: np.random.Generator) -> None:
    step = power.Step(SMALL, 50, 10.0, 17, rng)
    assert step.draw_projections().sum() == pytest.approx(step.norm)
    assert step.draw_projections()[17] == pytest.approx(float(step.culprit @ step.whole) / step.norm)


def test_drawn_segments_add_up_whatever_the_order_they_are_asked_in(power: Any, rng: np.random.Generator) -> None:
    step = power.Step(SMALL, 20, 5.0, 100, rng)
    middle = step.segment(64, 128)
    assert np.allclose(step.segment(64, 96) + step.segment(96, 128), middle)
    assert np.allclose(step.segment(0, 64) + middle + step.segment(128, 256), step.whole)
    sizes = [float(np.square(power.Step(SMALL, 20, 0.0, 0, rng).segment(32, 64)).mean()) for _ in range(200)]
    assert np.mean(sizes) == pytest.approx(32, rel=0.1)


@pytest.mark.parametrize("kind", ["directional", "bisect"])
def test_draws_lead_the_search_where_materialised_vectors_lead_it(
    power: Any, rng: np.random.Generator, kind: str
) -> None:
    states = power.trained_states(24, 50, rng)
    stage = {"directional": "naming", "bisect": "search"}[kind]
    ratio = power.half_power_ratios(math.prod(SMALL), 24, 4)[stage]
    rates = [
        power.searched(kind, SMALL, 24, ratio, states, 100, rng, make=make).right / 100
        for make in (power.Step, power.MaterializedStep)
    ]
    assert 0.2 < rates[1] < 0.8
    assert rates[0] == pytest.approx(rates[1], abs=0.22)


def test_the_ladder_names_a_culprit_over_the_threshold_and_nobody_else(power: Any, rng: np.random.Generator) -> None:
    states = power.trained_states(100, 20, rng)
    ratio = 1.3 * power.half_power_ratios(math.prod(SMALL), 100, 4)["trigger"]
    spiked = power.searched("auto", SMALL, 100, ratio, states, 20, rng, is_forced=False, rounding=1e-6)
    assert (spiked.right, spiked.innocents) == (20, 0)
    clean = power.searched("auto", SMALL, 100, 0.0, states, 20, rng)
    assert clean.innocents == 0


def test_the_sum_of_shares_misses_one_by_what_rounding_explains(power: Any, rng: np.random.Generator) -> None:
    states = power.trained_states(100, 5, rng)
    outcome = power.searched("directional", (4, 4, 4, 32), 100, 300.0, states, 60, rng, rounding=1e-5)
    expected = power.completeness_error(300.0, 2048, rounding=1e-5)
    assert 0.3 * expected < float(np.std(outcome.completeness)) < 1.5 * expected


def test_the_search_spends_the_probes_of_the_formula(power: Any, rng: np.random.Generator) -> None:
    shape = (4, 8, 2, 16)
    states = power.trained_states(50, 5, rng)
    ratio = 2 * power.half_power_ratios(math.prod(shape), 50, 4)["trigger"]
    outcome = power.searched("bisect", shape, 50, ratio, states, 5, rng)
    # One backward more takes away what was found.
    assert set(outcome.probes) == {power.search_probes(4, 8, 32) + 1} == {4 + 3 + 5 + 1}


def test_head_norms_touch_the_share_of_innocents_that_their_spread_explains(
    power: Any, rng: np.random.Generator
) -> None:
    ledger = power.Ledger()
    rows = power.head_norms(ledger, rng, 200_000)
    assert all(row["ok"] for row in ledger.rows)
    wide = rows[-1]
    expected = 200_000 * power.head_norm_false_share(1.0)
    assert wide["touched"] == pytest.approx(expected, rel=0.4)
    assert power.head_norm_ratio(1000) == pytest.approx(3.0 * (1 + 2.33 / math.sqrt(2000)), rel=0.01)


def test_a_pass_takes_as_long_as_the_slower_of_arithmetic_and_wires(power: Any) -> None:
    machine = power.Machine()
    moved, seconds = power.pass_cost(7e9, 8, 4096, machine, has_backward=True, is_fp32=False)
    assert seconds == pytest.approx(6 * 7e9 * 4096 / 400e12)
    assert moved == pytest.approx(7e9 * (2 + 2 + 4) * 7 / 8)
    _, seconds = power.pass_cost(7e9, 64, 1, machine, has_backward=False, is_fp32=True)
    assert seconds == pytest.approx(7e9 * 4 * 63 / 64 / 400e9)


def test_token_level_probes_halve_what_they_run(power: Any) -> None:
    load = power.Load(sequences=4, prompt=0, length=8)
    assert power.token_probe_positions(load, 0) == [16, 8, 4, 2, 1]


def test_a_spike_costs_more_passes_with_more_ranks_only_for_the_reference_search(power: Any) -> None:
    few, many = (power.spike_cost(7e9, gpus) for gpus in (8, 1024))
    assert many["search"]["passes"] - few["search"]["passes"] == 7
    assert many["shares_autocast"]["passes"] == few["shares_autocast"]["passes"] == 9
    assert few["shares_fp32"]["seconds"] < 0.5 * few["sweep_fp32"]["seconds"]


def test_the_picture_names_every_stage(power: Any) -> None:
    assert all(words in power.picture({"crossings": {}}, 1000) for words in power.STAGES.values())
