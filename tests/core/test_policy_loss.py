from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlstab.core.logprobs import token_statistics
from lightning_rlstab.core.policy_loss import (
    LossInputs,
    LossSettings,
    adaptive_entropy_coef,
    applied_entropy_coef,
    entropy_threshold,
    merged_readings,
    policy_loss,
)
from lightning_rlstab.core.ratio_correction import RATIO_MODES
from lightning_rlstab.core.surrogates import LOSS_FAMILIES

LOSS_TYPES = tuple(LOSS_FAMILIES)
LEVELS = ("token", "sequence")
CONSTANTS = ("old_logprobs", "behavior_logprobs", "reference_logprobs")
INF, NAN = math.inf, math.nan


def everything_on(loss_type, level="token", **changes):
    """Settings with every term of the loss switched on."""
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.1,
        "entropy_coef": 0.01,
        "off_policy_mask_threshold": 0.5,
        "top_entropy_quantile": 0.75,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "max_completion_length": 8,
    }
    return LossSettings(**{**options, **changes})


def batch(rows=4, time=5, *, seed=0, dtype=torch.float32, **changes):
    """A micro-batch with ragged rows; logprobs and entropy are leaves."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale):
        return torch.randn(rows, time, generator=g, dtype=torch.float64) * scale

    logprobs = -2 + noise(0.5).clamp(max=1.5)
    mask = torch.arange(time) < torch.randint(1, time + 1, (rows, 1), generator=g)
    values = {
        "logprobs": logprobs.to(dtype).clone().requires_grad_(),
        "entropy": noise(0.3).abs().to(dtype).requires_grad_(),
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=g).to(dtype),
        "old_logprobs": (logprobs + noise(0.3)).to(dtype),
        "behavior_logprobs": (logprobs + noise(0.3)).to(dtype),
        "reference_logprobs": (logprobs + noise(0.3)).to(dtype),
        "num_items": float(mask.sum()),
    }
    return LossInputs(**{**values, **changes})


def evaluated(inputs, loss_settings, **options):
    """Loss, gradients of logprobs and entropy (zeros where unused), and readings."""
    made = policy_loss(inputs, loss_settings, **{"accumulation": 1, **options})
    grads = torch.autograd.grad(made.loss, [inputs.logprobs, inputs.entropy], allow_unused=True)
    filled = [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip((inputs.logprobs, inputs.entropy), grads, strict=True)
    ]
    return made, *filled


# The slow twin --------------------------------------------------------------------------------------------------------

FLOATS = st.floats(-4, -0.05)
OPTIONS = {
    "loss_type": st.sampled_from(LOSS_TYPES),
    "level": st.sampled_from(LEVELS),
    "beta": st.sampled_from([0.0, 0.3]),
    "is_kl_weighted": st.booleans(),
    "delta": st.sampled_from([None, 1.5]),
    "epsilon_high": st.sampled_from([0.2, 0.4]),
    "entropy_coef": st.sampled_from([0.0, 0.1]),
    "off_policy_threshold": st.sampled_from([None, 0.2]),
    "top_share": st.sampled_from([1.0, 0.5]),
    "ratio_mode": st.sampled_from([None, *RATIO_MODES]),
    "clip_min": st.sampled_from([0.0, 0.4]),
    "slices": st.sampled_from([1, 4]),
    "accumulation": st.sampled_from([1, 2]),
    "world_size": st.sampled_from([1, 2]),
}


@st.composite
def twin_rows(draw):
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 4))
        columns = [draw(st.lists(FLOATS, min_size=length, max_size=length)) for _ in range(4)]
        # Eighths, so that a quantile that falls on a token's entropy falls on it in both precisions.
        entropy = [draw(st.integers(0, 24)) / 8 for _ in range(length)]
        rows.append((draw(st.floats(-2, 2)), *columns, entropy))
    return rows


def padded(rows, column, fill):
    width = max(1, *(len(row[1]) for row in rows))
    return torch.tensor([list(row[column]) + [fill] * (width - len(row[1])) for row in rows], dtype=torch.float64)


@settings(max_examples=300, deadline=None)
@given(rows=twin_rows(), drawn=st.fixed_dictionaries(OPTIONS))
def test_every_loss_equals_its_slow_twin(twin, rows, drawn):
    if drawn["loss_type"] == "vespo" and str(drawn["ratio_mode"]).startswith("sequence"):
        drawn["ratio_mode"] = None
    items = sum(len(row[1]) for row in rows) + 3
    options = twin.Options(**drawn, num_items=items)
    expected = twin.loss([twin.Row(*row) for row in rows], options)
    inputs = LossInputs(
        logprobs=padded(rows, 1, NAN),
        entropy=padded(rows, 5, NAN),
        completion_mask=~padded(rows, 1, NAN).isnan(),
        advantages=torch.tensor([row[0] for row in rows], dtype=torch.float64),
        old_logprobs=padded(rows, 2, NAN),
        behavior_logprobs=padded(rows, 3, INF),
        reference_logprobs=padded(rows, 4, -INF),
        num_items=items,
    )
    loss_settings = LossSettings(
        loss_type=drawn["loss_type"],
        importance_sampling_level=drawn["level"],
        epsilon_high=drawn["epsilon_high"],
        delta=drawn["delta"],
        beta=drawn["beta"],
        use_bias_correction_kl=drawn["is_kl_weighted"],
        entropy_coef=drawn["entropy_coef"],
        off_policy_mask_threshold=drawn["off_policy_threshold"],
        top_entropy_quantile=drawn["top_share"],
        vllm_importance_sampling_correction=drawn["ratio_mode"] is not None,
        vllm_importance_sampling_mode=drawn["ratio_mode"] or "token_mask",
        vllm_importance_sampling_clip_min=drawn["clip_min"] or None,
        max_completion_length=16,
        steps_per_generation=drawn["slices"],
    )
    made = policy_loss(inputs, loss_settings, accumulation=drawn["accumulation"], world_size=drawn["world_size"])
    assert made.loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_pass_gradcheck(loss_type, level):
    loss_settings = everything_on(loss_type, level, entropy_coef=0.1, epsilon_high=0.3)
    inputs = batch(rows=3, time=4, seed=3, dtype=torch.float64)
    # What the loss holds constant (CISPO's and VESPO's weights) has to be constant for the check as well.
    if loss_type in ("cispo", "vespo"):
        loss_settings = dataclasses.replace(loss_settings, use_bias_correction_kl=False)
        check = _held_weight_loss(loss_type, inputs, loss_settings)
    else:

        def check(logprobs, entropy):
            threshold = entropy_threshold(inputs.entropy, inputs.completion_mask, 0.75)
            given = dataclasses.replace(inputs, logprobs=logprobs, entropy=entropy, entropy_threshold=threshold)
            return policy_loss(given, loss_settings, accumulation=2).token_loss

    assert torch.autograd.gradcheck(check, (inputs.logprobs, inputs.entropy), eps=1e-6, atol=1e-6)


def _held_weight_loss(loss_type, inputs, loss_settings):
    """Token loss without the policy term, whose gradient is by definition -weight * A on the log-probability."""

    def check(logprobs, entropy):
        threshold = entropy_threshold(inputs.entropy, inputs.completion_mask, 0.75)
        given = dataclasses.replace(
            inputs,
            logprobs=logprobs,
            entropy=entropy,
            entropy_threshold=threshold,
            advantages=torch.zeros_like(inputs.advantages),
        )
        return policy_loss(given, loss_settings, accumulation=2).token_loss

    return check


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_weights_of_log_probability_losses_carry_no_gradient(loss_type):
    inputs = batch(seed=4)
    made, grad, _ = evaluated(inputs, LossSettings(loss_type=loss_type, epsilon_high=1.1))
    per_logprob = (made.token_loss / inputs.logprobs).detach()
    assert torch.allclose(grad, torch.where(inputs.completion_mask, per_logprob, 0.0), rtol=1e-5)


# The closed door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
def test_poison_behind_the_mask_changes_nothing(loss_type, level, poison):
    loss_settings = everything_on(loss_type, level)
    clean = batch(seed=5, advantages=torch.randn(4, 5, generator=torch.Generator().manual_seed(6)))
    fields = ("logprobs", "entropy", "advantages", "old_logprobs", "behavior_logprobs", "reference_logprobs")
    poisoned = dataclasses.replace(
        clean,
        **{
            name: torch.where(clean.completion_mask, getattr(clean, name).detach(), poison).requires_grad_()
            for name in fields
        },
    )
    for expected, got in zip(evaluated(clean, loss_settings)[1:], evaluated(poisoned, loss_settings)[1:], strict=True):
        assert torch.equal(torch.where(clean.completion_mask, expected, 0.0), got)
    left, right = evaluated(clean, loss_settings)[0], evaluated(poisoned, loss_settings)[0]
    assert torch.equal(left.token_loss, right.token_loss)
    assert all(torch.equal(left.readings[name], right.readings[name]) for name in left.readings)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
def test_a_token_weight_of_zero_closes_the_token(loss_type, level, poison):
    inputs = batch(seed=7)
    weights = torch.ones(4, 5)
    weights[0, 0] = 0.0
    broken = inputs.logprobs.detach().clone()
    broken[0, 0] = poison
    closed = dataclasses.replace(inputs, logprobs=broken.requires_grad_(), token_weights=weights)
    made, grad, _ = evaluated(closed, everything_on(loss_type, level))
    assert made.token_loss[0, 0] == 0
    assert grad[0, 0] == 0
    assert grad.isfinite().all()


def test_token_weights_scale_the_token_loss_and_leave_the_normaliser():
    inputs = batch(seed=8)
    plain = policy_loss(inputs, LossSettings(beta=0.1), accumulation=1).token_loss
    halved = dataclasses.replace(inputs, token_weights=torch.full((4, 5), 0.5))
    assert torch.allclose(policy_loss(halved, LossSettings(beta=0.1), accumulation=1).token_loss, plain / 2)


def test_fr030_a_nan_behind_the_mask_is_the_same_as_no_slot():
    def loss_of(old, mask):
        width = len(old)
        inputs = LossInputs(
            logprobs=torch.full((1, width), -1.0, requires_grad=True),
            entropy=torch.ones(1, width),
            completion_mask=torch.tensor([mask]),
            advantages=torch.tensor([1.0]),
            old_logprobs=torch.tensor([old]),
            num_items=1,
        )
        return policy_loss(inputs, LossSettings(), accumulation=1)

    assert torch.equal(loss_of([0.0, NAN], [1, 0]).loss, loss_of([0.0], [1]).loss)
    visible = loss_of([0.0, NAN], [1, 1])
    assert visible.loss.isnan()
    assert visible.readings["non_finite_tokens_count"] == 1


@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "reference_logprobs", "advantages"])
@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
def test_fr030_a_nan_on_an_open_token_stays_visible_whatever_else_is_masked(loss_type, level, field):
    inputs = batch(seed=9, advantages=-torch.ones(4, 5), completion_mask=torch.ones(4, 5, dtype=torch.bool))
    broken = getattr(inputs, field).detach().clone()
    broken[1, 2] = NAN
    made = policy_loss(dataclasses.replace(inputs, **{field: broken}), everything_on(loss_type, level), accumulation=1)
    assert made.loss.isnan()
    assert made.readings["non_finite_tokens_count"] >= 1


def test_a_token_that_the_sampler_could_not_score_gets_no_correction_and_is_counted():
    inputs = batch(seed=10, completion_mask=torch.ones(4, 5, dtype=torch.bool))
    behavior = inputs.old_logprobs.clone()
    behavior[0, 1] = NAN
    inputs = dataclasses.replace(inputs, behavior_logprobs=behavior)
    made = policy_loss(inputs, everything_on("dapo"), accumulation=1)
    assert made.loss.isfinite()
    assert made.readings["unscored_tokens_count"] == 1
    assert made.readings["sampling_logp_difference_count"] == 19
    assert made.readings["importance_sampling_ratio_max"] == 1


EXTREMES = [(0.0, -100.0), (-100.0, 0.0), (-INF, -1.0), (-1.0, -INF), (-INF, -INF), (-1e30, 0.0)]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(("policy", "other"), EXTREMES)
@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
def test_extreme_log_ratios_give_finite_losses_and_gradients(loss_type, level, policy, other, advantage):
    open_inputs = batch(seed=11, advantages=torch.full((4,), advantage))

    def pinned(values, value):
        changed = values.detach().clone()
        changed[:, 0] = value
        return changed

    extreme = dataclasses.replace(
        open_inputs,
        logprobs=pinned(open_inputs.logprobs, policy).requires_grad_(),
        old_logprobs=pinned(open_inputs.old_logprobs, other),
        behavior_logprobs=pinned(open_inputs.behavior_logprobs, other),
        reference_logprobs=pinned(open_inputs.reference_logprobs, other),
    )
    plain = LossSettings(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    for loss_settings in (plain, everything_on(loss_type, level)):
        made, grad, entropy_grad = evaluated(extreme, loss_settings)
        assert made.loss.isfinite()
        assert grad.isfinite().all()
        assert entropy_grad.isfinite().all()
        assert all(value.isfinite() for name, value in made.readings.items() if not name.endswith(("_min", "_max")))


def test_a_clipped_runaway_token_has_a_gradient_of_exactly_zero():
    inputs = LossInputs(
        logprobs=torch.tensor([[0.0]], requires_grad=True),
        entropy=torch.zeros(1, 1, requires_grad=True),
        completion_mask=torch.ones(1, 1),
        advantages=torch.tensor([1.0]),
        old_logprobs=torch.tensor([[-100.0]]),
        num_items=1,
    )
    made, grad, _ = evaluated(inputs, LossSettings())
    assert made.loss.item() == pytest.approx(-1.2)
    assert grad.item() == 0.0
    assert made.readings["saturated_tokens_count"] == 1


# Normalisers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
@pytest.mark.parametrize("level", LEVELS)
def test_fr006_cutting_sixteen_rollouts_into_micro_batches_changes_no_gradient(loss_type, level):
    g = torch.Generator().manual_seed(12)
    weight = (torch.randn(6, 11, generator=g) * 0.5).requires_grad_()
    features = torch.randn(16, 7, 6, generator=g)
    tokens = torch.randint(11, (16, 7), generator=g)
    mask = torch.arange(7) < torch.randint(1, 8, (16, 1), generator=g)
    advantages = torch.randn(16, generator=g)
    old = token_statistics(features @ weight, tokens).logprobs.detach() + 0.2 * torch.randn(16, 7, generator=g)
    threshold = 2.0

    def gradient(accumulation):
        loss_settings = LossSettings(
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=0.1,
            top_entropy_quantile=0.5,
            max_completion_length=7,
            steps_per_generation=accumulation,
        )
        total = torch.zeros_like(weight)
        for rows in torch.arange(16).chunk(accumulation):
            stats = token_statistics(features[rows] @ weight, tokens[rows])
            inputs = LossInputs(
                logprobs=stats.logprobs,
                entropy=stats.entropy,
                completion_mask=mask[rows],
                advantages=advantages[rows],
                old_logprobs=old[rows],
                reference_logprobs=old[rows] - 0.1,
                entropy_threshold=threshold,
                num_items=mask.sum(),
            )
            loss = policy_loss(inputs, loss_settings, accumulation=accumulation).loss
            total += torch.autograd.grad(loss, weight)[0]
        return total

    whole = gradient(1)
    assert whole.norm() > 0
    for accumulation in (2, 4):
        assert (gradient(accumulation) - whole).norm() <= 1e-5 * whole.norm()


def test_fr060_short_micro_batches_do_not_weigh_too_much():
    losses = [(100, 2.0), (900, 0.5)]
    total = 0.0
    for tokens, value in losses:
        inputs = LossInputs(
            logprobs=torch.full((1, tokens), -1.0),
            entropy=torch.zeros(1, tokens),
            completion_mask=torch.ones(1, tokens),
            advantages=torch.tensor([-value]),
            num_items=1000,
        )
        total += policy_loss(inputs, LossSettings(steps_per_generation=2), accumulation=2).loss.item()
    assert total == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("loss_type", "kept"), [("dapo", [1, 0]), ("bnpo", [1, 0]), ("dapo", [0, 0]), ("bnpo", [0, 0])]
)
def test_fr063_masked_answers_leave_the_denominator_and_an_empty_batch_is_no_0_over_0(loss_type, kept):
    mask = torch.tensor(kept).unsqueeze(1).expand(2, 100)
    inputs = LossInputs(
        logprobs=torch.full((2, 100), -1.0, requires_grad=True),
        entropy=torch.zeros(2, 100, requires_grad=True),
        completion_mask=mask,
        advantages=torch.tensor([-1.0, -1.0]),
        num_items=mask.sum(),
    )
    made, grad, _ = evaluated(inputs, LossSettings(loss_type=loss_type))
    assert made.loss.item() == pytest.approx(1.0 if any(kept) else 0.0)
    assert grad.sum().item() == pytest.approx(1.0 if any(kept) else 0.0)
    assert made.readings["token_count"] == 100 * sum(kept)


@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
def test_fr131_a_batch_without_tokens_has_loss_zero_gradient_zero_and_finite_counts(loss_type, level):
    inputs = batch(seed=13, completion_mask=torch.zeros(4, 5, dtype=torch.bool), num_items=0)
    made, grad, entropy_grad = evaluated(inputs, everything_on(loss_type, level))
    assert made.loss.item() == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert torch.equal(entropy_grad, torch.zeros_like(entropy_grad))
    assert all(value.isfinite() for name, value in made.readings.items() if not name.endswith(("_min", "_max")))


def test_evaluation_knows_neither_accumulation_nor_slices():
    inputs = batch(seed=14)
    held_out = policy_loss(inputs, LossSettings(steps_per_generation=4), accumulation=8, is_training=False).loss
    assert torch.equal(held_out, policy_loss(inputs, LossSettings(), accumulation=1).loss)


def test_fr027_the_scale_follows_the_tokens_of_the_whole_generation_batch():
    inputs = batch(seed=15, num_items=100.0)
    halved = dataclasses.replace(inputs, num_items=200.0)
    assert policy_loss(inputs, LossSettings(), accumulation=1).loss.item() == pytest.approx(
        2 * policy_loss(halved, LossSettings(), accumulation=1).loss.item()
    )


# KL and entropy -------------------------------------------------------------------------------------------------------


def test_fr045_the_kl_coefficient_moves_the_gradient():
    inputs = batch(seed=16)
    assert not torch.allclose(evaluated(inputs, LossSettings(beta=1.0))[1], evaluated(inputs, LossSettings())[1])


def test_old_sampling_and_reference_log_probs_never_carry_a_gradient():
    constants = {name: torch.full((4, 5), -2.0, requires_grad=True) for name in CONSTANTS}
    loss = policy_loss(batch(**constants), everything_on("grpo"), accumulation=1).loss
    assert torch.autograd.grad(loss, list(constants.values()), allow_unused=True) == (None, None, None)


def test_fr051_beta_zero_needs_no_reference_and_beta_above_zero_says_so():
    inputs = batch(seed=17, reference_logprobs=None)
    assert policy_loss(inputs, LossSettings(), accumulation=1).loss.isfinite()
    with pytest.raises(ValueError, match="reference_logprobs"):
        policy_loss(inputs, LossSettings(beta=0.1), accumulation=1)


def test_fr053_without_a_coefficient_the_entropy_has_no_gradient_at_all():
    inputs = batch(seed=18)
    loss = policy_loss(inputs, LossSettings(beta=0.1), accumulation=1).loss
    assert torch.autograd.grad(loss, inputs.entropy, allow_unused=True) == (None,)


def test_fr041_one_token_of_kl_in_the_billions_is_seen_in_max_and_mean_and_stays_finite():
    reference = torch.zeros(1, 4000)
    reference[0, 7] = 22.6
    inputs = LossInputs(
        logprobs=torch.zeros(1, 4000, requires_grad=True),
        entropy=torch.zeros(1, 4000, requires_grad=True),
        completion_mask=torch.ones(1, 4000),
        advantages=torch.tensor([0.0]),
        reference_logprobs=reference,
        num_items=4000,
    )
    made, grad, _ = evaluated(inputs, LossSettings(beta=0.01, use_bias_correction_kl=False))
    assert made.readings["kl_max"] > 1e9
    assert made.readings["kl_sum"] == pytest.approx(made.readings["kl_max"].item())
    assert grad.isfinite().all()
    assert grad.abs().argmax() == 7


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_the_entropy_threshold_is_torch_s_quantile(share):
    entropy = torch.rand(5, 31, generator=torch.Generator().manual_seed(19))
    mask = torch.rand(5, 31, generator=torch.Generator().manual_seed(20)) > 0.3
    assert torch.equal(entropy_threshold(entropy, mask, share), torch.quantile(entropy[mask], 1 - share))
    poisoned = torch.where(mask, entropy, NAN)
    assert torch.equal(entropy_threshold(poisoned, mask, share), torch.quantile(entropy[mask], 1 - share))


def test_the_entropy_threshold_of_nothing_keeps_nothing():
    assert entropy_threshold(torch.ones(2, 2), torch.zeros(2, 2), 0.5) == INF


def test_the_adaptive_coefficient_moves_by_its_step_inside_its_bounds():
    rule = {"target": 0.2, "delta": 0.25, "minimum": 0.0, "maximum": 0.5}
    assert adaptive_entropy_coef(0.0, 0.2, **rule) == 0.25
    assert adaptive_entropy_coef(0.4, 0.1, **rule) == 0.5
    assert adaptive_entropy_coef(0.3, 0.9, **rule) == pytest.approx(0.05)
    assert adaptive_entropy_coef(0.1, 0.9, **rule) == 0.0


def test_the_applied_coefficient_waits_for_a_measurement_at_or_under_the_target():
    assert applied_entropy_coef(0.1, INF, target=0.2) == 0.0
    assert applied_entropy_coef(0.1, 0.2, target=0.2) == 0.1


# Readings and settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
def test_readings_of_two_halves_merge_to_those_of_the_whole(loss_type, level):
    loss_settings = everything_on(loss_type, level)
    whole = batch(rows=6, seed=21, entropy_threshold=0.2)
    names = [f.name for f in dataclasses.fields(LossInputs) if torch.is_tensor(getattr(whole, f.name))]

    def half(part):
        return dataclasses.replace(whole, **{name: getattr(whole, name)[part] for name in names})

    def readings(inputs, accumulation):
        sliced = dataclasses.replace(loss_settings, steps_per_generation=accumulation)
        return policy_loss(inputs, sliced, accumulation=accumulation).readings

    left, right = readings(half(slice(0, 3)), 2), readings(half(slice(3, 6)), 2)
    merged, expected = merged_readings(right, left), readings(whole, 1)
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        if not (loss_type == "bnpo" and name == "policy_loss_sum"):
            assert merged[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


def test_readings_are_detached_float32_scalars():
    for value in policy_loss(batch(), everything_on("dapo"), accumulation=1).readings.values():
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert not value.requires_grad


def test_low_precision_inputs_give_a_float32_loss():
    inputs = batch(dtype=torch.bfloat16)
    assert policy_loss(inputs, everything_on("grpo"), accumulation=1).token_loss.dtype == torch.float32


def test_num_items_is_asked_for_by_name():
    with pytest.raises(ValueError, match="num_items"):
        policy_loss(batch(num_items=None), LossSettings(), accumulation=1)


NUMBERS = (
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "entropy_coef",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "max_completion_length",
    "steps_per_generation",
)


@pytest.mark.parametrize("value", [NAN, -1, "1.0", True, INF])
@pytest.mark.parametrize("name", NUMBERS)
def test_fr012_a_number_that_is_none_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        LossSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "dapoo"),
        ("loss_type", None),
        ("importance_sampling_level", "sentence"),
        ("vllm_importance_sampling_mode", "mask"),
        ("use_bias_correction_kl", 1),
        ("vllm_importance_sampling_correction", "yes"),
    ],
)
def test_unknown_words_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        LossSettings(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 3.0},
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
        {"vllm_importance_sampling_correction": True, "loss_type": "vespo"},
    ],
)
def test_bounds_and_modes_that_contradict_each_other_are_refused(fields):
    with pytest.raises(ValueError, match="vllm_importance_sampling"):
        LossSettings(**fields)
