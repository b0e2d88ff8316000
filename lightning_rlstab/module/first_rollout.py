"""The self-check at the first rollout: do the sampler and the training forward agree before anything was updated?"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlstab.module.forward import attention_mask_of, policy_logprobs
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.self_check import SelfCheck, mismatch_report

__all__ = ["first_rollout_check"]

_log = logging.getLogger(__name__)


def first_rollout_check(policy: nn.Module, rollout: Rollout, *, temperature: float, rows: int) -> SelfCheck:
    """Compare the sampler's log-probs with the training forward, without dropout and before the first update.

    Where they differ, the forward is run again under other temperatures, so that the report can name the cause.

    Args:
        policy: The policy; every submodule's mode is put back.
        rollout: The first rollout, with ``behavior_logprobs``.
        temperature: The training temperature.
        rows: How many completions to look at.

    Returns:
        The report; a gap is also logged as a warning.
    """
    assert rollout.behavior_logprobs is not None
    sample = rollout.select(slice(0, rows))
    behavior, mask = sample.behavior_logprobs, attention_mask_of(sample)
    assert behavior is not None
    modes = {module: module.training for module in policy.modules()}
    policy.eval()

    def logprobs_at(other: float) -> Tensor:
        return policy_logprobs(policy, sample, temperature=other, rows_per_forward=rows)

    pad_counts = (~sample.prompt_mask).sum(dim=1)
    # Rounding of half-precision weights is expected; a gap beyond it is not.
    is_full_precision = next(policy.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(
        behavior.device.type
    )
    options: dict[str, Any] = {"pad_counts": pad_counts, "tolerance": 1e-4 if is_full_precision else 2e-2}
    try:
        training = logprobs_at(temperature)
        report = mismatch_report(behavior, training, mask, **options)
        if not report.is_ok:
            others = {
                f"temperature {value}": logprobs_at(value) for value in (1.0, temperature**2) if value != temperature
            }
            report = mismatch_report(behavior, training, mask, alternatives=others, **options)
            _log.warning(report.message)
    finally:
        for module, is_training in modes.items():
            module.training = is_training
    return report
