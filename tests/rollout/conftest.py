"""A small rollout and the reward table that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_rlstab.rollout.records import Rollout

PAD = 9


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    """A rollout of 4 completions with 1, 2, 3 and 4 tokens in two groups; any field can be given."""

    def make(**changes: Any) -> Rollout:
        lengths = torch.tensor([1, 2, 3, 4])
        mask = torch.arange(4) < lengths.unsqueeze(1)
        prompt_mask = torch.tensor([[False, True, True]] * 2 + [[True, True, True]] * 2)
        fields: dict[str, Any] = {
            "prompts": ["a", "a", "b", "b"],
            "completions": ["w", "x", "y", "z"],
            "columns": {"answer": [1, 1, 2, 2]},
            "prompt_ids": torch.where(prompt_mask, torch.arange(12).reshape(4, 3) % 7, PAD),
            "prompt_mask": prompt_mask,
            "completion_ids": torch.where(mask, torch.arange(16).reshape(4, 4) % 7, PAD),
            "completion_mask": mask,
            "is_truncated": torch.tensor([False, False, False, True]),
            "group_ids": torch.tensor([5, 5, 8, 8]),
            "behavior_logprobs": torch.where(mask, -torch.arange(16.0).reshape(4, 4), 0.0),
            "pad_token_id": PAD,
        }
        return Rollout(**{**fields, **changes})

    return make
