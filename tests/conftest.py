"""Fixtures that several rooms use: a byte-level tokenizer and tiny language models, all built in code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a logger writes into the working directory; tests leave nothing in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """256 bytes, then <pad>, <bos>, <eos>: 259 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    for special in ("<pad>", "<bos>", "<eos>"):
        vocab[special] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


@pytest.fixture
def tiny_policy(byte_tokenizer: Any) -> Callable[..., Any]:
    """A function that builds the same two-layer Qwen2 for the same seed."""

    def build(seed: int = 0, **changes: Any) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            **{
                "vocab_size": 259,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "tie_word_embeddings": False,
                "pad_token_id": byte_tokenizer.pad_token_id,
                "bos_token_id": byte_tokenizer.bos_token_id,
                "eos_token_id": byte_tokenizer.eos_token_id,
                **changes,
            }
        )
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)

    return build
