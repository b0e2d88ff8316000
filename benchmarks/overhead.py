"""All three layers on and nothing wrong: step time against the bare module, step by step in turn.

    python benchmarks/overhead.py [--quick] [--model tiny|135m|both] [--accumulate 1]

One run, in which GEPO, OPEFO and QUATRO take part in every other optimizer step: both kinds of steps see the same
weights, machine and memory. A step is measured in seconds of CPU time of its thread (on the CPU backward runs in it,
too), which other processes do not disturb. Compared are neighbouring steps. The bar: the median ratio is at most 1.03.
QUATRO's replay and the filter's dropping are off, because they change what is trained on; the filter still judges.

The tiny model samples its own completions, as in a real run. For the 135 M model completions are drawn at random at no
cost, which makes its ratio stricter than a real one; it has SmolLM2-135M's architecture and random weights, because
time does not depend on their values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from demo_runs import quiet

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.gepo import GEPO
from lightning_rlstab.callbacks.opefo import OPEFO, SnapshotConfig
from lightning_rlstab.callbacks.opefo_snapshots import weight_versions
from lightning_rlstab.callbacks.quatro import QUATRO, RolloutFilterConfig
from lightning_rlstab.demo.digits import addition_rows
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer
from lightning_rlstab.rollout.sampler import Samples
from lightning_rlstab.strategies import RLStabSingleDevice


class FixedCompletions:
    """Random completions of a fixed length, at no cost."""

    def __init__(self, length: int) -> None:
        self.length = length

    def sample(self, policy: Any, prompt_ids: Any, prompt_mask: Any, *, settings: Any, seed: int = 0) -> Samples:
        """Draw them."""
        source = torch.Generator().manual_seed(seed % (1 << 40))
        shape = (len(prompt_ids), self.length)
        return Samples(
            completion_ids=torch.randint(4, 16, shape, generator=source),
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


class EveryOther(pl.Callback):
    """Passes hooks on to the layers in odd optimizer steps, to none in even ones, and times both kinds."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.seconds: list[float] = []
        self.is_on = False
        self._began = 0.0

    def _each(self, hook: str, *arguments: Any) -> None:
        if self.is_on:
            for layer in self.layers:
                getattr(layer, hook)(*arguments)

    def _through(self, hook: str, trainer: Any, pl_module: Any, value: Any) -> Any:
        for layer in self.layers if self.is_on else []:
            if hasattr(layer, hook):
                value = getattr(layer, hook)(trainer, pl_module, value)
        return value

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start every layer."""
        for layer in self.layers:
            layer.on_train_start(trainer, pl_module)

    def is_staging_needed(self, trainer: Any) -> bool:
        """Whatever the layers ask for, in their steps."""
        return self.is_on and any(layer.is_staging_needed(trainer) for layer in self.layers[:1])

    def on_micro_batch_gradient(self, trainer: Any, pl_module: Any, norms: Any) -> bool:
        """Ask GEPO."""
        return bool(self.layers[0].on_micro_batch_gradient(trainer, pl_module, norms))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock with the optimizer step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.is_on = trainer.global_step % 2 == 1
            self._began = time.thread_time()
        self._each("on_train_batch_start", trainer, pl_module, batch, batch_idx)

    def on_rollout_scored(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        """Pass on."""
        return self._through("on_rollout_scored", trainer, pl_module, rollout)

    def on_rollout_ready(self, trainer: Any, pl_module: Any, rollout: Any) -> Any:
        """Pass on."""
        return self._through("on_rollout_ready", trainer, pl_module, rollout)

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        """Pass on."""
        return self._through("on_policy_loss", trainer, pl_module, inputs)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Pass on."""
        self._each("on_before_backward", trainer, pl_module, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Pass on."""
        self._each("on_before_optimizer_step", trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Stop the clock with the optimizer step; ``rest`` ends with the index of the batch."""
        self._each("on_train_batch_end", trainer, pl_module, *rest)
        if (rest[-1] + 1) % trainer.accumulate_grad_batches == 0:
            self.seconds.append(time.thread_time() - self._began)
            # OPEFO looks at the weights after its steps, and before the next one only if something else wrote to them,
            # which is what a bare step does. With the layers always on that second look does not happen.
            self.layers[1]._checked_versions = weight_versions(trainer)


def ratios(name: str, *, steps: int, rows: int, length: int, accumulate: int) -> tuple[list[float], float]:
    """Ratios of neighbouring steps, with layers over bare, and the seconds of a bare step."""
    tokenizer = digit_tokenizer()
    is_tiny = name == "tiny"
    layers = [
        GEPO(advantages=False),
        OPEFO(snapshots=SnapshotConfig(at_start=False, every_steps=10_000)),
        QUATRO(
            replay=False,
            kl=False,
            filter=RolloutFilterConfig(no_spread=False, repetition_max=1.0, prompt_overlap_max=1.0),
        ),
    ]
    turns = EveryOther(layers)
    module = GRPOModule(
        digit_policy(tokenizer) if is_tiny else model_135m(tokenizer),
        [lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions]],
        processing_class=tokenizer,
        sampler=None if is_tiny else FixedCompletions(length),
        num_generations=4,
        per_device_train_batch_size=rows,
        max_completion_length=length,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            strategy=RLStabSingleDevice(),
            callbacks=[turns],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            inference_mode=False,
            log_every_n_steps=10,
            accumulate_grad_batches=accumulate,
            default_root_dir=folder,
        )
        trainer.fit(module, PromptDataModule(addition_rows(64)))
    warm = 4 if steps < 20 else 10
    bare, layered = turns.seconds[warm::2], turns.seconds[warm + 1 :: 2]
    pairs = zip(bare, layered, strict=False)
    return [on / off for off, on in pairs], statistics.median(bare)


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, 60 steps")
    parser.add_argument("--model", choices=["tiny", "135m", "both"], default="both")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    quiet()
    wanted = ["tiny", "135m"] if options.model == "both" and not options.quick else [options.model]
    if options.quick:
        wanted = ["tiny"]
    results: dict[str, Any] = {}
    worst = 0.0
    for name in wanted:
        sizes = {"steps": 60 if options.quick else 200, "rows": 64, "length": 16}
        if name == "135m":
            sizes = {"steps": 44, "rows": 8, "length": 64}
        found, bare = ratios(name, accumulate=options.accumulate, **sizes)
        quarter = statistics.quantiles(found, n=4)
        worst = max(worst, statistics.median(found))
        results[name] = {
            "ratio": round(statistics.median(found), 4),
            "quartiles": [round(quarter[0], 4), round(quarter[2], 4)],
            "bare_step_cpu_seconds": round(bare, 4),
        }
        print(name, results[name], flush=True)
    figures = {
        "name": "overhead",
        "value": round(worst, 4),
        "bar": 1.03,
        "ok": worst <= 1.03,
        "what": "CPU seconds of a step with GEPO, OPEFO and QUATRO over a bare step, median of neighbours, one thread",
        "accumulate": options.accumulate,
        **results,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
