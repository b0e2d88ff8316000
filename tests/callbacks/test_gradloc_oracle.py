"""The oracle's answers against brute force: one backward per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gradloc_oracle import StepOracle
from lightning_rlstab.gradloc.attribution import layer_shares
from lightning_rlstab.gradloc.directional import gradient_shares
from lightning_rlstab.gradloc.oracle import TokenAddress

MISMATCH = {"kind": "token_mismatch", "step": 0, "micro_batch": 1, "token": -1}


class Inquiry(pl.Callback):
    """Runs ``ask(oracle, pl_module, parameters)`` at the first optimizer step and checks that nothing moved."""

    needs_token_signals = True

    def __init__(self, ask: Callable[[StepOracle, Any, dict[str, Any]], None]) -> None:
        self.ask, self.asked = ask, 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        strategy: Any = trainer.strategy
        parameters = dict(strategy.trainable_parameters())
        before = {name: (p.detach().clone(), p.grad.clone()) for name, p in parameters.items()}
        draws = torch.get_rng_state()
        temperature = pl_module.settings.temperature
        oracle = StepOracle(pl_module, strategy, strategy.gradient_norms, rank=0, temperature=temperature)
        with oracle:
            self.ask(oracle, pl_module, {name: grad for name, (_, grad) in before.items()})
        for name, (weight, grad) in before.items():
            assert torch.equal(parameters[name].detach(), weight)
            assert oracle._is_installing or torch.equal(parameters[name].grad, grad)
        assert torch.equal(torch.get_rng_state(), draws)
        self.asked += 1


@pytest.fixture
def ask(grpo_run: Callable[..., Any]) -> Callable[..., None]:
    def run(question: Callable[[StepOracle, Any, dict[str, Any]], None], *others: pl.Callback, **settings: Any) -> None:
        inquiry = Inquiry(question)
        settings = {"per_device_train_batch_size": 4, "max_completion_length": 8, **settings}
        flags = {"max_steps": 1, "accumulate_grad_batches": 3}
        grpo_run(FireDrill([MISMATCH]), *others, inquiry, settings=settings, **flags)
        assert inquiry.asked == 1

    return run


def token_gradients(pl_module: Any, parameters: dict[str, Tensor]) -> Any:
    """Address and gradient of every token, by the module's own loss."""
    trained = [dict(pl_module.named_parameters())[name] for name in parameters]
    for entry in pl_module.window:
        mask = entry.rollout.completion_mask.bool()
        for row, token in mask.nonzero().tolist():
            alone = torch.zeros_like(mask)
            alone[row, token] = True
            loss = pl_module.token_losses(entry, token_mask=alone).sum()
            gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            yield (entry.micro_batch, 0, row, token), dict(zip(parameters, gradients, strict=True))


def inner(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return sum(float((left[name].double() * right[name].double()).sum()) for name in left)


LOSSES = [
    {},
    {"loss_type": "grpo", "beta": 0.04},
    {"loss_type": "bnpo", "temperature": 0.7},
    {"loss_type": "dr_grpo", "entropy_coef": 0.01},
    {"loss_type": "luspo", "epsilon_high": 0.3},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda settings: settings.get("loss_type", "dapo"))
def test_shares_equal_brute_force_to_a_thousandth_under_every_loss(ask: Callable[..., None], settings: Any) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        shares = gradient_shares(oracle, tolerance=0.05)
        assert shares.completeness == pytest.approx(1.0, abs=1e-3)
        square = inner(whole, whole)
        assert oracle.grad_norm == pytest.approx(math.sqrt(square), rel=1e-5)
        worst = max(
            abs(inner(gradient, whole) / square - float(shares.values[address]))
            for address, gradient in token_gradients(pl_module, whole)
        )
        assert worst < 1e-3
        assert oracle.cost_sweeps < 0.75

    ask(question, **settings)


def test_a_sequence_level_ratio_charges_each_token_with_its_own_log_prob(ask: Callable[..., None]) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        shares = gradient_shares(oracle, tolerance=0.05)
        assert shares.completeness == pytest.approx(1.0, abs=1e-3)
        entry = pl_module.window[1]
        slope = entry.constants["token_loss_slope"]
        row, token = (int(i) for i in torch.unravel_index(slope.abs().argmax(), slope.shape))
        trained = [dict(pl_module.named_parameters())[name] for name in whole]
        logprob = pl_module.token_statistics(entry.rollout).logprobs[row, token]
        gradient = torch.autograd.grad(slope[row, token] * logprob, trained, allow_unused=True, materialize_grads=True)
        share = inner(dict(zip(whole, gradient, strict=True)), whole) / inner(whole, whole)
        assert float(shares.values[1, 0, row, token]) == pytest.approx(share, abs=1e-3)

    ask(question, importance_sampling_level="sequence")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_norms_equal_autograd_for_the_untied_head(ask: Callable[..., None], temperature: float) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        for address, gradient in token_gradients(pl_module, whole):
            exact = float(gradient["policy.lm_head.weight"].norm())
            assert float(oracle.signals.head_norms[address]) == pytest.approx(exact, rel=1e-5, abs=1e-9)

    ask(question, temperature=temperature)


def test_a_tokens_norm_and_layer_profile_equal_its_own_backward(ask: Callable[..., None]) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        largest = max(token_gradients(pl_module, whole), key=lambda item: inner(item[1], item[1]))
        address, gradient = TokenAddress(*largest[0]), largest[1]
        part = oracle.subset_gradient(oracle.signals.selection(address))
        assert part.norm == pytest.approx(math.sqrt(inner(gradient, gradient)), rel=1e-5)
        blocks: dict[str, float] = {}
        for name, piece in gradient.items():
            layer = ".".join(name.split(".")[:4]) if ".layers." in name else name.rpartition(".")[0]
            blocks[layer] = blocks.get(layer, 0.0) + float(piece.double().square().sum())
        exact = {name: square / sum(blocks.values()) for name, square in blocks.items()}
        profile = dict(layer_shares(part.layers))
        assert profile.keys() == exact.keys()
        for name, share in exact.items():
            assert profile[name] == pytest.approx(share, abs=1e-5)

    ask(question)


def test_a_difference_of_kept_gradients_is_the_gradient_of_the_rest(ask: Callable[..., None]) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        left = oracle.signals.mask.clone()
        left[:, :, 2:] = False
        parent = oracle.subset_gradient(oracle.signals.mask, is_kept=True)
        part = oracle.subset_gradient(left, is_kept=True)
        right = oracle.subset_gradient(oracle.signals.mask & ~left)
        assert oracle.difference(parent, part).norm == pytest.approx(right.norm, rel=1e-4)
        assert parent.norm == pytest.approx(oracle.grad_norm, rel=1e-5)

    ask(question)


def test_what_remains_after_deducting_equals_running_the_rest_alone(ask: Callable[..., None]) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        place = TokenAddress(*(int(i) for i in torch.unravel_index(oracle.signals.head_norms.argmax(), (3, 1, 4, 8))))
        deducted = oracle.deduct(oracle.subset_gradient(oracle.signals.selection(place))).remaining_norm
        assert deducted < oracle.grad_norm
        assert oracle.rebuild_without(oracle.signals.selection(place)) == pytest.approx(deducted, rel=1e-5)

    ask(question)


def test_a_deducted_tokens_share_is_its_inner_product_with_the_gradient(ask: Callable[..., None]) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        square = inner(whole, whole)
        for address, gradient in sorted(token_gradients(pl_module, whole), key=lambda item: item[0])[:9]:
            part = oracle.subset_gradient(oracle.signals.selection(TokenAddress(*address)))
            assert oracle.deduct(part).share == pytest.approx(inner(gradient, whole) / square, abs=1e-6)

    ask(question)


def test_a_parameter_without_gradient_in_the_step_is_no_part_of_a_deduction(ask: Callable[..., None]) -> None:
    """DDP fills zeros in for unused parameters, also where the step's own gradient has none."""

    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        part = oracle.subset_gradient(oracle.signals.mask)
        name, parameter = next(iter(oracle._probe.trainable_parameters().items()))
        del oracle._gradients[name]
        parameter.grad = torch.zeros_like(parameter)
        assert oracle.deduct(part).remaining_norm == pytest.approx(0, abs=1e-4 * oracle.grad_norm)

    ask(question)


def test_starting_over_puts_the_whole_gradient_back(ask: Callable[..., None]) -> None:
    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        few = oracle.signals.mask.clone()
        few[:, :, 1:] = False
        first = oracle.deduct(oracle.subset_gradient(few))
        oracle.start_over()
        assert not oracle.deducted.any()
        assert oracle.deduct(oracle.subset_gradient(few)) == first

    ask(question)


@pytest.mark.parametrize("case", ["dropout", "tied", "checkpointing", "lora"])
def test_shares_sum_to_one_with_every_kind_of_policy(
    ask: Callable[..., None], tiny_policy: Callable[..., Any], case: str
) -> None:
    settings: dict[str, Any] = {}
    if case == "dropout":
        settings["model"] = tiny_policy(attention_dropout=0.2)
    if case == "tied":
        settings["model"] = tiny_policy(tie_word_embeddings=True)
    if case == "checkpointing":
        settings["gradient_checkpointing"] = True
    if case == "lora":
        from peft import LoraConfig

        settings["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        shares = gradient_shares(oracle, tolerance=0.05)
        assert shares.completeness == pytest.approx(1.0, abs=1e-3)
        place = TokenAddress(*(int(i) for i in torch.unravel_index(shares.values.argmax(), shares.values.shape)))
        part = oracle.subset_gradient(oracle.signals.selection(place))
        again = oracle.subset_gradient(oracle.signals.selection(place))
        assert part.norm == again.norm  # dropout is drawn as in training, every time
        assert oracle.subset_gradient(oracle.signals.mask).norm == pytest.approx(oracle.grad_norm, rel=1e-4)

    ask(question, **settings)


def test_a_dropped_micro_batch_is_no_part_of_the_step(ask: Callable[..., None]) -> None:
    class Drop(pl.Callback):
        """Takes one micro-batch's gradient out, as a guard does."""

        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            entry = pl_module.window[1]
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            losses = pl_module.token_losses(entry).sum()
            for parameter, part in zip(trained, torch.autograd.grad(losses, trained), strict=True):
                parameter.grad -= part
            entry.is_dropped = True

    def question(oracle: StepOracle, pl_module: Any, whole: dict[str, Tensor]) -> None:
        assert not oracle.signals.mask[1].any()
        shares = gradient_shares(oracle, tolerance=0.05)
        assert shares.completeness == pytest.approx(1.0, abs=1e-3)
        assert float(shares.values[1].abs().sum()) == 0

    ask(question, Drop())
