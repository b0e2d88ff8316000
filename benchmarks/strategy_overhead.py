"""What the step gate, its norms and staging cost against Lightning's own strategy, step by step and interleaved.

The model has SmolLM2-135M's shape (30 layers, 134.5 M parameters, tied embeddings) with random weights; one optimizer
step is 4 micro-batches of 256 tokens, AdamW, clipping at 1.0. Short fits under each strategy take turns on the same
weights, and every timing is divided by the stock timing of its own turn, so that a machine that slows down slows all of
them. On a CPU the process's own time is counted, on one thread; on a GPU the clock, between two waits for the device.

Whole steps differ by ten percent from turn to turn on a shared machine, so the gate is measured by its parts: the
seconds inside the verdict (norms, votes, scaling) and inside clipping, less the seconds that Lightning's own clipping
takes, over the stock step. The difference of whole steps is printed beside it.

    python benchmarks/strategy_overhead.py [--quick] [--device cuda] [--rounds 5] [--steps 4]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_rlstab.control.protocols import GradientNorms
from lightning_rlstab.strategies import RLStabSingleDevice

GATE_BAR, STAGING_BAR = 0.01, 0.03
"""Largest extra share of a step: for the gate with norms and verdict, and for staging one micro-batch of it."""


class LanguageModel(pl.LightningModule):
    """Next-token loss on random tokens."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": layers,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        }
        self.model = LlamaForCausalLM(LlamaConfig(**shape))
        self.clip_seconds: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        """Clip as ever, and note how long it took."""
        start = _now(self.device)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.clip_seconds.append(_now(self.device) - start)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as GRPO uses it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class MeteredGate(RLStabSingleDevice):
    """The gate, noting how long its verdict takes: norms, votes, scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict_seconds: list[float] = []

    def decide(self) -> None:
        """Decide as ever, on the clock."""
        start = _now(self.root_device)
        self.gradient_norms()
        super().decide()
        self.verdict_seconds.append(_now(self.root_device) - start)


class Watch(pl.Callback):
    """Seconds of every optimizer step, and synchronizing calls in micro-batches that do not step."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.seconds: list[float] = []
        self.gate_seconds: list[float] = []
        self.syncs: list[int] = []
        self._caught: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of a step, and the count within a micro-batch."""
        if batch_idx % self.accumulate == 0:
            self._start = _now(module.device)
        if (batch_idx + 1) % self.accumulate and module.device.type == "cuda":
            self._caught = warnings.catch_warnings(record=True)
            self._seen = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop both."""
        if self._caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self._caught = None
            self.syncs.append(sum("synchronizing CUDA operation" in str(w.message) for w in self._seen))
        if (batch_idx + 1) % self.accumulate == 0:
            self.seconds.append(_now(module.device) - self._start)


class KeepAll(pl.Callback):
    """A guard that looks at every micro-batch's own gradient and keeps it."""

    def is_staging_needed(self, trainer: pl.Trainer) -> bool:
        """Always."""
        return True

    def on_micro_batch_gradient(self, trainer: pl.Trainer, pl_module: pl.LightningModule, norms: GradientNorms) -> bool:
        """Keep what is a number."""
        return norms.total >= 0


def _now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(module: LanguageModel, kind: str, arguments: argparse.Namespace, *, clip: float | None) -> Watch:
    """Fit for some steps under one strategy; the first step is warm-up and left out."""
    watch = Watch(arguments.accumulate)
    gate = None if kind == "stock" else MeteredGate()
    trainer = pl.Trainer(
        accelerator="gpu" if arguments.device == "cuda" else "cpu",
        devices=1,
        strategy="auto" if gate is None else gate,
        callbacks=[watch, *([KeepAll()] if kind == "staged" else [])],
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=clip,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    count = (arguments.steps + 1) * arguments.accumulate
    tokens = torch.randint(0, 49152, (count, arguments.rows, arguments.tokens // arguments.rows))
    module.clip_seconds.clear()
    trainer.fit(module, torch.utils.data.DataLoader(list(tokens), batch_size=None))
    watch.seconds = watch.seconds[1:]
    verdicts = [0.0] * len(module.clip_seconds) if gate is None else gate.verdict_seconds
    watch.gate_seconds = [sum(parts) for parts in zip(verdicts, module.clip_seconds, strict=True)][1:]
    return watch


def compared(module: LanguageModel, arguments: argparse.Namespace, *, clip: float | None) -> dict[str, Any]:
    """Extra shares over stock, median over rounds of the ratio of medians within a round."""
    ratios: dict[str, list[float]] = {"gate": [], "staged": []}
    stock: list[float] = []
    parts: list[float] = []
    syncs: dict[str, list[int]] = {"stock": [], "gate": [], "staged": []}
    for round_index in range(arguments.rounds):
        kinds = ["stock", "gate", "staged"]
        turn = round_index % len(kinds)
        runs = {kind: timed(module, kind, arguments, clip=clip) for kind in kinds[turn:] + kinds[:turn]}
        base = statistics.median(runs["stock"].seconds)
        stock.append(base)
        own, given = (statistics.median(runs[kind].gate_seconds) for kind in ("gate", "stock"))
        parts.append((own - given) / base)
        for kind, values in ratios.items():
            values.append(statistics.median(runs[kind].seconds) / base - 1)
        for kind, counts in syncs.items():
            counts.extend(runs[kind].syncs)
    extra = {kind: statistics.median(values) for kind, values in ratios.items()}
    return {
        "gate_parts_frac": round(statistics.median(parts), 5),
        "gate_parts_frac_rounds": [round(value, 5) for value in parts],
        "gate_frac": round(extra["gate"], 5),
        "staging_one_micro_batch_frac": round((extra["staged"] - extra["gate"]) / arguments.accumulate, 5),
        "staging_all_micro_batches_frac": round(extra["staged"] - extra["gate"], 5),
        "gate_frac_rounds": [round(value, 4) for value in ratios["gate"]],
        "staged_frac_rounds": [round(value, 4) for value in ratios["staged"]],
        "stock_step_seconds": round(statistics.median(stock), 4),
        "syncs_per_micro_batch": {kind: max(counts, default=0) for kind, counts in syncs.items()},
    }


def main() -> None:
    """Measure and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 layers, one round: checks that it runs")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps per turn")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per micro-batch")
    parser.add_argument("--rows", type=int, default=2, help="sequences per micro-batch")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--no-clip", action="store_true", help="time without clipping instead of at 1.0")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.tokens = 1, 1, 32
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    module = LanguageModel(3 if arguments.quick else 30)
    measured = compared(module, arguments, clip=None if arguments.no_clip else 1.0)
    syncs = measured["syncs_per_micro_batch"]
    is_met = (
        measured["gate_parts_frac"] <= GATE_BAR
        and measured["staging_one_micro_batch_frac"] <= STAGING_BAR
        and max(syncs["gate"], syncs["staged"]) <= syncs["stock"]
    )
    result = {
        "name": "strategy_overhead",
        "value": measured["gate_parts_frac"],
        "bar": GATE_BAR,
        "ok": bool(is_met) if not arguments.quick else True,
        "staging_bar": STAGING_BAR,
        "is_quick": arguments.quick,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu, one thread",
        "parameters": sum(p.numel() for p in module.parameters()),
        "tokens_per_step": arguments.tokens * arguments.accumulate,
        "is_clipping": not arguments.no_clip,
        **measured,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
