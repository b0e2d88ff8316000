from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlstab.core.kl import LOG_RATIO_BOUND, bounded_exp, kl_k3
from lightning_rlstab.core.masked import masked_mean


@given(policy=st.floats(-15, 0), reference=st.floats(-15, 0))
def test_k3_equals_its_slow_twin(twin, policy, reference):
    value = kl_k3(torch.tensor([policy], dtype=torch.double), torch.tensor([reference], dtype=torch.double))
    assert value.item() == pytest.approx(twin.kl(policy, reference), rel=1e-9, abs=1e-12)
    assert value.item() >= -1e-12


def test_fr040_tokens_impossible_under_both_policies_add_nothing():
    policy = torch.tensor([[-1.0, -math.inf, -math.inf]], requires_grad=True)
    reference = torch.tensor([[-1.5, -math.inf, -math.inf]])
    kl = kl_k3(policy, reference)
    assert kl[0, 1:].tolist() == [0.0, 0.0]
    masked_mean(kl, torch.ones(1, 3)).backward()
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize("gap", [22.6, 100.0])
def test_fr041_a_reference_far_above_the_policy_gives_a_finite_kl_that_still_pulls_back(gap):
    policy = torch.tensor([-gap], requires_grad=True)
    kl = kl_k3(policy, torch.zeros(1))
    assert kl.isfinite().all()
    assert kl.item() > math.exp(LOG_RATIO_BOUND)
    kl.sum().backward()
    assert policy.grad.isfinite().all()
    assert policy.grad.item() < 0


def test_kl_grows_with_the_gap_beyond_the_bound():
    kl = kl_k3(-torch.linspace(10, 90, 50), torch.zeros(50))
    assert (kl.diff() > 0).all()


def test_the_bounded_exponential_is_exp_bit_for_bit_up_to_its_bound():
    x = torch.linspace(-60, LOG_RATIO_BOUND, 5000)
    assert torch.equal(bounded_exp(x), x.exp())


def test_the_bounded_exponential_passes_gradcheck_on_both_sides_of_its_bound():
    x = torch.tensor([-3.0, 0.0, 2.5, 3.5, 40.0], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: bounded_exp(value, bound=3.0), (x,))


def test_the_bounded_exponential_keeps_nan():
    assert bounded_exp(torch.tensor([math.nan])).isnan().all()
