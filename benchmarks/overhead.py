"""All three layers on and nothing wrong: step time against the bare module, interleaved.

    python benchmarks/overhead.py [--quick] [--model tiny|135m|both] [--accumulate 1|4]

Two runs are built, one bare and one with GEPO, OPEFO and QUATRO, and take turns step by step in one process, so that a
busy machine slows both alike; a step is measured in seconds of CPU time of its thread (on the CPU backward runs in it,
too), which other processes do not disturb. Both see the same prompts, the same completions and the same weights.
Compared are the medians of the ratios of neighbouring steps. The bar: 1.03. QUATRO's replay and the filter's dropping
are off in the timed run, because they change what is trained on; the filter still judges every rollout.

The 135 M model is the architecture of SmolLM2-135M with random weights: time does not depend on their values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from demo_runs import quiet

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.gepo import GEPO
from lightning_rlstab.callbacks.opefo import OPEFO, SnapshotConfig
from lightning_rlstab.callbacks.quatro import QUATRO, RolloutFilterConfig
from lightning_rlstab.demo.digits import addition_rows
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer
from lightning_rlstab.rollout.sampler import Samples
from lightning_rlstab.strategies import RLStabSingleDevice


class FixedCompletions:
    """Random completions of a fixed length: sampling costs nothing, so the ratio is that of the training step."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary

    def sample(self, policy: Any, prompt_ids: Any, prompt_mask: Any, *, settings: Any, seed: int = 0) -> Samples:
        """Draw them."""
        source = torch.Generator().manual_seed(seed % (1 << 40))
        shape = (len(prompt_ids), self.length)
        return Samples(
            completion_ids=torch.randint(4, self.vocabulary, shape, generator=source),
            completion_mask=torch.ones(shape, dtype=torch.bool),
            is_truncated=torch.zeros(len(prompt_ids), dtype=torch.bool),
            behavior_logprobs=torch.full(shape, -2.0),
        )


def model_135m(tokenizer: Any) -> Any:
    """SmolLM2-135M's shape, with this tokenizer's special tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class TakeTurns(pl.Callback):
    """Lets two Trainers in two threads step one after the other, and times each step."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        self.mine, self.other = mine, other
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Wait for the turn at the start of an optimizer step; first in the list of callbacks."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.mine.acquire()
            self._began = time.thread_time()


class PassTurn(pl.Callback):
    """The end of a turn; last in the list of callbacks."""

    def __init__(self, turns: TakeTurns) -> None:
        self.turns = turns

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock and let the other one go."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.turns.seconds.append(time.thread_time() - self.turns._began)
            self.turns.other.release()


def fit(
    model: Any,
    tokenizer: Any,
    turns: TakeTurns,
    layers: list[pl.Callback],
    *,
    steps: int,
    rows: int,
    length: int,
    **flags: Any,
) -> None:
    """One of the two runs."""
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        strategy=RLStabSingleDevice(),
        callbacks=[turns, *layers, PassTurn(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        log_every_n_steps=10,
        **flags,
    )
    module = GRPOModule(
        model,
        [lambda completions, **_: [float(hash(text) % 7) for text in completions]],
        processing_class=tokenizer,
        sampler=FixedCompletions(length, model.config.vocab_size if model.config.vocab_size < 100 else 16),
        num_generations=4,
        per_device_train_batch_size=rows,
        max_completion_length=length,
    )
    trainer.fit(module, PromptDataModule(addition_rows(64)))


def compared(make: Callable[[Any], Any], *, steps: int, rows: int, length: int, accumulate: int) -> list[float]:
    """Ratios of neighbouring steps, with layers over bare."""
    tokenizer = digit_tokenizer()
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    bare, layered = TakeTurns(first, second), TakeTurns(second, first)
    layers: list[pl.Callback] = [
        GEPO(advantages=False),
        OPEFO(snapshots=SnapshotConfig(at_start=False, every_steps=10_000)),
        QUATRO(replay=False, filter=RolloutFilterConfig(no_spread=False, repetition_max=1.0, prompt_overlap_max=1.0)),
    ]
    options = {"steps": steps, "rows": rows, "length": length, "accumulate_grad_batches": accumulate}
    runs = [(make(tokenizer), bare, []), (make(tokenizer), layered, layers)]
    threads = [
        threading.Thread(target=fit, args=(model, tokenizer, turns, stack), kwargs=options)
        for model, turns, stack in runs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    warm = max(2, steps // 10)
    return [b / a for a, b in zip(bare.seconds[warm:], layered.seconds[warm:], strict=True)]


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, 30 steps")
    parser.add_argument("--model", choices=["tiny", "135m", "both"], default="both")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    quiet()
    wanted = ["tiny"] if options.quick or options.model == "tiny" else ["tiny", "135m"]
    if options.model == "135m" and not options.quick:
        wanted = ["135m"]
    results: dict[str, float] = {}
    for name in wanted:
        if name == "tiny":
            sizes = {"steps": 30 if options.quick else 200, "rows": 64, "length": 16}
            ratios = compared(digit_policy, accumulate=options.accumulate, **sizes)
        else:
            ratios = compared(model_135m, accumulate=options.accumulate, steps=12, rows=8, length=48)
        results[name] = round(statistics.median(ratios), 4)
        spread = statistics.quantiles(ratios, n=4)
        results[f"{name}_quartiles"] = [round(spread[0], 4), round(spread[2], 4)]  # type: ignore[assignment]
    worst = max(results[name] for name in wanted)
    figures = {
        "name": "overhead",
        "value": worst,
        "bar": 1.03,
        "ok": worst <= 1.03,
        "what": "step time with GEPO, OPEFO and QUATRO over the bare module, median of neighbouring steps, one thread",
        "accumulate": options.accumulate,
        **results,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
