"""Sequence classifiers as reward functions, and the suite that a run's settings describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlstab.module.reward_model import ClassifierReward, reward_suite
from lightning_rlstab.module.settings import GRPOSettings

TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"


@pytest.fixture
def classifier() -> Any:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.5,
        num_labels=1,
    )
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(config).train()


def alone(classifier: Any, tokenizer: Any, text: str) -> float:
    with torch.no_grad():
        return float(
            classifier.eval()(**tokenizer(text=[text], return_tensors="pt", add_special_tokens=False)).logits[0, 0]
        )


def test_a_batch_scores_every_text_as_it_would_alone(classifier: Any, byte_tokenizer: Any) -> None:
    reward = ClassifierReward(classifier, byte_tokenizer, batch_size=2)
    prompts, completions = ["a", "bb", "a", "c", "dd"], ["long long long", "x", "middle", "", "yy"]
    scores = reward(prompts=prompts, completions=completions, answer=[1] * 5)
    expected = [alone(classifier, byte_tokenizer, p + c) for p, c in zip(prompts, completions, strict=True)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 5
    assert not classifier.training
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_messages_are_joined_through_the_chat_template(
    classifier: Any, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_tokenizer, "chat_template", TEMPLATE)
    reward = ClassifierReward(classifier, byte_tokenizer)
    prompts = [[{"role": "user", "content": "2+2"}]]
    scores = reward(prompts=prompts, completions=[[{"role": "assistant", "content": "4"}]])
    assert scores == pytest.approx([alone(classifier, byte_tokenizer, "[user]2+2[assistant]4")], abs=1e-5)


def test_a_directory_is_loaded_with_its_tokenizer_and_named_after_it(
    classifier: Any, byte_tokenizer: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    classifier.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    suite = reward_suite(str(folder), None, GRPOSettings(num_generations=2))
    assert suite.names == ("judge",)
    table = suite.to("cpu").score(prompts=["a"], completions=["b"], completion_ids=[[1]], columns={})
    assert table.weighted.tolist() == pytest.approx([alone(classifier, byte_tokenizer, "ab")], abs=1e-5)


def test_the_padding_of_tokenizer_and_model_agree(classifier: Any, byte_tokenizer: Any) -> None:
    ClassifierReward(classifier, byte_tokenizer)
    assert classifier.config.pad_token_id == byte_tokenizer.pad_token_id


def test_a_tokenizer_without_pad_token_uses_its_end_token(
    classifier: Any, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.pad_token = None
    ClassifierReward(classifier, tokenizer)
    assert classifier.config.pad_token_id == byte_tokenizer.eos_token_id


def test_a_model_without_a_tokenizer_is_refused(classifier: Any) -> None:
    with pytest.raises(ValueError, match="`reward_processing_classes` must be given for this model"):
        ClassifierReward(classifier)


def test_settings_give_weights_and_limit_and_models_stay_in_the_process(classifier: Any, byte_tokenizer: Any) -> None:
    settings = GRPOSettings(num_generations=2, reward_weights=[0.5, 2.0], reward_time_limit_seconds=5.0)
    suite = reward_suite([classifier, "math.sqrt"], [byte_tokenizer, None], settings)
    assert suite.weights == (0.5, 2.0)
    assert suite.names == ("Qwen2ForSequenceClassification", "sqrt")
    assert list(suite._timed) == [1]


def test_a_number_of_tokenizers_that_does_not_fit_is_refused(classifier: Any, byte_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="`reward_processing_classes` must have one entry per reward function"):
        reward_suite(["math.sqrt", "math.sin"], [byte_tokenizer], GRPOSettings(num_generations=2))
