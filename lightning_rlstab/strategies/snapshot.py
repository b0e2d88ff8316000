"""Copies of a run's weights and optimizer state, and putting them back bit for bit; each rank copies its own pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rlstab.control.parameters import local

__all__ = ["copied_state", "put_back"]


def copied_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Weights, buffers and optimizer state on the CPU, sharing no memory with the run's.

    A ``state_dict`` would hold references that go on training. A sharded weight is copied as this rank's piece; no
    collective, no gather, and one copy however often a weight is tied. Call it while the weights are sharded.

    Args:
        module: The module.
        optimizers: Its optimizers.

    Returns:
        Plain dicts, lists, numbers and tensors, for :func:`put_back` on the same rank of the same layout.
    """
    return {
        "tensors": {name: _copy(tensor) for name, tensor in _tensors(module)},
        "optimizers": [
            {
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
                "state": [[_copied(optimizer.state.get(p, {})) for p in g["params"]] for g in optimizer.param_groups],
            }
            for optimizer in optimizers
        ],
    }


@torch.no_grad()
def put_back(copied: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Write a copy back into the live tensors, which stay the same objects (so tied weights stay tied).

    Args:
        copied: From :func:`copied_state`; not changed, so it can be put back again.
        module: The module it was taken from.
        optimizers: Its optimizers.

    Raises:
        ValueError: If the copy does not fit the module or the optimizers.
    """
    live = dict(_tensors(module))
    if live.keys() != copied["tensors"].keys():
        odd = sorted(live.keys() ^ copied["tensors"].keys())
        raise ValueError(f"the copied state must fit the module, got other tensors: {', '.join(odd[:5])}.")
    for name, tensor in live.items():
        local(tensor).copy_(copied["tensors"][name])
    for optimizer, saved in zip(optimizers, copied["optimizers"], strict=True):
        for group, settings, states in zip(optimizer.param_groups, saved["groups"], saved["state"], strict=True):
            group.update(settings)
            for parameter, state in zip(group["params"], states, strict=True):
                _put_back_state(optimizer, parameter, state)


def _put_back_state(optimizer: Optimizer, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
    if not saved:
        optimizer.state.pop(parameter, None)
        return
    current = optimizer.state[parameter]
    for key, value in saved.items():
        if not isinstance(value, Tensor):
            current[key] = value
        elif key in current:
            local(current[key]).copy_(value)
        else:
            like = parameter if value.shape == local(parameter).shape else None
            current[key] = value.clone() if like is None else torch.zeros_like(like, dtype=value.dtype)
            local(current[key]).copy_(value)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor).to("cpu", copy=True)
