"""The faults a fire drill can plant, and the pure functions that put them into loss inputs or a rollout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.core.checks import choice, integer, nearest_name, number, refusal
from lightning_rlstab.core.policy_loss import LossInputs
from lightning_rlstab.rollout.records import Rollout

__all__ = ["FAULTS", "Fault", "FaultKind", "fault_from", "planted_in_inputs", "planted_in_rollout"]


@dataclass(frozen=True)
class FaultKind:
    """What a fault is.

    Attributes:
        place: Where it is planted: ``"rollout"``, ``"loss"``, ``"layer"``, ``"gradient"``, ``"weights"``,
            ``"optimizer"``.
        magnitude: Its default size; the meaning is in ``meaning``.
        meaning: One line for documentation; logs say the size in the place of "`magnitude`".
    """

    place: str
    magnitude: float
    meaning: str


FAULTS: Mapping[str, FaultKind] = {
    "reward_nan": FaultKind("rollout", 1.0, "the reward of one completion is NaN"),
    "reward_outlier": FaultKind("rollout", 1e3, "the reward of one completion is `magnitude`"),
    "repeated_output": FaultKind("rollout", 1.0, "every completion repeats its first token"),
    "all_truncated": FaultKind("rollout", 1.0, "every completion counts as cut off"),
    "reward_hacking": FaultKind("rollout", 1.0, "rewards grow by `magnitude` times the completion's length share"),
    "behavior_logprob_neg_inf": FaultKind("loss", 1.0, "the sampler's log-prob of one token is -inf"),
    "log_ratio_overflow": FaultKind("loss", 100.0, "the log-ratio of one token is `magnitude` nats"),
    "token_mismatch": FaultKind("loss", 50.0, "one token is `magnitude` times likelier in training and weighs as much"),
    "sequence_mismatch": FaultKind(
        "loss", 20.0, "each token of one sequence is `magnitude` times likelier in training"
    ),
    "systematic_mismatch": FaultKind("loss", 20.0, "each token of the step is `magnitude` times likelier in training"),
    "loss_nan": FaultKind("loss", 1.0, "the loss of one token is NaN"),
    "layer_explosion": FaultKind("layer", 100.0, "the gradient of one layer's weights is `magnitude` times too large"),
    "gradient_nan": FaultKind("gradient", 1.0, "one entry of a layer's gradient is NaN"),
    "gradient_inf": FaultKind("gradient", 1.0, "one entry of a layer's gradient is inf"),
    "parameter_nan": FaultKind("weights", 1.0, "one entry of a layer's weights is NaN"),
    "optimizer_state_nan": FaultKind("optimizer", 1.0, "one entry of a layer's second moments is NaN"),
    "optimizer_state_underflow": FaultKind("optimizer", 1e-16, "a layer's second moments are `magnitude`"),
    "lr_spike": FaultKind("optimizer", 100.0, "the learning rate is `magnitude` times itself for the step"),
}
"""Every kind of fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and its address; what an address field means depends on the kind.

    Attributes:
        kind: A key of ``FAULTS``.
        step: Optimizer step (``trainer.global_step``) at which it is planted.
        last_step: Last step of a fault that lasts; None for ``step``.
        rank: Process on which it is planted.
        micro_batch: Micro-batch within the step.
        sequence: Row of the micro-batch (of the generation batch for faults of rewards); None for the row with the
            largest absolute advantage, for ``log_ratio_overflow`` the lowest one (row 0 for rewards).
        token: Position among the row's loss tokens, negative from the end; None for the middle one.
        layer: Part of a layer's name; None for the first trainable one.
        magnitude: Size; None for the kind's default.
    """

    kind: str
    step: int
    last_step: int | None = None
    rank: int = 0
    micro_batch: int = 0
    sequence: int | None = None
    token: int | None = None
    layer: str | None = None
    magnitude: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: Naming the field, the rule and the value.
        """
        choice("faults.kind", self.kind, FAULTS)
        for name in ("step", "rank", "micro_batch"):
            integer(f"faults.{name}", getattr(self, name), at_least=0)
        if self.last_step is not None:
            integer("faults.last_step", self.last_step, at_least=self.step)
        if self.sequence is not None:
            integer("faults.sequence", self.sequence, at_least=0)
        if self.token is not None:
            integer("faults.token", self.token)
        if self.magnitude is not None:
            number("faults.magnitude", self.magnitude, above=0)

    @property
    def size(self) -> float:
        """``magnitude`` or the kind's default."""
        return FAULTS[self.kind].magnitude if self.magnitude is None else self.magnitude

    @property
    def meaning(self) -> str:
        """One line with the size in it."""
        return FAULTS[self.kind].meaning.replace("`magnitude`", f"{self.size:g}")

    @property
    def place(self) -> str:
        """Where it is planted."""
        return FAULTS[self.kind].place

    def is_due(self, step: int) -> bool:
        """Whether it is to be planted at this optimizer step."""
        return self.step <= step <= (self.step if self.last_step is None else self.last_step)


def fault_from(values: Mapping[str, Any] | Fault) -> Fault:
    """A fault from a YAML mapping.

    Raises:
        ValueError: If a field is unknown or missing, or a value is out of range.
    """
    if isinstance(values, Fault):
        return values
    known = [field.name for field in dataclasses.fields(Fault)]
    for name in values:
        if name not in known:
            close = nearest_name(str(name), known)
            raise refusal("faults", f"have fields among {', '.join(known)}", name, f"Write {close}" if close else "")
    for name in ("kind", "step"):
        if name not in values:
            raise refusal("faults", f"name a {name}", dict(values))
    return Fault(**values)


# Faults of the loss ---------------------------------------------------------------------------------------------------


def planted_in_inputs(fault: Fault, inputs: LossInputs) -> tuple[LossInputs, dict[str, Any]]:
    """The loss inputs of one micro-batch with the fault in them.

    Args:
        fault: One whose place is ``"loss"``.
        inputs: As the earlier hooks left them.

    Returns:
        New inputs and the address used, for the event line; the very same inputs when no loss token is there.
    """
    mask = inputs.completion_mask.bool()
    tokens, address = _tokens(fault, inputs, mask)
    if tokens is None:
        return inputs, {"is_planted": False}
    return _LOSS_FAULTS[fault.kind](inputs, tokens, fault.size), {"is_planted": True, **address}


def _tokens(fault: Fault, inputs: LossInputs, mask: Tensor) -> tuple[Tensor | None, dict[str, Any]]:
    if fault.kind == "systematic_mismatch":
        return (mask if mask.any() else None), {}
    row = fault.sequence
    if row is None:
        advantages = inputs.advantages.detach()
        # A ratio that overflows upwards is clipped where the advantage is positive.
        sizes = -advantages if fault.kind == "log_ratio_overflow" else advantages.abs()
        sizes = sizes if sizes.dim() == 1 else sizes.amax(dim=1)
        row = int(torch.where(mask.any(dim=1), sizes, -math.inf).argmax())
    if row >= mask.shape[0]:
        raise refusal("faults.sequence", f"be below the micro-batch's {mask.shape[0]} rows", row)
    places = mask[row].nonzero().flatten().tolist()
    if not places:
        return None, {}
    tokens = torch.zeros_like(mask)
    if fault.kind == "sequence_mismatch":
        tokens[row] = mask[row]
        return tokens, {"sequence": row}
    index = len(places) // 2 if fault.token is None else fault.token
    token = places[max(-len(places), min(index, len(places) - 1))]
    tokens[row, token] = True
    return tokens, {"sequence": row, "token": token}


def _weights(inputs: LossInputs, tokens: Tensor, factor: float) -> Tensor:
    before = torch.ones_like(inputs.logprobs.detach()) if inputs.token_weights is None else inputs.token_weights
    return torch.where(tokens, before * factor, before)


def _mismatch(inputs: LossInputs, tokens: Tensor, ratio: float) -> LossInputs:
    """The sampler gave these tokens ``ratio`` times less probability, and the loss weighs them by that ratio."""
    logprobs = inputs.logprobs.detach()
    behavior = logprobs if inputs.behavior_logprobs is None else inputs.behavior_logprobs
    advantages = inputs.advantages
    is_idle = tokens.any(dim=1) & (advantages == 0 if advantages.dim() == 1 else (advantages == 0).all(dim=1))
    # A row without an advantage has no gradient to multiply.
    idle = is_idle if advantages.dim() == 1 else is_idle.unsqueeze(1)
    return dataclasses.replace(
        inputs,
        behavior_logprobs=torch.where(tokens, logprobs - math.log(ratio), behavior),
        token_weights=_weights(inputs, tokens, ratio),
        advantages=torch.where(idle, torch.ones_like(advantages), advantages),
    )


def _neg_inf_behavior(inputs: LossInputs, tokens: Tensor, _size: float) -> LossInputs:
    behavior = inputs.logprobs.detach() if inputs.behavior_logprobs is None else inputs.behavior_logprobs
    return dataclasses.replace(inputs, behavior_logprobs=torch.where(tokens, -math.inf, behavior))


def _overflow(inputs: LossInputs, tokens: Tensor, nats: float) -> LossInputs:
    logprobs = inputs.logprobs.detach()
    old = logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    return dataclasses.replace(inputs, old_logprobs=torch.where(tokens, logprobs - nats, old))


def _nan_loss(inputs: LossInputs, tokens: Tensor, _size: float) -> LossInputs:
    return dataclasses.replace(inputs, token_weights=_weights(inputs, tokens, math.nan))


_LOSS_FAULTS: Mapping[str, Callable[[LossInputs, Tensor, float], LossInputs]] = {
    "behavior_logprob_neg_inf": _neg_inf_behavior,
    "log_ratio_overflow": _overflow,
    "token_mismatch": _mismatch,
    "sequence_mismatch": _mismatch,
    "systematic_mismatch": _mismatch,
    "loss_nan": _nan_loss,
}


# Faults of the rollout ------------------------------------------------------------------------------------------------


def planted_in_rollout(fault: Fault, rollout: Rollout, *, is_truncated_masked: bool = False) -> Rollout:
    """The scored rollout with the fault in it.

    Args:
        fault: One whose place is ``"rollout"``.
        rollout: After the reward functions, before advantages; not yet shuffled.
        is_truncated_masked: Whether the module leaves cut-off completions out of the loss; it has done so by now.
    """
    if fault.kind == "all_truncated":
        is_truncated = torch.ones_like(rollout.is_truncated)
        mask = torch.zeros_like(rollout.completion_mask) if is_truncated_masked else rollout.completion_mask
        return rollout.replace(is_truncated=is_truncated, completion_mask=mask)
    if fault.kind == "repeated_output":
        return _repeated(rollout)
    rows = torch.arange(len(rollout), device=rollout.completion_ids.device)
    if fault.kind == "reward_hacking":
        width = rollout.completion_ids.shape[1]
        return _with_rewards(rollout, lambda rewards: rewards + fault.size * rollout.completion_lengths / width)
    row = fault.sequence or 0
    if row >= len(rollout):
        raise refusal("faults.sequence", f"be below the generation batch's {len(rollout)} rows", row)
    value = math.nan if fault.kind == "reward_nan" else fault.size
    return _with_rewards(rollout, lambda rewards: torch.where(rows == row, value, rewards))


def _with_rewards(rollout: Rollout, change: Callable[[Tensor], Tensor]) -> Rollout:
    """Change the weighted rewards, and the first function's along with them: advantages are made from the latter."""
    per_func = rollout.rewards_per_func
    if per_func is not None:
        per_func = torch.cat([change(per_func[:, 0]).unsqueeze(1), per_func[:, 1:]], dim=1)
    rewards = None if rollout.rewards is None else change(rollout.rewards)
    return rollout.replace(rewards_per_func=per_func, rewards=rewards)


def _repeated(rollout: Rollout) -> Rollout:
    """Every completion is its first token over and over, at its own length; its sampling log-probs are unknown."""
    first = rollout.completion_ids[:, :1].expand_as(rollout.completion_ids)
    ids = torch.where(rollout.completion_mask.bool(), first, rollout.completion_ids)
    behavior = rollout.behavior_logprobs
    return rollout.replace(
        completion_ids=ids,
        completions=[_repeated_text(completion) for completion in rollout.completions],
        behavior_logprobs=None if behavior is None else torch.full_like(behavior, math.nan),
    )


def _repeated_text(completion: Any) -> Any:
    if isinstance(completion, str):
        return completion[:1] * max(len(completion), 1)
    return [{**message, "content": _repeated_text(message["content"])} for message in completion]
