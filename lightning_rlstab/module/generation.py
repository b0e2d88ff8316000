"""Sampling with Hugging Face ``generate``: right masks, the sampling policy's log-probs, and nothing left changed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlstab.core.checks import nearest_name, refusal
from lightning_rlstab.module.sampling_state import (
    own_generation_config,
    sampling_modes,
    seeded,
)
from lightning_rlstab.module.token_draw import LogprobRecorder, TokenDraw
from lightning_rlstab.rollout.sampler import Samples, SamplingSettings

__all__ = ["HFSampler", "eos_token_ids_of", "pad_token_id_of"]

_log = logging.getLogger(__name__)

# These would change how many rows come back, or what `generate` returns.
_REFUSED_KWARGS = ("num_return_sequences", "num_beams", "return_dict_in_generate", "output_logits", "output_scores")

# Ways to sample that are left to `generate` itself.
_RARE_KNOBS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
_PLAIN_KNOBS = ("temperature", "top_k", "top_p", "min_p")


class HFSampler:
    """A ``Sampler`` on the policy's own ``generate``.

    What it takes care of: left padding with position ids from the mask; the KV cache, also when gradient checkpointing
    is on; evaluation mode while sampling, with every submodule's mode restored exactly; several end-of-sequence ids;
    the model folder's own generation settings, which never override the given ones; the random generators, which are
    left as they were when a seed is given. It runs under ``no_grad``, never in inference mode: a sharded model that has
    once run in inference mode cannot be trained any more.

    Equal neighbouring prompts, as in a group, are run through the model once and their cache is copied.

    Args:
        processing_class: Tokenizer, or a processor that has one; may be None when both ids are given.
        pad_token_id: Id of the padding; by default the tokenizer's, and without one its end-of-sequence id.
        eos_token_ids: Ids that end a completion; by default the tokenizer's and all that the model declares.
        is_eval_mode: Sample without dropout. False leaves every module in the mode it is in.
        synced_gpus: Passed to ``generate``, True where every forward is a collective; None finds out by itself.
        is_prefill_shared: Run equal neighbouring prompts through the model once; only where no collective is involved.

    Example:
        >>> HFSampler(pad_token_id=0, eos_token_ids=[1, 2]).pad_token_id
        0
    """

    def __init__(
        self,
        processing_class: Any = None,
        *,
        pad_token_id: int | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        is_eval_mode: bool = True,
        synced_gpus: bool | None = None,
        is_prefill_shared: bool = True,
    ) -> None:
        self.pad_token_id = pad_token_id_of(processing_class) if pad_token_id is None else pad_token_id
        self._processing_class = processing_class
        self._eos_token_ids = None if eos_token_ids is None else _as_ids(eos_token_ids)
        self.is_eval_mode = is_eval_mode
        self.synced_gpus = synced_gpus
        self.is_prefill_shared = is_prefill_shared

    def eos_token_ids(self, policy: Any) -> list[int]:
        """The ids that end a completion of this policy."""
        return self._eos_token_ids or eos_token_ids_of(_generating_model(policy), self._processing_class)

    def sample(
        self,
        policy: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        settings: SamplingSettings,
        seed: int | None = None,
    ) -> Samples:
        """Continue every row once; see ``Sampler.sample``.

        Args:
            policy: A transformers model with ``generate``, or a peft model around one.
            prompt_ids: (B, P) int64, left-padded.
            prompt_mask: (B, P) bool, True on real tokens.
            settings: The knobs.
            seed: Draw from this seed and leave the global generators alone; None draws from them.

        Returns:
            ``Samples`` on the device of ``prompt_ids``.

        Raises:
            ValueError: If a prompt fills the model's context, or ``generation_kwargs`` holds an unknown field.
        """
        model = _generating_model(policy)
        eos_token_ids = self.eos_token_ids(policy)
        configuration = self._configuration(settings, model, eos_token_ids, prompt_mask)
        recorder = LogprobRecorder(temperature=float(configuration.temperature or 1.0))
        processors: list[Any] = [recorder]
        if configuration.do_sample and not any(getattr(configuration, name, None) for name in _RARE_KNOBS):
            processors += [*_warpers(configuration), TokenDraw()]
            configuration = _greedy(configuration)
        elif not configuration.do_sample:
            configuration = _greedy(configuration)
        has_collectives = _has_collectives(policy)
        # Left alone, `generate` reduces over all ranks for every token whenever the model was ever sharded, also where
        # the weights are whole on each of them.
        synced_gpus = False if self.synced_gpus is None and not has_collectives else self.synced_gpus
        extra: dict[str, Any] = {"tokenizer": self._processing_class} if configuration.stop_strings else {}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(sampling_modes(policy, is_eval_mode=self.is_eval_mode))
            stack.enter_context(own_generation_config(model, configuration))
            if self.is_prefill_shared and not has_collectives:  # ranks have different prompts: no branch on these
                extra |= _shared_prefill(policy, model, prompt_ids, prompt_mask)
            if seed is not None:
                stack.enter_context(seeded(prompt_ids.device, seed))
            stack.enter_context(recorder.attached(model))
            sequences = policy.generate(
                input_ids=prompt_ids,
                attention_mask=prompt_mask.long(),
                generation_config=configuration,
                logits_processor=processors,
                synced_gpus=synced_gpus,
                **extra,
            )
        completion_ids = sequences[:, prompt_ids.shape[1] :]
        lengths, has_eos = _lengths(completion_ids, eos_token_ids, self.pad_token_id)
        mask = torch.arange(completion_ids.shape[1], device=completion_ids.device) < lengths.unsqueeze(1)
        is_truncated = ~has_eos
        if configuration.stop_strings:  # a row that met one of these ends without an end-of-sequence token
            is_truncated &= lengths >= configuration.max_new_tokens
        return Samples(
            completion_ids=torch.where(mask, completion_ids, self.pad_token_id),
            completion_mask=mask,
            is_truncated=is_truncated,
            behavior_logprobs=torch.where(mask, recorder.logprobs(completion_ids), 0.0),
        )

    def _configuration(self, settings: SamplingSettings, model: Any, eos_token_ids: list[int], mask: Tensor) -> Any:
        from transformers import GenerationConfig

        fields: dict[str, Any] = {
            "max_new_tokens": settings.max_completion_length,
            "do_sample": True,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            "use_cache": True,  # models saved for training often say no
            "disable_compile": True,
            "pad_token_id": self.pad_token_id,
            "eos_token_id": eos_token_ids,
        }
        known = GenerationConfig()
        for name, value in (settings.generation_kwargs or {}).items():
            if name in _REFUSED_KWARGS:
                raise refusal("generation_kwargs", f"not hold {name}", value, "Every prompt gives one completion")
            if not hasattr(known, name):
                close = nearest_name(name, vars(known))
                advice = f"Did you mean {close!r}" if close else ""
                raise refusal("generation_kwargs", "hold fields of transformers.GenerationConfig", name, advice)
            fields[name] = value
        if not fields["do_sample"]:  # knobs of a draw that does not happen; transformers would warn of each
            fields |= dict.fromkeys(("temperature", "top_p", "top_k", "min_p"))
        fields["max_new_tokens"] = _within_context(model, mask, int(fields["max_new_tokens"]))
        return GenerationConfig(**fields)


def pad_token_id_of(processing_class: Any) -> int:
    """The padding id of a tokenizer or processor; without one, its end-of-sequence id, as TRL does.

    Safe for training: masks are made from positions, so a real end-of-sequence token is never taken for padding.

    Raises:
        ValueError: If there is neither.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    for name in ("pad_token_id", "eos_token_id"):
        if (token_id := getattr(tokenizer, name, None)) is not None:
            return int(token_id)
    advice = "Set tokenizer.pad_token or pass pad_token_id"
    raise refusal("processing_class", "have a pad token or an end-of-sequence token", processing_class, advice)


def eos_token_ids_of(model: Any, processing_class: Any = None) -> list[int]:
    """The tokenizer's end-of-sequence id and every one that the model declares, without repeats.

    Raises:
        ValueError: If there is none at all.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [*_as_ids(getattr(tokenizer, "eos_token_id", None)), *_as_ids(declared)]
    if not ids:
        advice = "Set tokenizer.eos_token or pass eos_token_ids"
        raise refusal("processing_class", "have an end-of-sequence token", processing_class, advice)
    return list(dict.fromkeys(ids))


def _as_ids(ids: Any) -> list[int]:
    if ids is None:
        return []
    return [int(ids)] if isinstance(ids, int) else [int(token_id) for token_id in ids]


def _generating_model(policy: Any) -> Any:
    """The transformers model whose forward ``generate`` calls: inside ``torch.compile`` and peft wrappers."""
    model = getattr(policy, "_orig_mod", policy)
    if callable(unwrap := getattr(model, "get_base_model", None)):
        model = unwrap()
    if not callable(getattr(model, "generate", None)):
        advice = "Use a transformers causal language model, or pass a Sampler of your own"
        raise refusal("model", "have a `generate` method", type(policy).__name__, advice)
    return model


def _has_collectives(policy: nn.Module) -> bool:
    """Whether a forward talks to other ranks: parameters are sharded now, or modules gather them when called."""
    is_wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in policy.modules())
    return is_wrapped or any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in policy.parameters())


def _within_context(model: Any, prompt_mask: Tensor, max_new_tokens: int) -> int:
    """``max_new_tokens``, cut where prompt and completion would leave the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return max_new_tokens
    longest = int(prompt_mask.sum(dim=1).max())
    if longest >= context:
        advice = "Shorten or drop the longest prompts"
        raise refusal("prompt", f"be shorter than the model's context of {context} tokens", longest, advice)
    if longest + max_new_tokens > context:
        words = "a prompt of %d tokens leaves %d of max_completion_length %d in the model's context of %d"
        _log.warning(words, longest, context - longest, max_new_tokens, context)
    return min(max_new_tokens, int(context) - longest)


def _lengths(completion_ids: Tensor, eos_token_ids: list[int], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """(B,) tokens up to and with the first end-of-sequence token, and (B,) bool whether there is one."""
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids, device=completion_ids.device))
    has_eos = is_eos.any(dim=1)
    positions = torch.arange(1, completion_ids.shape[1] + 1, device=completion_ids.device)
    # Without an end-of-sequence token a row is full, unless a stop string ended it: then padding follows.
    last_token = torch.where(completion_ids != pad_token_id, positions, 0).amax(dim=1)
    unended = torch.full_like(last_token, completion_ids.shape[1]) if pad_token_id in eos_token_ids else last_token
    return torch.where(has_eos, is_eos.int().argmax(dim=1) + 1, unended.clamp(min=1)), has_eos


def _warpers(configuration: Any) -> list[Any]:
    """The processors that `generate` would put before its own draw, in its order."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = []
    if configuration.temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(float(configuration.temperature)))
    if configuration.top_k:
        warpers.append(TopKLogitsWarper(top_k=configuration.top_k))
    if configuration.top_p is not None and configuration.top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=configuration.top_p))
    if configuration.min_p is not None:
        warpers.append(MinPLogitsWarper(min_p=configuration.min_p))
    return warpers


def _greedy(configuration: Any) -> Any:
    # Without the sampling fields, about which transformers would warn when nothing is sampled.
    from transformers import GenerationConfig

    fields = {**configuration.to_dict(), "do_sample": False, **dict.fromkeys(_PLAIN_KNOBS)}
    return GenerationConfig(**fields)


def _shared_prefill(policy: Any, model: Any, prompt_ids: Tensor, prompt_mask: Tensor) -> dict[str, Any]:
    """Keywords for ``generate`` with the prompts' cache, all but the last token; empty if it cannot be shared."""
    from transformers import DynamicCache

    has_virtual_tokens = bool(getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False))
    is_stateful = bool(getattr(model, "_is_stateful", False)) or model.config.is_encoder_decoder
    parameters = inspect.signature(model.forward).parameters
    if has_virtual_tokens or is_stateful or "logits_to_keep" not in parameters or prompt_ids.shape[1] == 1:
        return {}
    both = torch.stack([prompt_ids, prompt_mask.to(prompt_ids.dtype)], dim=1)
    rows, row_of = torch.unique_consecutive(both, dim=0, return_inverse=True)
    if rows.shape[0] == prompt_ids.shape[0]:
        return {}
    ids, mask = rows[:, 0, :-1], rows[:, 1, :-1]
    cache = DynamicCache(config=model.config)
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    # transformers renamed the argument during its fifth major version and warns about the old name.
    cached = {"cache" if "cache" in parameters else "past_key_values": cache}
    model(input_ids=ids, attention_mask=mask, position_ids=position_ids, logits_to_keep=1, **cached)
    cache.batch_select_indices(row_of)
    return cached
