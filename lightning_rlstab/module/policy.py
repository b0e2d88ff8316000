"""The policy: loading, dropout, LoRA, and the forward that gives completion logits."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from lightning_rlstab.core.checks import refusal
from lightning_rlstab.module.reference import reference_context, reference_of, sync_reference

__all__ = [
    "context_length",
    "disable_dropout_",
    "empty_policy",
    "forward_logits",
    "load_policy",
    "load_processing_class",
    "loaded_from",
    "pretrained",
    "reference_context",
    "reference_of",
    "sync_reference",
    "with_lora",
]


def load_policy(
    model: str | Path | nn.Module,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "float32",
    gradient_checkpointing: bool = False,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The policy in training mode, from a directory, a hub name or a module.

    Args:
        model: A directory in Hugging Face format (read without network), a hub name, or a module (kept as it is).
        model_init_kwargs: Keyword arguments for ``from_pretrained``; only with a name.
        dtype: Weight type when ``model_init_kwargs`` names none. AdamW's steps at a learning rate of 1e-6 are lost in
            bfloat16 weights, hence float32.
        gradient_checkpointing: Recompute activations in the backward.
        gradient_checkpointing_kwargs: For ``torch.utils.checkpoint``; ``use_reentrant`` is False by default, because
            the reentrant form loses the gradient of a LoRA adapter and breaks nested backwards.

    Returns:
        The policy.

    Raises:
        ValueError: If ``model`` names nothing that can be loaded, or the options do not fit it.
    """
    options = dict(model_init_kwargs or {})
    if isinstance(model, nn.Module):
        if options:
            raise refusal("model_init_kwargs", "be left out when `model` is a module", options)
        policy = model
    else:
        from transformers import AutoModelForCausalLM

        if "torch_dtype" not in options:
            options.setdefault("dtype", dtype)
        policy = pretrained(AutoModelForCausalLM.from_pretrained, "model", model, options)
    if gradient_checkpointing:
        # Renamed in transformers 5.24; the old name then warns.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next((getattr(policy, name) for name in names if hasattr(policy, name)), None)
        if enable is None:
            raise refusal("gradient_checkpointing", f"be false for a {type(policy).__name__}, which has none", True)
        enable({"use_reentrant": False, **(gradient_checkpointing_kwargs or {})})
    return policy.train()


def empty_policy(
    model: str | Path, *, model_init_kwargs: Mapping[str, Any] | None = None, dtype: str | torch.dtype = "float32"
) -> nn.Module:
    """The policy's structure without its weights, on the default device; only its configuration is read.

    Args:
        model: A directory in Hugging Face format or a hub name.
        model_init_kwargs: As in ``load_policy``.
        dtype: As in ``load_policy``.

    Returns:
        The policy in training mode, with arbitrary weights.

    Raises:
        ValueError: If ``model`` names nothing that can be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(model_init_kwargs or {})
    dtype = options.pop("torch_dtype", options.pop("dtype", dtype))
    kept = {name: options[name] for name in ("attn_implementation", "trust_remote_code") if name in options}
    config = pretrained(AutoConfig.from_pretrained, "model", model, options)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    built: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=config.dtype if dtype == "auto" else dtype, **kept
    )
    return built.train()


def load_processing_class(
    model: str | Path | nn.Module,
    processing_class: Any | None = None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Any:
    """The tokenizer, ready for left-padded prompts.

    Args:
        model: What the policy is loaded from; a module is asked for the name it was loaded from.
        processing_class: A tokenizer, or the directory or hub name of one; None for the model's own.
        trust_remote_code: As in ``from_pretrained``.
        revision: As in ``from_pretrained``.

    Returns:
        A tokenizer that pads and truncates on the left, with a pad token: its own, or else its end-of-text token. A
        tokenizer given by hand is changed in place in these three settings.

    Raises:
        ValueError: If there is no tokenizer, or neither a pad nor an end-of-text token.
    """
    tokenizer = processing_class
    if tokenizer is None or isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        name = tokenizer or (loaded_from(model) if isinstance(model, nn.Module) else model)
        if not name:
            raise refusal(
                "processing_class", "be given when `model` is a module built in code", None, "Pass its tokenizer"
            )
        field = "model" if tokenizer is None and not isinstance(model, nn.Module) else "processing_class"
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if revision is not None:
            options["revision"] = revision
        tokenizer = pretrained(AutoTokenizer.from_pretrained, field, name, options)
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # a multimodal processor holds its tokenizer
    inner.padding_side = "left"
    inner.truncation_side = "left"
    if inner.pad_token_id is None:
        if inner.eos_token_id is None:
            raise refusal(
                "processing_class",
                "have a pad token or an end-of-text token",
                type(inner).__name__,
                "Set `tokenizer.pad_token` to a token that completions never hold",
            )
        inner.pad_token = inner.eos_token
    return tokenizer


def disable_dropout_(model: nn.Module) -> int:
    """Set every dropout probability to 0, in place; those of attention kernels too.

    Returns:
        How many were above 0.
    """
    changed = 0
    for module in model.modules():
        # Attention blocks hand a plain float to the kernel instead of holding a dropout module.
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "attention_dropout"
        probability = getattr(module, name, None)
        if isinstance(probability, float | int) and probability > 0:
            setattr(module, name, 0.0)
            changed += 1
    return changed


def with_lora(policy: nn.Module, peft_config: Any) -> nn.Module:
    """The policy under a trainable adapter; its base weights are frozen.

    Args:
        policy: A transformers model without an adapter.
        peft_config: A ``peft`` configuration, a mapping of ``LoraConfig`` fields, or the directory of a saved adapter
            to go on training (the reference is then the adapter as loaded, see ``reference_of``).

    Returns:
        A ``peft.PeftModel`` in training mode.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If the policy has an adapter already.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("`peft_config` needs peft. Install it with `pip install lightning-rlstab[peft]`.") from error
    if isinstance(policy, peft.PeftModel):
        raise refusal("peft_config", "be left out when `model` has an adapter already", type(peft_config).__name__)
    if isinstance(peft_config, Mapping):
        try:
            peft_config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **peft_config})
        except TypeError as error:
            raise refusal(
                "peft_config", "hold fields of `peft.LoraConfig` only", dict(peft_config), f"peft says: {error}"
            ) from error
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.24 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if isinstance(peft_config, str | Path):
            load = partial(peft.PeftModel.from_pretrained, policy, is_trainable=True)
            adapted = pretrained(load, "peft_config", peft_config, {})
        else:
            adapted = peft.get_peft_model(policy, peft_config)
    return cast(nn.Module, adapted).train()


def context_length(policy: nn.Module) -> int | None:
    """Longest prompt plus completion, in tokens, that the model's configuration allows; None when it names no limit."""
    config: Any = getattr(policy, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(text, "max_position_embeddings", None)
    return length if isinstance(length, int) else None


@overload
def forward_logits(
    policy: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    with_hidden_norm: Literal[False] = False,
) -> Tensor: ...


@overload
def forward_logits(
    policy: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    with_hidden_norm: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def forward_logits(
    policy: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    with_hidden_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Logits that predict the completion tokens: entry t comes from the position before token t.

    Positions are counted over real tokens, so left padding moves nothing: ten pads more change log-probabilities by
    less than 1e-4.

    Args:
        policy: A causal language model, plain, sharded or under an adapter.
        prompt_ids: (batch, prompt) token ids, padded on the left.
        prompt_mask: (batch, prompt) 1 on tokens, 0 on padding.
        completion_ids: (batch, time) token ids, padded on the right.
        completion_mask: (batch, time) 1 on tokens, 0 on padding.
        with_hidden_norm: Also return the length of the vector that enters the output layer.

    Returns:
        (batch, time, vocab) logits as the model gives them, before any temperature; with ``with_hidden_norm`` also
        (batch, time) float32 norms, detached.

    Raises:
        ValueError: With ``with_hidden_norm``, if the policy names no output layer that the forward runs through.
    """
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    attention_mask = torch.cat([prompt_mask, completion_mask], dim=1).long()
    steps = completion_ids.shape[1]
    inputs: dict[str, Any] = {
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "logits_to_keep": steps + 1,
        "use_cache": False,
    }
    accepted = _parameter_names(_forward_of(policy))
    given = {name: value for name, value in inputs.items() if name in accepted}
    norms: list[Tensor] = []
    with _hidden_norms_into(norms, policy) if with_hidden_norm else nullcontext():
        output = policy(input_ids=input_ids, attention_mask=attention_mask, **given)
    # A model that keeps all positions and one that keeps the last steps + 1 end alike.
    kept = slice(-steps - 1, -1)
    logits: Tensor = output.logits[:, kept]
    if not with_hidden_norm:
        return logits
    if not norms:
        raise refusal("model", "run its forward through `get_output_embeddings()`", type(policy).__name__)
    return logits, norms[-1][:, kept]


def _hidden_norms_into(norms: list[Tensor], policy: nn.Module) -> AbstractContextManager[Any]:
    head = getattr(policy, "get_output_embeddings", lambda: None)()
    if head is None:
        raise refusal("model", "name its output layer in `get_output_embeddings()`", type(policy).__name__)

    def keep_norm(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        norms.append(torch.linalg.vector_norm(args[0].detach(), dim=-1, dtype=torch.float32))

    return cast(nn.Module, head).register_forward_pre_hook(keep_norm)


def _forward_of(policy: nn.Module) -> Callable[..., Any]:
    base = getattr(policy, "get_base_model", None)  # an adapter's forward takes **kwargs and says nothing
    return type(base() if base is not None else policy).forward


@lru_cache(maxsize=32)
def _parameter_names(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def loaded_from(model: nn.Module) -> str:
    """Name or directory that a model was loaded from; empty for one built in code."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def pretrained(load: Callable[..., Any], field: str, name: str | Path, options: dict[str, Any]) -> Any:
    """What ``load(name, **options)`` gives; local directories without network, failures named after the field.

    Args:
        load: A ``from_pretrained``.
        field: The setting that the name came from.
        name: Directory or hub name.
        options: Further arguments of ``load``.

    Raises:
        ValueError: If the name cannot be loaded.
    """
    text = str(name)
    place = Path(text).expanduser()
    if place.is_dir():
        text = str(place)
        options = {**options, "local_files_only": True}
    elif isinstance(name, Path) or text.startswith((".", "/", "~")):
        raise refusal(field, "name an existing directory", text, f"The working directory is {str(Path.cwd())!r}")
    try:
        return load(text, **options)
    except (OSError, ValueError) as error:
        rule = "name a directory in Hugging Face format or a hub name that can be loaded"
        raise refusal(field, rule, text, f"transformers says: {str(error).strip().rstrip('.')}") from error
