"""Which curves belong together: by the death they warn of, then by layer of defence; for TensorBoard and the page."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["GROUPS", "Chart", "Group", "chart_names", "custom_scalars"]


@dataclass(frozen=True)
class Chart:
    """Curves drawn in one chart.

    Attributes:
        title: Shown above the chart.
        names: Logged names; ``*`` stands for any text.
    """

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


GROUPS: tuple[Group, ...] = (
    Group(
        "Hard collapse",
        (
            Chart(
                "Gradient norm and interventions",
                ("grad_norm", "rlstab/gepo/grad_norm_level", "rlstab/gepo/grad_norm_limit", "rlstab/events/*"),
            ),
            Chart("Gradient norm per layer", ("rlstab/layer_norm/*",)),
            Chart("Loss", ("loss",)),
            Chart(
                "Non-finite values",
                ("rlstab/grpo/rewards_nan", "rlstab/grpo/rewards_inf", "rlstab/grpo/non_finite_tokens"),
            ),
            Chart("Log-prob gap", ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")),
            Chart(
                "Importance ratio", tuple(f"sampling/importance_sampling_ratio/{end}" for end in ("min", "mean", "max"))
            ),
        ),
    ),
    Group(
        "Entropy collapse",
        (
            Chart("Entropy", ("entropy", "rlstab/quatro/entropy_mean", "rlstab/quatro/entropy_floor")),
            Chart("KL to the reference", ("kl", "rlstab/quatro/kl_capped")),
            Chart("Clipped tokens", ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")),
            Chart("Repetition", ("rlstab/monitor/repetition",)),
        ),
    ),
    Group(
        "Silent failure",
        (
            Chart("Reward, training and held-out", ("reward", "val/reward")),
            Chart("Gap of training and held-out", ("rlstab/monitor/held_out_gap",)),
            Chart("Rewards by function", ("rewards/*/mean",)),
            Chart("Held-out scores", ("val/pass@*",)),
            Chart(
                "Completion length",
                ("completions/mean_length", "completions/mean_terminated_length", "val/completions/mean_length"),
            ),
        ),
    ),
    Group(
        "Not learning",
        (
            Chart("Groups without spread", ("frac_reward_zero_std",)),
            Chart("Spread of rewards", ("reward_std", "rlstab/grpo/advantage_abs_mean")),
            Chart("Cut-off completions", ("completions/clipped_ratio", "val/completions/clipped_ratio")),
            Chart("Learning rate", ("learning_rate", "lr-*")),
            Chart("Weights moved", ("rlstab/monitor/weights_moved",)),
        ),
    ),
    Group(
        "Layer GEPO: advantages and step guard",
        (
            Chart(
                "Advantages",
                ("rlstab/gepo/advantage_abs_mean", "rlstab/gepo/advantage_std", "rlstab/gepo/advantage_abs_max"),
            ),
            Chart("Skips", ("rlstab/gepo/skipped_steps", "rlstab/gepo/dropped_micro_batches", "rlstab/gepo/releases")),
            Chart("Share of skipped steps", ("rlstab/gepo/skip_frac", "rlstab/monitor/skipped_frac")),
        ),
    ),
    Group(
        "Layer OPEFO: optimizer state",
        (
            Chart("Second moments", ("rlstab/opefo/tiny_frac",)),
            Chart(
                "Error feedback",
                ("rlstab/opefo/residuals_pending", "rlstab/opefo/residuals_discarded", "rlstab/opefo/feedback_frac"),
            ),
            Chart(
                "Snapshots and rollbacks",
                ("rlstab/opefo/snapshots", "rlstab/opefo/snapshots_refused", "rlstab/opefo/rollbacks"),
            ),
            Chart("Learning-rate factor", ("rlstab/opefo/lr_factor",)),
        ),
    ),
    Group(
        "Layer QUATRO: sampling loop",
        (
            Chart(
                "Replay", ("rlstab/quatro/replay_groups", "rlstab/quatro/replay_buffer", "rlstab/quatro/replay_missing")
            ),
            Chart("KL anchor", ("rlstab/quatro/kl_coef",)),
            Chart("Entropy floor", ("rlstab/quatro/entropy_coef",)),
            Chart("Filtered completions", ("rlstab/quatro/filtered_*",)),
            Chart("Kept share", ("rlstab/quatro/kept_frac",)),
        ),
    ),
    Group(
        "Layer GradLoc: spikes and cures",
        (
            Chart(
                "Spikes and culprits", ("rlstab/gradloc/spikes", "rlstab/gradloc/culprits", "rlstab/gradloc/releases")
            ),
            Chart("Share of the first culprit", ("rlstab/gradloc/top_share", "rlstab/gradloc/completeness")),
            Chart("Cost in sweeps", ("rlstab/gradloc/cost_sweeps",)),
            Chart("Share clipped", ("rlstab/clips/token_frac", "rlstab/clips/sequence_frac")),
            Chart("Layers clipped", ("rlstab/clips/layers_clipped", "rlstab/clips/smallest_layer_scale")),
        ),
    ),
)
"""The groups, in the order in which they are looked at."""


def chart_names(chart: Chart, logged: Iterable[str]) -> list[str]:
    """The chart's curves among the names that were logged, in the chart's order.

    Example:
        >>> chart_names(Chart("", ("reward", "rewards/*/mean")), ["rewards/b/mean", "loss", "reward"])
        ['reward', 'rewards/b/mean']
    """
    names = sorted(logged)
    found: list[str] = []
    for pattern in chart.names:
        matching = fnmatch.filter(names, pattern.replace("[", "[[]")) if "*" in pattern else [pattern]
        found += [name for name in matching if name in names and name not in found]
    return found


def custom_scalars(logged: Iterable[str]) -> dict[str, dict[str, list[str | list[str]]]]:
    """The layout for TensorBoard's custom-scalars tab, without panels that would stay empty.

    Args:
        logged: Names that the run logs.

    Returns:
        What ``SummaryWriter.add_custom_scalars`` takes: heading to chart title to ``["Multiline", patterns]``.
    """
    names = list(logged)
    layout: dict[str, dict[str, list[str | list[str]]]] = {}
    for group in GROUPS:
        charts: dict[str, list[str | list[str]]] = {}
        for chart in group.charts:
            if chart_names(chart, names):
                charts[chart.title] = ["Multiline", [_pattern(name) for name in chart.names]]
        if charts:
            layout[group.title] = charts
    return layout


def _pattern(name: str) -> str:
    """A logged name as the regular expression that TensorBoard wants; ``*`` also takes names that come later."""
    return f"^{re.escape(name).replace(re.escape('*'), '.*')}$"
