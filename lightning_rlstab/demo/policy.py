"""The demo's policy: a character-level tokenizer, a two-layer Qwen2 and its supervised warm start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_rlstab.demo.digits import addition_rows, forgetful_sum

__all__ = ["digit_policy", "digit_tokenizer", "greedy_accuracy", "save_policy", "warm_start"]

_ALPHABET = "0123456789+="
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_LONGEST_ANSWER = 3
_WARM_START_BATCH = 128
_CHECK_EVERY_STEPS = 25
_IGNORED = -100  # label that the cross entropy leaves out


def digit_tokenizer() -> Any:
    """A Hugging Face tokenizer with one token per character; every text begins with ``<bos>``.

    Returns:
        A ``PreTrainedTokenizerFast`` with left padding, saved and loaded like any other.

    Example:
        >>> tokenizer = digit_tokenizer()
        >>> tokenizer.decode(tokenizer("12+30=")["input_ids"], skip_special_tokens=True)
        '12+30='
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_ALPHABET))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def digit_policy(tokenizer: Any, *, seed: int = 0) -> nn.Module:
    """A two-layer Qwen2 with 0.43 M parameters, seeded without touching the caller's generators.

    Args:
        tokenizer: What ``digit_tokenizer`` returns.
        seed: Seed of the initial weights.

    Returns:
        A ``Qwen2ForCausalLM`` in float32 on the CPU.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.05,  # at the default 0.02 a model this narrow needs twice the steps to leave its plateau
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast("nn.Module", Qwen2ForCausalLM(config))


def _labelled(tokenizer: Any, rows: Sequence[dict[str, str]]) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts with answers: (batch, time) ids, attention mask, and labels on the answers and their ends only."""
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    # Left padding puts every answer at the end of its line: the last len(answer) + 1 places are the ones to learn.
    answered = torch.tensor([len(row["answer"]) + 1 for row in rows])
    places_to_end = torch.arange(ids.shape[1], 0, -1)
    labels = torch.where(places_to_end <= answered.unsqueeze(1), ids, torch.full_like(ids, _IGNORED))
    return ids, mask, labels


def warm_start(
    policy: nn.Module,
    tokenizer: Any,
    *,
    right_share: float = 0.3,
    target_agreement: float = 0.9,
    max_steps: int = 400,
    seed: int = 0,
    on_check: Callable[[int, float], None] | None = None,
) -> int:
    """Supervised training on a teacher who forgets the carry in most of its examples.

    The policy then answers greedily as if there were no carry, which is right for a quarter of the additions, and
    samples the true sum now and then: what is left for GRPO is to find out which of the two is rewarded. Stopping at an
    agreement and not at a step count leaves it the same room for every seed.

    Args:
        policy: Changed in place; its dropout must be 0.
        tokenizer: What ``digit_tokenizer`` returns.
        right_share: Share of examples with the true sum, in (0, 1).
        target_agreement: Greedy agreement with the forgetful teacher, on 256 train pairs, at which to stop, in (0, 1].
        max_steps: Steps of 128 examples after which to stop anyway.
        seed: Orders the examples.
        on_check: Called every 25 steps with the step and the agreement.

    Returns:
        The number of steps taken.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    right = addition_rows(seed=seed)
    forgetful = [{"prompt": row["prompt"], "answer": forgetful_sum(row["prompt"])} for row in right]
    ids, mask, labels = _labelled(tokenizer, right + forgetful)
    draws = torch.Generator().manual_seed(seed)
    policy.train()
    for step in range(1, max_steps + 1):
        chosen = torch.randint(len(right), (_WARM_START_BATCH,), generator=draws)
        is_forgetful = torch.rand(_WARM_START_BATCH, generator=draws) >= right_share
        chosen = chosen + len(right) * is_forgetful
        loss = policy(input_ids=ids[chosen], attention_mask=mask[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % _CHECK_EVERY_STEPS == 0:
            agreement = greedy_accuracy(policy, tokenizer, forgetful[:256])
            if on_check is not None:
                on_check(step, agreement)
            if agreement >= target_agreement:
                return step
    return max_steps


@torch.no_grad()
def greedy_accuracy(policy: nn.Module, tokenizer: Any, rows: Sequence[dict[str, str]]) -> float:
    """Share of rows that greedy decoding answers to the letter, in [0, 1].

    Args:
        policy: Put back into the mode, train or eval, it came in.
        tokenizer: What ``digit_tokenizer`` returns.
        rows: Rows with ``prompt`` and ``answer``.
    """
    was_training = policy.training
    policy.eval()
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    generate = cast("Callable[..., Tensor]", policy.generate)
    lines = generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=False,
        max_new_tokens=_LONGEST_ANSWER + 1,
    )
    policy.train(was_training)
    texts = tokenizer.batch_decode(lines[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
    return float(sum(right)) / len(right)


def save_policy(policy: nn.Module, tokenizer: Any, directory: Path) -> None:
    """Write the policy and its tokenizer as a Hugging Face directory that ``model: <directory>`` in YAML loads."""
    cast("Callable[[Path], None]", policy.save_pretrained)(directory)
    tokenizer.save_pretrained(directory)
