"""Prompts to padded token ids, through the tokenizer or its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_conversational", "prompt_tokens", "tokenized_prompts"]


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages rather than text."""
    return not isinstance(prompt, str)


def prompt_tokens(
    prompts: Sequence[Any], processing_class: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of each prompt, unpadded; messages go through the chat template with the generation prompt added.

    Args:
        prompts: Texts or message lists, all of one kind.
        processing_class: A Hugging Face tokenizer.
        chat_template_kwargs: Further arguments of the chat template.

    Returns:
        One list of ids per prompt.

    Raises:
        ValueError: If a conversational prompt meets a tokenizer without a chat template.
    """
    if is_conversational(prompts[0]):
        if getattr(processing_class, "chat_template", None) is None:
            raise ValueError(
                "`processing_class` must have a chat template for conversational prompts, got none. "
                "Set `tokenizer.chat_template` or give prompts as text."
            )
        encoded = processing_class.apply_chat_template(
            list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True, **(chat_template_kwargs or {})
        )
    else:
        encoded = processing_class(text=list(prompts))
    return [list(ids) for ids in encoded["input_ids"]]


def tokenized_prompts(
    ids: Sequence[Sequence[int]], *, pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Left-padded prompt ids and their mask.

    Args:
        ids: Token ids of each prompt.
        pad_token_id: Id written into the padding.
        device: Where the tensors are made.

    Returns:
        ids (batch, prompt) int64 and mask (batch, prompt) bool.

    Example:
        >>> tokenized_prompts([[5], [6, 7]], pad_token_id=0, device=torch.device("cpu"))[0].tolist()
        [[0, 5], [6, 7]]
    """
    width = max(len(row) for row in ids)
    padded = [[pad_token_id] * (width - len(row)) + list(row) for row in ids]
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in ids]
    return torch.tensor(padded, device=device), torch.tensor(mask, device=device)
