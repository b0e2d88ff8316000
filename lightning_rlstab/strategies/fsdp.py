"""Fully sharded data parallel (FSDP2), also replicated (HSDP) and beside tensor parallelism, with the step gate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_rlstab.core.checks import choice, flag, refusal
from lightning_rlstab.strategies.background import BackgroundShards
from lightning_rlstab.strategies.checkpoint import METADATA, is_sharded
from lightning_rlstab.strategies.gate import StepGateMixin
from lightning_rlstab.strategies.materialize import fill_from_rank0, materialize, tied_names
from lightning_rlstab.strategies.mesh import REPLICATE, SHARD, check_sharded, mesh_sizes, replicated_mesh
from lightning_rlstab.strategies.optimizer_state import by_name, by_position, parameter_order
from lightning_rlstab.strategies.sharding import fsdp_modules, roots, shard, whole_weights

__all__ = ["RLStabFSDP"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ShardingStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy that shards by itself what ``configure_model`` left whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._background = BackgroundShards()
        self._is_in_background = False
        self._finish: Callable[[], None] | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard, then set up as every strategy does; Lightning's own would demand a ``configure_model``."""
        # On a GPU a first forward under inference mode, by an evaluation, would spoil every later training forward.
        loops: Any = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        for loop in (*loops, trainer.predict_loop):
            loop.inference_mode = False
        self.shard_model()
        Strategy.setup(self, trainer)
        self.barrier()

    def shard_model(self) -> None:
        """Shard the connected module in place."""
        raise AssertionError("the concrete strategy knows how")

    def saved_in_background(self, save: Callable[[], None]) -> Callable[[], None] | None:
        """Run the Trainer's ``save_checkpoint`` so that shards are copied now and written by a thread; on all ranks.

        Args:
            save: Saves one checkpoint.

        Returns:
            To be called on every rank, from any thread: waits until the folder is whole, and raises OSError when it
            cannot become so. None where no shards were asked for: then one file was saved as ever.
        """
        self._is_in_background, self._finish = True, None
        try:
            save()
        finally:
            self._is_in_background = False
        return self._finish

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save a folder of shards or one file; inside :meth:`saved_in_background` only begin to."""
        if not (self._is_in_background and self._save_distributed_checkpoint):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        folder = Path(self.broadcast(filepath))
        folder.mkdir(parents=True, exist_ok=True)
        optimizers = enumerate(checkpoint.pop("optimizer_states", []))
        shards = {"state_dict": checkpoint.pop("state_dict"), **{f"optimizer_{i}": state for i, state in optimizers}}
        rest_file = METADATA if self.is_global_zero else None
        self._finish = self._background.begin(shards, checkpoint, folder, rest_file)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of shards or one file, written by any strategy and any number of processes."""
        path = Path(self.broadcast(checkpoint_path))
        if is_sharded(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        module = self.lightning_module
        assert module is not None
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=module.strict_loading)
        set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
        states = checkpoint.get("optimizer_states", [])
        for optimizer, saved in zip(self.optimizers, states, strict=False):
            # Lightning counts a file's parameters through the module; a file counts them through the optimizer.
            named = by_name(saved, parameter_order(module, optimizer))
            if named["state"]:
                set_optimizer_state_dict(module, optimizer, optim_state_dict=named, options=options)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing left to do: :meth:`load_checkpoint` has loaded it."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of the optimizer: this rank's shards, or on rank 0 the whole with parameters by position."""
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        inner = getattr(optimizer, "_optimizer", optimizer)
        assert self.lightning_module is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        order = parameter_order(self.lightning_module, inner)
        state = get_optimizer_state_dict(self.lightning_module, inner, options=options)
        return by_position(state, order) if self.is_global_zero else {}


class RLStabFSDP(StepGateMixin, ShardingStrategy):
    """``Trainer(strategy="rlstab_fsdp")``: FSDP2 with the step gate, staging, probes and generation under sharding.

    Every child of the LightningModule is sharded block by block, unless ``configure_model`` did so already. Weights and
    optimizer state are float32; ``compute_dtype="bfloat16"`` gathers and computes in bfloat16 and reduces gradients in
    float32. FSDP1 (``FullyShardedDataParallel``) is refused: its flat pieces know no per-parameter norm, and it cannot
    run the extra forward that a probe needs.

    Args:
        data_parallel_size: Ranks with prompts of their own; "auto" is all processes over ``tensor_parallel_size``.
        tensor_parallel_size: Ranks that share a layer and get the same prompts; needs a plan in ``configure_model``.
        replicate_size: Copies of the sharded model (HSDP), e.g. the number of nodes.
        compute_dtype: "float32", "bfloat16" or "float16", of forward and backward.
        block_classes: Class names of the blocks to shard one by one; None asks the model.
        reshard_after_forward: Free a block's whole weights after its forward, or keep them until its backward.
        generation: "unsharded" gathers the whole model once per rollout; "sharded" gathers block by block for every
            token, for models that do not fit on one device. Then all ranks must take the same number of tokens.
        **kwargs: ``skip_non_finite`` and ``survivors`` of :class:`~lightning_rlstab.strategies.gate.StepGateMixin`, and
            ``save_distributed_checkpoint``, ``process_group_backend`` and ``timeout`` of Lightning's
            ``ModelParallelStrategy``.
    """

    reads_shards = True

    def __init__(
        self,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        replicate_size: int = 1,
        compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        block_classes: list[str] | None = None,
        reshard_after_forward: bool = True,
        generation: Literal["unsharded", "sharded"] = "unsharded",
        **kwargs: Any,
    ) -> None:
        super().__init__(data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size, **kwargs)
        self._units: list[FSDPModule] = []
        self.replicate_size = replicate_size
        self.compute_dtype = _DTYPES[choice("compute_dtype", compute_dtype, _DTYPES)]
        self.block_classes = block_classes
        self.reshard_after_forward = flag("reshard_after_forward", reshard_after_forward)
        self.generation = choice("generation", generation, ("unsharded", "sharded"))

    def setup_environment(self) -> None:
        """Join the processes and lay out the mesh.

        Raises:
            ValueError: If the sizes do not fit the number of processes.
        """
        world_size = self.num_nodes * self.num_processes
        data_size, tensor_size = mesh_sizes(
            world_size,
            data_parallel_size=self._data_parallel_size,
            tensor_parallel_size=self._tensor_parallel_size,  # type: ignore[arg-type]
            replicate_size=self.replicate_size,
        )
        self._data_parallel_size, self._tensor_parallel_size = data_size, tensor_size
        super().setup_environment()
        if self.replicate_size > 1:
            self._device_mesh = replicated_mesh(
                self.root_device.type,
                replicate_size=self.replicate_size,
                shard_size=data_size // self.replicate_size,
                tensor_size=tensor_size,
            )
            assert self.lightning_module is not None
            self.lightning_module._device_mesh = self._device_mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh that ``fully_shard`` takes: "data_parallel", or "replicate" times "shard"."""
        return self.device_mesh[REPLICATE, SHARD] if self.replicate_size > 1 else self.device_mesh["data_parallel"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of data-parallel ranks and this one's place among them; tensor-parallel ranks share a place."""
        mesh = self.shard_mesh
        if mesh.ndim == 1:
            return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}
        rank = mesh.get_local_rank(REPLICATE) * mesh.size(1) + mesh.get_local_rank(SHARD)
        return {"num_replicas": mesh.size(), "rank": rank}

    def shard_model(self) -> None:
        """Shard every root of the module, block by block.

        Raises:
            ValueError: If the module brings FSDP1, or a trainable weight stays whole.
        """
        module = self.lightning_module
        assert module is not None
        flat = [name for name, m in module.named_modules() if isinstance(m, FullyShardedDataParallel)]
        if flat:
            rule = "not be wrapped in FSDP1 (`FullyShardedDataParallel`)"
            raise refusal(flat[0] or type(module).__name__, rule, "FSDP1", "Leave sharding to the strategy")
        for _, root in roots(module):
            self._shard(root)
        self._units = fsdp_modules(module)
        check_sharded(module, tensor_size=self.device_mesh["tensor_parallel"].size())

    def full_state_dict(self, policy: nn.Module) -> Mapping[str, Tensor]:
        """Whole weights under the names of ``policy.state_dict()``, on the CPU of rank 0; empty on other ranks.

        Gathers one weight at a time, so no device holds the whole model; collective.
        """
        self.reshard()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(policy, options=options)
        for first, *others in tied_names(policy):
            if first in weights:  # gathered apart, they would be stored apart
                weights.update(dict.fromkeys(others, weights[first]))
        return weights

    def on_train_start(self) -> None:
        """Refuse ranks with different numbers of batches, which would wait for each other for ever."""
        super().on_train_start()
        self._check_equal_counts("training", [self._trainer.num_training_batches])

    def on_validation_start(self) -> None:
        """Refuse ranks with different numbers of batches: under sharding every forward is a collective."""
        super().on_validation_start()
        self._check_equal_counts("validation", self._trainer.num_val_batches)

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _check_equal_counts(self, stage: str, counts: Sequence[int | float]) -> None:
        own = sum(counts)
        rows = [float(row) for row in self.collectives.gathered_tensors(torch.tensor(float(own)))]
        if len(set(rows)) > 1:
            rule = f"have the same number of {stage} batches on every rank"
            advice = "Let the Trainer's distributed sampler pad them, or drop the last ones"
            raise refusal("dataloader", rule, [int(row) for row in rows], advice)

    def _shard(self, root: nn.Module) -> None:
        policy = MixedPrecisionPolicy()
        if self.compute_dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        shard(
            root,
            self.shard_mesh,
            block_classes=self.block_classes,
            policy=policy,
            reshard_after_forward=self.reshard_after_forward,
        )

    def loaded(self, load: Callable[[], nn.Module], empty: Callable[[], nn.Module]) -> nn.Module:
        """A sharded model whose weights only rank 0 has read; call it in ``configure_model``.

        The other ranks never hold more than their shards and one weight in transit.

        Args:
            load: Makes the model with its weights on the CPU; called on rank 0 only.
            empty: Makes the same model; called on every rank with the meta device as default.

        Returns:
            The model on this rank's device, in the mode ``empty`` left it in.
        """
        with torch.device("meta"):
            module = empty()
        self._shard(module)
        materialize(module, self.root_device)
        fill_from_rank0(module, load, is_global_zero=self.is_global_zero)
        return module

    def reshard(self) -> None:
        """Give up every whole weight; FSDP2's roots keep theirs after a forward that no backward follows."""
        for unit in self._units:
            unit.reshard()

    @property
    def is_generation_synced(self) -> bool:
        """Whether all ranks must take the same number of tokens (``generate(synced_gpus=...)``)."""
        return self.generation == "sharded" and self.collectives.world_size > 1

    @contextmanager
    def generation_ready(self, module: nn.Module) -> Generator[None, None, None]:
        """Make a module ready for many forwards without gradient; resharded on exit.

        With ``generation="unsharded"`` no forward inside is a collective, so completions may differ in length over the
        ranks; entering is a collective. With "sharded" pass ``synced_gpus=strategy.is_generation_synced``.

        Args:
            module: The model that generates.
        """
        if self.generation == "unsharded":
            with whole_weights(module, reshard_after_forward=self.reshard_after_forward):
                yield
            return
        try:
            yield
        finally:
            for unit in fsdp_modules(module):
                unit.reshard()
