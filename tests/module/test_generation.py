"""Sampling with Hugging Face generate: masks, log-probs, modes, seeds, and what must not change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlstab.module.generation import HFSampler, eos_token_ids_of, pad_token_id_of
from lightning_rlstab.rollout.sampler import Sampler, Samples, SamplingSettings

Build = Callable[..., Any]
PAD, EOS = 256, 258


@pytest.fixture
def policy(tiny_policy: Build) -> Any:
    """A policy with large weights, so that its distributions are far from flat."""
    return tiny_policy(initializer_range=0.4).eval()


def prompts(*lengths: int) -> tuple[Tensor, Tensor]:
    width = max(lengths)
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(0, 256, (len(lengths), width), generator=generator)
    return torch.where(mask, ids, PAD), mask


def sampled(policy: Any, ids: Tensor, mask: Tensor, *, seed: int | None = 0, **settings: Any) -> Samples:
    own = {
        name: settings.pop(name) for name in ("is_eval_mode", "is_prefill_shared", "eos_token_ids") if name in settings
    }
    sampler = HFSampler(pad_token_id=PAD, **{"eos_token_ids": EOS, **own})
    return sampler.sample(
        policy, ids, mask, settings=SamplingSettings(**{"max_completion_length": 12, **settings}), seed=seed
    )


@torch.no_grad()
def training_logprobs(policy: Any, ids: Tensor, mask: Tensor, samples: Samples, temperature: float = 1.0) -> Tensor:
    whole = torch.cat([ids, samples.completion_ids], dim=1)
    attention = torch.cat([mask, samples.completion_mask], dim=1).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = policy(input_ids=whole, attention_mask=attention, position_ids=positions).logits[:, ids.shape[1] - 1 : -1]
    picked = (logits.float() / temperature).log_softmax(-1).gather(2, samples.completion_ids.unsqueeze(2)).squeeze(2)
    return torch.where(samples.completion_mask, picked, 0.0)


def test_it_is_a_sampler() -> None:
    assert isinstance(HFSampler(pad_token_id=PAD), Sampler)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5, "temperature": 1.3},
        {"top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.5},
        {"generation_kwargs": {"suppress_tokens": list(range(100))}},
        {"generation_kwargs": {"typical_p": 0.9}},
        {"generation_kwargs": {"do_sample": False}},
    ],
)
def test_behavior_log_probs_are_those_of_the_training_forward_whatever_the_knobs(
    policy: Any, settings: dict[str, Any]
) -> None:
    ids, mask = prompts(5, 9, 2)
    samples = sampled(policy, ids, mask, **settings)
    expected = training_logprobs(policy, ids, mask, samples, settings.get("temperature", 1.0))
    assert samples.behavior_logprobs.dtype == torch.float32
    assert torch.allclose(samples.behavior_logprobs, expected, atol=1e-4)


def test_fr_028_ten_more_left_pads_change_neither_tokens_nor_log_probs(policy: Any) -> None:
    ids, mask = prompts(5, 9)
    more_ids, more_mask = torch.nn.functional.pad(ids, (10, 0), value=PAD), torch.nn.functional.pad(mask, (10, 0))
    first, second = sampled(policy, ids, mask), sampled(policy, more_ids, more_mask)
    assert torch.equal(first.completion_ids, second.completion_ids)
    assert torch.allclose(first.behavior_logprobs, second.behavior_logprobs, atol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 5, 5, 5), (7, 4, 4, 9), (1, 1)])
def test_sharing_the_prefill_of_equal_prompts_changes_nothing(policy: Any, lengths: tuple[int, ...]) -> None:
    ids, mask = (part.repeat_interleave(3, dim=0) for part in prompts(*lengths))
    shared, plain = (sampled(policy, ids, mask, is_prefill_shared=is_shared) for is_shared in (True, False))
    assert torch.equal(shared.completion_ids, plain.completion_ids)
    assert torch.allclose(shared.behavior_logprobs, plain.behavior_logprobs, atol=1e-4)


def test_a_shared_prefill_runs_each_prompt_once(policy: Any) -> None:
    ids, mask = (part.repeat_interleave(4, dim=0) for part in prompts(6, 6))
    widths = []
    handle = policy.model.register_forward_hook(lambda _, __, output: widths.append(output[0].shape[:2]))
    sampled(policy, ids, mask)
    handle.remove()
    assert widths[0] == (2, 5)
    assert set(widths[1:]) == {(8, 1)}


def test_the_first_of_several_end_tokens_closes_a_row_and_counts(policy: Any) -> None:
    ids, mask = prompts(*[4] * 16)
    eos = [EOS, *range(0, 256, 8)]
    samples = sampled(policy, ids, mask, eos_token_ids=eos, max_completion_length=30)
    lengths = samples.completion_mask.sum(1)
    assert samples.completion_ids.shape[1] == int(lengths.max())
    assert (~samples.is_truncated).any()
    for row, length in enumerate(lengths.tolist()):
        tokens = samples.completion_ids[row].tolist()
        ends = [index for index, token in enumerate(tokens[:length]) if token in eos]
        assert ends == ([] if samples.is_truncated[row] else [length - 1])
        assert tokens[length:] == [PAD] * (len(tokens) - length)
        assert samples.completion_mask[row].tolist() == [index < length for index in range(len(tokens))]
        assert (samples.behavior_logprobs[row, length:] == 0).all()


def test_a_row_without_an_end_token_is_truncated_at_the_limit(policy: Any) -> None:
    ids, mask = prompts(3, 4)
    samples = sampled(policy, ids, mask, generation_kwargs={"suppress_tokens": [EOS]})
    assert samples.is_truncated.tolist() == [True, True]
    assert samples.completion_mask.all()
    assert samples.completion_ids.shape == (2, 12)


def test_padding_with_the_end_token_keeps_the_real_one(policy: Any) -> None:
    ids, mask = prompts(4, 4, 4, 4, 4, 4)
    sampler = HFSampler(pad_token_id=5, eos_token_ids=[5, *range(0, 256, 8)])
    samples = sampler.sample(policy, ids, mask, settings=SamplingSettings(max_completion_length=20), seed=0)
    last = samples.completion_ids.gather(1, samples.completion_mask.sum(1, keepdim=True) - 1).flatten()
    assert (torch.isin(last, torch.tensor([5, *range(0, 256, 8)])) == ~samples.is_truncated).all()


def test_a_stop_string_ends_a_row_without_truncating_it(policy: Any, byte_tokenizer: Any) -> None:
    ids, mask = prompts(4, 4, 4, 4)
    stop = [chr(code) for code in range(33, 100)]
    settings = SamplingSettings(max_completion_length=40, generation_kwargs={"stop_strings": stop})
    samples = HFSampler(byte_tokenizer).sample(policy, ids, mask, settings=settings, seed=0)
    lengths = samples.completion_mask.sum(1)
    assert (lengths < 40).all()
    assert not samples.is_truncated.any()
    assert lengths.min() < lengths.max()


def test_a_seed_repeats_the_draw_and_leaves_the_global_generator_alone(policy: Any) -> None:
    ids, mask = prompts(5, 5)
    before = torch.get_rng_state()
    first, again, other = (sampled(policy, ids, mask, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert not torch.equal(first.completion_ids, other.completion_ids)


def test_without_a_seed_the_global_generator_is_drawn_from(policy: Any) -> None:
    ids, mask = prompts(5, 5)
    torch.manual_seed(7)
    first = sampled(policy, ids, mask, seed=None)
    second = sampled(policy, ids, mask, seed=None)
    torch.manual_seed(7)
    assert torch.equal(sampled(policy, ids, mask, seed=None).completion_ids, first.completion_ids)
    assert not torch.equal(first.completion_ids, second.completion_ids)


def test_fr_135_every_modules_mode_is_restored_exactly(tiny_policy: Build) -> None:
    policy = tiny_policy(attention_dropout=0.5).train()
    policy.model.layers[0].eval()
    policy.model.layers[0].mlp.train()
    modes = [module.training for module in policy.modules()]
    seen: list[bool] = []
    handle = policy.model.layers[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    ids, mask = prompts(5, 5)
    sampled(policy, ids, mask)
    assert seen
    assert not any(seen)
    assert [module.training for module in policy.modules()] == modes
    sampled(policy, ids, mask, is_eval_mode=False)
    assert seen[-1]
    assert [module.training for module in policy.modules()] == modes
    handle.remove()


def test_modes_and_settings_are_restored_after_a_failure_too(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.train()
    before = policy.generation_config

    def fail(**_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampled(policy, *prompts(5, 5))
    assert all(module.training for module in policy.modules())
    assert policy.generation_config is before
    assert not policy._forward_hooks


@pytest.mark.parametrize("is_eval_mode", [True, False])
def test_the_cache_stays_on_under_gradient_checkpointing(tiny_policy: Build, is_eval_mode: bool) -> None:
    policy = tiny_policy(use_cache=False).train()
    enable = getattr(policy, "activation_checkpointing_enable", policy.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    flags = [vars(module).get("gradient_checkpointing") for module in policy.modules()]
    assert True in flags
    ids, mask = prompts(5, 6)
    widths = []
    handle = policy.model.register_forward_hook(lambda _, __, output: widths.append(output[0].shape[1]))
    sampled(policy, ids, mask, is_eval_mode=is_eval_mode)
    handle.remove()
    assert widths == [6] + [1] * 11
    assert [vars(module).get("gradient_checkpointing") for module in policy.modules()] == flags
    loss = policy(input_ids=ids).logits.sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_the_models_own_generation_settings_never_override_the_given_ones(policy: Any) -> None:
    ids, mask = prompts(5, 5, 5)
    plain = sampled(policy, ids, mask)
    policy.generation_config.update(do_sample=False, temperature=0.01, top_k=1, top_p=0.1, repetition_penalty=3.0)
    policy.generation_config.update(min_p=0.9, no_repeat_ngram_size=1, max_new_tokens=2)
    before = policy.generation_config.to_dict()
    assert torch.equal(sampled(policy, ids, mask).completion_ids, plain.completion_ids)
    assert policy.generation_config.to_dict() == before


def test_generation_kwargs_win_over_the_fields(policy: Any) -> None:
    ids, mask = prompts(5, 5)
    samples = sampled(policy, ids, mask, generation_kwargs={"max_new_tokens": 3, "temperature": 0.5})
    assert samples.completion_ids.shape == (2, 3)
    assert torch.allclose(samples.behavior_logprobs, training_logprobs(policy, ids, mask, samples, 0.5), atol=1e-4)


def test_top_k_one_is_the_greedy_choice(policy: Any) -> None:
    ids, mask = prompts(5, 7)
    one = sampled(policy, ids, mask, top_k=1)
    assert torch.equal(
        one.completion_ids, sampled(policy, ids, mask, generation_kwargs={"do_sample": False}).completion_ids
    )


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_return_sequences": 2}, "not hold num_return_sequences"),
        ({"num_beams": 2}, "not hold num_beams"),
        ({"temprature": 2}, "Did you mean 'temperature'"),
    ],
)
def test_generation_kwargs_that_break_the_rows_or_are_misspelt_are_refused(
    policy: Any, kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sampled(policy, *prompts(5), generation_kwargs=kwargs)


def test_a_prompt_as_long_as_the_context_is_refused_before_generating(tiny_policy: Build) -> None:
    policy = tiny_policy(max_position_embeddings=16)
    with pytest.raises(ValueError, match="`prompt` must be shorter than the model's context of 16 tokens, got 16"):
        sampled(policy, *prompts(16, 3))


def test_a_completion_ends_where_the_context_ends_and_this_is_said(
    tiny_policy: Build, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy(max_position_embeddings=16)
    with caplog.at_level(logging.WARNING):
        samples = sampled(policy, *prompts(10, 3), generation_kwargs={"suppress_tokens": [EOS]})
    assert samples.completion_ids.shape == (2, 6)
    assert "leaves 6 of max_completion_length 12" in caplog.text


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token() -> None:
    assert pad_token_id_of(SimpleNamespace(pad_token_id=None, eos_token_id=4)) == 4
    assert pad_token_id_of(SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=4))) == 0
    with pytest.raises(ValueError, match="must have a pad token or an end-of-sequence token"):
        pad_token_id_of(SimpleNamespace(pad_token_id=None, eos_token_id=None))


def test_every_end_token_that_tokenizer_and_model_declare_counts(policy: Any, byte_tokenizer: Any) -> None:
    policy.generation_config.eos_token_id = [7, EOS]
    assert eos_token_ids_of(policy, byte_tokenizer) == [EOS, 7]
    assert HFSampler(byte_tokenizer).eos_token_ids(policy) == [EOS, 7]
    policy.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="must have an end-of-sequence token"):
        eos_token_ids_of(policy, None)


def test_something_that_cannot_generate_is_refused() -> None:
    with pytest.raises(ValueError, match="`model` must have a `generate` method"):
        sampled(torch.nn.Linear(2, 2), *prompts(3))


def test_sampling_inside_autocast_leaves_the_weights_their_gradient(policy: Any) -> None:
    ids, mask = prompts(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sampled(policy, ids, mask)
        policy(input_ids=ids).logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_a_lora_policy_samples_with_its_adapter(policy: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(policy, config)
    ids, mask = (part.repeat_interleave(2, dim=0) for part in prompts(5, 8))
    samples = sampled(adapted, ids, mask)
    assert torch.allclose(samples.behavior_logprobs, training_logprobs(adapted, ids, mask, samples), atol=1e-4)


def test_learned_positions_count_from_the_first_real_token() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=259, bos_token_id=257, eos_token_id=EOS, **shape)).eval()
    ids, mask = (part.repeat_interleave(2, dim=0) for part in prompts(5, 9))
    samples = sampled(policy, ids, mask)
    assert torch.allclose(samples.behavior_logprobs, training_logprobs(policy, ids, mask, samples), atol=1e-4)
