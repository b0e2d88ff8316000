"""A policy named by its directory is read by rank 0 alone and trains like one that every rank has read."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.module import policy as policy_module

ROWS = [{"prompt": f"{number}+1="} for number in range(16)]


def letters(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("is_tied", [False, True])
def test_only_rank_0_reads_the_weights_and_training_is_the_same(
    run_on_ranks, on_ranks, tmp_path, tiny_policy, byte_tokenizer, is_tied
):
    directory = tmp_path / "policy"
    tiny_policy(tie_word_embeddings=is_tied).save_pretrained(directory)
    byte_tokenizer.save_pretrained(directory)

    def work(is_named):
        read = []
        original = policy_module.pretrained

        def counted(load, field, name, options):
            read.append(getattr(load, "__self__", load).__name__)
            return original(load, field, name, options)

        policy_module.pretrained = counted
        model = str(directory) if is_named else policy_module.load_policy(str(directory))
        read.clear()
        module = GRPOModule(
            model=model,
            reward_funcs=letters,
            processing_class=byte_tokenizer,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=5,
            learning_rate=1e-2,
            beta=0.1,
        )
        trainer = on_ranks("rlstab_fsdp", tmp_path, max_steps=3)
        trainer.fit(module, PromptDataModule(ROWS, shuffle=False))
        weights = {name: whole(weight) for name, weight in module.policy.named_parameters()}
        frozen = {name: whole(weight) for name, weight in module.reference.named_parameters()}
        return (
            read.count("AutoModelForCausalLM"),
            weights,
            frozen,
            all(isinstance(weight, DTensor) and not weight.requires_grad for weight in module.reference.parameters()),
        )

    named, given = run_on_ranks(work, True), run_on_ranks(work, False)
    assert [reads for reads, *_ in named] == [2, 0]  # policy and reference, on rank 0
    assert all(is_sharded for *_, is_sharded in named)
    for (_, weights, frozen, _), (_, other_weights, other_frozen, _) in zip(named, given, strict=True):
        for name in weights:
            torch.testing.assert_close(weights[name], other_weights[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(frozen[name], other_frozen[name])
        assert any(not torch.equal(weights[name], frozen[name]) for name in weights)
