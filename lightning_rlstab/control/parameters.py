"""The optimizers' parameters by name, and the local piece of whatever is sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["local", "named_trainable_parameters"]


def local(tensor: Tensor) -> Tensor:
    """The piece of a sharded tensor that lies on this rank, sharing its memory; a plain tensor is its own piece."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # under autograd `to_local` returns a new node instead of the piece itself
        piece: Tensor = tensor.to_local()
        return piece.detach()


def named_trainable_parameters(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """Qualified name to parameter, in the optimizers' order.

    The parameters are the optimizers', never the module's: FSDP2 swaps the module's for whole ones between a forward
    and its backward. Only the names come from the module, so call this while its weights are sharded.

    Args:
        module: The module whose names are used.
        optimizers: Whose parameters are listed; frozen ones are left out.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    listed: dict[str, nn.Parameter] = {}
    for optimizer in optimizers:
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad:
                    listed[names.get(id(parameter), f"group_{group_index}.{index}")] = parameter
    return listed
