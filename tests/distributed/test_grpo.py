"""GRPOModule under every strategy: the joined batch, real rollouts of unequal lengths, guards and probes."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import GEPO, OPEFO, QUATRO, GradLoc
from lightning_rlstab.control.opefo import SnapshotConfig
from lightning_rlstab.control.parameters import local
from lightning_rlstab.rollout.sampler import Samples
from lightning_rlstab.strategies.materialize import tied_names

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]


class Scripted:
    """Completions that depend on the prompt and the place in its group only, of unequal lengths."""

    def sample(self, policy, prompt_ids, prompt_mask, *, settings, seed=None):
        rows, width = len(prompt_ids), settings.max_completion_length
        places = prompt_mask.long().flip(1).cumsum(1).flip(1)  # from the right: padding on the left changes nothing
        kinds = (torch.where(prompt_mask, prompt_ids, 0) * 7**places).sum(1)
        seen: dict[int, int] = {}
        ids = torch.full((rows, width), 258)
        lengths = []
        for row, kind in enumerate(kinds.tolist()):
            place = seen[kind] = seen.get(kind, -1) + 1
            generator = torch.Generator().manual_seed(1000 * kind + place)
            ids[row] = torch.randint(20, 90, (width,), generator=generator)
            lengths.append(2 + (kind + 3 * place) % (width - 2))
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        return Samples(
            completion_ids=torch.where(mask, ids, 256),
            completion_mask=mask,
            is_truncated=torch.zeros(rows, dtype=torch.bool),
            behavior_logprobs=torch.where(mask, -4.0, 0.0),
        )


def letters(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Curves(pl.Callback):
    """Loss of every micro-batch, norms and gradient of every optimizer step."""

    def __init__(self):
        self.losses, self.norms, self.gradients = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(trainer.strategy.gradient_norms())
        self.gradients.append({n: whole(p.grad) for n, p in trainer.strategy.trainable_parameters().items()})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


@pytest.fixture
def grpo(run_on_ranks, on_ranks, tmp_path, tiny_policy, byte_tokenizer):
    """Trains GRPOModule for some steps on one or two processes."""

    def run(strategy, *, ranks, rows, accumulate=1, steps=5, callbacks=(), sampler=Scripted, settings=None, **flags):
        def work():
            curves = Curves()
            made = [make() for make in callbacks]
            trainer = on_ranks(
                strategy,
                tmp_path,
                callbacks=[curves, *made],
                max_steps=steps,
                max_epochs=-1,
                accumulate_grad_batches=accumulate,
                num_sanity_val_steps=0,
                **flags,
            )
            module = GRPOModule(
                model=tiny_policy(tie_word_embeddings=True),
                reward_funcs=[letters],
                processing_class=byte_tokenizer,
                sampler=sampler() if sampler else None,
                num_generations=4,
                per_device_train_batch_size=rows,
                max_completion_length=8,
                learning_rate=1e-2,
                **(settings or {}),
            )
            trainer.fit(module, PromptDataModule(ROWS))
            return {
                "losses": curves.losses,
                "norms": curves.norms,
                "gradients": curves.gradients,
                "weights": {n: whole(p) for n, p in module.named_parameters()},
                "counts": (trainer.strategy.applied_steps, trainer.strategy.skipped_steps),
                "found": [getattr(callback, "found", None) for callback in made],
                "tied": bool(tied_names(module.policy)),
            }

        return run_on_ranks(work, world_size=ranks)

    return run


@pytest.mark.parametrize("accumulate", [1, 3])
def test_grpo_on_two_processes_equals_one_on_the_joined_batch(grpo, accumulate):
    # plain descent: AdamW divides by the root of a squared gradient, and where that is tiny, rounding decides
    settings = {"beta": 0.04, "loss_type": "dapo", "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    one = grpo("rlstab", ranks=1, rows=8, accumulate=accumulate, settings=settings)[0]
    for strategy in ("rlstab_ddp", "rlstab_fsdp"):
        both = grpo(strategy, ranks=2, rows=4, accumulate=accumulate, settings=settings)
        for rank in both:
            assert rank["counts"] == (5, 0)
            torch.testing.assert_close(rank["gradients"], one["gradients"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-5, atol=1e-5)
        joined = torch.tensor([rank["losses"] for rank in both]).mean(0).split(accumulate)
        for ours, theirs in zip(joined, torch.tensor(one["losses"]).split(accumulate), strict=True):
            torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=1e-5, atol=1e-5)


def test_grpo_samples_completions_of_unequal_lengths_under_sharding_for_twenty_steps(grpo):
    both = grpo("rlstab_fsdp", ranks=2, rows=4, steps=20, sampler=None, settings={"beta": 0.02})
    for rank in both:
        assert rank["counts"] == (20, 0)
        assert rank["tied"]
    assert both[0]["norms"] == both[1]["norms"]


class Localizer(pl.Callback):
    """The central difference of the whole window, run again token by token."""

    def __init__(self):
        self.found = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        probe = trainer.strategy
        norm = probe.gradient_norms().total
        sides = []
        with torch.no_grad():
            for sign in (1, -1):
                with probe.perturbed(sign * 1e-3 / norm):
                    own = sum(pl_module.token_losses(entry).double().sum() for entry in pl_module.window)
                rows = probe.all_gathered(own)
                sides.append(float(sum(rows) / len(rows)))
        self.found.append(((sides[0] - sides[1]) / 2e-3, norm))


@pytest.mark.parametrize(("strategy", "ranks"), [("rlstab", 1), ("rlstab_ddp", 2), ("rlstab_fsdp", 2)])
def test_token_losses_under_a_probe_give_the_norm_of_the_gradient(grpo, strategy, ranks):
    # on policy the ratio is 1 whatever the weights: only against old log-probs does the value move along with them
    settings = {"num_iterations": 2}
    for rank in grpo(strategy, ranks=ranks, rows=4, accumulate=2, steps=3, callbacks=[Localizer], settings=settings):
        for slope, norm in rank["found"][0]:
            assert slope == pytest.approx(norm, rel=1e-3)


class DropSecond(pl.Callback):
    """Drops the second micro-batch of every window, and looks at the marks afterwards."""

    def __init__(self):
        self.found, self.seen = [], 0

    def is_staging_needed(self, trainer):
        return True

    def on_micro_batch_gradient(self, trainer, pl_module, norms):
        self.seen += 1
        return self.seen % 3 != 2

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found.append([entry.is_dropped for entry in pl_module.window])


@pytest.mark.parametrize(("strategy", "ranks"), [("rlstab", 1), ("rlstab_fsdp", 2)])
def test_fr_112_a_dropped_micro_batch_is_marked_in_the_window(grpo, strategy, ranks):
    for rank in grpo(strategy, ranks=ranks, rows=4, accumulate=3, steps=2, callbacks=[DropSecond]):
        assert rank["found"][0] == [[False, True, False]] * 2


def test_a_lora_adapter_trains_and_samples_under_sharding_with_its_base_as_reference(grpo):
    settings = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), "beta": 0.04}
    both = grpo("rlstab_fsdp", ranks=2, rows=4, steps=3, sampler=None, settings=settings)
    for rank in both:
        assert rank["counts"] == (3, 0)
        trained = [name for name, norm in rank["norms"][0].per_parameter.items() if norm > 0]
        assert trained
        assert all("lora" in name for name in trained)
    assert both[0]["norms"] == both[1]["norms"]


class SpoilWeights(pl.Callback):
    """NaN in the weights behind every guard's back, once."""

    def __init__(self):
        self.attempts = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.attempts += 1
        if self.attempts == 4:
            with torch.no_grad():
                local(optimizer.param_groups[0]["params"][0])[0] = float("nan")


def test_all_layers_together_roll_a_spoilt_sharded_run_back(grpo):
    layers = [GradLoc, GEPO, lambda: OPEFO(snapshots=SnapshotConfig(every_steps=2, recovery_steps=2)), QUATRO]
    both = grpo(
        "rlstab_fsdp",
        ranks=2,
        rows=4,
        accumulate=2,
        steps=7,
        sampler=None,
        settings={"beta": 0.04},
        callbacks=[*layers, SpoilWeights],
    )
    for rank in both:
        assert all(weight.isfinite().all() for weight in rank["weights"].values())
        assert all(torch.equal(weight, both[0]["weights"][name]) for name, weight in rank["weights"].items())


def test_fr_152_gradient_clip_val_of_the_trainer_works_with_the_module(grpo):
    for rank in grpo("rlstab_fsdp", ranks=2, rows=4, steps=2, gradient_clip_val=0.5, settings={"max_grad_norm": 0.5}):
        assert rank["counts"] == (2, 0)
