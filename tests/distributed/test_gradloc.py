"""GradLoc on two processes: one verdict, global addresses, and a run that reporting does not disturb."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(24)]
STEP = 3

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather is deprecated.*:FutureWarning")  # lightning's own gather


def distinct_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def same(first: Any, second: Any) -> bool:
    """Equal findings; only the work done is each rank's own."""
    return dataclasses.replace(first, cost_sweeps=0.0) == dataclasses.replace(second, cost_sweeps=0.0)


class Weights(pl.Callback):
    """This rank's pieces of the weights after every step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pieces = []
        for parameter in trainer.strategy.trainable_parameters().values():
            piece = parameter.detach()
            pieces.append((piece.to_local() if hasattr(piece, "to_local") else piece).flatten().clone())
        self.steps.append(torch.cat(pieces))


@pytest.fixture
def grpo_on_ranks(run_on_ranks, on_ranks, tiny_policy, byte_tokenizer, tmp_path):
    def fit(strategy, faults, options):
        from lightning_rlstab import GRPOModule, PromptDataModule
        from lightning_rlstab.callbacks import FireDrill, GradLoc

        module = GRPOModule(
            model=tiny_policy(),
            processing_class=byte_tokenizer,
            reward_funcs=[distinct_letters],
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
        )
        watch = Weights()
        guards = [] if options is None else [GradLoc(**{"warmup_steps": 2, "min_norm": 0.05, **options})]
        trainer = on_ranks(
            strategy,
            tmp_path / f"{strategy}-{options}",
            callbacks=[FireDrill(faults), *guards, watch],
            max_steps=STEP + 1,
            max_epochs=-1,
            accumulate_grad_batches=2,
            num_sanity_val_steps=0,
            inference_mode=False,
            log_every_n_steps=1,
        )
        trainer.fit(module, PromptDataModule(ROWS))
        finding = guards[0].last_finding if guards else None
        return finding, watch.steps

    def run(strategy, faults, options):
        return run_on_ranks(fit, strategy, faults, options)

    return run


MISMATCH = {"kind": "token_mismatch", "step": STEP, "magnitude": 400.0, "token": 1}


@pytest.mark.parametrize("strategy", ["rlstab_ddp", "rlstab_fsdp"])
@pytest.mark.parametrize(("search", "tier"), [("auto", 2), ("directional", 1)])
def test_both_ranks_name_the_same_token_of_the_second_rank(grpo_on_ranks, strategy, search, tier) -> None:
    faults = [{**MISMATCH, "rank": 1, "micro_batch": 1}]
    (first, weights), (second, others) = grpo_on_ranks(strategy, faults, {"action": "remove", "search": search})
    assert first.verdict == second.verdict == "tokens"
    assert first.tier == tier
    assert first.culprits[0].share == pytest.approx(1, abs=1e-3)  # of the whole job's gradient
    assert first.completeness == pytest.approx(1, abs=1e-3)
    assert same(first, second)
    (culprit,) = first.culprits
    assert (culprit.address.micro_batch, culprit.address.rank) == (1, 1)
    assert culprit.cause == "token_mismatch"
    assert first.is_removal_enough
    if strategy == "rlstab_ddp":
        assert torch.equal(weights[-1], others[-1])


def test_culprits_on_both_ranks_are_found_in_one_search(grpo_on_ranks) -> None:
    faults = [{**MISMATCH, "rank": 0, "micro_batch": 1}, {**MISMATCH, "rank": 1, "micro_batch": 0}]
    (finding, _), _ = grpo_on_ranks("rlstab_fsdp", faults, {"action": "remove"})
    assert {(c.address.rank, c.address.micro_batch) for c in finding.culprits} == {(0, 1), (1, 0)}
    assert finding.is_removal_enough


@pytest.mark.parametrize("search", ["auto", "directional"])
def test_reporting_leaves_the_trajectory_alone_to_the_bit_under_fsdp(grpo_on_ranks, search) -> None:
    faults = [{**MISMATCH, "rank": 1, "micro_batch": 0}]
    reported = grpo_on_ranks("rlstab_fsdp", faults, {"action": "report", "search": search})
    alone = grpo_on_ranks("rlstab_fsdp", faults, None)
    for (finding, steps), (_, plain) in zip(reported, alone, strict=True):
        assert finding.culprits
        assert all(torch.equal(a, b) for a, b in zip(steps, plain, strict=True))


def test_a_non_finite_loss_on_one_rank_is_traced_by_both(grpo_on_ranks) -> None:
    faults = [{"kind": "loss_nan", "step": STEP, "rank": 1, "micro_batch": 1}]
    (first, weights), (second, _) = grpo_on_ranks("rlstab_fsdp", faults, {"action": "remove"})
    assert first.verdict == second.verdict == "numeric"
    assert [c.address[:2] for c in first.culprits] == [(1, 1)]
    assert first.is_removal_enough
    assert weights[-1].isfinite().all()


def test_the_reference_search_finds_the_rank_by_halving(grpo_on_ranks) -> None:
    faults = [{**MISMATCH, "rank": 1, "micro_batch": 1, "magnitude": 2000.0}]
    (first, _), (second, _) = grpo_on_ranks("rlstab_fsdp", faults, {"action": "report", "search": "bisect"})
    assert same(first, second)
    assert first.tier == 3
    assert first.culprits[0].address[:2] == (1, 1)
