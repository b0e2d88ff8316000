from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_rlstab.core.histogram import LogHistogram, log_histogram
from lightning_rlstab.core.opefo import (
    adam_step_bound,
    add_feedback_,
    feedback_factor,
    lift_,
    lifted_count,
    second_moment_floor,
    tiny_frac,
)

EPS = 1e-8


def mixed_scales(count: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    exponent = torch.rand(count, generator=source, dtype=torch.float64) * 18 - 20
    return (10**exponent).float()


@pytest.mark.parametrize("percentile", [5.0, 10.0, 20.0])
def test_the_floor_is_within_one_percent_of_numpys_percentile_on_mixed_scales(percentile: float) -> None:
    values = torch.cat([mixed_scales(200_000) + 1e-15, torch.zeros(50_000)])
    floor = second_moment_floor(log_histogram([values]), eps=EPS, percentile=percentile).item()
    assert floor == pytest.approx(float(np.percentile(values[values > 0].numpy(), percentile)), rel=0.01)


def test_shards_of_any_size_give_the_same_floor_as_the_whole() -> None:
    """The reduction over ranks is a sum of counts."""
    values = mixed_scales(10_001)
    whole = log_histogram([values])
    packed = sum(log_histogram([piece]).packed() for piece in (values[:1], values[1:1], values[1:9000], values[9000:]))
    assert isinstance(packed, torch.Tensor)
    assert torch.equal(LogHistogram.unpacked(packed).counts, whole.counts)


def test_coordinates_without_gradient_are_neither_counted_nor_lifted() -> None:
    """LoRA matrices and unused embeddings: with their zeros the 10th percentile would be 0."""
    values = torch.cat([torch.zeros(900), torch.linspace(1e-6, 1e-4, 100)])
    floor = second_moment_floor(log_histogram([values]), eps=EPS, percentile=10.0).item()
    assert floor > 1e-6
    before = values.clone()
    lift_([values], floor)
    assert 8 <= int((values != before).sum()) <= 11
    assert (values[:900] == 0).all()


def test_the_share_of_tiny_values_is_taken_over_coordinates_with_gradient() -> None:
    values = torch.tensor([0.0] * 96 + [1e-18, 1e-12, 1e-12, 1e-12])
    assert tiny_frac(log_histogram([values]), EPS).item() == pytest.approx(0.25)


def test_where_most_values_are_tiny_the_floor_is_taken_from_the_others() -> None:
    values = torch.cat([torch.full((600,), 1e-18), torch.linspace(1e-9, 1e-8, 400)])
    floor = second_moment_floor(log_histogram([values]), eps=EPS, percentile=10.0).item()
    assert floor == pytest.approx(float(np.percentile(np.linspace(1e-9, 1e-8, 400), 10)), rel=0.02)


def test_with_every_value_tiny_there_is_nothing_to_lift_to() -> None:
    values = torch.full((100,), 1e-20)
    floor = second_moment_floor(log_histogram([values]), eps=EPS, percentile=10.0).item()
    lift_([values], floor)
    assert (values == 1e-20).all()


def test_an_empty_group_is_left_alone() -> None:
    floor = second_moment_floor(log_histogram([torch.zeros(5)]), eps=EPS, percentile=10.0).item()
    assert math.isnan(floor)
    values = torch.zeros(5)
    lift_([values, torch.zeros(0)], floor)
    assert (values == 0).all()
    assert lifted_count(log_histogram([values]), floor) == 0


def adam_step_in_lr(second_moment: float, *, is_lifted: bool) -> float:
    """How many learning rates plain Adam moves a weight with v = second_moment, m = 9e-7 and gradient 0."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight], lr=1e-3, eps=EPS)
    weight.grad = torch.ones(1000)
    optimizer.step()
    state = optimizer.state[weight]
    state["step"].fill_(100_000.0)  # bias correction over
    state["exp_avg_sq"].copy_(torch.linspace(1e-12, 1e-10, 1000))
    state["exp_avg_sq"][0] = second_moment
    state["exp_avg"].fill_(9e-7)
    if is_lifted:
        floor = second_moment_floor(log_histogram([state["exp_avg_sq"]]), eps=EPS, percentile=10.0)
        lift_([state["exp_avg_sq"]], float(floor))
    before = weight.detach().clone()
    weight.grad = torch.zeros(1000)
    optimizer.step()
    return float((weight.detach() - before)[0].abs()) / 1e-3


def test_an_underflown_state_takes_an_oversized_step_without_the_floor_and_not_with_it() -> None:
    """FR-083: v = 1e-16, stale m = 9e-7, gradient 0."""
    assert adam_step_in_lr(1e-16, is_lifted=False) > 35
    assert adam_step_in_lr(1e-16, is_lifted=True) < 1


def test_lifting_only_shortens_steps() -> None:
    values = mixed_scales(10_000)
    before = values.clone()
    histogram = log_histogram([values])
    floor = float(second_moment_floor(histogram, eps=EPS, percentile=10.0))
    lift_([values], floor)
    assert (values >= before).all()
    assert torch.equal(values, before.clamp(min=floor))
    assert lifted_count(histogram, floor) == pytest.approx(int((before < floor).sum()), rel=0.01)


def test_a_nan_is_not_hidden_by_lifting() -> None:
    values = torch.tensor([math.nan, 1e-20, 1e-6])
    lift_([values], 1e-10)
    assert values[0].isnan()


def test_feedback_of_the_recipes_weights_adds_up_to_one_rescaled_residual() -> None:
    source = torch.Generator().manual_seed(0)
    residual = torch.randn(50, generator=source) * 1e4
    fed = torch.zeros(50)
    for weight in (0.3, 0.3, 0.2, 0.2):
        gradient = torch.randn(50, generator=source)
        gradient *= 2.0 / gradient.norm()
        before = gradient.clone()
        add_feedback_([gradient], [residual], feedback_factor(weight, 2.0, float(residual.norm())))
        fed += gradient - before
    assert torch.allclose(fed, 2.0 * residual / residual.norm(), atol=1e-5)


@pytest.mark.parametrize(("gradient", "residual"), [(1.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (0.0, 1.0)])
def test_nothing_is_fed_back_where_a_norm_is_zero_or_broken(gradient: float, residual: float) -> None:
    assert feedback_factor(0.3, gradient, residual) == 0.0


def test_missing_gradients_are_passed_over_and_dtypes_may_differ() -> None:
    gradient = torch.ones(3, dtype=torch.bfloat16)
    add_feedback_([None, gradient], [torch.ones(3), torch.full((3,), 4.0)], 0.5)
    assert gradient.tolist() == [3.0] * 3


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.3, 0.9), (0.8, 0.99)])
@pytest.mark.parametrize("steps", [1, 2, 17, 300])
def test_adam_never_steps_further_than_the_bound_and_reaches_it(beta1: float, beta2: float, steps: int) -> None:
    """Random gradients stay below; those that grow by beta1 / beta2 from step to step meet it."""
    source = torch.Generator().manual_seed(steps)
    random = torch.randn(steps, 500, generator=source, dtype=torch.float64).exp() * torch.randn(
        steps, 500, generator=source, dtype=torch.float64
    )
    worst = torch.tensor([(beta1 / beta2) ** (steps - 1 - at) for at in range(steps)], dtype=torch.float64)
    gradients = torch.cat([random, worst.unsqueeze(1)], dim=1)
    weight = torch.zeros(501, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(beta1, beta2), eps=0.0)
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
    moved = (weight.detach() - before).abs()
    bound = adam_step_bound(steps, beta1, beta2)
    assert float(moved.max()) <= bound * (1 + 1e-9)
    assert float(moved[-1]) == pytest.approx(bound, rel=1e-6)


def test_there_is_no_bound_where_the_first_moment_remembers_longer() -> None:
    assert adam_step_bound(10, 0.99, 0.9) == math.inf
