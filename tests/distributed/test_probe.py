"""Probes and rollouts inside a run: right numbers, and not a bit of the run changed."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

STRATEGIES = ["rlstab", "rlstab_ddp", "rlstab_fsdp"]


class Blocks(nn.Module):
    """A tied language model with dropout, small enough that float32 differences are exact to 1e-3."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class TinyLM(pl.LightningModule):
    """Keeps the window so that its losses can be run again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = Blocks()
        self.window = []

    def token_losses(self, tokens, mask=None):
        logits = self.model(tokens[:, :-1])
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        losses = losses / losses.numel()
        return losses if mask is None else torch.where(mask, losses, 0.0)

    def training_step(self, batch, batch_idx):
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.window = []
        tokens = batch[0][self.global_rank]
        self.window.append((tokens, self.trainer.strategy.captured_rng()))
        return self.token_losses(tokens).sum() * self.trainer.accumulate_grad_batches

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Prober(pl.Callback):
    """Central differences along the gradient, masked backwards, and generations of unequal lengths."""

    def __init__(self, *, is_probing=True, is_generating=True):
        self.is_probing, self.is_generating = is_probing, is_generating
        self.found = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.is_generating:
            rng = trainer.strategy.captured_rng()
            generate(trainer.strategy, pl_module, steps=2 + 3 * trainer.global_rank)
            trainer.strategy.restore_rng(rng)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.is_probing:
            return
        gate = trainer.strategy
        before = {n: local(p).clone() for n, p in gate.trainable_parameters().items()}
        grads = {n: local(p.grad).clone() for n, p in gate.trainable_parameters().items()}
        norm = gate.gradient_norms().total
        look(gate, pl_module)  # FSDP2's root keeps its whole weights after a forward without backward
        sides = [swept(gate, pl_module, sign * 1e-3 / norm) for sign in (1, -1)]
        slope = (sides[0] - sides[1]) / 2e-3
        with gate.stashed_gradients():
            for tokens, rng in pl_module.window:
                with gate.replayed_rng(rng):
                    gate.backward_of(pl_module.token_losses(tokens).sum())
            again = gate.gradient_norms().total
            inside = swept(gate, pl_module, 1e-3 / norm)  # the gradients just made point the same way
            for p in gate.trainable_parameters().values():
                p.grad = None
            aside = swept(gate, pl_module, 1e-3 / norm)
        same = all(torch.equal(before[n], local(p)) for n, p in gate.trainable_parameters().items())
        back = all(torch.equal(grads[n], local(p.grad)) for n, p in gate.trainable_parameters().items())
        look(gate, pl_module)
        self.found.append(
            {"norm": norm, "slope": slope, "again": again, "same": same and back, "sides": [sides[0], inside, aside]}
        )


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def look(gate, module):
    with gate.replayed_rng({}):
        module.token_losses(module.window[0][0])


@torch.no_grad()
def swept(gate, module, scale):
    """Mean over ranks of the window's loss at the moved weights."""
    total = 0.0
    with gate.perturbed(scale):
        for tokens, rng in module.window:
            with gate.replayed_rng(rng):
                total += module.token_losses(tokens).double().sum()
    rows = gate.all_gathered(torch.as_tensor(total))
    return float(sum(rows) / len(rows))


@torch.no_grad()
def generate(strategy, module, *, steps):
    was_training = module.training
    module.eval()
    tokens = torch.full((1, 1), module.global_rank)
    with strategy.generation_ready(module.model):
        for _ in range(steps):
            tokens = torch.cat([tokens, module.model(tokens)[:, -1:].argmax(-1)], dim=1)
    module.train(was_training)
    return tokens


def loader(count):
    tokens = torch.randint(0, 13, (count, 2, 2, 9), generator=torch.Generator().manual_seed(4))
    return torch.utils.data.DataLoader(list(tokens), batch_size=1, collate_fn=list)


def trained(on_ranks, strategy, root, callback, *, steps=10, accumulate=2):
    def work():
        torch.manual_seed(11)
        module = TinyLM()
        trainer = on_ranks(
            strategy, root, callbacks=[callback()], accumulate_grad_batches=accumulate, use_distributed_sampler=False
        )
        trainer.fit(module, loader(steps * accumulate))
        weights = {n: local(p).clone() for n, p in module.named_parameters()}
        tied = module.model.head.weight is module.model.embed.weight
        return {"weights": weights, "tied": tied, "found": getattr(trainer.callbacks[0], "found", [])}

    return work


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_probes_and_generations_are_right_and_change_no_bit_of_the_run(run_on_ranks, on_ranks, tmp_path, strategy):
    ranks = 1 if strategy == "rlstab" else 2
    probed = run_on_ranks(trained(on_ranks, strategy, tmp_path, Prober), world_size=ranks)
    plain = run_on_ranks(trained(on_ranks, strategy, tmp_path, pl.Callback), world_size=ranks)
    for ours, theirs in zip(probed, plain, strict=True):
        assert len(ours["found"]) == 10
        for probe in ours["found"]:
            assert probe["slope"] == pytest.approx(probe["norm"], rel=1e-3)
            assert probe["again"] == pytest.approx(probe["norm"], rel=1e-5)
            assert probe["sides"] == pytest.approx([probe["sides"][0]] * 3, rel=1e-6)
            assert probe["same"]
        for name, weight in theirs["weights"].items():
            assert torch.equal(ours["weights"][name], weight), name


def test_fr_111_tied_embeddings_stay_one_weight_under_sharding(run_on_ranks, on_ranks, tmp_path):
    assert all(rank["tied"] for rank in run_on_ranks(trained(on_ranks, "rlstab_fsdp", tmp_path, Prober, steps=1)))


def test_generation_before_any_forward_works_and_leaves_the_weights_sharded(run_on_ranks, on_ranks, tmp_path):
    class First(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.tokens = generate(trainer.strategy, pl_module, steps=4 + 5 * trainer.global_rank)
            self.sizes = [local(p).numel() for p in pl_module.parameters()]
            self.kinds = {type(p) for p in pl_module.parameters()}

    def work():
        first = First()
        trainer = on_ranks("rlstab_fsdp", tmp_path, callbacks=[first], use_distributed_sampler=False)
        module = TinyLM()
        whole = [p.numel() for p in module.parameters()]
        trainer.fit(module, loader(2))
        return first.tokens.shape[1], sum(first.sizes), sum(whole), [kind.__name__ for kind in first.kinds]

    short, long = run_on_ranks(work)
    assert (short[0], long[0]) == (5, 10)
    assert short[1] + long[1] == short[2]
    assert short[3] == ["DTensor"]


def test_ranks_of_unequal_lengths_generate_and_train_twenty_steps(run_on_ranks, on_ranks, tmp_path):
    make = trained(on_ranks, "rlstab_fsdp", tmp_path, lambda: Prober(is_probing=False), steps=20, accumulate=1)
    assert len(run_on_ranks(make)) == 2


def test_slow_generation_gathers_block_by_block_and_stays_in_step(run_on_ranks, on_ranks, tmp_path):
    def work():
        class Slow(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                assert trainer.strategy.is_generation_synced
                generate(trainer.strategy, pl_module, steps=3)

        options = {"generation": "sharded"}
        trainer = on_ranks("rlstab_fsdp", tmp_path, callbacks=[Slow()], options=options, use_distributed_sampler=False)
        trainer.fit(TinyLM(), loader(2))
        return trainer.strategy.applied_steps

    assert run_on_ranks(work) == [2, 2]


def test_fr_086_a_copied_state_shares_nothing_and_goes_back_bit_for_bit(run_on_ranks, on_ranks, tmp_path):
    class Rollback(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            gate = trainer.strategy
            if batch_idx == 1:
                self.copied = gate.copied_state()
                self.at_copy = [local(p).clone() for p in pl_module.parameters()]
            if batch_idx == 3:
                moved = [local(p).clone() for p in pl_module.parameters()]
                gate.put_back(self.copied)
                weights = [local(p) for p in pl_module.parameters()]
                again = gate.copied_state()
                self.result = (
                    all(torch.equal(a, b) for a, b in zip(weights, self.at_copy, strict=True)),
                    any(not torch.equal(a, b) for a, b in zip(moved, self.at_copy, strict=True)),
                    same_state(again["optimizers"], self.copied["optimizers"]),
                    pl_module.model.head.weight is pl_module.model.embed.weight,
                )

    def work(strategy):
        rollback = Rollback()
        trainer = on_ranks(strategy, tmp_path, callbacks=[rollback], use_distributed_sampler=False)
        trainer.fit(TinyLM(), loader(5))
        return rollback.result

    assert run_on_ranks(work, "rlstab", world_size=1) == [(True, True, True, True)]
    assert run_on_ranks(work, "rlstab_fsdp") == [(True, True, True, True)] * 2


def same_state(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return all(same_state(a, b) for a, b in zip(left, right, strict=True))
    return left == right
