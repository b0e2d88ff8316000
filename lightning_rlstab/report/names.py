"""One vocabulary for metric names: TRL's, with the names other trainers use mapped onto it.

The rules read only canonical names, so a verl or OpenRLHF run is judged by the same rules as ours. Names nobody maps
stay as they are and can still be drawn.
"""

from __future__ import annotations

import functools
import re

__all__ = ["ALIASES", "STEP_COLUMNS", "canonical_name", "preference"]

STEP_COLUMNS = ("step", "global_step", "_step", "training/global_step", "trainer/global_step", "iteration", "steps")
"""Column or key names that hold the optimizer step, best first."""

ALIASES: dict[str, tuple[str, ...]] = {
    "reward": (
        "critic/score/mean",
        "critic/rewards/mean",
        "reward/mean",
        "rollout/raw_reward",
        "rollout/reward",
        "rewards/mean",
        "mean_reward",
        "reward_mean",
        "objective/scores",
        "return",
    ),
    "reward_std": ("critic/score/std", "critic/rewards/std", "reward/std", "rewards/std", "group_reward_std"),
    "frac_reward_zero_std": ("zero_std_frac", "frac_zero_std", "rollout/zero_std_ratio", "group/zero_std_frac"),
    "entropy": (
        "actor/entropy",
        "actor/entropy_loss",
        "policy/entropy",
        "entropy/mean",
        "entropy_loss",
        "policy_entropy",
        "objective/entropy",
    ),
    "kl": (
        "actor/kl_loss",
        "actor/reward_kl_penalty",
        "kl_loss",
        "kl/mean",
        "kl_mean",
        "kl_div",
        "objective/kl",
        "critic/kl",
        "policy/kl",
    ),
    "loss": ("actor/pg_loss", "actor/loss", "policy_loss", "pg_loss", "loss/mean", "actor_loss", "policy/loss"),
    "grad_norm": (
        "actor/grad_norm",
        "actor_grad_norm",
        "act_grad_norm",
        "policy/grad_norm",
        "optim/grad_norm",
        "gradient_norm",
        "grad_norm/total",
    ),
    "learning_rate": ("actor/lr", "actor_lr", "lr", "optim/lr", "policy/lr"),
    "completions/mean_length": (
        "completion_length",
        "response_length/mean",
        "response_length",
        "rollout/response_lengths",
        "rollout/response_len/mean",
        "seq_len/mean",
        "mean_completion_length",
    ),
    "completions/min_length": ("response_length/min", "seq_len/min"),
    "completions/max_length": ("response_length/max", "seq_len/max"),
    "completions/clipped_ratio": (
        "response_length/clip_ratio",
        "rollout/truncated_ratio",
        "rollout/truncated",
        "truncated_rate",
        "is_truncated/mean",
    ),
    "clip_ratio/region_mean": ("clip_ratio", "actor/pg_clipfrac", "clipfrac", "clip_frac", "policy_clip_ratio"),
    "num_tokens": ("perf/total_num_tokens", "total_num_tokens", "tokens_seen"),
    "sampling/sampling_logp_difference/mean": (
        "training/rollout_probs_diff_mean",
        "rollout_corr/log_prob_diff",
        "mismatch_kl/mean",
        "train_rollout_logprob_abs_diff",
    ),
    "sampling/sampling_logp_difference/max": ("training/rollout_probs_diff_max", "mismatch_kl/max"),
    "val/reward": (
        "val/test_score",
        "val/mean_reward",
        "eval/reward",
        "eval_reward",
        "eval/score",
        "eval_accuracy",
        "eval/accuracy",
        "val/accuracy",
        "val/acc",
        "val_reward",
        "validation/reward",
        "validation/accuracy",
        "test_score",
    ),
}
"""Canonical name to the names other trainers use for the same quantity, best first."""

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"val-core/.+/(?:acc|reward|score)/mean@\d+"), "val/reward"),
    (re.compile(r"val/test_score/.+"), "val/reward"),
    (re.compile(r"eval_(?:.+_)?pass(\d+)"), r"val/pass@\1"),
    (re.compile(r"(?:eval|val)/(?:.+/)?pass@(\d+)"), r"val/pass@\1"),
    (re.compile(r"eval[_/](rewards/.+|completions/.+)"), r"val/\1"),
)

_PREFIXES = ("train/", "training/", "policy/", "metrics/")


@functools.cache
def _by_alias() -> dict[str, tuple[str, int]]:
    return {
        alias: (name, rank) for name, aliases in ALIASES.items() for rank, alias in enumerate((name, *aliases), start=0)
    }


@functools.cache
def preference(name: str) -> tuple[str, int]:
    """The canonical name of a logged name, and how good a source it is.

    Args:
        name: The name as found in the file.

    Returns:
        ``(canonical, rank)``; when several logged names share a canonical one, the lowest rank is used.

    Example:
        >>> preference("train/reward"), preference("actor/entropy_loss")
        (('reward', 0), ('entropy', 2))
    """
    table = _by_alias()
    if name in table:
        return table[name]
    for pattern, template in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(template), 50
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            canonical, rank = preference(name[len(prefix) :])
            return canonical, rank
    return name, 0


def canonical_name(name: str) -> str:
    """The canonical name of a logged name; names nobody maps stay as they are.

    Example:
        >>> canonical_name("critic/score/mean"), canonical_name("perf/mfu")
        ('reward', 'perf/mfu')
    """
    return preference(name)[0]
