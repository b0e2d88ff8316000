"""Our loss and gradient against the installed TRL's, cell by cell of one grid."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
TOLERANCE = 1e-5

# Each row: what is switched on together. Crossed with loss type, level, KL and the two masks.
KL = ({}, {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False})
MASKS = (
    {},
    {"off_policy_mask_threshold": 0.05},
    {"top_entropy_quantile": 0.4},
    {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.4, "entropy_coef": 0.005},
    {"entropy_coef": 0.01},
)
CORRECTIONS = (
    {},
    {"correction_mode": "token_truncate"},
    {"correction_mode": "token_mask", "clip_min": 0.6},
    {"correction_mode": "sequence_truncate", "clip_min": 0.6},
    {"correction_mode": "sequence_mask"},
)


def grid(loss_type: str) -> list[dict[str, Any]]:
    """Every cell of the grid for one loss type, as keyword arguments."""
    deltas: tuple[dict[str, Any], ...] = ({},)
    if loss_type in ("grpo", "dapo"):
        deltas = ({}, {"delta": 1.25})
    elif loss_type in CLIPPED:
        deltas = ({"delta": 1.25},)
    elif loss_type == "cispo":
        deltas = ({"epsilon_high": 1.3},)
    corrections = [c for c in CORRECTIONS if loss_type != "vespo" or not str(c.get("correction_mode")).startswith("seq")]
    cells = itertools.product(("token", "sequence"), KL, MASKS, deltas, corrections)
    return [
        {"loss_type": loss_type, "importance_sampling_level": level, **kl, **masks, **delta, **correction}
        for level, kl, masks, delta, correction in cells
    ]


def extra_cells(loss_type: str) -> list[dict[str, Any]]:
    """On-policy, evaluation mode, asymmetric clip, per-token advantages, absent sampler log-probs."""
    base = {"loss_type": loss_type, "beta": 0.1}
    return [
        {**base, "has_old": False, "has_sampling": False},
        {**base, "has_old": False, "correction_mode": "token_truncate"},
        {**base, "is_training": False, "entropy_coef": 0.01},
        {**base, "epsilon_high": 0.35, "accumulation": 1},
        {**base, "has_token_advantages": True},
        {**base, "has_sampling": False, "off_policy_mask_threshold": 0.01},
    ]


def test_the_grid_has_more_than_six_hundred_cells():
    assert sum(len(grid(name)) for name in LOSS_TYPES) >= 600


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_equal_trl(loss_type, make_case, case_inputs, trl_evaluation, our_evaluation):
    worst_loss, worst_gradient = (0.0, "-"), (0.0, "-")
    for cell in grid(loss_type) + extra_cells(loss_type):
        case = make_case(**cell)
        inputs = case_inputs(case)
        ours, theirs = our_evaluation(case, inputs), trl_evaluation(case, inputs)
        loss_error, gradient_error = ours.relative_errors(theirs)
        worst_loss = max(worst_loss, (loss_error, str(case)))
        worst_gradient = max(worst_gradient, (gradient_error, str(case)))
    print(f"{loss_type}: worst loss {worst_loss}, worst gradient {worst_gradient}")  # noqa: T201
    assert worst_loss[0] <= TOLERANCE, worst_loss
    assert worst_gradient[0] <= TOLERANCE, worst_gradient
