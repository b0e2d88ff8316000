"""Our loss and gradient against the installed TRL's, cell by cell of one grid."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest

logger = logging.getLogger(__name__)

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
TOLERANCE = 1e-5

# Each row: what is switched on together. Crossed with loss type, level, KL and the two masks.
KL = ({}, {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False})
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"off_policy_mask_threshold": 0.05},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.002},
    {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6, "entropy_coef": 0.003},
)
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"correction_mode": "token_truncate"},
    {"correction_mode": "token_mask", "clip_min": 0.6},
    {"correction_mode": "sequence_mask"},
)
MORE: tuple[dict[str, Any], ...] = (
    {"correction_mode": "sequence_truncate", "clip_min": 0.6},
    {"top_entropy_quantile": 0.4},
    {"entropy_coef": 0.002},
)


def grid(loss_type: str) -> list[dict[str, Any]]:
    """Every cell of the grid for one loss type, as keyword arguments."""
    fixed = {"cispo": {"epsilon_high": 1.3}, "bnpo": {"delta": 1.25}, "luspo": {"delta": 1.25}}.get(loss_type, {})
    deltas = ({}, {"delta": 1.25}) if loss_type == "dapo" else (fixed,)
    is_refused = "sequence" if loss_type == "vespo" else "never"
    corrections = [c for c in CORRECTIONS if not str(c.get("correction_mode")).startswith(is_refused)]
    cells = itertools.product(("token", "sequence"), KL, MASKS, deltas, corrections)
    return [
        {"loss_type": loss_type, "importance_sampling_level": level, **kl, **masks, **delta, **correction}
        for level, kl, masks, delta, correction in cells
    ]


def special_cells(loss_type: str) -> list[dict[str, Any]]:
    """On-policy, evaluation mode, asymmetric clip, per-token advantages, absent sampler log-probs."""
    base = {"loss_type": loss_type, "beta": 0.1}
    return [
        {**base, "has_old": False, "has_sampling": False},
        {**base, "has_old": False, "correction_mode": "token_truncate"},
        {**base, "is_training": False, "entropy_coef": 0.002},
        {**base, "epsilon_high": 0.35, "accumulation": 1},
        {**base, "has_token_advantages": True},
        {**base, "has_sampling": False, "off_policy_mask_threshold": 0.01},
        {**base, "correction_mode": "token_mask", "clip_min": 0.5, "top_entropy_quantile": 0.5},
        {"loss_type": loss_type, "importance_sampling_level": "sequence", "delta": 1.25},
    ]


def worst_errors(cells, make_case, case_inputs, evaluation, trl_evaluation):
    """The largest relative error of loss and gradient, each with its cell."""
    worst_loss, worst_gradient = (0.0, "none"), (0.0, "none")
    for cell in cells:
        case = make_case(**cell)
        inputs = case_inputs(case)
        ours, theirs = evaluation(case, inputs), trl_evaluation(case, inputs)
        loss_error, gradient_error = ours.relative_errors(theirs)
        worst_loss = max(worst_loss, (loss_error, str(case)))
        worst_gradient = max(worst_gradient, (gradient_error, str(case)))
    return worst_loss, worst_gradient


def test_the_grid_has_more_than_six_hundred_cells():
    assert sum(len(grid(name)) for name in LOSS_TYPES) >= 600


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_module_gives_trl_s_loss_and_gradient(loss_type, make_case, case_inputs, trl_evaluation, module_evaluation):
    loss, gradient = worst_errors(grid(loss_type), make_case, case_inputs, module_evaluation, trl_evaluation)
    logger.info("%s: loss %s, gradient %s", loss_type, loss, gradient)
    assert loss[0] <= TOLERANCE, loss
    assert gradient[0] <= TOLERANCE, gradient


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_core_gives_trl_s_loss_when_it_forms_the_ratio_itself(
    loss_type, make_case, case_inputs, trl_evaluation, core_evaluation
):
    more = [{"loss_type": loss_type, **cell} for cell in MORE if loss_type != "vespo" or "clip_min" not in cell]
    cells = special_cells(loss_type) + more + [cell for cell in grid(loss_type) if len(cell) <= 4]
    loss, gradient = worst_errors(cells, make_case, case_inputs, core_evaluation, trl_evaluation)
    logger.info("%s: loss %s, gradient %s", loss_type, loss, gradient)
    assert loss[0] <= TOLERANCE, loss
    assert gradient[0] <= TOLERANCE, gradient


# TRL's metric name: (numerator, denominator) among our readings, or the reading itself.
METRICS = {
    "entropy": ("entropy_sum", "token_count"),
    "kl": ("kl_sum", "token_count"),
    "clip_ratio/low_mean": ("clip_low_sum", "clip_count"),
    "clip_ratio/high_mean": ("clip_high_sum", "clip_count"),
    "clip_ratio/low_min": "clip_low_min",
    "clip_ratio/high_max": "clip_high_max",
    "cispo_clip_ratio": ("cispo_clip_sum", "cispo_clip_count"),
    "vespo/phi_seq_mean": ("vespo_phi_sum", "vespo_phi_count"),
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_readings_give_trl_s_metrics(loss_type, level, make_case, case_inputs, trl_evaluation, core_evaluation):
    cell = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.2, "entropy_coef": 0.002}
    case = make_case(**cell, epsilon_high=1.2 if loss_type == "cispo" else 0.1)
    inputs = case_inputs(case)
    readings, metrics = core_evaluation(case, inputs).metrics, trl_evaluation(case, inputs).metrics
    known = [name for name in METRICS if name in metrics]
    assert {"entropy", "kl"} < set(known) or loss_type == "sapo"
    for name in known:
        ours = METRICS[name]
        value = readings[ours] if isinstance(ours, str) else readings[ours[0]] / readings[ours[1]]
        assert value == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), name


KNOBS = (
    {"loss_type": "grpo"},
    {"importance_sampling_level": "sequence"},
    {"beta": 0.3},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"delta": 1.25},
    {"epsilon_high": 0.5},
    *({"loss_type": name} for name in LOSS_TYPES if name not in ("grpo", "dapo")),
    *MASKS[1:],
    *CORRECTIONS[1:],
    *MORE,
)


def test_every_knob_of_the_grid_moves_the_loss(make_case, case_inputs, trl_evaluation):
    seen: dict[float, dict[str, Any]] = {}
    for cell in ({}, *KNOBS):
        case = make_case(**cell)
        loss = trl_evaluation(case, case_inputs(case)).loss.item()
        assert loss not in seen, (cell, seen[loss])
        seen[loss] = cell
