"""Loading, dropout, adapters, the reference model and the forward of the policy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lightning_rlstab.module.policy import (
    context_length,
    disable_dropout_,
    forward_logits,
    load_policy,
    load_processing_class,
    reference_context,
    reference_of,
    sync_reference,
    with_lora,
)

VOCAB = 48


def tiny(family: str, *, tied: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "attention_dropout": dropout,
    }
    model: nn.Module
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=64,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
            )
        )
    return model.train()


@pytest.fixture(params=["llama", "qwen2", "gpt2"])
def policy(request: pytest.FixtureRequest) -> nn.Module:
    return tiny(request.param)


def tokens(rows: int = 3, prompt: int = 5, time: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    prompt_mask = torch.ones(rows, prompt, dtype=torch.long)
    prompt_mask[0, :2] = 0
    completion_mask = torch.ones(rows, time, dtype=torch.long)
    completion_mask[1, 2:] = 0
    return {
        "prompt_ids": torch.randint(0, VOCAB, (rows, prompt), generator=generator),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(0, VOCAB, (rows, time), generator=generator),
        "completion_mask": completion_mask,
    }


def chosen_logprobs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logprobs = forward_logits(model, **inputs).log_softmax(-1)
    return logprobs.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def tuned_adapter(family: str = "llama") -> nn.Module:
    adapted = with_lora(tiny(family), {"r": 2, "target_modules": "all-linear"})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return adapted


class TestForward:
    def test_logits_predict_each_completion_token_from_the_one_before_it(self, policy: nn.Module) -> None:
        inputs = tokens()
        inputs["prompt_mask"].fill_(1)
        inputs["completion_mask"].fill_(1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        torch.testing.assert_close(forward_logits(policy, **inputs), policy(input_ids=ids).logits[:, 4:-1])

    def test_fr_028_ten_more_left_pads_move_logprobs_less_than_1e_4(self, policy: nn.Module) -> None:
        inputs = tokens()
        padded = dict(inputs)
        padded["prompt_ids"] = nn.functional.pad(inputs["prompt_ids"], (10, 0), value=7)
        padded["prompt_mask"] = nn.functional.pad(inputs["prompt_mask"], (10, 0))
        mask = inputs["completion_mask"].bool()
        moved = (chosen_logprobs(policy, inputs) - chosen_logprobs(policy, padded))[mask].abs().max()
        assert moved < 1e-4

    def test_right_padding_of_a_completion_changes_nothing_before_it(self, policy: nn.Module) -> None:
        inputs = tokens()
        longer = dict(inputs)
        longer["completion_ids"] = nn.functional.pad(inputs["completion_ids"], (0, 3), value=9)
        longer["completion_mask"] = nn.functional.pad(inputs["completion_mask"], (0, 3))
        short = forward_logits(policy, **inputs)
        mask = inputs["completion_mask"].bool()
        torch.testing.assert_close(short[mask], forward_logits(policy, **longer)[:, :4][mask])

    def test_the_hidden_norm_is_that_of_the_vector_entering_the_output_layer(self, policy: nn.Module) -> None:
        inputs = tokens()
        logits, norms = forward_logits(policy, **inputs, with_hidden_norm=True)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        hidden = policy.base_model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).last_hidden_state
        torch.testing.assert_close(norms, hidden.norm(dim=-1)[:, 4:-1].detach())
        assert norms.shape == logits.shape[:2]
        assert not norms.requires_grad
        assert not policy.get_output_embeddings()._forward_pre_hooks

    def test_a_model_that_keeps_all_positions_gives_the_same_logits(self) -> None:
        class KeepsAll(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> object:
                return self.inner(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

        inner = tiny("llama")
        torch.testing.assert_close(forward_logits(KeepsAll(inner), **tokens()), forward_logits(inner, **tokens()))

    def test_an_adapter_gets_position_ids_too(self) -> None:
        adapted = with_lora(tiny("llama"), {"r": 2, "target_modules": "all-linear"})
        torch.testing.assert_close(forward_logits(adapted, **tokens()), forward_logits(tiny("llama"), **tokens()))

    def test_hidden_norms_of_a_model_without_output_layer_are_refused(self) -> None:
        with pytest.raises(ValueError, match="`model` must name its output layer"):
            forward_logits(nn.Linear(2, 2), **tokens(), with_hidden_norm=True)


class TestLoading:
    def test_a_saved_directory_is_loaded_in_float32_and_training_mode(self, tmp_path: Path) -> None:
        tiny("qwen2").to(torch.bfloat16).save_pretrained(tmp_path)
        policy = load_policy(str(tmp_path))
        assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
        assert all(module.training for module in policy.modules())

    def test_the_weight_type_of_the_init_kwargs_wins(self, tmp_path: Path) -> None:
        tiny("qwen2").save_pretrained(tmp_path)
        policy = load_policy(tmp_path, model_init_kwargs={"dtype": torch.bfloat16})
        assert next(policy.parameters()).dtype == torch.bfloat16

    def test_a_missing_directory_is_refused_by_field(self) -> None:
        with pytest.raises(ValueError, match=r"`model` must name an existing directory, got './no/such/model'"):
            load_policy("./no/such/model")

    def test_a_directory_without_a_model_is_refused_by_field(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="`model` must name a directory in Hugging Face format"):
            load_policy(tmp_path)

    def test_init_kwargs_for_a_module_are_refused(self) -> None:
        with pytest.raises(ValueError, match="`model_init_kwargs` must be left out when `model` is a module"):
            load_policy(tiny("gpt2"), model_init_kwargs={"dtype": "float32"})

    def test_gradient_checkpointing_leaves_gradients_as_they_are(self) -> None:
        plain, checkpointed = tiny("llama"), load_policy(tiny("llama"), gradient_checkpointing=True)
        for model in (plain, checkpointed):
            chosen_logprobs(model, tokens()).sum().backward()
        # The name of the flag changed with transformers 5.21.
        assert getattr(checkpointed, "is_activation_checkpointing", None) or checkpointed.is_gradient_checkpointing
        for one, two in zip(plain.parameters(), checkpointed.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)

    def test_gradient_checkpointing_of_a_module_without_it_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`gradient_checkpointing` must be false for a Linear"):
            load_policy(nn.Linear(2, 2), gradient_checkpointing=True)

    def test_the_context_length_is_that_of_the_configuration(self, policy: nn.Module) -> None:
        assert context_length(policy) == 64
        assert context_length(nn.Linear(2, 2)) is None


class TestTokenizer:
    @staticmethod
    def tokenizer(**special: str) -> object:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1, "a": 2, "<unk>": 3}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=inner, **special)

    def test_it_pads_left_and_falls_back_to_the_end_token(self) -> None:
        tokenizer = load_processing_class(tiny("gpt2"), self.tokenizer(eos_token="<eos>"))
        assert tokenizer.pad_token == "<eos>"
        assert tokenizer(["a", "a a"], padding=True)["attention_mask"] == [[0, 1], [1, 1]]

    def test_its_own_pad_token_stays(self) -> None:
        tokenizer = self.tokenizer(eos_token="<eos>", pad_token="<pad>")
        assert load_processing_class(tiny("gpt2"), tokenizer).pad_token == "<pad>"

    def test_one_without_pad_and_end_token_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`processing_class` must have a pad token or an end-of-text token"):
            load_processing_class(tiny("gpt2"), self.tokenizer())

    def test_it_is_loaded_from_the_directory_of_the_model(self, tmp_path: Path) -> None:
        self.tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
        tiny("gpt2").save_pretrained(tmp_path)
        assert load_processing_class(tmp_path).eos_token == "<eos>"
        assert load_processing_class(load_policy(tmp_path)).eos_token == "<eos>"

    def test_a_module_built_in_code_needs_one_given(self) -> None:
        with pytest.raises(ValueError, match="`processing_class` must be given when `model` is a module"):
            load_processing_class(tiny("gpt2"))

    def test_a_missing_directory_names_the_field_it_was_given_for(self) -> None:
        with pytest.raises(ValueError, match="`processing_class` must name an existing directory"):
            load_processing_class(tiny("gpt2"), "./nowhere")


class TestDropout:
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_none_is_left_in_modules_or_attention(self, family: str) -> None:
        model = tiny(family, dropout=0.5)
        assert not torch.equal(forward_logits(model, **tokens()), forward_logits(model, **tokens()))
        assert disable_dropout_(model) > 0
        assert disable_dropout_(model) == 0
        assert torch.equal(forward_logits(model, **tokens()), forward_logits(model, **tokens()))


class TestReference:
    def test_without_kl_there_is_none(self, policy: nn.Module) -> None:
        assert reference_of(policy, 0.0) is None
        with (
            pytest.raises(ValueError, match="`beta` must be above 0 for a reference model to exist"),
            reference_context(policy, None),
        ):
            pass

    def test_it_is_a_frozen_copy_in_eval_mode(self, policy: nn.Module) -> None:
        reference = reference_of(policy, 0.1)
        assert reference is not None
        with reference_context(policy, reference) as model:
            before = forward_logits(model, **tokens())
        assert not before.requires_grad
        assert not any(weight.requires_grad for weight in reference.parameters())
        assert not any(module.training for module in reference.modules())
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(1.0)
        assert torch.equal(before, forward_logits(reference, **tokens()))
        assert all(weight.requires_grad for weight in policy.parameters())

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_fr_111_tied_weights_stay_tied_in_policy_and_reference(self, family: str) -> None:
        policy = tiny(family, tied=True)
        reference = reference_of(policy, 0.1)
        for model in (policy, reference):
            assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert reference.get_input_embeddings().weight is not policy.get_input_embeddings().weight

    def test_a_fresh_adapter_is_switched_off_for_the_reference(self) -> None:
        base = tiny("llama")
        start = forward_logits(base, **tokens()).detach()
        adapted = with_lora(base, {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.5})
        assert reference_of(adapted, 0.1) is None
        with torch.no_grad():
            for weight in adapted.parameters():
                if weight.requires_grad:
                    weight.add_(0.1)
        trainable = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
        with reference_context(adapted, None) as model:
            torch.testing.assert_close(forward_logits(model, **tokens()), start)
        assert [name for name, weight in adapted.named_parameters() if weight.requires_grad] == trainable
        assert not torch.allclose(forward_logits(adapted, **tokens()), start)

    def test_fr_135_the_mode_of_every_module_is_put_back(self) -> None:
        adapted = with_lora(tiny("llama"), {"r": 2, "target_modules": "all-linear"})
        frozen = next(iter(adapted.get_base_model().model.layers))
        frozen.eval()
        before = [module.training for module in adapted.modules()]
        with reference_context(adapted, None) as model:
            assert not any(module.training for module in model.modules())
        assert [module.training for module in adapted.modules()] == before

    def test_fr_133_a_tuned_adapter_gives_kl_zero_at_step_0(self) -> None:
        adapted = tuned_adapter()
        reference = reference_of(adapted, 0.1)
        assert reference is not None
        with reference_context(adapted, reference) as model:
            before = forward_logits(model, **tokens())
        assert torch.equal(before, forward_logits(adapted.eval(), **tokens()))
        with torch.no_grad():
            for weight in adapted.parameters():
                if weight.requires_grad:
                    weight.add_(0.1)
        assert torch.equal(before, forward_logits(reference, **tokens()))

    def test_fr_133_an_adapter_loaded_from_disk_is_its_own_reference(self, tmp_path: Path) -> None:
        tuned_adapter().save_pretrained(tmp_path)
        adapted = with_lora(tiny("llama"), tmp_path)
        reference = reference_of(adapted, 0.1)
        torch.testing.assert_close(forward_logits(adapted, **tokens()), forward_logits(tuned_adapter(), **tokens()))
        torch.testing.assert_close(forward_logits(reference, **tokens()), forward_logits(adapted, **tokens()))
        assert any(weight.requires_grad for weight in adapted.parameters())

    def test_the_reference_of_an_adapter_shares_the_frozen_base(self) -> None:
        adapted = tuned_adapter()
        reference = reference_of(adapted, 0.1)
        for one, two in zip(adapted.parameters(), reference.parameters(), strict=True):
            assert (one is two) == (not one.requires_grad)

    def test_syncing_mixes_the_policy_in_and_keeps_ties(self) -> None:
        policy = tiny("llama", tied=True)
        reference = reference_of(policy, 0.1)
        before = copy.deepcopy(reference)
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(1.0)
        sync_reference(policy, reference, 0.25)
        for now, old in zip(reference.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(now, old + 0.25)
        assert reference.get_input_embeddings().weight is reference.get_output_embeddings().weight

    def test_syncing_leaves_the_shared_base_of_an_adapter_alone(self) -> None:
        adapted = tuned_adapter()
        reference = reference_of(adapted, 0.1)
        base = [weight.clone() for weight in adapted.parameters() if not weight.requires_grad]
        sync_reference(adapted, reference, 0.5)
        after = [weight for weight in adapted.parameters() if not weight.requires_grad]
        assert all(torch.equal(one, two) for one, two in zip(base, after, strict=True))


class TestAdapter:
    def test_only_the_adapter_trains(self) -> None:
        adapted = with_lora(tiny("qwen2"), {"r": 2, "target_modules": ["q_proj"]})
        assert {name.split(".")[-3] for name, weight in adapted.named_parameters() if weight.requires_grad} == {
            "lora_A",
            "lora_B",
        }

    def test_a_second_adapter_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`peft_config` must be left out when `model` has an adapter already"):
            with_lora(tuned_adapter(), {"r": 2})

    def test_an_unknown_field_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"`peft_config` must hold fields of `peft.LoraConfig` only"):
            with_lora(tiny("llama"), {"rank": 2})

    def test_a_missing_peft_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "peft", None)
        with pytest.raises(ImportError, match=r"pip install lightning-rlstab\[peft\]"):
            with_lora(tiny("llama"), {"r": 2})
