"""Sizes of the device mesh: defaults that shard, and refusals of those that would not."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as pl
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_rlstab.core.checks import integer, refusal

__all__ = ["check_sharded", "mesh_sizes", "replicated_mesh"]

SHARD, REPLICATE, TENSOR = "shard", "replicate", "tensor_parallel"


def mesh_sizes(
    world_size: int,
    *,
    data_parallel_size: int | Literal["auto"],
    tensor_parallel_size: int,
    replicate_size: int,
) -> tuple[int, int]:
    """Data-parallel and tensor-parallel sizes that use every process.

    Lightning's own "auto" means one data-parallel rank per node and tensor parallelism over all of a node's devices;
    without a tensor-parallel plan that leaves the weights whole and gives every rank the same prompts. Here "auto"
    means that every process that is not needed for tensor parallelism is a data-parallel rank.

    Args:
        world_size: Number of processes.
        data_parallel_size: Ranks with prompts of their own, or "auto".
        tensor_parallel_size: Ranks that share one layer's work and get the same prompts.
        replicate_size: Copies of the sharded model (HSDP); the weights are sharded over
            ``data_parallel_size / replicate_size`` ranks.

    Returns:
        (data_parallel_size, tensor_parallel_size).

    Raises:
        ValueError: If the sizes do not multiply to the number of processes, or leave nothing to shard over.

    Example:
        >>> mesh_sizes(8, data_parallel_size="auto", tensor_parallel_size=2, replicate_size=1)
        (4, 2)
    """
    tensor_size = integer("tensor_parallel_size", tensor_parallel_size, at_least=1)
    if world_size % tensor_size:
        raise refusal("tensor_parallel_size", f"divide the number of processes ({world_size})", tensor_parallel_size)
    rest = world_size // tensor_size
    size = rest if data_parallel_size == "auto" else integer("data_parallel_size", data_parallel_size, at_least=1)
    if size != rest:
        rule = f"be {rest}, the {world_size} processes over `tensor_parallel_size` ({tensor_size})"
        raise refusal("data_parallel_size", rule, size, 'Leave it at "auto"')
    copies = integer("replicate_size", replicate_size, at_least=1)
    if size % copies:
        raise refusal("replicate_size", f"divide `data_parallel_size` ({size})", copies)
    if copies > 1 and copies == size:
        rule = f"be under `data_parallel_size` ({size}), or no rank shards its weights"
        raise refusal("replicate_size", rule, copies, 'Use strategy "rlstab_ddp" for whole weights on every rank')
    return size, tensor_size


def replicated_mesh(device_type: str, *, replicate_size: int, shard_size: int, tensor_size: int) -> DeviceMesh:
    """The HSDP mesh: copies times shards times tensor-parallel ranks.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        replicate_size: Copies of the sharded model.
        shard_size: Ranks that share one copy.
        tensor_size: Ranks that share one layer.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device_type, (replicate_size, shard_size, tensor_size), mesh_dim_names=(REPLICATE, SHARD, TENSOR)
    )


def check_sharded(module: pl.LightningModule, *, tensor_size: int) -> None:
    """Refuse a model whose weights are whole although the mesh asks for shards.

    Args:
        module: The module after sharding.
        tensor_size: Ranks of the tensor-parallel dimension.

    Raises:
        ValueError: If a trainable weight is whole, or the tensor-parallel dimension shards nothing.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    whole = [name for name, p in trainable.items() if not isinstance(p, DTensor)]
    if whole:
        rule = "hold every trainable weight in a submodule that can be sharded"
        raise refusal(type(module).__name__, rule, whole[:3], "Move them into a submodule with a forward of its own")
    if tensor_size > 1:
        sharded = [name for name, p in trainable.items() if _is_split(p, TENSOR)]
        if not sharded:
            rule = "be 1 without a tensor-parallel plan, or its ranks do the same work on the same prompts"
            advice = "Call `parallelize_module` in `configure_model` with `self.device_mesh['tensor_parallel']`"
            raise refusal("tensor_parallel_size", rule, tensor_size, advice)


def _is_split(parameter: object, dimension: str) -> bool:
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == dimension and isinstance(placement, Shard)
        for name, placement in zip(names, parameter.placements, strict=True)
    )
