from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlstab.demo.digits import addition_rows
from lightning_rlstab.demo.policy import (
    _labelled,
    digit_policy,
    digit_tokenizer,
    greedy_accuracy,
    save_policy,
    warm_start,
)


@pytest.fixture(scope="module")
def tokenizer():
    return digit_tokenizer()


def test_the_tokenizer_gives_every_character_its_token_and_gives_texts_back(tokenizer):
    ids = tokenizer("12+39=51<eos>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *"12+39=51", "<eos>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12+39=51"


def test_the_tokenizer_pads_on_the_left_and_marks_what_it_does_not_know(tokenizer):
    batch = tokenizer(["12+39=1", "x"], padding=True)
    assert batch["attention_mask"][1] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert batch["input_ids"][1][-1] == tokenizer.unk_token_id


def test_the_policy_and_its_tokenizer_survive_their_directory(tokenizer, tmp_path):
    policy = digit_policy(tokenizer, seed=1)
    save_policy(policy, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = again(["12+39=", "10+10="], return_tensors="pt")["input_ids"]
    assert torch.equal(ids, tokenizer(["12+39=", "10+10="], return_tensors="pt")["input_ids"])
    assert torch.equal(loaded(ids).logits, policy.eval()(ids).logits)
    assert (again.pad_token, again.eos_token, again.padding_side) == ("<pad>", "<eos>", "left")


def test_the_seed_decides_the_weights_and_the_callers_generator_stays_put(tokenizer):
    before = torch.get_rng_state()
    first, again, other = (digit_policy(tokenizer, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_only_the_answer_and_its_end_are_learnt(tokenizer):
    ids, _, labels = _labelled(tokenizer, [{"prompt": "12+39=", "answer": "51"}, {"prompt": "99+99=", "answer": "198"}])
    learnt = [tokenizer.decode(row[row != -100]) for row in labels]
    assert learnt == ["51<eos>", "198<eos>"]
    assert ids.shape == labels.shape


def test_a_warm_start_repeats_with_its_seed_and_stops_at_its_limit(tokenizer):
    def steps_and_weights():
        policy = digit_policy(tokenizer, seed=0)
        steps = warm_start(policy, tokenizer, seed=0, max_steps=3)
        return steps, policy.state_dict()

    (steps, first), (_, again) = steps_and_weights(), steps_and_weights()
    assert steps == 3
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_greedy_accuracy_counts_whole_answers_and_leaves_the_mode_alone(tokenizer):
    policy = digit_policy(tokenizer, seed=0).train()
    assert greedy_accuracy(policy, tokenizer, addition_rows(16)) == 0.0
    assert policy.training
