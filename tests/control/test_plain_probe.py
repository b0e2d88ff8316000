from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_rlstab.control.plain_probe import PlainProbe
from lightning_rlstab.control.protocols import GradientProbe


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.fixture
def probe(network) -> PlainProbe:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return PlainProbe.of(network, [optimizer])


def loss_of(network: nn.Module) -> torch.Tensor:
    return network(torch.arange(8.0).reshape(2, 4)).square().sum()


def test_it_offers_the_probe_protocol(probe) -> None:
    assert isinstance(probe, GradientProbe)


def test_weights_come_back_bit_for_bit_also_after_an_error(network, probe) -> None:
    loss_of(network).backward()
    before = [p.detach().clone() for p in network.parameters()]

    def fail_in_between() -> None:
        with probe.perturbed(0.3):
            assert not all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail_in_between()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_gradients_come_back_as_the_same_tensors_and_steer_the_probe_meanwhile(network, probe) -> None:
    loss_of(network).backward()
    gradients = [p.grad for p in network.parameters()]
    weights = [p.detach().clone() for p in network.parameters()]
    with probe.stashed_gradients():
        assert all(p.grad is None for p in network.parameters())
        with probe.perturbed(2.0):
            for parameter, weight, gradient in zip(network.parameters(), weights, gradients, strict=True):
                torch.testing.assert_close(parameter.detach(), weight + 2 * gradient)
        probe.backward_of(loss_of(network))
    assert all(p.grad is gradient for p, gradient in zip(network.parameters(), gradients, strict=True))


def test_dropout_is_replayed_and_the_generator_left_alone(network, probe) -> None:
    state = {"cpu": torch.get_rng_state()}
    first = loss_of(network)
    now = torch.get_rng_state()
    with probe.replayed_rng(state):
        second = loss_of(network)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), now)


def test_norms_are_exact_per_layer_and_do_not_overflow(network, probe) -> None:
    for value, parameter in enumerate(network.parameters()):
        parameter.grad = torch.full_like(parameter, float(value))
    network[0].weight.grad = torch.full_like(network[0].weight, 1e20)
    norms = probe.gradient_norms()
    assert norms.is_finite
    assert norms.total == pytest.approx(1e20 * math.sqrt(32))
    assert norms.per_parameter["3.weight"] == pytest.approx(2 * math.sqrt(8))
    network[3].weight.grad = None
    network[3].bias.grad = torch.tensor([math.nan])
    norms = probe.gradient_norms()
    assert norms.per_parameter["3.weight"] == 0.0
    assert not norms.is_finite


def test_one_process_gathers_its_own_value(probe) -> None:
    value = torch.tensor(3.0)
    assert probe.all_gathered(value) == [value]
