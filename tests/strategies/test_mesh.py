"""Meshes that would leave weights whole, or give ranks the same prompts, are refused before anything runs."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_rlstab.strategies import RLStabFSDP
from lightning_rlstab.strategies.mesh import mesh_sizes
from lightning_rlstab.strategies.sharding import blocks, roots


def sizes(world_size, *, data="auto", tensor=1, copies=1):
    return mesh_sizes(world_size, data_parallel_size=data, tensor_parallel_size=tensor, replicate_size=copies)


@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (1, {}, (1, 1)),
        (8, {}, (8, 1)),
        (8, {"data": 8}, (8, 1)),
        (8, {"tensor": 2}, (4, 2)),
        (8, {"data": 4, "tensor": 2}, (4, 2)),
        (8, {"copies": 2}, (8, 1)),
        (2, {"tensor": 2}, (1, 2)),
    ],
)
def test_every_process_that_is_not_needed_for_tensor_parallelism_is_data_parallel(world_size, options, expected):
    assert sizes(world_size, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": 1}, "`data_parallel_size` must be 8"),
        ({"data": 4}, "`data_parallel_size` must be 8"),
        ({"data": "all"}, "`data_parallel_size` must be a whole number"),
        ({"tensor": 3}, "`tensor_parallel_size` must divide the number of processes"),
        ({"tensor": 0}, "`tensor_parallel_size` must be a whole number of at least 1"),
        ({"tensor": True}, "`tensor_parallel_size` must be a whole number"),
        ({"copies": 3}, "`replicate_size` must divide `data_parallel_size`"),
        ({"copies": 8}, "or no rank shards its weights"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        sizes(8, **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("compute_dtype", "bf16"),
        ("generation", "fast"),
        ("reshard_after_forward", 1),
    ],
)
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must be"):
        RLStabFSDP(**{option: value})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Model(nn.Module):
    _no_split_modules = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(Block() for _ in range(3))


def test_blocks_are_what_the_model_says_else_the_elements_of_its_lists():
    model = Model()
    assert blocks(model) == list(model.layers)
    assert blocks(model, ["Linear"]) == [model.embed, *(layer.linear for layer in model.layers)]
    model._no_split_modules = ["Block"]
    assert blocks(model) == list(model.layers)


def test_a_block_that_shares_a_weight_stays_in_the_root():
    model = Model()
    model.layers[1].linear.weight = model.embed.weight
    assert blocks(model) == [model.layers[0], model.layers[2]]


def test_roots_are_the_children_that_are_called_on_their_own():
    module = pl.LightningModule()
    module.policy, module.rewards, module.empty = Model(), nn.ModuleList([Block(), Block()]), nn.ReLU()
    assert [name for name, _ in roots(module)] == ["policy", "rewards.0", "rewards.1"]


def test_weights_outside_of_any_submodule_are_refused(tmp_path, monkeypatch):
    class Loose(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    from lightning_rlstab.strategies.mesh import check_sharded

    with pytest.raises(ValueError, match="`Loose` must hold every trainable weight in a submodule"):
        check_sharded(Loose(), tensor_size=1)
