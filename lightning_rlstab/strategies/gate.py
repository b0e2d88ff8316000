"""The step gate: guards look at the complete gradient and vote, all ranks take one verdict, a skip is a true skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rlstab.control.parameters import local, named_trainable_parameters
from lightning_rlstab.control.protocols import GradientNorms, MicroBatchGuard, PolicyModule, Verdict, Vote
from lightning_rlstab.core.checks import choice, flag, number
from lightning_rlstab.strategies import voting
from lightning_rlstab.strategies.checkpoint import CheckpointMixin
from lightning_rlstab.strategies.clipping import clip_by_norm, clip_by_value, scale_gradients
from lightning_rlstab.strategies.collectives import Collectives
from lightning_rlstab.strategies.norms import gradient_norms, pending_norms
from lightning_rlstab.strategies.probe import ProbeMixin
from lightning_rlstab.strategies.scaler import gradient_scaler, inverse_scale, withhold_scaler_step
from lightning_rlstab.strategies.schedule import hold_schedule_on_skip, release_schedule
from lightning_rlstab.strategies.staging import MicroBatchStaging, Survivors
from lightning_rlstab.strategies.verdict import RunStopped, StepWithheld, checked_vote, merged_verdict
from lightning_rlstab.strategies.weights import WeightsMixin

__all__ = ["StepGateMixin"]


class StepGateMixin(ProbeMixin, WeightsMixin, CheckpointMixin):
    """Turns a Lightning strategy into one whose optimizer steps pass a gate; put it before the strategy in the bases.

    The order within one optimizer step: the last micro-batch's backward, every callback's ``on_before_optimizer_step``
    (guards call :meth:`gradient_norms` and :meth:`vote`), one verdict, then either the module's own
    ``on_before_optimizer_step``, clipping and the update, or nothing at all.

    What a skip leaves alone: weights, optimizer state, weight decay, step-wise learning-rate schedules, the gradient
    scaler (which backs off only after an overflow). What still advances is Lightning's ``trainer.global_step``, which
    counts attempts; ``applied_steps`` counts updates.

    Args:
        skip_non_finite: Whether a gradient with inf or NaN anywhere, on any rank, is skipped without any guard's vote.
        survivors: What becomes of the other micro-batches when guards drop some of a window: ``"keep"`` takes their sum
            as it is, ``"rescale"`` multiplies it by window / survivors.

    Attributes:
        applied_steps: Optimizer steps that updated the weights, since the start of the run; saved and restored.
        skipped_steps: Optimizer steps that were skipped; saved and restored.
    """

    def __init__(self, *args: Any, skip_non_finite: bool = True, survivors: Survivors = "keep", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skip_non_finite = flag("skip_non_finite", skip_non_finite)
        choice("survivors", survivors, ("keep", "rescale"))
        self.applied_steps = 0
        self.skipped_steps = 0
        self._last_gradient_norm: float | None = None
        self._staging = MicroBatchStaging(survivors)
        self._votes: list[Vote] = []
        self._last_verdict: Verdict | None = None
        self._is_stepping = False
        self._is_voting = False
        self._measured: _Measured | None = None
        self._named: dict[str, nn.Parameter] = {}
        self._stashed = []

    # -- set-up ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Set the strategy up and, for a fit, the gate: names of parameters, schedules, the voting callback.

        Raises:
            ValueError: If ``gradient_clip_val`` is not a finite number above 0.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.gradient_clip_val is not None:
            # Lightning takes 0 as "off" and hands NaN on to every gradient.
            number("gradient_clip_val", trainer.gradient_clip_val, above=0, advice="Leave it out to clip nothing")
        assert self.lightning_module is not None
        self._named = named_trainable_parameters(self.lightning_module, self.optimizers)
        self._staging.is_open = False
        voting.attach(trainer, self)
        hold_schedule_on_skip(self, self.lightning_module)

    def setup_precision_plugin(self) -> None:
        """Attach the precision plugin and clip through it: with the norm already measured, on shards as well."""
        super().setup_precision_plugin()
        # Lightning clips in the plugin. Its own norm overflows from 1e19 on (and then zeroes everything), costs a
        # second pass, and cannot stack shards of different meshes.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    def teardown(self) -> None:
        """Leave the Trainer and the module as they were found."""
        if self.lightning_module is not None:
            release_schedule(self.lightning_module)
            if self.lightning_module._trainer is not None:
                voting.detach(self.lightning_module.trainer)
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        super().teardown()

    @property
    def collectives(self) -> Collectives:
        """Reductions and gathers over all processes of the run."""
        return Collectives(world_size=getattr(self, "world_size", 1), device=self.root_device)

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Qualified name to parameter (sharded where the strategy shards), in the optimizer's order."""
        known = {id(parameter) for parameter in self._named.values()}
        listed = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]
        if len(listed) != len(known) or any(id(parameter) not in known for parameter in listed):
            assert self.lightning_module is not None
            self._named = named_trainable_parameters(self.lightning_module, self.optimizers)
        return self._named

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every rank, stacked in a new first dimension; of one process, ``tensor`` itself."""
        if sync_grads or group is not None or self.collectives.world_size == 1:
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[safe-super]
        # Lightning 2.6.6 gathers through `torch.distributed.nn`, which torch 2.13 has deprecated.
        return torch.stack(self.collectives.gathered_tensors(tensor))

    # -- the gate ----------------------------------------------------------------------------------------------------

    @property
    def last_verdict(self) -> Verdict | None:
        """The verdict of the optimizer step that ended last; None before the first."""
        return self._last_verdict

    @property
    def last_gradient_norm(self) -> float | None:
        """Total norm of the optimizer step that ended last, also of a skipped one; None where nobody measured it."""
        return self._last_gradient_norm

    @property
    def dropped_micro_batches(self) -> tuple[int, ...]:
        """Indices in the current (or last) window whose contribution a guard dropped."""
        return tuple(self._staging.dropped)

    @property
    def pending_votes(self) -> tuple[Vote, ...]:
        """This rank's votes in the current optimizer step so far, in the order of the callbacks."""
        return tuple(self._votes)

    def vote(self, vote: Vote) -> None:
        """Record a vote; only inside a callback's ``on_before_optimizer_step``.

        Raises:
            ValueError: If the action or the scale makes no sense.
            RuntimeError: If no optimizer step is waiting for votes.
        """
        if not self._is_voting:
            raise RuntimeError(
                f"`vote` must be called inside a callback's `on_before_optimizer_step`, got a vote of {vote.source!r} "
                "outside of it. Keep the finding and vote at the next optimizer step."
            )
        self._votes.append(checked_vote(vote))

    def gradient_norms(self) -> GradientNorms:
        """Norms of the window's complete, reduced gradient as it stands; collective where gradients are sharded.

        One pass, one reduction and one wait for the device; repeated calls are free until a gradient changes.
        """
        parameters = self.trainable_parameters()
        if self._measured is None or not self._measured.is_of(parameters):
            self._measured = _Measured(parameters, gradient_norms(parameters, self.collectives))
        return self._measured.norms

    def decide(self) -> None:
        """Merge all votes of all ranks; called once per optimizer step, on every rank, after the last callback.

        Raises:
            StepWithheld: On all ranks, when the step is skipped or the run stops; the strategy catches it.
        """
        if self.skip_non_finite and not self.gradient_norms().is_finite:
            self._votes.append(Vote(source="strategy", action="skip", reason="the gradient is not finite"))
        if self._staging.is_all_dropped:
            self._votes.append(Vote(source="strategy", action="skip", reason="every micro-batch was dropped"))
        self._is_voting = False
        # A callback's forward without backward leaves FSDP2's root whole; after the update it would answer with the old
        # weights.
        self.reshard()
        votes, self._votes = self._votes, []
        verdict = merged_verdict(votes, self.collectives, fingerprint=self._staging.fingerprint)
        self._last_verdict = verdict
        if verdict.action != "apply":
            raise StepWithheld(verdict)
        scale_gradients(self.trainable_parameters().values(), verdict.scale)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """One optimizer step: the closure, the votes, and the update unless the verdict withholds it.

        Raises:
            RunStopped: On all ranks with the same words, after saving a checkpoint, when a guard voted to stop.
        """
        self._is_stepping = True
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except StepWithheld as withheld:
            self._withhold(optimizer, withheld.verdict)
            return None
        finally:
            self._is_stepping = self._is_voting = self._staging.is_open = False
            self._last_gradient_norm = None if self._measured is None else self._measured.norms.total
            self._measured = None
            self._votes.clear()
        self.applied_steps += 1
        if self._staging.has_non_finite_dropped:
            withhold_scaler_step(gradient_scaler(self.precision_plugin), is_overflow=True)
        return output

    def _withhold(self, optimizer: Optimizer, verdict: Verdict) -> None:
        scaler = gradient_scaler(self.precision_plugin)
        if scaler is not None:
            is_overflow = self._staging.has_non_finite_dropped or not self.gradient_norms().is_finite
            withhold_scaler_step(scaler, is_overflow=is_overflow)
        # Zeros are not a skip: AdamW would still decay the weights and move along its momentum.
        optimizer.zero_grad(set_to_none=True)
        self.skipped_steps += 1
        if verdict.action == "stop":
            raise RunStopped(verdict, self._save_stop())

    def _save_stop(self) -> str:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / f"stopped-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        return str(path)

    # -- staging -----------------------------------------------------------------------------------------------------

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-batch; staged when a callback asked for it at the start of the window.

        While staged, ``.grad`` holds this micro-batch's own gradient in ``on_after_backward``, and guards hear about a
        micro-batch when the next one is about to run backward, the last one before ``on_before_optimizer_step``.
        """
        staging, parameters = self._staging, self.trainable_parameters()
        self.open_window()
        if staging.is_on:
            staging.before_backward(parameters, self._is_kept)
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if staging.is_on:
            unscale = inverse_scale(gradient_scaler(self.precision_plugin), self.root_device)
            staging.after_backward(pending_norms(parameters, self.collectives, unscale=unscale))
        if self._is_stepping:
            self._close_window(parameters)
        return loss

    def open_window(self) -> None:
        """At a window's first micro-batch, ask the callbacks whether to stage it; later calls do nothing."""
        if not self._staging.is_open:
            self._staging.open_window(is_on=self._is_staging_needed())

    def _close_window(self, parameters: Mapping[str, nn.Parameter]) -> None:
        staging = self._staging
        if staging.is_on:
            staging.close_window(parameters, self._is_kept)
        if staging.micro_batches == 1 and not staging.dropped and staging.newest is not None:
            self._measured = _Measured(parameters, staging.newest)
        self._is_voting = True

    def _is_staging_needed(self) -> bool:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        guards = [c for c in trainer.callbacks if isinstance(c, MicroBatchGuard)]  # type: ignore[attr-defined]
        return any(guard.is_staging_needed(trainer) for guard in guards)

    def _is_kept(self, micro_batch: int, norms: GradientNorms) -> bool:
        assert self.lightning_module is not None
        module, trainer = self.lightning_module, self.lightning_module.trainer
        guards = [c for c in trainer.callbacks if isinstance(c, MicroBatchGuard)]  # type: ignore[attr-defined]
        # Every guard hears about every micro-batch, whatever the others decided: their averages must not depend on it.
        opinions = [guard.on_micro_batch_gradient(trainer, module, norms) for guard in guards]
        is_kept = all(opinions)
        if not is_kept and isinstance(module, PolicyModule):
            for entry in module.window:
                entry.is_dropped |= entry.micro_batch == micro_batch
        return is_kept

    # -- clipping ----------------------------------------------------------------------------------------------------

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_norm(self.trainable_parameters().values(), float(clip_val), total=self.gradient_norms().total)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self.trainable_parameters().values(), float(clip_val))


class _Measured:
    """Norms, and the gradients they are of: gone when a gradient is replaced or written to, whole or local piece.

    By weak reference and not by ``id``: the memory of a freed gradient is often the next one's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], norms: GradientNorms) -> None:
        self.norms = norms
        self._seen = [_seen(parameter.grad) for parameter in parameters.values()]

    def is_of(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether these parameters' gradients are the ones measured, unchanged."""
        gradients = [parameter.grad for parameter in parameters.values()]
        return len(gradients) == len(self._seen) and all(map(_is_unchanged, gradients, self._seen))


_Seen = tuple["weakref.ref[Tensor]", int, int]


def _seen(gradient: Tensor | None) -> _Seen | None:
    return None if gradient is None else (weakref.ref(gradient), gradient._version, local(gradient)._version)


def _is_unchanged(gradient: Tensor | None, seen: _Seen | None) -> bool:
    if gradient is None or seen is None:
        return gradient is None and seen is None
    return seen[0]() is gradient and seen[1:] == (gradient._version, local(gradient)._version)
