"""Does GradLoc name the right tokens? Planted spikes on a real Trainer, clean steps between them, and kinds of causes.

    python benchmarks/gradloc_recall.py [--quick] [--model DIR] [--spikes 200] [--clean 200] [--causes 20]

Every spiked step holds 1 to 5 culprits at random addresses over four micro-batches: anywhere, the first token, the last
one (next to padding). A culprit is a token whose own gradient is 2 to 30 times the spike threshold, planted as a
train/inference mismatch: its loss weighs as much as its importance ratio. On the tiny model the culprits' own norms are
checked by one backward each; those under the threshold do not count as planted.

The bars: the first token named is a culprit in every spike, at least 98 % of all culprits are named, at most 0.5 % of
clean steps name anybody, and at least 95 % of the planted causes get the right verdict.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import random
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import FireDrill, GradLoc
from lightning_rlstab.control.gradloc import spike_threshold
from lightning_rlstab.core.gradloc import head_gradient_norms
from lightning_rlstab.core.policy_loss import LossInputs, policy_loss
from lightning_rlstab.strategies import RLStabSingleDevice

PLACES = ("anywhere", "anywhere", "first", "last")
KINDS = {
    "token_mismatch": "tokens",
    "sequence_mismatch": "sequence",
    "layer_explosion": "layer",
    "systematic_mismatch": "systematic",
    "numeric": "numeric",
}
NUMERIC = ("loss_nan", "gradient_nan", "gradient_inf")
MAGNITUDES = {
    "token_mismatch": 2000.0,
    "sequence_mismatch": 150.0,
    "layer_explosion": 500.0,
    "systematic_mismatch": 50.0,
}


def varied(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward with spread in nearly every group: distinct characters and length."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [len(set(text)) + 0.01 * len(text) for text in texts]


class Planter(pl.Callback):
    """Plants culprits at every second step after the warm-up and checks what GradLoc says."""

    needs_token_signals = True

    def __init__(self, gradloc: GradLoc, *, seed: int, is_exact: bool, warmup: int) -> None:
        self.gradloc, self.is_exact, self.warmup = gradloc, is_exact, warmup
        self.random = random.Random(seed)
        self.plan: list[tuple[int, str, float]] = []
        self.planted: dict[tuple[int, int, int], float] = {}
        self.body_over_head = 2.0  # full over head norm of a token; learned from what GradLoc measures
        self.results: list[dict[str, Any]] = []
        self.clean: list[int] = []

    def is_spiked(self, step: int) -> bool:
        """Whether this step gets culprits."""
        return step >= self.warmup and (step - self.warmup) % 2 == 0

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: LossInputs) -> LossInputs:
        """Draw the step's culprits, and plant those of this micro-batch."""
        micro_batch = len(pl_module.window)
        if micro_batch == 0:
            self.planted, count = {}, self.random.randint(1, 5)
            draw = self.random
            wishes = [
                (draw.randrange(trainer.accumulate_grad_batches), draw.choice(PLACES), math.exp(draw.uniform(0.7, 3.4)))
                for _ in range(count)
            ]
            self.plan = wishes if self.is_spiked(trainer.global_step) else []
        for wanted, place, times in self.plan:
            if wanted == micro_batch:
                inputs = self._planted(trainer, pl_module, inputs, place, times)
        return inputs

    def _planted(self, trainer: Any, pl_module: Any, inputs: LossInputs, place: str, times: float) -> LossInputs:
        norms = self._norms(trainer, pl_module, inputs)
        mask = inputs.completion_mask.bool()
        rows = [row for row in range(len(mask)) if bool((norms[row] > 0).any())]
        if not rows:
            return inputs
        row = self.random.choice(rows)
        places = mask[row].nonzero().flatten().tolist()
        token = {"first": places[0], "last": places[-1]}.get(place, self.random.choice(places))
        address = (len(pl_module.window), row, token)
        if address in self.planted or float(norms[row, token]) <= 0:
            return inputs
        threshold = self._threshold(pl_module)
        weight = times * threshold / (float(norms[row, token]) * self.body_over_head)
        chosen = torch.zeros_like(mask)
        chosen[row, token] = True
        before = torch.ones_like(inputs.logprobs.detach()) if inputs.token_weights is None else inputs.token_weights
        behavior = inputs.logprobs.detach() if inputs.behavior_logprobs is None else inputs.behavior_logprobs
        self.planted[address] = math.nan
        return dataclasses.replace(
            inputs,
            token_weights=torch.where(chosen, weight, before),
            behavior_logprobs=torch.where(chosen, inputs.logprobs.detach() - math.log(weight), behavior),
        )

    def _norms(self, trainer: Any, pl_module: Any, inputs: LossInputs) -> Tensor:
        """Head norms as they are without any planted weight."""
        with torch.enable_grad():
            logprobs = inputs.logprobs.detach().requires_grad_()
            free = dataclasses.replace(inputs, logprobs=logprobs, entropy=inputs.entropy.detach(), token_weights=None)
            loss = policy_loss(free, pl_module.loss_settings, accumulation=trainer.accumulate_grad_batches)
            (slope,) = torch.autograd.grad(loss.token_loss.sum(), logprobs)
        signals = pl_module.forward_signals
        logprobs = inputs.logprobs.detach()
        return head_gradient_norms(slope, logprobs, signals["sum_squared_probs"], signals["hidden_norms"])

    def _threshold(self, pl_module: Any) -> float:
        items = float(pl_module.window[0].rollout.num_items) if pl_module.window else self.items
        tokens = items * pl_module.trainer.accumulate_grad_batches / pl_module.loss_settings.steps_per_generation
        return spike_threshold(self.gradloc.config, self.gradloc.state, tokens) or 1.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the tokens of the step before: the window is empty when the first culprit is planted."""
        if pl_module.window:
            self.items = float(pl_module.window[0].rollout.num_items)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Before GradLoc looks: the planted tokens' own norms, by one backward each."""
        self.gradloc.last_finding = None
        if not self.is_exact:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for micro_batch, row, token in self.planted:
            entry = pl_module.window[micro_batch]
            alone = torch.zeros_like(entry.rollout.completion_mask.bool())
            alone[row, token] = True
            loss = pl_module.token_losses(entry, token_mask=alone).sum()
            squares = [
                g.double().square().sum()
                for g in torch.autograd.grad(loss, trained, allow_unused=True)
                if g is not None
            ]
            self.planted[micro_batch, row, token] = float(torch.stack(squares).sum().sqrt())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After GradLoc looked: compare."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step, finding = trainer.global_step - 1, self.gradloc.last_finding
        if step < self.warmup:
            return
        named = (
            [(c.address.micro_batch, c.address.sequence, c.address.token) for c in finding.culprits] if finding else []
        )
        if not self.is_spiked(step):
            self.clean.append(len(named))
            return
        threshold = finding.threshold if finding else math.inf
        planted = {place for place, norm in self.planted.items() if not norm < threshold}
        if not planted:
            return
        if finding and finding.culprits and finding.culprits[0].layers:
            self._learn(finding, pl_module)
        self.results.append(
            {
                "step": step,
                "planted": len(planted),
                "found": len(planted & set(named)),
                "is_first_right": bool(named) and named[0] in planted,
                "innocent": len([place for place in named if place not in self.planted]),
                "cost": finding.cost_sweeps if finding else 0.0,
                "verdict": finding.verdict if finding else "no trigger",
                "tier": finding.tier if finding else None,
            }
        )

    def _learn(self, finding: Any, pl_module: Any) -> None:
        first = finding.culprits[0]
        entry = pl_module.window[first.address.micro_batch]
        constants, place = entry.constants, (first.address.sequence, first.address.token)
        head = head_gradient_norms(
            constants["token_loss_slope"][place],
            constants["logprobs"][place],
            constants["sum_squared_probs"][place],
            constants["hidden_norms"][place],
        )
        if first.grad_norm and float(head) > 0:
            self.body_over_head = 0.8 * self.body_over_head + 0.2 * first.grad_norm / float(head)


def tiny_policy(tokenizer: Any) -> Any:
    """A two-layer Llama built in code."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    policy = LlamaForCausalLM(config)
    with torch.no_grad():  # peaked distributions, as a trained model has
        policy.lm_head.weight.mul_(8.0)
    return policy


def byte_tokenizer() -> Any:
    """256 bytes and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in ("<pad>", "<bos>", "<eos>"):
        vocab[special] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def built(options: argparse.Namespace, callbacks: list[pl.Callback], steps: int, folder: Path) -> tuple[Any, Any, Any]:
    """Trainer, module and data of one measurement."""
    if options.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        policy = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True, dtype=torch.float32)
        rows, generations, width, iterations = 4, 4, options.width or 24, 20
    else:
        tokenizer = byte_tokenizer()
        policy, rows, generations, width, iterations = tiny_policy(tokenizer), 4, 4, options.width or 24, 4
    module = GRPOModule(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=[varied],
        num_generations=generations,
        per_device_train_batch_size=rows,
        max_completion_length=width,
        num_iterations=iterations,
        lr_scheduler_type="constant",
        seed=options.seed,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-9),  # the weights stay; no state to hold
    )
    data = PromptDataModule([{"prompt": f"What is {a} plus {b}?"} for a in range(20) for b in range(20)])
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        strategy=RLStabSingleDevice(),
        accumulate_grad_batches=4 if not options.model else 2,
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        inference_mode=False,
    )
    return trainer, module, data


def recall(options: argparse.Namespace) -> dict[str, Any]:
    """Planted tokens and clean steps in turn."""
    gradloc = GradLoc(action="report", min_norm=0.0, warmup_steps=options.warmup - 2)
    planter = Planter(gradloc, seed=options.seed, is_exact=not options.model, warmup=options.warmup)
    steps = options.warmup + 2 * max(options.spikes, options.clean)
    with tempfile.TemporaryDirectory() as folder:
        trainer, module, data = built(options, [planter, gradloc], steps, Path(folder))
        trainer.fit(module, data)
    results = planter.results[: options.spikes]
    planted = sum(result["planted"] for result in results)
    clean = planter.clean[: options.clean]
    return {
        "spikes": len(results),
        "first_right": sum(result["is_first_right"] for result in results),
        "culprits": planted,
        "culprits_found": sum(result["found"] for result in results),
        "innocents_named": sum(result["innocent"] for result in results),
        "clean_steps": len(clean),
        "false_alarms": sum(count > 0 for count in clean),
        "mean_cost_sweeps": round(sum(result["cost"] for result in results) / max(len(results), 1), 3),
        "largest_cost_sweeps": round(max((result["cost"] for result in results), default=0.0), 3),
        "missed": [result for result in results if result["found"] < result["planted"] or not result["is_first_right"]],
    }


def causes(options: argparse.Namespace) -> dict[str, Any]:
    """Kinds of faults at random addresses, and the verdicts they get."""
    draw = random.Random(options.seed)
    accumulation = 4 if not options.model else 2
    faults = []
    for index in range(options.causes * len(KINDS)):
        kind = list(KINDS)[index % len(KINDS)]
        chosen = draw.choice(NUMERIC) if kind == "numeric" else kind
        fault = {
            "kind": chosen,
            "step": options.warmup + 2 * index,
            "micro_batch": draw.randrange(accumulation),
            "token": draw.randrange(12),
            "layer": str(draw.randrange(2)) if chosen == "layer_explosion" else None,
            "magnitude": MAGNITUDES.get(chosen, 1.0) * math.exp(draw.uniform(0.0, 1.0)),
        }
        faults.append({name: value for name, value in fault.items() if value is not None})
    gradloc = GradLoc(action="report", min_norm=0.0, warmup_steps=options.warmup - 2)
    verdicts: dict[int, str] = {}

    class Note(pl.Callback):
        """Keeps each step's verdict."""

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if gradloc.last_finding is not None:
                verdicts[trainer.global_step - 1], gradloc.last_finding = gradloc.last_finding.verdict, None

    with tempfile.TemporaryDirectory() as folder:
        steps = options.warmup + 2 * len(faults)
        trainer, module, data = built(options, [FireDrill(faults), gradloc, Note()], steps, Path(folder))
        trainer.fit(module, data)
    table: dict[str, dict[str, int]] = {}
    for fault in faults:
        kind = "numeric" if fault["kind"] in NUMERIC else fault["kind"]
        verdict = verdicts.get(fault["step"], "no trigger")
        row = table.setdefault(kind, {})
        row[verdict] = row.get(verdict, 0) + 1
    right = sum(row.get(KINDS[kind], 0) for kind, row in table.items())
    return {"causes": len(faults), "causes_right": right, "verdicts": table}


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 spikes, 20 clean steps, 3 of each cause")
    parser.add_argument("--model", default="", help="directory of a causal language model; default: a tiny Llama")
    parser.add_argument("--spikes", type=int, default=200)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--causes", type=int, default=20, help="faults of each kind; 0 for none")
    parser.add_argument("--warmup", type=int, default=12, help="clean steps while the level is learned")
    parser.add_argument("--width", type=int, default=0, help="longest completion in tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.spikes, options.clean, options.causes = 20, 20, 3
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    measured = recall(options)
    found = measured["culprits_found"] / max(measured["culprits"], 1)
    is_right = measured["first_right"] == measured["spikes"] and found >= 0.98
    is_silent = measured["false_alarms"] <= 0.005 * measured["clean_steps"]
    if options.causes:
        measured |= causes(options)
    are_causes_right = measured.get("causes_right", 0) >= 0.95 * measured.get("causes", 0)
    record = {
        "name": "gradloc_recall",
        "value": round(found, 4),
        "bar": 0.98,
        "ok": is_right and is_silent and are_causes_right,
        "model": Path(options.model).name if options.model else "two-layer Llama",
        **measured,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
