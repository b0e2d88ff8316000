"""GradLoc on a real Trainer, with faults planted by a fire drill."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.gepo import GEPO, StepGuardConfig
from lightning_rlstab.callbacks.gradloc import GradLoc
from lightning_rlstab.report.scalars import undeclared
from lightning_rlstab.strategies import RLStabSingleDevice

STEP = 4
PAD = 256
SETTINGS = {"per_device_train_batch_size": 4, "max_completion_length": 8}
FLAGS = {"max_steps": STEP + 1, "accumulate_grad_batches": 3}


def gradloc(**changes: Any) -> GradLoc:
    return GradLoc(**{"warmup_steps": 3, "min_norm": 0.1, **changes})


def fault(kind: str, **changes: Any) -> FireDrill:
    return FireDrill([{"kind": kind, "step": STEP, "micro_batch": 1, **changes}])


@pytest.fixture
def spiked(grpo_run: Callable[..., Any]) -> Callable[..., Any]:
    def run(*callbacks: pl.Callback, settings: dict[str, Any] | None = None, **flags: Any) -> Any:
        return grpo_run(*callbacks, settings={**SETTINGS, **(settings or {})}, **{**FLAGS, **flags})

    return run


def spike_of(run: Any) -> dict[str, Any]:
    (event,) = run.events("spike")
    return event


def test_a_planted_token_is_named_removed_and_told(spiked: Callable[..., Any]) -> None:
    """FR-041, FR-112: one token among many, the third micro-batch of a window, seen once per optimizer step."""
    run = spiked(fault("token_mismatch", micro_batch=2, token=3, magnitude=200.0), gradloc())
    event, drill = spike_of(run), run.events("fire_drill")[0]
    assert event["step"] == STEP
    assert event["verdict"] == "tokens"
    assert event["action"] == "removed"
    assert event["shares_of"] == "culprits"
    assert 0.8 < event["completeness"] < 1.2
    assert "rlstab/gradloc/completeness" not in run.curves  # that curve is the check of all tokens' shares
    assert event["grad_norm"] > event["threshold"] >= event["remaining_norm"]
    (culprit,) = event["culprits"]
    assert (culprit["micro_batch"], culprit["rank"]) == (2, 0)
    assert (culprit["sequence"], culprit["token"]) == (drill["sequence"], drill["token"])
    assert culprit["cause"] == "token_mismatch"
    assert culprit["importance_ratio"] == pytest.approx(200.0, rel=1e-3)
    assert culprit["share"] > 0.8
    assert sum(layer["share"] for layer in culprit["layers"]) == pytest.approx(1.0, abs=1e-6)
    assert f"[[{culprit['text']}]]" in culprit["context"]
    assert len(event["strip"]["texts"]) == len(event["strip"]["weights"])
    assert "The token was removed" in event["summary"]
    assert not undeclared(name for name in run.curves if name.startswith("rlstab/gradloc"))
    assert dict(run.curves["rlstab/gradloc/culprits"])[STEP] == 1


class Gradients(pl.Callback):
    """The gradient of every step, as the optimizer will see it before clipping."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in listed]))


class WithoutToken(pl.Callback):
    """The same fault, but the token's weight is 0: the batch without it."""

    def __init__(self, token: tuple[int, int, int]) -> None:
        self.token = token

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        micro_batch, row, token = self.token
        if trainer.global_step != STEP or len(pl_module.window) != micro_batch:
            return inputs
        weights = inputs.token_weights.clone()
        weights[row, token] = 0
        return dataclasses.replace(inputs, token_weights=weights)


@pytest.mark.parametrize("search", ["auto", "directional"])
@pytest.mark.parametrize("magnitude", [100.0, 3000.0])
def test_removing_gives_the_update_of_the_same_batch_without_the_token(
    spiked: Callable[..., Any], magnitude: float, search: str
) -> None:
    seen, expected = Gradients(), Gradients()
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    drill = {"token": 2, "magnitude": magnitude}
    run = spiked(fault("token_mismatch", **drill), gradloc(search=search), seen, settings=sgd)
    culprit = spike_of(run)["culprits"][0]
    token = (culprit["micro_batch"], culprit["sequence"], culprit["token"])
    clean = spiked(fault("token_mismatch", **drill), WithoutToken(token), expected, settings=sgd)
    difference = (seen.steps[STEP] - expected.steps[STEP]).norm() / expected.steps[STEP].norm()
    assert difference < 1e-5
    update = [r.watch.weights[3 * STEP + 2] - r.watch.weights[3 * STEP - 1] for r in (run, clean)]
    assert (update[0] - update[1]).norm() / update[1].norm() < 1e-5


@pytest.mark.parametrize("search", ["auto", "directional"])
def test_reporting_leaves_every_bit_of_the_run_alone(spiked: Callable[..., Any], search: str) -> None:
    with_it = spiked(fault("token_mismatch", magnitude=200.0), gradloc(action="report", search=search))
    without = spiked(fault("token_mismatch", magnitude=200.0))
    assert spike_of(with_it)["action"] == "reported"
    assert all(torch.equal(a, b) for a, b in zip(with_it.watch.weights, without.watch.weights, strict=True))
    assert with_it.watch.losses == without.watch.losses


@pytest.mark.parametrize("search", ["auto", "directional"])
def test_reporting_leaves_a_run_with_dropout_alone_too(
    spiked: Callable[..., Any], tiny_policy: Callable[..., Any], search: str
) -> None:
    runs = [
        spiked(
            fault("token_mismatch", magnitude=200.0), *guards, settings={"model": tiny_policy(attention_dropout=0.1)}
        )
        for guards in ([gradloc(action="report", search=search)], [])
    ]
    assert spike_of(runs[0])["culprits"]
    assert torch.equal(runs[0].weights, runs[1].weights)


def test_dormant_it_changes_nothing_and_writes_nothing(spiked: Callable[..., Any]) -> None:
    watched, plain = spiked(gradloc()), spiked()
    assert torch.equal(watched.weights, plain.weights)
    assert watched.events("spike") == []


def test_skipping_drops_the_culprits_micro_batch_only(spiked: Callable[..., Any]) -> None:
    seen = Gradients()
    run = spiked(fault("token_mismatch", magnitude=200.0), gradloc(action="skip"), seen)
    assert spike_of(run)["action"] == "micro-batch skipped"
    assert 0 < float(seen.steps[STEP].norm()) < spike_of(run)["threshold"]
    assert run.trainer.strategy.skipped_steps == 0


def test_stopping_ends_the_run_with_the_finding_in_words(spiked: Callable[..., Any], tmp_path: Path) -> None:
    from lightning_rlstab.strategies.verdict import RunStopped

    with pytest.raises(RunStopped, match=r"gradloc: gradient norm .* caused \d+% of it"):
        spiked(fault("token_mismatch", magnitude=200.0), gradloc(action="stop"))


def test_a_spike_with_nobody_to_blame_is_skipped_and_said_so(spiked: Callable[..., Any]) -> None:
    run = spiked(fault("systematic_mismatch"), gradloc())
    event = spike_of(run)
    assert event["verdict"] == "systematic"
    assert event["culprits"] == []
    assert event["action"] == "skipped"
    assert run.trainer.strategy.skipped_steps == 1


def test_a_mismatched_sequence_is_removed_whole(spiked: Callable[..., Any]) -> None:
    run = spiked(fault("sequence_mismatch", magnitude=60.0), gradloc())
    event = spike_of(run)
    assert event["verdict"] == "sequence"
    assert event["action"] == "removed"
    assert {culprit["sequence"] for culprit in event["culprits"]} == {run.events("fire_drill")[0]["sequence"]}


def test_an_exploding_layer_is_named(spiked: Callable[..., Any]) -> None:
    event = spike_of(spiked(fault("layer_explosion", layer="1", magnitude=300.0), gradloc()))
    assert event["verdict"] == "layer"
    assert event["layers"][0]["name"] == "policy.model.layers.1"
    assert event["layers"][0]["share"] > 0.9


def test_a_loss_of_nan_is_traced_to_its_token_and_removed(spiked: Callable[..., Any]) -> None:
    run = spiked(fault("loss_nan", token=1), gradloc())
    event, drill = spike_of(run), run.events("fire_drill")[0]
    assert event["verdict"] == "numeric"
    assert event["action"] == "removed"
    (culprit,) = event["culprits"]
    assert (culprit["micro_batch"], culprit["sequence"], culprit["token"]) == (1, drill["sequence"], drill["token"])
    assert culprit["cause"] == "non-finite: loss"
    assert run.weights.isfinite().all()


def test_a_gradient_of_nan_that_no_token_made_names_the_parameter(spiked: Callable[..., Any]) -> None:
    event = spike_of(spiked(fault("gradient_nan", layer="layers.1.mlp.up_proj"), gradloc()))
    assert event["verdict"] == "numeric"
    assert event["culprits"] == []
    assert "layers.1.mlp.up_proj" in event["notes"][0]
    assert event["action"] == "skipped"


class BrokenLayer(pl.Callback):
    """From one step on, one layer spoils one position of one row: in its output, or in the gradient that enters it."""

    POSITION, ROWS = -4, 4

    def __init__(self, *, is_backward: bool) -> None:
        self.is_backward = is_backward
        self.is_broken = False
        self.beginning: list[int] = []
        self.row = -1

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP and not self.is_broken:
            self.is_broken = True
            pl_module.policy.get_input_embeddings().register_forward_hook(self._read)
            pl_module.policy.model.layers[1].register_forward_hook(self._spoil)

    def _read(self, _module: Any, inputs: Any, _output: Any) -> None:
        self.ids = inputs[0]

    def _spoil(self, _module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not self.beginning and torch.is_grad_enabled() and len(self.ids) == self.ROWS:
            self.row = int((self.ids[:, -1] != PAD).int().argmax())  # a row without padding at its end
            self.beginning = self.ids[self.row, : self.POSITION].tolist()
        is_bad = torch.zeros(output.shape[:2], dtype=torch.bool)
        for row, ids in enumerate(self.ids.tolist()):
            if self.beginning and ids[: len(self.beginning)] == self.beginning:
                is_bad[row, len(self.beginning) - 1] = True
        if not self.is_backward:
            return torch.where(is_bad.unsqueeze(-1), math.nan, output)
        if output.requires_grad:
            spoilt = is_bad.unsqueeze(-1)
            output.register_hook(lambda gradient: torch.where(spoilt & (gradient != 0), math.nan, gradient))
        return None


def test_a_hidden_state_of_nan_is_followed_to_its_layer_and_to_the_token_that_brought_it(
    spiked: Callable[..., Any],
) -> None:
    broken = BrokenLayer(is_backward=False)
    run = spiked(broken, gradloc())
    event = spike_of(run)
    assert event["verdict"] == "numeric"
    (culprit,) = event["culprits"]
    assert culprit["cause"] == "non-finite: hidden_state of policy.model.layers.1"
    assert (culprit["micro_batch"], culprit["sequence"]) == (0, broken.row)
    assert culprit["token_id"] == broken.beginning[-1]
    assert event["action"] == "removed"
    assert run.weights.isfinite().all()


def test_a_gradient_that_is_nan_only_in_the_backward_is_bisected_to_its_token(spiked: Callable[..., Any]) -> None:
    broken = BrokenLayer(is_backward=True)
    run = spiked(broken, gradloc(action="report"))
    event = spike_of(run)
    assert event["tier"] == 3
    assert event["culprits"]
    for culprit in event["culprits"]:
        assert culprit["cause"] == "non-finite: backward"
        assert (culprit["micro_batch"], culprit["sequence"]) == (0, broken.row)


def test_the_reference_search_names_the_same_token(spiked: Callable[..., Any]) -> None:
    drill = {"token": 2, "magnitude": 500.0}
    ladder = spike_of(spiked(fault("token_mismatch", **drill), gradloc()))
    search = spike_of(spiked(fault("token_mismatch", **drill), gradloc(search="bisect")))
    assert search["tier"] == 3
    places = [
        [(c["micro_batch"], c["sequence"], c["token"]) for c in event["culprits"][:1]] for event in (ladder, search)
    ]
    assert places[0] == places[1]
    assert ladder["cost_sweeps"] < search["cost_sweeps"]


def test_an_exhausted_budget_is_reported(spiked: Callable[..., Any]) -> None:
    event = spike_of(spiked(fault("token_mismatch", magnitude=500.0), gradloc(search="bisect", probe_budget=3)))
    assert event["is_budget_exhausted"]
    assert event["culprits"] == []
    assert "budget" in event["notes"][0]


@pytest.mark.parametrize(("search", "tier"), [("auto", 2), ("directional", 1)])
def test_in_bf16_the_probe_runs_in_float32_and_still_names_the_token(
    spiked: Callable[..., Any], search: str, tier: int
) -> None:
    callbacks = fault("token_mismatch", token=2, magnitude=300.0), gradloc(search=search)
    run = spiked(*callbacks, precision="bf16-mixed")
    event = spike_of(run)
    drill = run.events("fire_drill")[0]
    assert event["tier"] == tier
    assert event["completeness"] == pytest.approx(1, abs=0.05)
    culprit = event["culprits"][0]
    assert (culprit["micro_batch"], culprit["sequence"], culprit["token"]) == (1, drill["sequence"], drill["token"])
    assert event["action"] == "removed"


@pytest.mark.parametrize("search", ["auto", "directional"])
def test_with_bf16_weights_the_token_is_named_and_a_check_that_fails_is_noticed(
    spiked: Callable[..., Any], tiny_policy: Callable[..., Any], search: str
) -> None:
    run = spiked(
        fault("token_mismatch", token=2, magnitude=300.0),
        gradloc(action="report", search=search),
        settings={"model": tiny_policy().to(torch.bfloat16)},
        precision="bf16-true",
    )
    event = spike_of(run)
    drill = run.events("fire_drill")[0]
    is_probed = search == "directional"  # head norms first need no probe that moves the weights
    assert event["shares_of"] == ("all tokens" if is_probed else "culprits")
    assert (abs(event["completeness"] - 1) > 0.05) == is_probed
    assert ("not trusted" in " ".join(event["notes"])) == is_probed
    assert event["tier"] == 2
    culprit = event["culprits"][0]
    assert (culprit["micro_batch"], culprit["sequence"], culprit["token"]) == (1, drill["sequence"], drill["token"])


def test_it_works_with_the_stock_strategy_of_one_device(spiked: Callable[..., Any]) -> None:
    run = spiked(fault("token_mismatch", magnitude=200.0), gradloc(), strategy=SingleDeviceStrategy("cpu"))
    ours = spiked(fault("token_mismatch", magnitude=200.0), gradloc(), strategy=RLStabSingleDevice())
    assert spike_of(run)["action"] == "removed"
    assert torch.equal(run.weights, ours.weights)


def test_a_whole_step_skipped_under_the_stock_strategy_leaves_the_weights_alone(spiked: Callable[..., Any]) -> None:
    run = spiked(fault("systematic_mismatch"), gradloc(), strategy=SingleDeviceStrategy("cpu"))
    weights = run.watch.weights
    assert spike_of(run)["action"] == "skipped"
    assert torch.equal(weights[3 * STEP + 2], weights[3 * STEP - 1])


def test_several_processes_under_a_strategy_without_probes_are_refused_by_name() -> None:
    class Two:
        world_size = 2
        strategy = SingleDeviceStrategy("cpu")

    class Policy(pl.LightningModule):
        loss_settings = None
        window: list[Any] = []  # noqa: RUF012

        def token_losses(self) -> None: ...

        def token_statistics(self) -> None: ...

    with pytest.raises(ValueError, match=r"`strategy` must offer probes .* got 'SingleDeviceStrategy'"):
        GradLoc().setup(Two(), Policy(), "fit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`GradLoc` must run with a module that keeps its window"):
        GradLoc().setup(Two(), pl.LightningModule(), "fit")  # type: ignore[arg-type]


def test_the_level_learned_survives_a_checkpoint(spiked: Callable[..., Any], tmp_path: Path) -> None:
    first = gradloc()
    run = spiked(first, max_steps=4)
    path = tmp_path / "at_four.ckpt"
    run.trainer.save_checkpoint(path)
    resumed = gradloc(trigger_factor=7.0)
    spiked(resumed, max_steps=5, ckpt_path=str(path))
    assert resumed.state.levels[:4] == first.state.levels
    assert resumed.config.factor == 7.0
    uninterrupted = gradloc()
    spiked(uninterrupted, max_steps=5)
    assert resumed.state == uninterrupted.state


def test_a_level_that_really_changed_is_accepted_in_the_end(spiked: Callable[..., Any]) -> None:
    drill = FireDrill([{"kind": "systematic_mismatch", "step": STEP, "last_step": STEP + 8, "magnitude": 30.0}])
    guard = gradloc(max_unresolved_steps=3)
    run = spiked(drill, guard, max_steps=STEP + 6)
    assert len(run.events("spike")) == 3
    assert guard.state.releases == 1
    assert run.trainer.strategy.skipped_steps == 3


class BehindTheMask(pl.Callback):
    """NaN in every closed slot of everything the loss is given."""

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        closed = ~inputs.completion_mask.bool()
        names = ("logprobs", "entropy", "old_logprobs", "behavior_logprobs")
        given = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
        return dataclasses.replace(inputs, **{n: torch.where(closed, math.nan, v) for n, v in given.items()})


def test_nan_behind_the_mask_changes_nothing_in_a_search(spiked: Callable[..., Any]) -> None:
    drill = {"token": 2, "magnitude": 200.0}
    runs = [spiked(fault("token_mismatch", **drill), *others, gradloc()) for others in ([], [BehindTheMask()])]
    found = [spike_of(run) for run in runs]
    assert found[0]["culprits"] == found[1]["culprits"]
    assert torch.equal(runs[0].weights, runs[1].weights)


def staged() -> GEPO:
    return GEPO(
        advantages=False, bounds=False, guard=StepGuardConfig(warmup_steps=3, hard_threshold=0.1, isolate="staging")
    )


def test_a_micro_batch_dropped_by_another_guard_is_searched_and_its_clean_part_given_back(
    spiked: Callable[..., Any],
) -> None:
    seen, expected = Gradients(), Gradients()
    drill = {"token": 2, "magnitude": 500.0}
    run = spiked(fault("token_mismatch", **drill), gradloc(), staged(), seen)
    assert run.events("skip", source="gepo", scope="micro_batch")
    event = spike_of(run)
    assert event["action"] == "removed"
    assert event["culprits"][0]["micro_batch"] == 1
    culprit = event["culprits"][0]
    clean = WithoutToken((1, culprit["sequence"], culprit["token"]))
    spiked(fault("token_mismatch", **drill), clean, expected)
    difference = (seen.steps[STEP] - expected.steps[STEP]).norm() / expected.steps[STEP].norm()
    assert difference < 1e-5


@pytest.mark.parametrize("search", ["auto", "directional"])
def test_in_report_mode_a_dropped_micro_batch_is_named_and_stays_dropped(
    spiked: Callable[..., Any], search: str
) -> None:
    drill = {"token": 2, "magnitude": 500.0}
    choices = ([gradloc(action="report", search=search)], [])
    runs = [spiked(fault("token_mismatch", **drill), *guards, staged()) for guards in choices]
    assert spike_of(runs[0])["action"] == "dropped"
    assert spike_of(runs[0])["culprits"]
    assert torch.equal(runs[0].weights, runs[1].weights)


class FarReference(pl.Callback):
    """The reference model is many nats away on the last token of one row, as template and end tokens can be."""

    def __init__(self, nats: float) -> None:
        self.nats = nats
        self.place: tuple[int, int, int] | None = None

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        if trainer.global_step != STEP or len(pl_module.window) != 2:
            return inputs
        reference = inputs.reference_logprobs.clone()
        token = int(inputs.completion_mask[1].sum()) - 1
        reference[1, token] = inputs.logprobs.detach()[1, token] + self.nats
        self.place = (2, 1, token)
        return dataclasses.replace(inputs, reference_logprobs=reference)


@pytest.mark.parametrize("nats", [22.6, 14.0])
def test_one_token_with_an_enormous_kl_is_named_by_gradloc(spiked: Callable[..., Any], nats: float) -> None:
    """FR-041, FR-049: one log-ratio among many tokens makes the KL term, and a tiny beta hides it in the loss."""
    far = FarReference(nats)
    # With the bias correction the gradient of k3 is bounded by the gap itself, and nothing spikes.
    settings = {"beta": 0.04, "use_bias_correction_kl": False, "max_completion_length": 24}
    run = spiked(far, gradloc(), settings=settings)
    event = spike_of(run)
    culprit = event["culprits"][0]
    assert (culprit["micro_batch"], culprit["sequence"], culprit["token"]) == far.place
    assert culprit["cause"] == "reference_gap"
    assert event["action"] == "removed"


class OtherTemperature(pl.Callback):
    """The sampler drew at temperature 1 while training takes log-probs at 0.6, and the loss is weighed by the ratio."""

    def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
        if trainer.global_step != STEP:
            return inputs
        behavior = 0.6 * inputs.logprobs.detach() - 1.0
        ratio = (inputs.logprobs.detach() - behavior).exp()
        return dataclasses.replace(inputs, behavior_logprobs=behavior, token_weights=20 * ratio.clamp(0.2, 5.0))


def test_a_sampler_at_another_temperature_is_a_systematic_cause_and_nobody_is_named(
    spiked: Callable[..., Any],
) -> None:
    """FR-067, FR-070: every token is off, so the spike has no culprit."""
    event = spike_of(spiked(OtherTemperature(), gradloc()))
    assert event["verdict"] == "systematic"
    assert event["culprits"] == []
    assert "disagree on every token" in event["summary"]


def test_without_an_update_in_between_the_ratio_is_one_to_the_last_digit(spiked: Callable[..., Any]) -> None:
    """FR-072: on-policy, the log-ratio to the start of the update is 0, and nothing is blamed on a mismatch."""

    class Ratios(pl.Callback):
        """The largest distance of a log-prob from the one at the start of the update."""

        largest = 0.0

        def on_policy_loss(self, trainer: Any, pl_module: Any, inputs: Any) -> Any:
            gap = torch.where(inputs.completion_mask.bool(), inputs.logprobs.detach() - inputs.old_logprobs, 0.0)
            self.largest = max(self.largest, float(gap.abs().max()))
            return inputs

    ratios = Ratios()
    spiked(ratios, gradloc(), settings={"num_iterations": 2}, max_steps=1)
    assert ratios.largest < 1e-6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trigger", 0.0),
        ("trigger", math.nan),
        ("trigger", "5"),
        ("trigger", True),
        ("trigger_factor", 1.0),
        ("min_norm", -1.0),
        ("warmup_steps", 0),
        ("action", "delete"),
        ("search", "fast"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    """FR-012, FR-147."""
    with pytest.raises(ValueError, match=f"`{field}` must"):
        GradLoc(**{field: value})
