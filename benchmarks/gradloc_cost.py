"""What GradLoc costs: the ladder against one forward+backward sweep and against the reference search; growth; dormancy.

    python benchmarks/gradloc_cost.py [--quick] [--model DIR] [--plot FILE.svg]

Within one optimizer step of a real Trainer, spikes of 1, 3 and 5 culprits are planted by scaling the slopes of random
tokens. In every round the step's own forward+backward sweep, the ladder and the reference search are timed in turn on
the same spike, on one thread. Then the tokens grow from 1k to 64k and the micro-batches from 1 to 16, and a run with a
dormant GradLoc is timed against one without, in turn.

The bars: the ladder takes at most 0.8 of a sweep with all culprits found; dormant it adds at most 1 % to a step.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _plots import log_chart

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import GradLoc
from lightning_rlstab.callbacks.gradloc_oracle import StepOracle
from lightning_rlstab.gradloc.ladder import LadderSettings, localized
from lightning_rlstab.rollout.sampler import Samples
from lightning_rlstab.strategies import RLStabSingleDevice

TIMES_THRESHOLD = 10.0


class RandomTokens:
    """Completions of full length without running the model: sampling is not what is measured here."""

    def __init__(self, vocabulary: int, width: int) -> None:
        self.vocabulary, self.width = vocabulary, width

    def sample(self, policy: Any, prompt_ids: Any, prompt_mask: Any, *, settings: Any, seed: int) -> Samples:
        """Random tokens of full length."""
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        shape = (len(prompt_ids), self.width)
        return Samples(
            completion_ids=torch.randint(3, self.vocabulary, shape, generator=generator),
            completion_mask=torch.ones(shape, dtype=torch.bool),
            is_truncated=torch.zeros(len(prompt_ids), dtype=torch.bool),
            behavior_logprobs=None,
        )


def noise(completions: list[Any], **_: Any) -> list[float]:
    """A reward with spread in every group."""
    draw = random.Random(len(completions))
    return [draw.random() for _ in completions]


def policy_and_tokenizer(model: str, hidden: int) -> tuple[Any, Any]:
    """The model of a directory, or a two-layer Llama built in code, with a byte-level tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if model:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        return AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32), tokenizer
    from tokenizers import Tokenizer, models, pre_tokenizers

    symbols = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config), tokenizer


def fit(options: argparse.Namespace, shape: tuple[int, int, int], callbacks: list[pl.Callback], steps: int = 1) -> None:
    """Train ``steps`` optimizer steps of (micro-batches, rows, completion tokens)."""
    micro_batches, rows, width = shape
    policy, tokenizer = policy_and_tokenizer(options.model, options.hidden)
    generations = min(4, rows * micro_batches)
    module = GRPOModule(
        model=policy,
        processing_class=tokenizer,
        sampler=RandomTokens(len(tokenizer), width),
        reward_funcs=[noise],
        num_generations=generations,
        per_device_train_batch_size=rows,
        max_completion_length=width,
        num_iterations=steps,
        learning_rate=1e-7,
        lr_scheduler_type="constant",
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            strategy=RLStabSingleDevice(),
            accumulate_grad_batches=micro_batches,
            callbacks=callbacks,
            logger=False,
            default_root_dir=Path(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            inference_mode=False,
        )
        rows_needed = max(rows * micro_batches // generations, 1)
        trainer.fit(module, PromptDataModule([{"prompt": f"{index:04d}+1="} for index in range(8 * rows_needed)]))


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and what it returns."""
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


class Spikes(pl.Callback):
    """Times sweep, ladder and reference search on planted spikes, all within one optimizer step."""

    needs_token_signals = True

    def __init__(self, culprits: list[int], rounds: int, *, has_search: bool = True) -> None:
        self.culprits, self.rounds, self.has_search = culprits, rounds, has_search
        self.records: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Plant and time."""
        draw = random.Random(0)
        clean = [entry.constants["token_loss_slope"].clone() for entry in pl_module.window]
        usual = trainer.strategy.gradient_norms().total
        for _ in range(self.rounds):
            for count in self.culprits:
                for entry, slope in zip(pl_module.window, clean, strict=True):
                    entry.constants["token_loss_slope"] = slope.clone()
                planted = self._plant(draw, pl_module, 5.0 * usual, count)
                self._measure(trainer, pl_module, 5.0 * usual, planted)

    def _plant(self, draw: random.Random, pl_module: Any, threshold: float, count: int) -> set[tuple[int, int, int]]:
        """Scale some tokens' slopes until each alone has about ten times the threshold."""
        planted: set[tuple[int, int, int]] = set()
        while len(planted) < count:
            micro_batch = draw.randrange(len(pl_module.window))
            entry = pl_module.window[micro_batch]
            slope = entry.constants["token_loss_slope"]
            row, token = draw.randrange(slope.shape[0]), draw.randrange(slope.shape[1])
            if (micro_batch, row, token) in planted or float(slope[row, token]) == 0:
                continue
            hidden, logprob = entry.constants["hidden_norms"][row, token], entry.constants["logprobs"][row, token]
            head = float(hidden) * float(-torch.expm1(logprob))
            slope[row, token] = math.copysign(TIMES_THRESHOLD * threshold / head, float(slope[row, token]))
            planted.add((micro_batch, row, token))
        return planted

    def _measure(self, trainer: Any, pl_module: Any, threshold: float, planted: set[tuple[int, int, int]]) -> None:
        strategy = trainer.strategy
        oracle = self._oracle(trainer, pl_module)
        tokens = oracle.signals.window_tokens

        def sweep() -> None:
            for parameter in strategy.trainable_parameters().values():
                parameter.grad = None
            for entry in pl_module.window:
                statistics = pl_module.token_statistics(entry.rollout)
                (statistics.logprobs * entry.constants["token_loss_slope"]).sum().backward()

        def search(kind: str) -> Any:
            with self._oracle(trainer, pl_module) as asked:
                return localized(
                    asked,
                    threshold=threshold,
                    tau_token=threshold * math.sqrt(tokens),
                    settings=LadderSettings(search=kind, probe_budget=400),  # type: ignore[arg-type]
                )

        sweep_seconds, _ = seconds(sweep)
        ladder_seconds, ladder = seconds(lambda: search("auto"))
        record = {
            "culprits": len(planted),
            "sweep_seconds": sweep_seconds,
            "ladder": ladder_seconds / sweep_seconds,
            "ladder_found": len(planted & named(ladder)),
        }
        if self.has_search:
            search_seconds, reference = seconds(lambda: search("bisect"))
            record |= {
                "search": search_seconds / sweep_seconds,
                "search_probes": reference.backward_probes,
                "search_found": len(planted & named(reference)),
            }
        self.records.append(record)

    @staticmethod
    def _oracle(trainer: Any, pl_module: Any) -> StepOracle:
        strategy = trainer.strategy
        return StepOracle(pl_module, strategy, strategy.gradient_norms, rank=0, temperature=1.0)


def named(finding: Any) -> set[tuple[int, int, int]]:
    """The places a finding names."""
    return {(c.address.micro_batch, c.address.sequence, c.address.token) for c in finding.culprits}


class Turns(pl.Callback):
    """Lets two runs take their steps in turn, and keeps the processor seconds of each.

    Two runs one after the other differ by some per cent whatever they do; steps side by side do not.
    """

    def __init__(self, turn: threading.Condition, order: list[int], own: int) -> None:
        self.turn, self.order, self.own = turn, order, own
        self.steps: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Wait for the turn, then start the clock."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            with self.turn:
                self.turn.wait_for(lambda: self.order[0] == self.own, timeout=600)
            self.began = time.thread_time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock and hand over."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.append(time.thread_time() - self.began)
            with self.turn:
                self.order[0] = 1 - self.own
                self.turn.notify_all()


def dormant(options: argparse.Namespace, steps: int) -> float:
    """Processor time of a step with a dormant GradLoc over one without: median of the ratios of neighbours."""
    turn, order = threading.Condition(), [0]
    clocks = [Turns(turn, order, own) for own in (0, 1)]
    runs = [
        threading.Thread(target=fit, args=(options, (4, 8, 64), [*guards, clock], steps))
        for clock, guards in zip(clocks, ([], [GradLoc(min_norm=1e9)]), strict=True)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    plain, guarded = (clock.steps[1:] for clock in clocks)  # the first holds the rollout
    return statistics.median(ours / bare for ours, bare in zip(guarded, plain, strict=True))


def picture(growth: list[dict[str, Any]]) -> str:
    """Cost in sweeps over the step's tokens, and of one number of tokens over its cut into micro-batches."""
    by_tokens = [row for row in growth if row["micro_batches"] == 4]
    cut = [row for row in growth if row["micro_batches"] != 4]
    curves = {
        "reference search": [(row["tokens"], row["search"]) for row in by_tokens if "search" in row],
        "ladder": [(row["tokens"], row["ladder"]) for row in by_tokens],
    }
    curves |= {f"cut into {row['micro_batches']}": [(row["tokens"], row["ladder"])] for row in cut}
    title = "Naming the culprits of a spike: cost in sweeps of the step (4 micro-batches)"
    return log_chart(title, "loss tokens in the step", "forward+backward sweeps", curves, bar=(0.8, "bar 0.8"))


def summary(records: list[dict[str, Any]], name: str) -> float:
    """Median of one column, rounded."""
    return round(statistics.median(record[name] for record in records), 3)


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, up to 4k tokens, no dormant runs")
    parser.add_argument("--model", default="", help="directory of a causal language model; default: a two-layer Llama")
    parser.add_argument("--plot", type=Path, help="where to draw the growth with tokens and micro-batches")
    parser.add_argument("--hidden", type=int, default=256, help="width of the built-in model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rounds = 1 if options.quick else 3
    main_shape = (4, 4, 24) if options.model else (4, 8, 128)
    spikes = Spikes([1, 3, 5], rounds)
    fit(options, main_shape, [spikes])
    by_count = {
        count: [record for record in spikes.records if record["culprits"] == count] for count in spikes.culprits
    }
    table = {
        str(count): {name: summary(records, name) for name in records[0] if name not in ("culprits", "sweep_seconds")}
        for count, records in by_count.items()
    }
    growth = []
    shapes = [(4, 4, 64), (4, 8, 128), (4, 16, 256), (4, 32, 512), (1, 16, 256), (16, 4, 64)]
    for shape in [] if options.model else shapes[:2] if options.quick else shapes:
        tokens = math.prod(shape)
        measured = Spikes([1, 5], 1, has_search=tokens <= 16_384)
        fit(options, shape, [measured])
        row = {"micro_batches": shape[0], "tokens": tokens, "ladder": summary(measured.records, "ladder")}
        if measured.has_search:
            row |= {name: summary(measured.records, name) for name in ("search", "search_probes")}
        growth.append(row)
    if options.plot is not None and growth:
        options.plot.write_text(picture(growth), encoding="utf-8")
    worst = max(summary(records, "ladder") for records in by_count.values())
    are_found = all(record["ladder_found"] == record["culprits"] for record in spikes.records)
    ratio = None if options.quick or options.model else round(dormant(options, 300), 4)
    record = {
        "name": "gradloc_cost",
        "value": worst,
        "bar": 0.8,
        "ok": worst <= 0.8 and are_found and (ratio is None or ratio <= 1.01),
        "model": Path(options.model).name if options.model else f"two-layer Llama, width {options.hidden}",
        "sweep_seconds": round(statistics.median(record["sweep_seconds"] for record in spikes.records), 4),
        "by_culprits": table,
        "growth": growth,
        "dormant_ratio": ratio,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
