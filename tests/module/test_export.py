"""Exports that transformers and peft load again, whole or absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlstab.module.export import save_policy
from lightning_rlstab.module.policy import with_lora

IDS = torch.tensor([[1, 5, 9, 2]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def tuned(policy: nn.Module) -> nn.Module:
    adapted = with_lora(policy, {"r": 2, "target_modules": "all-linear"})
    torch.manual_seed(4)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return adapted


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_loads_what_was_saved(
    tmp_path: Path, tiny_policy: Callable[..., Any], byte_tokenizer: Any, tied: bool
) -> None:
    policy = tiny_policy(tie_word_embeddings=tied)
    folder = save_policy(policy, byte_tokenizer, tmp_path / "runs" / "final")
    assert folder == tmp_path / "runs" / "final"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(policy))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("7+8=")["input_ids"] == byte_tokenizer("7+8=")["input_ids"]
    assert [path.name for path in folder.parent.iterdir()] == ["final"]


def test_given_weights_are_saved_instead_of_the_policys_own(tmp_path: Path, tiny_policy: Callable[..., Any]) -> None:
    gathered = tiny_policy(seed=1)
    save_policy(tiny_policy(seed=0).to("meta"), None, tmp_path / "final", state_dict=gathered.state_dict())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "final")), logits(gathered))


def test_an_adapter_is_saved_alone(tmp_path: Path, tiny_policy: Callable[..., Any]) -> None:
    adapted = tuned(tiny_policy())
    save_policy(adapted, None, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    again = with_lora(tiny_policy(), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))


@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_adapter_loads_without_peft(tmp_path: Path, tiny_policy: Callable[..., Any], tied: bool) -> None:
    adapted = tuned(tiny_policy(tie_word_embeddings=tied))
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    save_policy(adapted, None, tmp_path / "merged", is_merged=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), logits(adapted), atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.state_dict().items())


def test_an_older_export_is_replaced_as_a_whole(tmp_path: Path, tiny_policy: Callable[..., Any]) -> None:
    target = tmp_path / "final"
    target.mkdir()
    (target / "stale.txt").write_text("old")
    save_policy(tiny_policy(), None, target)
    assert not (target / "stale.txt").exists()
    assert list(tmp_path.iterdir()) == [target]


def test_a_save_that_fails_leaves_the_older_export_and_no_rubbish(
    tmp_path: Path, tiny_policy: Callable[..., Any], byte_tokenizer: Any
) -> None:
    save_policy(tiny_policy(), byte_tokenizer, tmp_path / "final")
    before = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}

    class FullDisk:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "half").write_text("half")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        save_policy(tiny_policy(seed=1), FullDisk(), tmp_path / "final")
    assert {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_what_cannot_be_exported_is_refused_by_name(tmp_path: Path, tiny_policy: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="`model` must be a transformers model to be exported, got 'Linear'"):
        save_policy(nn.Linear(2, 2), None, tmp_path / "final")
    with pytest.raises(ValueError, match="`is_merged` must be false for a model without adapter"):
        save_policy(tiny_policy(), None, tmp_path / "final", is_merged=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`directory` must be a folder or absent"):
        save_policy(tiny_policy(), None, tmp_path / "file")
