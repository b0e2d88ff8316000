"""Every scalar this package logs: its name, unit, meaning, direction and healthy range, in one table.

The table is what makes a curve readable: the report draws the healthy band from it, the documentation prints it, and
a test fails when a run logs a name that is not in it. TRL's names come first and keep TRL's meaning; the package's own
are ``rlstab/<method>/<quantity>``. A name may hold placeholders, ``rewards/{name}/mean``, each standing for one path
segment.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["SCALARS", "Direction", "Scalar", "declared", "markdown_table", "undeclared"]

Direction = Literal["higher", "lower", "range", "context"]

_DIRECTION_WORDS: dict[str, str] = {
    "higher": "higher is better",
    "lower": "lower is better",
    "range": "should stay in its range",
    "context": "neither up nor down is good in itself",
}


@dataclass(frozen=True)
class Scalar:
    """One row of the table.

    Attributes:
        name: The logged name; ``{placeholder}`` stands for one path segment.
        unit: ``"nats"``, ``"tokens"``, ``"fraction"`` (in [0, 1]), ``"count"``, ``"reward"``, ``"steps"``, or ``"1"``
            for a pure number.
        meaning: One line, without a full stop.
        direction: How to read it: ``"higher"`` or ``"lower"`` is better, a ``"range"`` to stay in, or ``"context"``.
        healthy: Closed healthy range, None at an open end; None when no range holds for every task.
    """

    name: str
    unit: str
    meaning: str
    direction: Direction
    healthy: tuple[float | None, float | None] | None = None


# TRL's names, with TRL's meaning.
_TRL = (
    Scalar("loss", "1", "Policy loss; near 0 on-policy by construction, so not a sign of learning", "context"),
    Scalar("grad_norm", "1", "Global L2 norm of the gradient before clipping", "range", (0.0, 5.0)),
    Scalar("learning_rate", "1", "Learning rate of the first parameter group", "context"),
    Scalar("num_tokens", "tokens", "Prompt and completion tokens processed since the start", "context"),
    Scalar("reward", "reward", "Mean over completions of the weighted sum of rewards", "higher"),
    Scalar("reward_std", "reward", "Standard deviation of the reward over completions; 0 means no signal", "context"),
    Scalar("rewards/{name}/mean", "reward", "Mean of one reward function, unweighted", "higher"),
    Scalar("rewards/{name}/std", "reward", "Standard deviation of one reward function over completions", "context"),
    Scalar(
        "frac_reward_zero_std",
        "fraction",
        "Share of groups whose rewards are all equal: they teach nothing",
        "lower",
        (0.0, 0.9),
    ),
    Scalar(
        "entropy",
        "nats",
        "Mean entropy of the policy's next-token distribution (not a loss: falling means less exploration)",
        "range",
    ),
    Scalar("kl", "nats", "Mean per-token KL (k3) from the reference model to the policy", "range", (0.0, 0.5)),
    Scalar("completions/mean_length", "tokens", "Mean completion length", "context"),
    Scalar("completions/min_length", "tokens", "Shortest completion", "context"),
    Scalar("completions/max_length", "tokens", "Longest completion", "context"),
    Scalar(
        "completions/clipped_ratio", "fraction", "Share of completions cut off at the length limit", "lower", (0.0, 0.5)
    ),
    Scalar(
        "completions/mean_terminated_length", "tokens", "Mean length of completions that ended by themselves", "context"
    ),
    Scalar("completions/min_terminated_length", "tokens", "Shortest completion that ended by itself", "context"),
    Scalar("completions/max_terminated_length", "tokens", "Longest completion that ended by itself", "context"),
    Scalar("clip_ratio/low_mean", "fraction", "Share of tokens clipped at the lower bound", "lower", (0.0, 0.2)),
    Scalar("clip_ratio/low_min", "fraction", "Smallest share of tokens clipped low over ranks", "lower", (0.0, 0.2)),
    Scalar("clip_ratio/high_mean", "fraction", "Share of tokens clipped at the upper bound", "lower", (0.0, 0.2)),
    Scalar("clip_ratio/high_max", "fraction", "Largest share of tokens clipped high over ranks", "lower", (0.0, 0.5)),
    Scalar("clip_ratio/region_mean", "fraction", "Share of tokens clipped at either bound", "lower", (0.0, 0.3)),
    Scalar(
        "sampling/sampling_logp_difference/mean",
        "nats",
        "Mean absolute gap between training and sampling log-probs of the same tokens",
        "lower",
        (0.0, 0.1),
    ),
    Scalar(
        "sampling/sampling_logp_difference/max",
        "nats",
        "Largest absolute gap between training and sampling log-probs",
        "lower",
    ),
    Scalar("sampling/importance_sampling_ratio/min", "1", "Smallest training/sampling importance ratio", "range"),
    Scalar(
        "sampling/importance_sampling_ratio/mean", "1", "Mean training/sampling importance ratio", "range", (0.8, 1.25)
    ),
    Scalar("sampling/importance_sampling_ratio/max", "1", "Largest training/sampling importance ratio", "range"),
)

# Lightning's own.
_LIGHTNING = (
    Scalar("epoch", "1", "Passes over the training prompts", "context"),
    Scalar("step", "steps", "Optimizer steps; logged by tools that keep it as a column", "context"),
    Scalar("hp_metric", "1", "Placeholder of the hyper-parameter tab, or the final score", "context"),
    Scalar("lr-{optimizer}", "1", "Learning rate by the LearningRateMonitor callback", "context"),
)

# TRL's names of single loss types and of the entropy bonus.
_TRL_VARIANTS = (
    Scalar("cispo_clip_ratio", "fraction", "Share of tokens whose importance weight CISPO capped", "lower", (0.0, 0.3)),
    Scalar("vespo/phi_seq_mean", "1", "Mean VESPO weight of the sequences; 1 on-policy", "range"),
    Scalar("entropy_coef", "1", "Coefficient of the entropy bonus", "context"),
)

# Held-out evaluation.
_VALIDATION = (
    Scalar("val/reward", "reward", "Mean reward on held-out prompts", "higher"),
    Scalar("val/rewards/{name}/mean", "reward", "Mean of one reward function on held-out prompts", "higher"),
    Scalar("val/pass@{k}", "fraction", "Share of held-out prompts solved by at least one of k completions", "higher"),
    Scalar("val/completions/mean_length", "tokens", "Mean completion length on held-out prompts", "context"),
    Scalar(
        "val/completions/clipped_ratio",
        "fraction",
        "Share of held-out completions cut off at the length limit",
        "lower",
        (0.0, 0.5),
    ),
    Scalar("val/rewards_missing_frac", "fraction", "Share of held-out completions without a finite reward", "lower"),
)

_TEST = tuple(replace(row, name=row.name.replace("val/", "test/", 1)) for row in _VALIDATION)

# The package's own, one block per method, each in its own tuple so that blocks can grow independently.
_GRPO = (
    Scalar(
        "rlstab/grpo/advantage_abs_mean", "1", "Mean absolute advantage; the plain mean is always about 0", "context"
    ),
    Scalar(
        "rlstab/grpo/rewards_missing", "count", "Rewards left out because a function abstained or gave NaN/inf", "lower"
    ),
    Scalar("rlstab/grpo/rewards_nan", "count", "NaN rewards in the last rollout", "lower", (0.0, 0.0)),
    Scalar("rlstab/grpo/rewards_inf", "count", "Infinite rewards in the last rollout", "lower", (0.0, 0.0)),
    Scalar("rlstab/grpo/rewards_timed_out", "count", "Rewards that did not come in time", "lower", (0.0, 0.0)),
    Scalar("rlstab/grpo/kl_max", "nats", "Largest KL of a single token; one outlier is no drift", "lower"),
    Scalar("rlstab/grpo/non_finite_tokens", "count", "Loss tokens that are NaN or infinite", "lower", (0.0, 0.0)),
    Scalar("rlstab/grpo/floored_tokens", "count", "Tokens whose log-probability was raised to -100 nats", "lower"),
    Scalar("rlstab/grpo/saturated_tokens", "count", "Tokens with a log-ratio beyond 20 nats", "lower", (0.0, 0.0)),
    Scalar("rlstab/grpo/unscored_tokens", "count", "Tokens for which the sampler gave no log-probability", "lower"),
)

_MONITOR = (
    Scalar("rlstab/monitor/alarms", "count", "Alarms raised since the start", "lower", (0.0, 0.0)),
    Scalar(
        "rlstab/monitor/held_out_gap",
        "reward",
        "Rise of the training reward minus rise of the held-out score since the first evaluation",
        "lower",
    ),
    Scalar(
        "rlstab/monitor/grad_norm_drift",
        "1",
        "Recent median of the gradient norm over its early median",
        "range",
        (0.2, 4.0),
    ),
    Scalar("rlstab/monitor/repetition", "fraction", "Share of repeated 4-grams in completions", "lower", (0.0, 0.5)),
    Scalar("rlstab/monitor/weights_moved", "1", "Largest change of a sample of weights since the start", "context"),
    Scalar("rlstab/monitor/skipped_frac", "fraction", "Share of skipped steps among the last 50", "lower", (0.0, 0.2)),
    Scalar("rlstab/layer_norm/{layer}", "1", "Gradient norm of one layer before clipping", "range", (0.0, 5.0)),
    Scalar("rlstab/events/{kind}", "1", "Marker: the gradient norm at a step with such an event, else 0", "context"),
)

_GEPO: tuple[Scalar, ...] = (
    Scalar("rlstab/gepo/advantage_mean", "1", "Mean advantage of the last rollout; about 0 by construction", "context"),
    Scalar("rlstab/gepo/advantage_std", "1", "Standard deviation of the advantages of the last rollout", "context"),
    Scalar("rlstab/gepo/advantage_abs_mean", "1", "Mean absolute advantage; 0 means nothing to learn", "context"),
    Scalar(
        "rlstab/gepo/advantage_abs_max", "1", "Largest absolute advantage; never above the bound c", "range", (0.0, 4.0)
    ),
    Scalar(
        "rlstab/gepo/zero_spread_frac", "fraction", "Share of completions in groups without spread", "lower", (0.0, 0.9)
    ),
    Scalar(
        "rlstab/gepo/rewards_nan",
        "count",
        "NaN rewards left out of their groups in the last rollout",
        "lower",
        (0.0, 0.0),
    ),
    Scalar(
        "rlstab/gepo/rewards_inf",
        "count",
        "Infinite rewards left out of their groups in the last rollout",
        "lower",
        (0.0, 0.0),
    ),
    Scalar(
        "rlstab/gepo/logprobs_non_finite",
        "count",
        "Training log-probs that were not finite since the last point",
        "lower",
        (0.0, 0.0),
    ),
    Scalar(
        "rlstab/gepo/ratios_non_finite",
        "count",
        "Importance ratios that were not finite since the last point",
        "lower",
        (0.0, 0.0),
    ),
    Scalar("rlstab/gepo/bounded_tokens", "count", "Tokens whose log-ratio was bounded since the last point", "lower"),
    Scalar(
        "rlstab/gepo/gradient_is_finite",
        "1",
        "1 when the last step's gradient was finite, else 0",
        "higher",
        (1.0, 1.0),
    ),
    Scalar("rlstab/gepo/grad_norm_level", "1", "Running level of applied gradient norms", "range", (0.0, 5.0)),
    Scalar("rlstab/gepo/grad_norm_limit", "1", "Gradient norm above which a step is skipped", "context"),
    Scalar(
        "rlstab/gepo/skipped_steps", "count", "Steps and micro-batches left out by the guard since the start", "lower"
    ),
    Scalar("rlstab/gepo/skip_frac", "fraction", "Recent share of skipped steps", "lower", (0.0, 0.2)),
    Scalar("rlstab/gepo/releases", "count", "Times the guard took a new level of gradient norms as real", "context"),
    Scalar("rlstab/gepo/dropped_micro_batches", "count", "Micro-batches left out of the last step", "lower"),
)

_OPEFO: tuple[Scalar, ...] = (
    Scalar(
        "rlstab/opefo/tiny_frac",
        "fraction",
        "Share of second moments too small for Adam's eps at the last look",
        "lower",
        (0.0, 0.05),
    ),
    Scalar("rlstab/opefo/lifted", "count", "Coordinates whose second moment was lifted since the start", "context"),
    Scalar("rlstab/opefo/residuals_pending", "count", "Skipped gradients on their way back", "context"),
    Scalar(
        "rlstab/opefo/residuals_discarded",
        "count",
        "Skipped gradients let go: non-finite, zero or pushed out",
        "context",
    ),
    Scalar(
        "rlstab/opefo/feedback_frac",
        "1",
        "Norm fed back in the last step over the norm of its gradient",
        "range",
        (0.0, 1.0),
    ),
    Scalar("rlstab/opefo/snapshots", "count", "Snapshots taken since the start", "context"),
    Scalar(
        "rlstab/opefo/snapshots_refused",
        "count",
        "Snapshots not taken because the state was not healthy",
        "lower",
        (0.0, 0.0),
    ),
    Scalar("rlstab/opefo/rollbacks", "count", "Rollbacks since the start", "lower", (0.0, 0.0)),
    Scalar(
        "rlstab/opefo/step_length_frac",
        "1",
        "Largest movement of a weight tensor in a step over the longest that Adam can make; above 1 is undone",
        "lower",
        (0.0, 1.0),
    ),
    Scalar(
        "rlstab/opefo/lr_factor", "1", "Factor on the schedule's learning rate; below 1 after a rollback", "context"
    ),
    Scalar("rlstab/opefo/quarantined_prompts", "count", "Prompts set aside after rollbacks", "context"),
)

_QUATRO: tuple[Scalar, ...] = (
    Scalar("rlstab/quatro/replay_groups", "count", "Old groups in the last rollout of this rank", "context"),
    Scalar("rlstab/quatro/replay_frac", "fraction", "Share of old groups since the start", "range", (0.0, 0.5)),
    Scalar("rlstab/quatro/replay_missing", "count", "Old groups that were due and not in the buffer", "context"),
    Scalar("rlstab/quatro/replay_buffer", "count", "Groups in this rank's buffer", "context"),
    Scalar("rlstab/quatro/replay_age_steps", "steps", "Mean age of the replayed groups of the last rollout", "context"),
    Scalar("rlstab/quatro/kl_coef", "1", "KL coefficient beta, moved by the KL anchor", "range", (0.001, 0.2)),
    Scalar(
        "rlstab/quatro/kl_capped",
        "nats",
        "Mean per-token KL, each token capped, as the anchor sees it",
        "range",
        (0.0, 0.05),
    ),
    Scalar("rlstab/quatro/kl_tokens_over_cap", "count", "Tokens whose KL was above the cap in the last step", "lower"),
    Scalar("rlstab/quatro/entropy_mean", "nats", "Rolling mean token entropy", "range"),
    Scalar("rlstab/quatro/entropy_floor", "nats", "Entropy under which the floor acts", "context"),
    Scalar(
        "rlstab/quatro/entropy_coef",
        "1",
        "Coefficient of the floor's entropy bonus; exactly 0 when not needed",
        "context",
    ),
    Scalar(
        "rlstab/quatro/filtered_{reason}",
        "count",
        "Completions left out of the last rollout for this reason",
        "context",
    ),
    Scalar("rlstab/quatro/kept_frac", "fraction", "Share of the last rollout's completions kept", "higher", (0.1, 1.0)),
    Scalar(
        "rlstab/quatro/effective_groups",
        "count",
        "Groups of the last rollout, all ranks, with a completion kept",
        "higher",
    ),
    Scalar(
        "rlstab/quatro/idle_rollouts", "count", "Rollouts in a row with nothing left to learn from", "lower", (0.0, 9.0)
    ),
)

_GRADLOC = (
    Scalar("rlstab/gradloc/threshold", "1", "Gradient norm above which a step counts as a spike", "context"),
    Scalar("rlstab/gradloc/spikes", "count", "Spikes since the start of the run", "lower", (0.0, 0.0)),
    Scalar("rlstab/gradloc/culprits", "count", "Tokens named for the spike of this step", "context"),
    Scalar(
        "rlstab/gradloc/top_share", "fraction", "Share of the first culprit in the squared gradient norm", "context"
    ),
    Scalar(
        "rlstab/gradloc/completeness",
        "fraction",
        "Sum of all tokens' shares, where they were taken; 1 checks the answer",
        "range",
        (0.95, 1.05),
    ),
    Scalar("rlstab/gradloc/tier", "1", "Rung of the search that answered: 0 flags to 3 bisection", "context"),
    Scalar(
        "rlstab/gradloc/cost_sweeps",
        "1",
        "Cost of the search in forward+backward sweeps of the step",
        "lower",
        (0.0, 2.0),
    ),
    Scalar("rlstab/gradloc/remaining_norm", "1", "Gradient norm without the culprits", "range"),
    Scalar(
        "rlstab/gradloc/releases",
        "count",
        "Times a raised level was accepted as the new usual one",
        "lower",
        (0.0, 0.0),
    ),
)

_CLIPS = (
    Scalar(
        "rlstab/clips/token_frac",
        "fraction",
        "Share of loss tokens whose weight TokenClip reduced",
        "lower",
        (0.0, 0.1),
    ),
    Scalar("rlstab/clips/token_limit", "1", "Head norm above which TokenClip scales a token down", "context"),
    Scalar(
        "rlstab/clips/sequence_frac", "fraction", "Share of sequences whose weight SeqClip reduced", "lower", (0.0, 0.1)
    ),
    Scalar("rlstab/clips/layers_clipped", "count", "Layers that LayerClip scaled down in this step", "lower"),
    Scalar("rlstab/clips/smallest_layer_scale", "fraction", "Smallest factor that LayerClip put on a layer", "context"),
)

_FINAL = (
    Scalar("final/held_out_reward", "reward", "Held-out reward at the end of the run", "higher"),
    Scalar("final/best_held_out_reward", "reward", "Best held-out reward of the run", "higher"),
    Scalar("final/reward", "reward", "Training reward of the last step", "higher"),
    Scalar("final/steps_applied", "steps", "Optimizer steps that changed the weights", "context"),
    Scalar("final/steps_skipped", "steps", "Optimizer steps that were skipped", "lower"),
    Scalar("final/spikes", "count", "Spikes in this folder's events.jsonl", "lower"),
    Scalar("final/rollbacks", "count", "Rollbacks in this folder's events.jsonl", "lower"),
    Scalar("final/alarms", "count", "Alarms in this folder's events.jsonl", "lower"),
)

_STRATEGY: tuple[Scalar, ...] = (
    Scalar("rlstab/strategy/applied_steps", "steps", "Optimizer steps applied since the start", "context"),
    Scalar("rlstab/strategy/skipped_steps", "steps", "Optimizer steps withheld since the start", "lower"),
)

SCALARS: dict[str, Scalar] = {
    row.name: row
    for row in (
        *_TRL,
        *_TRL_VARIANTS,
        *_LIGHTNING,
        *_VALIDATION,
        *_TEST,
        *_GRPO,
        *_MONITOR,
        *_GEPO,
        *_OPEFO,
        *_QUATRO,
        *_GRADLOC,
        *_CLIPS,
        *_FINAL,
        *_STRATEGY,
    )
}


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], Scalar], ...]:
    found = []
    for row in SCALARS.values():
        if "{" in row.name:
            parts = re.split(r"\{[^}]*\}", row.name)
            found.append((re.compile(r"[^/]+".join(map(re.escape, parts))), row))
    return tuple(found)


def declared(name: str) -> Scalar | None:
    """The table's row for a logged name, or None when nobody declared it.

    Args:
        name: The name as logged, e.g. ``"rewards/accuracy/mean"``.

    Returns:
        The exact row, else the first row whose placeholders match.

    Example:
        >>> declared("rewards/accuracy/mean").name
        'rewards/{name}/mean'
        >>> declared("rewards/accuracy") is None
        True
    """
    row = SCALARS.get(name)
    if row is not None:
        return row
    return next((row for pattern, row in _patterns() if pattern.fullmatch(name)), None)


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the table does not know, sorted and without repeats.

    Example:
        >>> undeclared(["reward", "rlstab/gepo/surprise"])
        ['rlstab/gepo/surprise']
    """
    return sorted({name for name in names if declared(name) is None})


def markdown_table() -> str:
    """The whole table in Markdown, for the documentation.

    Example:
        >>> markdown_table().splitlines()[0]
        '| name | unit | meaning | how to read it | healthy |'
    """
    lines = ["| name | unit | meaning | how to read it | healthy |", "|---|---|---|---|---|"]
    for row in SCALARS.values():
        reading = _DIRECTION_WORDS[row.direction]
        lines.append(f"| `{row.name}` | {row.unit} | {row.meaning} | {reading} | {_range_words(row.healthy)} |")
    return "\n".join(lines) + "\n"


def _range_words(healthy: tuple[float | None, float | None] | None) -> str:
    if healthy is None:
        return ""
    low, high = healthy
    if low is None:
        return f"at most {high:g}"
    if high is None:
        return f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
