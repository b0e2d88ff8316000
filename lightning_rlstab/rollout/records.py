"""One record for everything known about a batch of completions, and how to cut, join and save it.

Shape words: batch B completions, P prompt tokens (left-padded), T completion tokens (right-padded), F reward functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_rlstab.core.checks import integer, refusal

__all__ = ["Rollout", "concatenated", "rollout_from", "state_of", "trimmed"]

_STATE_VERSION = 1
_FROM_MASK = torch.empty(0, dtype=torch.int64)

# Padded tensors and the side and value of their padding; None stands for the record's pad token.
_LEFT_PADDED: dict[str, float | None] = {"prompt_ids": None, "prompt_mask": 0}
_RIGHT_PADDED: dict[str, float | None] = {
    "completion_ids": None,
    "completion_mask": 0,
    "behavior_logprobs": 0,
    "old_logprobs": 0,
    "reference_logprobs": 0,
}
_PER_ROW = (
    "is_truncated",
    "group_ids",
    "rewards_per_func",
    "rewards",
    "advantages",
    "policy_step",
    "completion_lengths",
)
_TENSORS = (*_LEFT_PADDED, *_RIGHT_PADDED, *_PER_ROW)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """B completions with their prompts, masks, log-probs, rewards and advantages.

    Immutable: every change makes a new record. Tensors are shared between records, so do not write into them.

    Attributes:
        prompts: Text or list of messages, as the dataset gave it; one per completion.
        completions: Text, or ``[{"role": "assistant", "content": ...}]`` when the prompt is conversational.
        columns: Every other dataset column, one entry per completion.
        prompt_ids: (B, P) int64, left-padded with ``pad_token_id``.
        prompt_mask: (B, P) bool, True on real tokens.
        completion_ids: (B, T) int64, right-padded with ``pad_token_id``.
        completion_mask: (B, T) bool, True on tokens that count in the loss.
        is_truncated: (B,) bool, no end-of-sequence token before the length limit.
        group_ids: (B,) int64, global id of the prompt; completions of one group share it.
        pad_token_id: Token id of the padding.
        behavior_logprobs: (B, T) float32 nats under the policy that sampled, or None.
        old_logprobs: (B, T) float32 nats of the training forward at the start of the update, or None.
        reference_logprobs: (B, T) float32 nats of the frozen reference, or None.
        rewards_per_func: (B, F) float32, NaN where a function gave no value, or None.
        rewards: (B,) float32 weighted sum, NaN where no function gave a value, or None.
        advantages: (B,) float32, or None.
        num_items: Loss tokens of the whole generation batch over all ranks, or None.
        policy_step: (B,) int64, optimizer step of the policy that sampled; a plain int is spread over the rows.
        completion_lengths: (B,) int64, generated tokens with the end-of-sequence token. Read off ``completion_mask``
            when the record is first made and kept from then on, so that masking a row out of the loss later leaves
            its length alone.
    """

    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    is_truncated: Tensor
    group_ids: Tensor
    pad_token_id: int
    behavior_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    rewards_per_func: Tensor | None = None
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    num_items: float | None = None
    policy_step: int | Tensor = 0
    completion_lengths: Tensor = _FROM_MASK

    def __post_init__(self) -> None:
        """Spread ``policy_step``, note the lengths and refuse tensors whose shapes do not belong together."""
        if not isinstance(self.policy_step, Tensor):
            steps = torch.full((len(self.prompts),), self.policy_step, device=self.completion_ids.device)
            object.__setattr__(self, "policy_step", steps)
        if self.completion_lengths is _FROM_MASK:
            object.__setattr__(self, "completion_lengths", self.completion_mask.sum(dim=1))
        self._check_shapes()

    def _check_shapes(self) -> None:
        rows, prompt_width = len(self.prompts), self.prompt_ids.shape[-1]
        width = self.completion_ids.shape[-1]
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            expected: tuple[int, ...] = (rows,)
            if name in _LEFT_PADDED:
                expected = (rows, prompt_width)
            elif name in _RIGHT_PADDED:
                expected = (rows, width)
            elif name == "rewards_per_func":
                expected = (rows, tensor.shape[-1])
            if tuple(tensor.shape) != expected:
                raise refusal(name, f"have shape {expected} for {rows} prompts", tuple(tensor.shape))
        for name, values in {"completions": self.completions, **self.columns}.items():
            if len(values) != rows:
                raise refusal(name, f"have one entry per prompt ({rows})", len(values))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def policy_steps(self) -> Tensor:
        """(B,) int64, ``policy_step`` with its type made certain."""
        return torch.as_tensor(self.policy_step)

    def replace(self, **changes: Any) -> Rollout:
        """A copy with some fields changed; ``completion_lengths`` stays unless it is given."""
        return dataclasses.replace(self, **changes)

    def select(self, indices: Tensor | Sequence[int] | slice) -> Rollout:
        """The rows at ``indices``, in that order; a row may be taken more than once.

        Args:
            indices: Row numbers (not a bool mask), or a slice.

        Returns:
            A record of the same padded widths. ``num_items`` is kept: it belongs to the generation batch.
        """
        if isinstance(indices, slice):
            rows = list(range(len(self))[indices])
        elif isinstance(indices, Tensor):
            if indices.dtype == torch.bool:
                raise refusal("indices", "be row numbers", indices.dtype, "Use mask.nonzero().flatten()")
            rows = indices.tolist()
        else:
            rows = list(indices)
        picked: dict[str, Any] = {"prompts": [self.prompts[row] for row in rows]}
        picked["completions"] = [self.completions[row] for row in rows]
        picked["columns"] = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        for name, tensor in self._tensors().items():
            picked[name] = tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]
        return self.replace(**picked)

    def slices(self, count: int) -> list[Rollout]:
        """Cut into ``count`` runs of neighbouring rows of equal size.

        Args:
            count: Number of slices; must divide the number of rows.

        Returns:
            The slices in order.

        Raises:
            ValueError: If the rows cannot be shared out equally.
        """
        integer("count", count, at_least=1)
        size, left_over = divmod(len(self), count)
        if left_over:
            raise refusal("count", f"divide the number of completions, {len(self)}", count)
        return [self.select(slice(start, start + size)) for start in range(0, size * count, size)] if size else []

    def to(self, device: torch.device | str) -> Rollout:
        """The same record with every tensor on ``device``."""
        return self.replace(**{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name in _TENSORS if (tensor := getattr(self, name)) is not None}


def concatenated(rollouts: Sequence[Rollout]) -> Rollout:
    """Join records row-wise, widening the padding where widths differ: prompts on the left, completions on the right.

    Args:
        rollouts: At least one record; all with the same columns, the same optional tensors and the same pad token.

    Returns:
        One record on the device of the first. ``num_items`` is kept when all agree, otherwise None: what the
        normaliser of a mixed batch is, only its maker knows.

    Raises:
        ValueError: If the list is empty or the records do not fit together; the field is named.
    """
    if not rollouts:
        raise refusal("rollouts", "hold at least one record", [])
    first = rollouts[0]
    _check_they_fit(rollouts)
    device = first.completion_ids.device
    widths = {
        **dict.fromkeys(_LEFT_PADDED, max(rollout.prompt_ids.shape[1] for rollout in rollouts)),
        **dict.fromkeys(_RIGHT_PADDED, max(rollout.completion_ids.shape[1] for rollout in rollouts)),
    }
    joined: dict[str, Any] = {
        "prompts": [prompt for rollout in rollouts for prompt in rollout.prompts],
        "completions": [completion for rollout in rollouts for completion in rollout.completions],
        "columns": {name: [value for rollout in rollouts for value in rollout.columns[name]] for name in first.columns},
        "num_items": first.num_items if len({rollout.num_items for rollout in rollouts}) == 1 else None,
    }
    for name in first._tensors():
        parts = [getattr(rollout, name).to(device) for rollout in rollouts]
        if name in widths:
            fill = {**_LEFT_PADDED, **_RIGHT_PADDED}[name]
            value = first.pad_token_id if fill is None else fill
            parts = [_widened(part, widths[name], value, is_left=name in _LEFT_PADDED) for part in parts]
        joined[name] = torch.cat(parts)
    return first.replace(**joined)


def _check_they_fit(rollouts: Sequence[Rollout]) -> None:
    first = rollouts[0]
    for other in rollouts[1:]:
        if other.pad_token_id != first.pad_token_id:
            raise refusal("pad_token_id", f"be the same in all records ({first.pad_token_id})", other.pad_token_id)
        if differing := set(first.columns) ^ set(other.columns):
            raise refusal("columns", "be the same in all records", sorted(differing), "Give every record these columns")
        if differing := set(first._tensors()) ^ set(other._tensors()):
            name = sorted(differing)[0]
            raise refusal(name, "be set in all records or in none", "set in some only", "Fill it or clear it first")
        if first.rewards_per_func is not None and other.rewards_per_func is not None:
            functions = first.rewards_per_func.shape[1]
            if other.rewards_per_func.shape[1] != functions:
                raise refusal(
                    "rewards_per_func", f"have {functions} columns in all records", other.rewards_per_func.shape[1]
                )


def _widened(tensor: Tensor, width: int, value: float, *, is_left: bool) -> Tensor:
    missing = width - tensor.shape[1]
    if not missing:
        return tensor
    padding = tensor.new_full((tensor.shape[0], missing), value)
    return torch.cat([padding, tensor] if is_left else [tensor, padding], dim=1)


def trimmed(rollout: Rollout) -> Rollout:
    """Drop the token columns that are padding in every row; at least one column of each kind stays.

    Reads two numbers back from the device: do it once per rollout, not once per micro-batch.

    Args:
        rollout: Any record, usually a slice of a longer one.

    Returns:
        The record with narrower tensors, or the very same one when nothing could be dropped.
    """
    prompt_width, width = rollout.prompt_ids.shape[1], rollout.completion_ids.shape[1]
    if not len(rollout):
        return rollout
    prompt_keep = max(int(rollout.prompt_mask.sum(dim=1).max()), 1)
    keep = min(max(int(rollout.completion_lengths.max()), 1), width)
    if prompt_keep == prompt_width and keep == width:
        return rollout
    tensors = rollout._tensors()
    changes = {name: tensors[name][:, prompt_width - prompt_keep :] for name in _LEFT_PADDED}
    changes |= {name: tensors[name][:, :keep] for name in _RIGHT_PADDED if name in tensors}
    return rollout.replace(**changes)


def state_of(rollout: Rollout) -> dict[str, Any]:
    """The record as plain types and CPU tensors, for checkpoints that are loaded with ``weights_only=True``.

    Numpy scalars, string subclasses, ordered dicts and the like become the plain type they stand for. Tensors are
    copied, so the state stays what it was when training goes on.

    Args:
        rollout: Any record.

    Returns:
        A dict for ``rollout_from``.

    Raises:
        ValueError: If a column holds something that is no plain value; the column and the type are named.
    """
    state: dict[str, Any] = {"version": _STATE_VERSION, "pad_token_id": int(rollout.pad_token_id)}
    state["num_items"] = None if rollout.num_items is None else float(rollout.num_items)
    state["prompts"] = _plain(rollout.prompts, "prompts")
    state["completions"] = _plain(rollout.completions, "completions")
    state["columns"] = {str(name): _plain(values, str(name)) for name, values in rollout.columns.items()}
    for name, tensor in rollout._tensors().items():
        state[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return state


def rollout_from(state: Mapping[str, Any]) -> Rollout:
    """The record that ``state_of`` saved, on the CPU.

    Args:
        state: What ``state_of`` returned, after any trip through ``torch.save``.

    Returns:
        An equal record.

    Raises:
        ValueError: If the state is of another version.
    """
    if state.get("version") != _STATE_VERSION:
        raise refusal(
            "version", f"be {_STATE_VERSION} in a saved rollout", state.get("version"), "Drop the saved rollouts"
        )
    return Rollout(**{name: value for name, value in state.items() if name != "version"})


def _plain(value: Any, column: str) -> Any:
    # Subclasses (numpy.float64 is a float, numpy.str_ a str) pickle as their own class, which weights-only loading
    # refuses: so the plain type is made even where isinstance already holds.
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(entry, column) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, column) for entry in value]
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):  # a numpy scalar
        return _plain(value.item(), column)
    rule = "hold only text, numbers, bools, None, tensors, lists and dicts with text keys, to be saved in a checkpoint"
    raise refusal(column, rule, f"{type(value).__module__}.{type(value).__qualname__}", "Convert the column first")
