"""Which modules become FSDP2 units, and the switch between sharded and whole weights."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

__all__ = ["blocks", "fsdp_modules", "roots", "shard", "whole_weights"]


def roots(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that are called on their own: the children with parameters, looking through lists and dicts.

    A LightningModule itself is no root: its ``training_step`` is not its ``forward``, so FSDP2's hooks would not fire.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", found) for inner, found in roots(child))
        elif next(child.parameters(), None) is not None:
            yield name, child


def blocks(root: nn.Module, block_classes: Sequence[str] | None = None) -> list[nn.Module]:
    """The repeated blocks of a model, each gathered and freed on its own.

    Args:
        root: A model.
        block_classes: Names of the blocks' classes; None takes what a Hugging Face model says must not be split, else
            the elements of the outermost module lists.

    Returns:
        Blocks in order, none inside another, none with a weight that is also used outside of it.
    """
    names = set(block_classes or ())
    if not names:
        for module in root.modules():
            names.update(getattr(module, "_no_split_modules", None) or ())
    if names:
        found = [m for m in root.modules() if type(m).__name__ in names and m is not root]
    else:
        found = [item for m in root.modules() if isinstance(m, nn.ModuleList) for item in m]
    inner = {id(sub) for block in found for sub in block.modules() if sub is not block}
    outermost = [block for block in found if id(block) not in inner and next(block.parameters(), None) is not None]
    return [block for block in outermost if not _shares_weights(block, root)]


def _shares_weights(block: nn.Module, root: nn.Module) -> bool:
    """Whether a weight of the block is tied to one outside of it (FSDP2 wants both in one unit: the root)."""
    within = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in own
        for module in root.modules()
        if id(module) not in within
        for parameter in module.parameters(recurse=False)
    )


def shard(
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    block_classes: Sequence[str] | None,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> None:
    """Shard a model block by block, in place; a model that its owner already sharded is left alone.

    Tied embeddings stay together in the root unit, so they remain one weight.

    Args:
        root: The model.
        mesh: One dimension to shard over, or two to replicate and shard over.
        block_classes: See :func:`blocks`.
        policy: Types of computation and reduction.
        reshard_after_forward: Whether blocks are freed after their forward (less memory) or kept until their backward
            (one gather less).
    """
    if any(isinstance(module, FSDPModule) for module in root.modules()):
        return
    for block in blocks(root, block_classes):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """All FSDP2 units under a module, outermost first."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


@contextmanager
def whole_weights(module: nn.Module, *, reshard_after_forward: bool) -> Generator[None, None, None]:
    """Gather every unit once and keep it whole inside; on exit all are sharded again and behave as before.

    Inside, forwards run without collectives, so ranks may call the model any number of times each.

    Args:
        module: A root, or anything that holds roots.
        reshard_after_forward: What blocks do otherwise; roots keep their weights until backward.
    """
    units = fsdp_modules(module)
    inner = {id(sub) for unit in units for sub in fsdp_modules(unit) if sub is not unit}  # type: ignore[arg-type]
    for unit in units:
        if id(unit) not in inner:
            # FSDP2 settles who is root in the first forward. `generate` of a LoRA policy goes around the outermost
            # module, so its blocks would each take themselves for one (torch 2.13 has no public way to say so).
            unit._get_fsdp_state()._lazy_init()
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(id(unit) in inner and reshard_after_forward, recurse=False)
            unit.reshard()
