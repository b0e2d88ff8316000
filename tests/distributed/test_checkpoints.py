"""A run saved by any strategy and number of processes goes on under any other."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_rlstab.strategies.materialize import tied_names


class Blocks(nn.Module):
    """Tied embeddings, a buffer that no checkpoint holds, and blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(1.0, 7.0), persistent=False)

    def forward(self, tokens):
        hidden = self.embed(tokens) * self.frequencies.cos()
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class TinyLM(pl.LightningModule):
    """With a frozen reference, a frozen block, and two parameter groups in an order of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.reference = Blocks().requires_grad_(False)
        self.model = Blocks()
        self.model.layers[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        half = len(batch) // self.trainer.world_size
        tokens = batch[self.global_rank * half : (self.global_rank + 1) * half]
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        small = [p for p in trained if p.ndim < 2]
        large = [p for p in trained if p.ndim >= 2]
        return torch.optim.AdamW([{"params": small, "weight_decay": 0.0}, {"params": large}], lr=0.05)


class NoDropout(TinyLM):
    """Random numbers do not carry over to another number of processes."""

    def __init__(self):
        super().__init__()
        for layer in self.model.layers:
            layer[2].p = 0.0


def loader(count):
    tokens = torch.randint(0, 11, (count, 4, 7), generator=torch.Generator().manual_seed(5))
    return torch.utils.data.DataLoader(list(tokens), batch_size=None)


def whole(tensor):
    tensor = torch.as_tensor(tensor).detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def state_of(module, trainer):
    optimizer = trainer.optimizers[0]
    return {
        "weights": {n: whole(p) for n, p in module.named_parameters()},
        "moments": [
            {k: whole(v) for k, v in optimizer.state[p].items()} for g in optimizer.param_groups for p in g["params"]
        ],
        "steps": trainer.strategy.applied_steps,
        "tied": tied_names(module.model),
    }


class StopAt(pl.Callback):
    """Ends the run after a batch, as a kill would, with a checkpoint behind it."""

    def __init__(self, batch_idx, path):
        self.batch_idx, self.path = batch_idx, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.fixture
def run(run_on_ranks, on_ranks, tmp_path):
    """Trains; ``to`` saves at the end, ``since`` resumes."""

    def fit(strategy, *, ranks, make=NoDropout, to=None, since=None, batches=3, callbacks=(), max_epochs=None):
        def work():
            module = make()
            options = {"save_distributed_checkpoint": False} if to == "file.ckpt" and "fsdp" in strategy else {}
            epochs = max_epochs or (2 if since else 1)
            trainer = on_ranks(
                strategy,
                tmp_path,
                options=options,
                max_epochs=epochs,
                callbacks=[c() for c in callbacks],
                use_distributed_sampler=False,
            )
            trainer.fit(module, loader(batches), ckpt_path=str(tmp_path / since) if since else None)
            if to:
                trainer.save_checkpoint(tmp_path / to)
            return state_of(module, trainer)

        return run_on_ranks(work, world_size=ranks)

    return fit


PLACES = [("rlstab", 1), ("rlstab_ddp", 2), ("rlstab_fsdp", 1), ("rlstab_fsdp", 2)]


@pytest.mark.parametrize(
    ("source", "ranks", "name"),
    [("rlstab", 1, "plain.ckpt"), ("rlstab_fsdp", 2, "folder.ckpt"), ("rlstab_fsdp", 2, "file.ckpt")],
)
def test_fr_114_a_run_resumes_with_another_number_of_processes_and_strategy(run, source, ranks, name):
    run(source, ranks=ranks, to=name)
    expected = run(source, ranks=ranks, since=name)[0]
    assert expected["steps"] == 6
    for strategy, count in PLACES:
        for state in run(strategy, ranks=count, since=name):
            torch.testing.assert_close(state["weights"], expected["weights"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state["moments"], expected["moments"], rtol=1e-4, atol=1e-5)
            assert state["steps"] == 6
            assert state["tied"] == [["embed.weight", "head.weight"]]


@pytest.mark.parametrize(("strategy", "ranks"), [("rlstab", 1), ("rlstab_ddp", 2), ("rlstab_fsdp", 2)])
def test_a_resumed_run_draws_the_random_numbers_the_first_would_have_drawn(run, tmp_path, strategy, ranks):
    whole_run = run(strategy, ranks=ranks, make=TinyLM, batches=4, max_epochs=2)
    run(strategy, ranks=ranks, make=TinyLM, batches=4, max_epochs=1, to="half.ckpt")
    resumed = run(strategy, ranks=ranks, make=TinyLM, batches=4, since="half.ckpt", max_epochs=2)
    for ours, theirs in zip(resumed, whole_run, strict=True):
        assert all(torch.equal(ours["weights"][n], w) for n, w in theirs["weights"].items())


def test_fr_102_a_save_within_a_callback_is_made_by_all_ranks_together(run, tmp_path):
    path = tmp_path / "within.ckpt"
    run("rlstab_fsdp", ranks=2, callbacks=[lambda: StopAt(1, path)], batches=4)
    assert (path / ".metadata").is_file()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_built_without_memory_gets_the_weights_that_rank_0_has_read(run_on_ranks, on_ranks, tmp_path, ranks):
    class Lazy(NoDropout):
        def __init__(self):
            super().__init__()
            self.model = None
            self.loads = 0

        def configure_model(self):
            def load():
                self.loads += 1
                return NoDropout().model

            if self.model is None:
                self.model = self.trainer.strategy.loaded(load, lambda: NoDropout().model)

    def work():
        module = Lazy()
        trainer = on_ranks("rlstab_fsdp", tmp_path, use_distributed_sampler=False)
        trainer.fit(module, loader(2))
        return {**state_of(module, trainer), "loads": module.loads, "buffer": module.model.frequencies.tolist()}

    lazy = run_on_ranks(work, world_size=ranks)

    def eager():
        module = NoDropout()
        trainer = on_ranks("rlstab_fsdp", tmp_path, use_distributed_sampler=False)
        trainer.fit(module, loader(2))
        return state_of(module, trainer)

    expected = run_on_ranks(eager, world_size=ranks)[0]["weights"]
    assert [state["loads"] for state in lazy] == [1, 0][:ranks]
    for state in lazy:
        assert state["buffer"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert state["tied"] == [["embed.weight", "head.weight"]]
        assert all(torch.equal(state["weights"][name], weight) for name, weight in expected.items())


def test_whole_weights_come_to_rank_0_only(run_on_ranks, on_ranks, tmp_path):
    def work():
        module = NoDropout()
        trainer = on_ranks("rlstab_fsdp", tmp_path, use_distributed_sampler=False)
        trainer.fit(module, loader(1))
        weights = trainer.strategy.full_state_dict(module.model)
        return {name: type(w).__name__ for name, w in weights.items()}, sorted(module.model.state_dict())

    (first, names), (second, _) = run_on_ranks(work)
    assert sorted(first) == names
    assert set(first.values()) == {"Tensor"}
    assert second == {}
