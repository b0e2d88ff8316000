"""FireDrill: plant a chosen fault in one's own run, so that the guards are tested before the long one."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_rlstab.callbacks.fire_drill_faults import (
    Fault,
    fault_from,
    planted_in_inputs,
    planted_in_rollout,
)
from lightning_rlstab.core.checks import refusal
from lightning_rlstab.core.policy_loss import LossInputs
from lightning_rlstab.report.events import EventLog

__all__ = ["FireDrill"]

_log = logging.getLogger(__name__)


class FireDrill(pl.Callback):
    """Plants faults on purpose; loud in the log and in ``events.jsonl``.

    What it watches: the optimizer step, to know when a fault is due. When it acts: at the steps of ``faults``, and
    never without that list. What it changes: what the fault says, nothing else. What it costs: nothing when no fault
    is due. What survives a resume: nothing; a fault whose step is over stays over.

    Put it first in the list of callbacks, so that every guard sees the fault.

    Args:
        faults: Mappings with ``kind`` and ``step``, and where they apply ``last_step``, ``rank``, ``micro_batch``,
            ``sequence``, ``token``, ``layer``, ``magnitude``; see
            :class:`~lightning_rlstab.callbacks.fire_drill_faults.Fault`.

    Raises:
        ValueError: If no fault is named, or a field is unknown or out of range.

    Example:
        >>> FireDrill([{"kind": "token_mismatch", "step": 20, "micro_batch": 3}]).faults[0].size
        50.0
    """

    def __init__(self, faults: Sequence[dict[str, Any]]) -> None:
        if not faults:
            raise refusal("faults", "name at least one fault", faults, "Remove FireDrill from a run that is meant")
        self.faults = tuple(fault_from(fault) for fault in faults)
        self._events: EventLog | None = None
        self._hooks = ExitStack()
        self._usual_rates: list[float] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say in the log what will happen."""
        folder = trainer.log_dir or trainer.default_root_dir
        self._events = EventLog(Path(folder) / "events.jsonl") if trainer.is_global_zero else None
        for fault in self.faults:
            _log.warning("FIRE DRILL: at step %d %s, on purpose.", fault.step, fault.meaning)

    # Rollout and loss -------------------------------------------------------------------------------------------------

    def on_rollout_scored(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        """Plant faults of rewards and completions."""
        settings = getattr(pl_module, "settings", None)
        is_masked = bool(getattr(settings, "mask_truncated_completions", False))
        for fault in self._due(trainer, "rollout"):
            if fault.rank == trainer.global_rank:
                rollout = planted_in_rollout(fault, rollout, is_truncated_masked=is_masked)
            self._announce(trainer, fault)
        return rollout

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: LossInputs) -> LossInputs:
        """Plant faults of log-probs, ratios and token losses."""
        for fault in self._due(trainer, "loss"):
            is_everywhere = fault.kind == "systematic_mismatch"
            if not is_everywhere and fault.micro_batch != len(pl_module.window):
                continue
            address: dict[str, Any] = {}
            if is_everywhere or fault.rank == trainer.global_rank:
                inputs, address = planted_in_inputs(fault, inputs)
            self._announce(trainer, fault, **address)
        return inputs

    # Weights, optimizer, layers ---------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plant faults of weights, optimizer state, learning rate and layers before the step's first forward."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        for fault in self._due(trainer, "weights"):
            with torch.no_grad():
                self._spoil(_parameter(pl_module, fault, trainer), math.nan)
            self._announce(trainer, fault)
        for fault in self._due(trainer, "optimizer"):
            self._spoil_optimizer(trainer, pl_module, fault)
            self._announce(trainer, fault)
        for fault in self._due(trainer, "layer"):
            name, layer = _layer(pl_module, fault)
            self._hooks.callback(
                layer.register_forward_pre_hook(_scaled_input(1 / fault.size), with_kwargs=True).remove
            )
            self._hooks.callback(layer.register_forward_hook(_scaled_output(fault.size)).remove)
            self._announce(trainer, fault, layer=name)

    def _spoil_optimizer(self, trainer: pl.Trainer, pl_module: pl.LightningModule, fault: Fault) -> None:
        if fault.kind == "lr_spike":
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self._usual_rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * fault.size
            return
        parameter = _parameter(pl_module, fault, trainer)
        for optimizer in trainer.optimizers:
            moments = optimizer.state.get(parameter, {}).get("exp_avg_sq")
            if moments is not None and fault.kind == "optimizer_state_nan":
                self._spoil(moments, math.nan)
            elif moments is not None:
                moments.fill_(fault.size)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plant faults of the gradient into the micro-batch they name."""
        window: list[Any] = pl_module.window  # type: ignore[assignment]
        for fault in self._due(trainer, "gradient"):
            if fault.micro_batch != len(window) - 1:
                continue
            gradient = _parameter(pl_module, fault, trainer).grad
            if gradient is not None and fault.rank == trainer.global_rank:
                self._spoil(gradient, math.nan if fault.kind == "gradient_nan" else math.inf)
            self._announce(trainer, fault)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take down what belongs to one step only, once the step is over."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and batch_idx + 1 != trainer.num_training_batches:
            return
        self._hooks.close()
        if self._usual_rates is not None:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            for group, rate in zip(groups, self._usual_rates, strict=True):
                # A schedule has already put its own value there; without one the spike would stay.
                group["lr"] = min(group["lr"], rate)
            self._usual_rates = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave no hook behind."""
        self._hooks.close()

    # Helpers of all places --------------------------------------------------------------------------------------------

    def _due(self, trainer: Any, place: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.place == place and fault.is_due(trainer.global_step)]

    @staticmethod
    def _spoil(tensor: Tensor, value: float) -> None:
        to_local = getattr(tensor, "to_local", None)
        piece = tensor.detach() if to_local is None else to_local().detach()
        if piece.numel():
            piece.view(-1)[0] = value

    def _announce(self, trainer: Any, fault: Fault, **address: Any) -> None:
        _log.warning("FIRE DRILL, step %d: %s.", trainer.global_step, fault.meaning)
        if self._events is not None:
            given = {
                "kind": fault.kind,
                "rank": fault.rank,
                "micro_batch": fault.micro_batch,
                "sequence": fault.sequence,
                "token": fault.token,
                "layer": fault.layer,
                "magnitude": fault.size,
                "meaning": fault.meaning,
            }
            self._events.write("fire_drill", step=trainer.global_step, **{**given, **address})


def _parameter(pl_module: nn.Module, fault: Fault, trainer: pl.Trainer) -> Tensor:
    """The first trainable parameter whose name holds ``fault.layer``; the optimizer's own, also while it is sharded."""
    names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
    listed = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    trainable = {names.get(id(parameter), str(index)): parameter for index, parameter in enumerate(listed)}
    for name, parameter in trainable.items():
        if fault.layer is None or fault.layer in name:
            return parameter  # type: ignore[no-any-return]
    raise refusal(
        "faults.layer", "be part of a trainable parameter's name", fault.layer, f"Try {next(iter(trainable))}"
    )


def _layer(pl_module: nn.Module, fault: Fault) -> tuple[str, nn.Module]:
    """The first numbered block whose name holds ``fault.layer``."""
    blocks = {
        name: layer
        for name, layer in pl_module.named_modules()
        if name.rpartition(".")[2].isdigit()
        and not name.startswith("reference")
        and next(layer.parameters(), None) is not None
    }
    for name, layer in blocks.items():
        if fault.layer is None or fault.layer == name or name.endswith(f".{fault.layer}"):
            return name, layer
    raise refusal("faults.layer", "end a numbered layer's name", fault.layer, f"Try one of {', '.join(blocks)}")


def _scaled_output(factor: float) -> Any:
    """Multiply the gradient that enters a layer from above; its output stays what it is."""

    def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    return hook


def _scaled_input(factor: float) -> Any:
    """Divide the gradient that leaves a layer downwards, so that only its own weights see the large one."""

    def hook(_layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].requires_grad:
            return None
        # A view of its own, so that the hook sees what comes through this layer and not the stream beside it.
        value = inputs[0].view_as(inputs[0])
        value.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        return (value, *inputs[1:]), keywords

    return hook
