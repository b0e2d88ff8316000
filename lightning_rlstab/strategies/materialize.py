"""Sharded weights from one rank's copy: the others build their model without memory and receive their shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

__all__ = ["fill_from_rank0", "materialize", "tied_names"]


def tied_names(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, group by group; weights with one name are not listed."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device (sharded or not) memory with arbitrary contents, and keep its tied weights tied.

    ``to_empty`` alone would make a weight of its own for every name of a tied one, and training would go on silently
    with input and output embeddings that drift apart.
    """
    ties = tied_names(module)
    module.to_empty(device=device)
    for first, *others in ties:
        shared = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, shared)


def fill_from_rank0(module: nn.Module, load: Callable[[], nn.Module], *, is_global_zero: bool) -> None:
    """Copy rank 0's weights and buffers into every rank's shards; collective, one weight at a time.

    Buffers that no checkpoint holds, such as rotary frequencies, are sent as well: on the meta device they were never
    computed.

    Args:
        module: Sharded and materialized.
        load: Makes the whole model with its weights; called on rank 0 only.
        is_global_zero: Whether this is rank 0.
    """
    source = load() if is_global_zero else None
    whole = {} if source is None else source.state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, whole, options=options)
    given = {} if source is None else dict(source.named_buffers())
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if source is not None:
                buffer.copy_(given[name])
            if dist.is_initialized():
                dist.broadcast(buffer, src=0)
