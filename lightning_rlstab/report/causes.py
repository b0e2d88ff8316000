"""What a run can be sick of: each cause's name, words, first suspect, next action, and which other signs it explains.

This is the table "Reading a sick run" in a form that the live monitor, the terminal and the HTML page share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CAUSES", "Cause", "Death", "Severity"]

Death = Literal["hard", "entropy", "silent", "idle"]
Severity = Literal["notice", "warning", "error"]


@dataclass(frozen=True)
class Cause:
    """One sickness.

    Attributes:
        name: Identifier in events and JSON.
        title: What is seen, in a few words.
        death: The way of dying it belongs to: ``"hard"`` (non-finite, exploding), ``"entropy"``, ``"silent"`` (curves
            fine, result bad), ``"idle"`` (nothing is learned).
        severity: ``"error"`` when steps from here on are lost, ``"warning"`` when it will be, ``"notice"`` for a thing
            worth knowing that is no alarm.
        suspect: Where to look first.
        action: One thing to do next.
        explains: Causes that follow from this one; they rank behind it.
    """

    name: str
    title: str
    death: Death
    severity: Severity
    suspect: str
    action: str
    explains: tuple[str, ...] = ()


_ALL = (
    Cause(
        "restart_death",
        "hard failure again right after a restart",
        "hard",
        "error",
        "snapshot, learning-rate recovery or lost optimizer state (OPEFO)",
        "Resume from an older healthy snapshot with its optimizer state and set the failing batch aside",
        ("nan_reward", "nan_logprobs", "nan_loss", "nan_gradient", "gradient_spike"),
    ),
    Cause(
        "nan_reward",
        "reward is NaN or inf",
        "hard",
        "error",
        "the reward function's output",
        "Run the reward function on the completions of this step and make it return a number or None",
        ("nan_loss", "nan_gradient", "no_signal", "frozen"),
    ),
    Cause(
        "nan_logprobs",
        "entropy, KL or log-probs are NaN or inf",
        "hard",
        "error",
        "logits or log-probs of masked or impossible tokens",
        "Check the rollout's log-probs for -inf and the logits for overflow; GEPO clamps log-ratios",
        ("nan_loss", "nan_gradient"),
    ),
    Cause(
        "nan_loss",
        "loss is NaN or inf",
        "hard",
        "error",
        "advantages (GEPO), optimizer state (OPEFO), rollout log-probs",
        "Look at advantages and log-probs of this step; with GEPO on such a step is skipped",
        ("nan_gradient",),
    ),
    Cause(
        "nan_gradient",
        "gradient is NaN or inf",
        "hard",
        "error",
        "a single token or layer (GradLoc), optimizer state (OPEFO)",
        "GradLoc names the token and layer, GEPO skips the micro-batch: switch on the one that is off",
    ),
    Cause(
        "learning_rate_jump",
        "learning rate jumps far above everything it was",
        "hard",
        "warning",
        "a schedule, a resume or a callback that sets the rate",
        "Find out who set the learning rate at this step, and go back to the snapshot before it",
        (
            *("gradient_spike", "nan_loss", "nan_gradient", "nan_logprobs", "gradient_drift"),
            *("entropy_explosion", "entropy_collapse", "over_optimised", "reward_hacking", "held_out_gap"),
            *("no_signal", "all_truncated", "repetition", "reward_collapse", "frozen"),
        ),
    ),
    Cause(
        "gradient_spike",
        "gradient norm jumps far above its usual level",
        "hard",
        "warning",
        "a few tokens with a train/inference mismatch",
        "Read GradLoc's spike card of this step; if spikes recur, bound such tokens with TokenClip",
        ("nan_loss", "nan_gradient", "nan_logprobs"),
    ),
    Cause(
        "gradient_drift",
        "gradient norm climbs steadily",
        "hard",
        "warning",
        "GEPO's guard (a ratio never trips on slow growth) and the advantages' spread",
        "Lower the learning rate and compare the advantages' standard deviation with the start of the run",
        ("gradient_spike", "nan_loss", "nan_gradient"),
    ),
    Cause(
        "skipping",
        "most steps are skipped",
        "hard",
        "error",
        "the guard's threshold or a real change of level",
        "Look at the skipped norms: if they are the new normal, raise the guard's threshold or let it release",
        ("frozen",),
    ),
    Cause(
        "over_optimised",
        "KL rises, reward falls, entropy falls",
        "entropy",
        "warning",
        "QUATRO's KL anchor and entropy floor",
        "See whether the entropy floor fired; then lower the KL target or raise its factor",
        ("entropy_collapse", "no_signal", "held_out_gap"),
    ),
    Cause(
        "entropy_collapse",
        "entropy falls and reward stalls",
        "entropy",
        "warning",
        "QUATRO's entropy floor and KL anchor; diversity of prompts",
        "Switch on the entropy floor at 0.8 of the initial entropy; if it is on, raise it",
        ("no_signal", "frozen"),
    ),
    Cause(
        "entropy_explosion",
        "entropy rises far above its start and reward does not",
        "entropy",
        "warning",
        "an entropy bonus that is too large, or a policy drifting to noise",
        "Remove or lower the entropy bonus and the learning rate",
        ("all_truncated", "gradient_drift", "reward_hacking", "no_signal"),
    ),
    Cause(
        "repetition",
        "completions repeat themselves",
        "entropy",
        "error",
        "a broken update, sampling settings, or a reward that pays for repetition",
        "Read the worst completions; QUATRO's rollout filter, if it is off, drops such rollouts",
        ("all_truncated", "no_signal", "entropy_collapse"),
    ),
    Cause(
        "reward_hacking",
        "reward hacking: KL rises and the real reward falls while entropy holds",
        "silent",
        "warning",
        "a reward that pays for something else than the task",
        "Tighten the rollout filter (z 3.0) and read best and worst rollouts for odd formats",
        ("held_out_gap",),
    ),
    Cause(
        "held_out_gap",
        "reward hacking: training reward rises while the held-out score falls",
        "silent",
        "warning",
        "a shortcut that the training reward accepts",
        "Put best and worst rollouts side by side: length, repetition, format",
    ),
    Cause(
        "mismatch",
        "sampling and training disagree about log-probs",
        "silent",
        "warning",
        "temperature, an off-by-one shift, padding, precision, or stale weights in the sampler",
        "Read the self-check of the first rollout and compare temperature and precision on both sides",
        ("gradient_spike",),
    ),
    Cause(
        "reward_outlier",
        "reward jumps far beyond everything it was",
        "silent",
        "warning",
        "one completion that the reward function scores out of all proportion",
        "Look at the best rollouts of this step and bound the reward; QUATRO's filter drops outliers (z 3.5)",
        ("reward_collapse", "reward_hacking", "held_out_gap", "over_optimised", "entropy_collapse"),
    ),
    Cause(
        "reward_collapse",
        "reward falls far below its best",
        "silent",
        "warning",
        "too large a learning rate, or a change in data or reward",
        "Go back to the snapshot at the best reward and lower the learning rate",
    ),
    Cause(
        "all_truncated",
        "not learning: every completion is cut off at the length limit",
        "idle",
        "error",
        "the length limit, or an end-of-sequence token that never comes",
        "Raise max_completion_length or check the end-of-sequence token and chat template",
        ("no_signal", "frozen", "repetition", "entropy_collapse", "over_optimised", "reward_hacking"),
    ),
    Cause(
        "no_signal",
        "not learning: no group has any spread of reward",
        "idle",
        "error",
        "prompts that are all too hard or all too easy, or a reward that always says the same",
        "Look at the rewards of one group; mix prompts of other difficulty",
        ("frozen", "entropy_collapse", "over_optimised", "reward_hacking"),
    ),
    Cause(
        "stopped_schedule",
        "not learning: the learning rate is 0",
        "idle",
        "error",
        "a schedule that ended before the run",
        "End the run, or start a new schedule: no further learning can happen",
        ("frozen",),
    ),
    Cause(
        "frozen",
        "not learning: the gradient is exactly 0 or the weights never move",
        "idle",
        "error",
        "weights that are frozen or not in the optimizer, a mask that closes everything",
        "List the trainable parameters and their gradients; with LoRA check that the adapter is active",
    ),
    Cause(
        "equal_lengths",
        "all completions have the same length though none is cut off",
        "idle",
        "notice",
        "a mask or an end-of-sequence rule that fixes the length",
        "Compare the mask's sums with the completions' lengths",
    ),
)

CAUSES: dict[str, Cause] = {cause.name: cause for cause in _ALL}
"""Name to cause, the more specific and more upstream first."""
