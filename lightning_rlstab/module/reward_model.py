"""Reward models: a sequence classifier as a reward function, and the suite that a run's settings describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_rlstab.core.checks import integer, refusal
from lightning_rlstab.module.policy import loaded_from, pretrained
from lightning_rlstab.module.prompts import is_conversational
from lightning_rlstab.module.settings import GRPOSettings
from lightning_rlstab.rollout.rewards import RewardSuite, is_model_spec

__all__ = ["ClassifierReward", "reward_suite"]


class ClassifierReward:
    """A sequence classifier whose first logit is the reward.

    Prompt and completion are joined as they are, or through the chat template when they are messages. The model runs in
    evaluation mode without gradient, in batches, and is never trained: it belongs to no Lightning module.

    Args:
        model_or_path: A sequence classification model, or a Hugging Face id or directory (loaded with one label).
        processing_class: Its tokenizer; by default the one saved with the model. Without a pad token, its
            end-of-sequence token pads.
        batch_size: Texts per forward.
        chat_template_kwargs: Further arguments of the chat template.
        model_kwargs: Further arguments of ``from_pretrained``.

    Raises:
        ValueError: If there is no tokenizer to be found, or no token to pad with.
    """

    runs_in_process = True
    """Never called in a worker process: the model lives here."""

    def __init__(
        self,
        model_or_path: str | nn.Module,
        processing_class: Any = None,
        *,
        batch_size: int = 32,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._batch_size = integer("batch_size", batch_size, at_least=1)
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self.model: Any = _loaded(model_or_path, dict(model_kwargs or {}))
        model_id = loaded_from(self.model)
        self.__name__ = model_id.rstrip("/").split("/")[-1] or type(self.model).__name__
        self._tokenizer = processing_class or _tokenizer_of(model_id, model_or_path)
        self._agree_on_padding()

    def _agree_on_padding(self) -> None:
        if self._tokenizer.pad_token_id is None:
            if self._tokenizer.eos_token is None:
                advice = "Set tokenizer.pad_token of the reward model"
                raise refusal("reward_processing_classes", "have a pad or end-of-sequence token", self.__name__, advice)
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The classifier scores the last token that is not padding, so it must know which one that is.
        config = getattr(self.model, "config", None)
        if config is not None:
            text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
            text_config.pad_token_id = self._tokenizer.pad_token_id

    def to(self, device: torch.device | str) -> ClassifierReward:
        """Move the model."""
        self.model.to(device)
        return self

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Score every completion.

        Args:
            prompts: N texts or message lists.
            completions: N texts or message lists.

        Returns:
            N rewards.
        """
        texts = [self._joined(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        # Texts of like length share a batch, so that little is padding.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        rewards = [0.0] * len(texts)
        self.model.eval()
        for start in range(0, len(texts), self._batch_size):
            rows = order[start : start + self._batch_size]
            for row, reward in zip(rows, self._scores([texts[row] for row in rows]), strict=True):
                rewards[row] = reward
        return rewards

    def _joined(self, prompt: Any, completion: Any) -> str:
        if not is_conversational(prompt):
            return str(prompt) + str(completion)
        messages = [*prompt, *completion]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **self._chat_template_kwargs))

    @torch.no_grad()
    def _scores(self, texts: list[str]) -> list[float]:
        encoded = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self.model.parameters()).device
        scores: list[float] = self.model(**encoded.to(device)).logits[:, 0].float().tolist()
        return scores


def _loaded(model_or_path: str | nn.Module, model_kwargs: dict[str, Any]) -> Any:
    if isinstance(model_or_path, nn.Module):
        return model_or_path
    from transformers import AutoModelForSequenceClassification

    load = AutoModelForSequenceClassification.from_pretrained
    return pretrained(load, "reward_funcs", model_or_path, {"num_labels": 1, **model_kwargs})


def _tokenizer_of(model_id: str, model_or_path: Any) -> Any:
    if not model_id:
        advice = "Pass the reward model's tokenizer"
        raise refusal("reward_processing_classes", "be given for this model", type(model_or_path).__name__, advice)
    from transformers import AutoTokenizer

    return pretrained(AutoTokenizer.from_pretrained, "reward_processing_classes", model_id, {})


def reward_suite(reward_funcs: Any, reward_processing_classes: Any, settings: GRPOSettings) -> RewardSuite:
    """The suite for one run: models and their ids become ``ClassifierReward``, everything else stays what it is.

    Args:
        reward_funcs: One function, import path, model id, directory or model, or a list of them.
        reward_processing_classes: One tokenizer or None per entry, or None for all.
        settings: Weights, time limit and chat template arguments.

    Returns:
        The suite.

    Raises:
        ValueError: If the numbers of entries differ or an entry cannot be loaded.
    """
    specs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    given = reward_processing_classes
    tokenizers = list(given) if isinstance(given, list | tuple) else [given] * (1 if len(specs) == 1 else 0)
    if given is None:
        tokenizers = [None] * len(specs)
    if len(tokenizers) != len(specs):
        rule = f"have one entry per reward function ({len(specs)})"
        raise refusal("reward_processing_classes", rule, len(tokenizers) or 1)
    functions = [
        ClassifierReward(spec, tokenizer, chat_template_kwargs=settings.chat_template_kwargs)
        if isinstance(spec, nn.Module) or is_model_spec(spec)
        else spec
        for spec, tokenizer in zip(specs, tokenizers, strict=True)
    ]
    return RewardSuite(
        functions, weights=settings.reward_weights, time_limit_seconds=settings.reward_time_limit_seconds
    )
