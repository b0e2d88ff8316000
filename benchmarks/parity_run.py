"""Twenty training steps of ours and of TRL's GRPOTrainer on the same fixed completions: losses and weights agree.

    python benchmarks/parity_run.py [--quick]

TRL gets the completions from a ``rollout_func``, our module from a ``Sampler``; both look them up by prompt, so that
order plays no part. Both start from the same weights. Optimizer (AdamW), schedule (linear) and clipping are each
trainer's own, from one ``GRPOConfig``.
The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _twins import grpo_config, our_trainer, quiet, trl_trainer, versions
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_rlstab.demo.digits import addition_rows
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy
from lightning_rlstab.module.generation import eos_token_ids_of
from lightning_rlstab.rollout.sampler import Samples, SamplingSettings

BAR = 1e-4
LONGEST = 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.04},
    "two_iterations": {"num_iterations": 2},
    "kl_two_iterations_accumulated": {
        "beta": 0.04,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8,
    },
    "grpo_clipped": {"loss_type": "grpo", "num_iterations": 3, "epsilon": 0.02, "max_grad_norm": 0.1},
}


class FixedCompletions:
    """Completions that depend on the prompt, on how often it was asked before and on nothing else.

    Args:
        eos: Id that ends a completion; every other completion reaches the longest length without it.
        vocab: Ids are drawn below this one.
    """

    def __init__(self, *, eos: int, vocab: int) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()
        self._eos = eos
        self._vocab = vocab

    def next(self, prompt: Sequence[int]) -> list[int]:
        """The next completion of a prompt given as token ids."""
        key = tuple(prompt)
        turn = self.asked[key]
        self.asked[key] += 1
        seed = int.from_bytes(hashlib.sha256(repr((key, turn)).encode()).digest()[:6], "big")
        draws = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, LONGEST + 1, (), generator=draws))
        ids: list[int] = torch.randint(4, self._vocab, (length,), generator=draws).tolist()
        return ids if length == LONGEST else [*ids, self._eos]


class FixedSampler:
    """The same completions behind our ``Sampler`` protocol."""

    def __init__(self, completions: FixedCompletions, *, pad: int) -> None:
        self._completions = completions
        self._pad = pad

    def sample(
        self,
        policy: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        settings: SamplingSettings,
        seed: int | None = None,
    ) -> Samples:
        """Look every row up; ``behavior_logprobs`` come from the training forward, as nothing was sampled."""
        from lightning_rlstab.module.policy import forward_logits

        eos = eos_token_ids_of(policy, None)
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]
        found = [self._completions.next(row) for row in rows]
        width = max(map(len, found))
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in found])
        mask = torch.arange(width) < torch.tensor([len(row) for row in found]).unsqueeze(1)
        with torch.no_grad():
            logits = forward_logits(policy, prompt_ids, prompt_mask, ids, mask)
            logprobs = (logits / settings.temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return Samples(
            completion_ids=ids,
            completion_mask=mask,
            is_truncated=torch.tensor([row[-1] not in eos for row in found]),
            behavior_logprobs=torch.where(mask, logprobs, torch.zeros(())),
        )


class _StepLosses(Callback):
    """The sum of every optimizer step's micro-batch losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._open = 0.0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._open += float(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.losses.append(self._open)
        self._open = 0.0


def _trl_losses(trainer: Any) -> list[float]:
    """Make the trainer note the sum of every optimizer step's micro-batch losses; filled while it trains."""
    losses: list[float] = []
    step = trainer.training_step

    def noting_step(*arguments: Any, **keywords: Any) -> Tensor:
        loss = step(*arguments, **keywords)
        if trainer.state.global_step == len(losses):
            losses.append(0.0)
        losses[-1] += float(loss)
        return loss

    trainer.training_step = noting_step
    return losses


def difference(case: str, *, steps: int) -> dict[str, float]:
    """Largest absolute differences of the step losses and of the final weights, for one case of ``CASES``.

    Args:
        case: Key of ``CASES``.
        steps: Optimizer steps.

    Returns:
        ``loss``, ``weights``, and for scale ``moved``, the largest change of a weight, and ``largest_loss``.
    """
    tokenizer = digit_tokenizer()
    policy = digit_policy(tokenizer, seed=0)
    fields = {
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "seed": 3,
        **CASES[case],
    }
    rows = addition_rows(24, seed=1)
    eos, pad, vocab = tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        save_policy(policy, tokenizer, Path(scratch))
        config = grpo_config(scratch, **fields)
        theirs = FixedCompletions(eos=eos, vocab=vocab)

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            prompt_ids = tokenizer(text=prompts)["input_ids"]
            completion_ids = [theirs.next(ids) for ids in prompt_ids]
            logprobs = [[0.0] * len(ids) for ids in completion_ids]
            return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

        trl = trl_trainer(config, scratch, tokenizer, rows, rollout_func=rollout)
        trl_losses = _trl_losses(trl)
        trl.train()
        ours = FixedCompletions(eos=eos, vocab=vocab)
        noted = _StepLosses()
        sampler = FixedSampler(ours, pad=pad)
        trainer, module, data = our_trainer(config, scratch, tokenizer, rows, callbacks=[noted], sampler=sampler)
        trainer.fit(module, data)
    assert theirs.asked == ours.asked, "the two trainers asked for different prompts"
    assert len(trl_losses) == len(noted.losses) == steps
    return {
        "loss": max(abs(a - b) for a, b in zip(trl_losses, noted.losses, strict=True)),
        "weights": _largest_change(trl.model, module.policy),
        "moved": _largest_change(policy, module.policy),
        "largest_loss": max(map(abs, trl_losses)),
    }


def _largest_change(first: nn.Module, second: nn.Module) -> float:
    other = second.state_dict()
    return max(float((value - other[name]).abs().max()) for name, value in first.state_dict().items())


def main() -> None:
    """Run all cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five steps instead of twenty")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    steps = 5 if arguments.quick else 20
    cases = {}
    for case in CASES:
        cases[case] = difference(case, steps=steps)
        print(f"{case}: " + ", ".join(f"{name} {value:.2e}" for name, value in cases[case].items()), flush=True)
    worst = max(max(figures["loss"], figures["weights"]) for figures in cases.values())
    figures = {
        "name": "parity_run",
        "value": worst,
        "bar": BAR,
        "ok": worst <= BAR,
        "what": "largest absolute difference of step losses and final weights against TRL's GRPOTrainer",
        "steps": steps,
        "cases": cases,
        **versions(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
