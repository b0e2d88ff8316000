from __future__ import annotations

import math

import pytest
import torch

from lightning_rlstab.core import norms as module
from lightning_rlstab.core.norms import tensor_norms


def test_norms_equal_torch_on_ordinary_gradients():
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 5, generator=g), torch.randn(7, generator=g), torch.zeros(2), torch.zeros(0)]
    made = tensor_norms(tensors)
    assert made.per_tensor.tolist() == pytest.approx([t.norm().item() for t in tensors])
    assert made.total.item() == pytest.approx(torch.cat([t.flatten() for t in tensors]).norm().item())
    assert made.total.dtype == torch.float32
    assert made.is_finite


def test_fr010_huge_finite_gradients_have_their_own_finite_norm():
    made = tensor_norms([torch.tensor([1.0, 1e20, 1.0])])
    assert made.total.item() == pytest.approx(1e20)
    assert made.is_finite


def test_tiny_gradients_do_not_vanish():
    assert tensor_norms([torch.full((4,), 1e-30)]).total.item() == pytest.approx(2e-30)


@pytest.mark.parametrize(("bad", "name"), [(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "nan")])
def test_fr010_non_finite_entries_are_reported_by_tensor(bad, name):
    made = tensor_norms([torch.tensor([1.0, bad, 1.0]), torch.tensor([3.0, 4.0])])
    assert str(made.total.item()) == name
    assert str(made.per_tensor[0].item()) == name
    assert made.per_tensor[1].item() == 5.0
    assert not made.is_finite


def test_a_norm_beyond_float32_is_inf_but_its_entries_count_as_finite():
    made = tensor_norms([torch.full((16,), 3e38)])
    assert made.total.item() == math.inf
    assert made.is_finite


def test_fr075_bf16_shards_are_squared_and_summed_in_float64():
    shards = [torch.full((4096,), 1e-3, dtype=torch.bfloat16)], [torch.tensor([3.0], dtype=torch.bfloat16)]
    partial = []
    for shard in shards:
        tensor_norms(shard, reduce=lambda squares: partial.append(squares) or squares)
    assert all(squares.dtype == torch.float64 for squares in partial)
    merged = tensor_norms(shards[0], reduce=lambda squares: squares + partial[1])
    expected = math.sqrt(9 + 4096 * shards[0][0][0].item() ** 2)
    assert merged.total.item() == pytest.approx(expected, rel=1e-6)


def test_fr108_a_rank_with_an_empty_shard_takes_part():
    whole = tensor_norms([torch.tensor([3.0, 4.0])])
    other = torch.tensor([25.0], dtype=torch.float64)
    assert torch.equal(tensor_norms([torch.zeros(0)], reduce=lambda squares: squares + other).total, whole.total)


def test_chunks_add_up(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = tensor_norms([tensor]).total
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 7})
    assert tensor_norms([tensor]).total.item() == pytest.approx(expected.item(), rel=1e-6)


def test_no_tensors_have_norm_zero():
    made = tensor_norms([])
    assert made.total.item() == 0.0
    assert made.per_tensor.shape == (0,)
    assert made.is_finite
