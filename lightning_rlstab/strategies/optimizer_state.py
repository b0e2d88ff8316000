"""Optimizer state between its two spellings: parameters by position, as torch saves them, and by name, as shards do.

Positions count through the optimizer's groups, so they mean the same parameters in every run that builds the same
optimizer, whatever else the module holds (a frozen reference model, for one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["by_name", "by_position", "parameter_order"]


def parameter_order(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Qualified names of an optimizer's parameters, group by group; call it while the weights are sharded."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def by_name(saved: Mapping[str, Any], order: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Saved state with names instead of positions; state that has names already is returned as it is.

    Args:
        saved: ``{"state": ..., "param_groups": ...}``.
        order: From :func:`parameter_order`.

    Example:
        >>> saved = {"state": {7: {"step": 1}}, "param_groups": [{"lr": 0.1, "params": [7]}]}
        >>> by_name(saved, [["net.weight"]])["state"]
        {'net.weight': {'step': 1}}
    """
    if all(isinstance(key, str) for group in saved["param_groups"] for key in group["params"]):
        return dict(saved)
    names = {
        position: name
        for group, own in zip(saved["param_groups"], order, strict=True)
        for position, name in zip(group["params"], own, strict=True)
    }
    return {
        "state": {names[position]: state for position, state in saved["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(saved["param_groups"], order, strict=True)
        ],
    }


def by_position(saved: Mapping[str, Any], order: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Saved state with positions instead of names; state that has positions already is returned as it is.

    Args:
        saved: ``{"state": ..., "param_groups": ...}``.
        order: From :func:`parameter_order`, of the optimizer that will load it.

    Example:
        >>> saved = {"state": {"net.weight": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["net.weight"]}]}
        >>> by_position(saved, [["net.weight"]])
        {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    if not any(isinstance(key, str) for group in saved["param_groups"] for key in group["params"]):
        return dict(saved)
    positions = {name: index for index, name in enumerate(name for own in order for name in own)}
    settings = {name: group for group in saved["param_groups"] for name in group["params"]}
    return {
        "state": {positions[name]: state for name, state in saved["state"].items()},
        "param_groups": [
            {**(settings[own[0]] if own else {}), "params": [positions[name] for name in own]} for own in order
        ],
    }
