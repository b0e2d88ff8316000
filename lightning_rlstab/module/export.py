"""Final weights and tokenizer in Hugging Face format, whole or absent."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from lightning_rlstab.core.checks import refusal

__all__ = ["save_policy"]


def save_policy(
    policy: nn.Module,
    processing_class: Any | None,
    directory: str | Path,
    *,
    is_merged: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a folder that ``from_pretrained`` loads.

    The files go to a temporary folder beside it, are flushed to disk and only then take the name: a kill at any instant
    leaves no half-written folder of that name. To be called on one rank.

    Args:
        policy: The policy; with ``state_dict`` its own weights are not read, so it may be sharded.
        processing_class: The tokenizer, saved beside the weights; None for none.
        directory: The folder to make; an older export of that name is replaced.
        is_merged: With an adapter: write the base model with the adapter added in (``AutoModelForCausalLM`` loads it)
            instead of the adapter alone (``PeftModel`` loads it).
        state_dict: Full (unsharded) weights under the names of ``policy.state_dict()``; None for the policy's own.

    Returns:
        The folder.

    Raises:
        ValueError: If the policy cannot be saved in this format, or ``directory`` is a file.
    """
    target = Path(directory).expanduser()
    if target.exists() and not target.is_dir():
        raise refusal("directory", "be a folder or absent", str(target))
    if not hasattr(policy, "save_pretrained"):
        raise refusal("model", "be a transformers model to be exported", type(policy).__name__)
    is_adapted = hasattr(policy, "peft_config")
    if is_merged and not is_adapted:
        raise refusal("is_merged", "be false for a model without adapter", True)
    weights = dict(policy.state_dict() if state_dict is None else state_dict)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        if is_merged:
            _merged(policy, weights).save_pretrained(fresh)
        else:
            cast(Any, policy).save_pretrained(fresh, state_dict=weights)
        if processing_class is not None:
            processing_class.save_pretrained(fresh)
        _flush(fresh)
        _take_name(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _merged(policy: nn.Module, weights: dict[str, Tensor]) -> Any:
    """A plain model on the CPU with the adapter added in; the policy itself is left alone."""
    import peft
    from transformers import AutoModelForCausalLM

    base = cast(Any, policy).get_base_model()
    # Built anew, because a sharded module can be neither copied nor merged.
    plain = AutoModelForCausalLM.from_config(base.config, dtype=_dtype(weights))
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.24 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted = peft.get_peft_model(plain, cast(Any, policy).active_peft_config)
    adapted.load_state_dict(weights)
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.generation_config = base.generation_config
    return merged


def _dtype(weights: Mapping[str, Tensor]) -> Any:
    return next(tensor.dtype for name, tensor in weights.items() if "lora_" not in name and tensor.is_floating_point())


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _take_name(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    # A folder cannot replace a folder in one act: the old one keeps a name of its own until the new one is in place.
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old)
