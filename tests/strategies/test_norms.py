"""Gradient norms on one device: right for huge, tiny, missing and non-finite gradients, and measured once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_rlstab.strategies.collectives import Collectives
from lightning_rlstab.strategies.norms import gradient_norms, pending_norms

ALONE = Collectives(world_size=1, device=torch.device("cpu"))


def parameters(**gradients):
    made = {}
    for name, values in gradients.items():
        tensor = torch.as_tensor(values)
        made[name.replace("__", ".")] = parameter = nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor.clone()
    return made


def test_total_layers_and_parameters_come_from_one_pass():
    norms = gradient_norms(
        parameters(net__layers__0__up__weight=[3.0, 0.0], net__layers__0__up__bias=[4.0], net__head__weight=[12.0]),
        ALONE,
    )
    assert norms.total == pytest.approx(13.0)
    assert norms.per_layer == pytest.approx({"net.layers.0": 5.0, "net.head": 12.0})
    assert list(norms.per_parameter.values()) == pytest.approx([3.0, 4.0, 12.0])


@pytest.mark.parametrize("scale", [1e20, 1e30, 3e38, 1e-20, 1e-38])
def test_fr_010_norms_outside_of_float32_squares_are_exact(scale):
    norms = gradient_norms(parameters(a__weight=[3 * scale / 5, 0.0], b__weight=[4 * scale / 5]), ALONE)
    assert norms.is_finite
    assert norms.total == pytest.approx(scale, rel=1e-5)


def test_a_norm_beyond_float32_is_still_finite():
    norms = gradient_norms(parameters(a__weight=torch.full((64,), 3e38)), ALONE)
    assert norms.is_finite
    assert norms.total == pytest.approx(8 * 3e38, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fr_010_a_non_finite_entry_is_told_from_a_huge_one(value):
    norms = gradient_norms(parameters(a__weight=[1.0, 1e20], b__weight=[1.0, value]), ALONE)
    assert not norms.is_finite
    assert norms.per_parameter["a.weight"] == pytest.approx(1e20)
    assert not math.isfinite(norms.per_parameter["b.weight"])


def test_a_missing_gradient_counts_as_zero():
    made = parameters(a__weight=[3.0], b__weight=[4.0])
    made["a.weight"].grad = None
    assert gradient_norms(made, ALONE).per_parameter == {"a.weight": 0.0, "b.weight": 4.0}
    made["b.weight"].grad = None
    assert gradient_norms(made, ALONE).total == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_low_precision_gradients_are_measured_in_float32_or_better(dtype):
    made = parameters(a__weight=torch.full((1000,), 0.1, dtype=dtype), b__weight=torch.ones(3))
    expected = math.sqrt(1000 * float(torch.tensor(0.1, dtype=dtype)) ** 2 + 3)
    assert gradient_norms(made, ALONE).total == pytest.approx(expected, rel=1e-6)


def test_sparse_gradients_are_measured():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert gradient_norms({"e.weight": embedding.weight}, ALONE).total == pytest.approx(math.sqrt(2 * 4 + 2))


def test_an_unscale_factor_applies_to_the_exact_pass_as_well():
    made = parameters(a__weight=[3e20, 4e20])
    norms = pending_norms(made, ALONE, unscale=torch.tensor(1e-20)).read()
    assert norms.total == pytest.approx(5.0)


def test_an_empty_piece_has_norm_zero():
    assert gradient_norms(parameters(a__weight=torch.zeros(0), b__weight=[2.0]), ALONE).total == 2.0
