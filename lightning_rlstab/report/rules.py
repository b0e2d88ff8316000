"""The rules: each looks at the memory and the newest reading, and gives evidence or None.

A rule raises no alarm by itself: ``monitor.step`` asks for ``patience`` times in a row and reports a cause once.
"Controls" that healthy runs trip all the time (entropy under 0.8 of its start, KL above 0.02) are no rules here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_rlstab.report.levels import BASE_READINGS, Level
from lightning_rlstab.report.memory import MonitorConfig, MonitorState, Snapshot
from lightning_rlstab.report.run import Reading

__all__ = ["PROMPT_RULES", "TREND_READINGS", "TREND_RULES", "Evidence", "Rule", "View"]

TREND_READINGS = 5
"""Trends are judged, and levels remembered, every 5 readings."""

_NO_LEVEL = Level()
_PLATEAU = 0.7
_RATE_JUMP = 5.0
_ALL_TRUNCATED = 0.95  # a few that end at once, with an empty answer, change nothing


@dataclass(frozen=True)
class Evidence:
    """Why a rule holds: words with the limits, the figures, and where it began (None: with this reading)."""

    words: str
    figures: Mapping[str, float] = field(default_factory=dict)
    since: int | None = None


@dataclass(frozen=True)
class View:
    """What a rule may look at.

    Attributes:
        config: Thresholds.
        before: The state before this reading.
        reading: The newest reading.
        signals: Levels with this reading taken in.
        broken: Names whose newest value is NaN or inf.
    """

    config: MonitorConfig
    before: MonitorState
    reading: Reading
    signals: Mapping[str, Level]
    broken: Mapping[str, float]

    def level(self, name: str) -> Level:
        """The running level of a signal; an empty one when it was never logged."""
        return self.signals.get(name, _NO_LEVEL)

    def past(self, name: str, *, least: int, most: int, since_reading: int = 0) -> list[tuple[int, float]]:
        """``(step, level)`` of a signal in the snapshots between ``least`` and ``most`` readings ago, oldest first.

        Snapshots of the run's first ``since_reading`` readings are left out.
        """
        newest = len(self.before.history)
        forgotten = math.ceil(self.before.readings / TREND_READINGS) - newest
        first = max(0, newest - most // TREND_READINGS, since_reading // TREND_READINGS - forgotten)
        last = max(0, newest - (least - 1) // TREND_READINGS)
        found = []
        for snapshot in self.before.history[first:last]:
            value = snapshot.levels.get(name)
            if value is not None:
                found.append((snapshot.step, value))
        return found

    def reward_names(self) -> list[str]:
        """Names of the components' means that were logged."""
        return [name for name in self.signals if name.startswith("rewards/")]

    def held_out(self) -> tuple[tuple[int, float, float], ...]:
        """The evaluations so far, this reading's included."""
        score = self.reading.values.get("val/reward")
        if score is None or not math.isfinite(score):
            return self.before.held_out
        return (*self.before.held_out[-11:], (self.reading.step, score, self.level("reward").level))


Check = Callable[[View], "Evidence | None"]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        cause: A key of ``causes.CAUSES``.
        patience: Times in a row that it must hold when asked; None for the configured ``idle_readings``.
        check: The rule.
        signal: It is asked only at readings that hold this signal; None for every reading.
    """

    cause: str
    patience: int | None
    check: Check
    signal: str | None = None


# ---- hard: non-finite and exploding ------------------------------------------------------------------------------


def nan_reward(view: View) -> Evidence | None:
    """The reward is NaN or inf, or the rollout counted such rewards."""
    for name in ("reward", "reward_std") if view.broken else ():
        if name in view.broken:
            return Evidence(f"{name} is {view.broken[name]}", {name: view.broken[name]})
    for name in ("rlstab/grpo/rewards_nan", "rlstab/grpo/rewards_inf"):
        count = view.reading.values.get(name, 0.0)
        if count > 0:
            return Evidence(f"{name} is {count:g}, above 0", {name: count})
    return _vanished_reward(view)


def _vanished_reward(view: View) -> Evidence | None:
    """The reward is missing from a reading for the first time: TRL's log leaves out a mean that has no finite value."""
    # Of the two names, which always come together, the second is logged last: a file cut off in between is no sign.
    if "reward" in view.reading.values or "frac_reward_zero_std" not in view.reading.values:
        return None
    before = [view.before.signals.get(name, _NO_LEVEL).readings for name in ("reward", "frac_reward_zero_std")]
    if before[0] != before[1] or before[0] < BASE_READINGS:
        return None
    return Evidence("no reward was logged with its groups' spread: every one is NaN or None", {"reward": math.nan})


def _broken(*names: str) -> Check:
    def check(view: View) -> Evidence | None:
        if not view.broken:
            return None
        found = {name: view.broken[name] for name in names if name in view.broken}
        if not found:
            return None
        return Evidence(" and ".join(f"{name} is {value}" for name, value in found.items()), found)

    return check


def gradient_spike(view: View) -> Evidence | None:
    """Norm > ratio x usual and norm > floor."""
    value = view.reading.values.get("grad_norm", math.nan)
    before = view.before.signals.get("grad_norm", _NO_LEVEL)
    if not math.isfinite(value) or before.readings < BASE_READINGS:
        return None
    usual, config = math.exp(before.level), view.config
    # Norms that always jump about need a wider margin: 6 standard deviations of the log-norm.
    ratio = max(config.spike_ratio, math.exp(6.0 * 1.25 * before.noise))
    if value > ratio * usual and value > config.spike_floor:
        words = f"grad_norm {value:.3g} > {ratio:.3g} x usual {usual:.3g} and > {config.spike_floor:g}"
        return Evidence(words, {"grad_norm": value, "usual": usual})
    return None


def gradient_drift(view: View) -> Evidence | None:
    """The usual norm is several times its initial level and still climbing."""
    level, config = view.level("grad_norm"), view.config
    if not level.is_settled:
        return None
    usual, base = math.exp(level.level), math.exp(level.base)
    if usual <= config.drift_ratio * base or usual <= config.drift_floor:
        return None
    earlier = view.past("grad_norm", least=10, most=30)
    if not earlier or level.level < max(value for _, value in earlier) + 0.05:
        return None
    since = _onset(view, "grad_norm", level.base + 0.3 * (level.level - level.base), is_rise=True)
    words = f"usual grad_norm {usual:.3g} > {config.drift_ratio:g} x initial {base:.3g} and still rising"
    return Evidence(words, {"usual": usual, "initial": base}, since)


def learning_rate_jump(view: View) -> Evidence | None:
    """The learning rate is several times anything it was; a warm-up grows, and a restart of a schedule comes back."""
    value, before = (
        view.reading.values.get("learning_rate", math.nan),
        view.before.signals.get("learning_rate", _NO_LEVEL),
    )
    if not math.isfinite(value) or not before.is_settled or value <= _RATE_JUMP * max(before.highest, before.last):
        return None
    words = f"learning_rate {value:.3g} > {_RATE_JUMP:g} x its highest level {before.highest:.3g}"
    return Evidence(words, {"learning_rate": value, "highest": before.highest})


def skipping(view: View) -> Evidence | None:
    """More steps are skipped than applied."""
    level, limit = view.level("rlstab/monitor/skipped_frac"), view.config.skipped_frac
    if level.readings < BASE_READINGS or level.last <= limit:
        return None
    return Evidence(f"share of skipped steps {level.last:.2f} > {limit:g}", {"skipped_frac": level.last})


# ---- entropy -----------------------------------------------------------------------------------------------------


def entropy_collapse(view: View) -> Evidence | None:
    """Entropy lost half and is still falling, and the reward gained nothing meanwhile.

    A policy also grows sure of itself on a plateau: while the reward stands at its best, it may fall further.
    """
    entropy, reward = view.level("entropy"), view.level("reward")
    limit = view.config.entropy_ratio
    if not entropy.is_settled or entropy.level > limit * entropy.base or is_solved(view):
        return None
    if _fall(view, "reward", 0.1) is None:
        limit *= _PLATEAU
        if entropy.level > limit * entropy.base:
            return None
    started = [mark for mark in view.past("entropy", least=10, most=80) if mark[1] > 1.6 * entropy.level]
    if not started:  # low, but no longer falling
        return None
    since = started[-1][0]
    then = _level_at(view.before.history, since, "reward")
    gain = reward.level - then if then is not None else 0.0
    if gain > max(0.05 * reward_scale(view), 2.0 * reward.standard_error):
        return None
    words = (
        f"entropy {entropy.level:.3g} < {limit:g} x initial {entropy.base:.3g} and fell by "
        f"more than 1.6 since step {since}, while reward went {gain:+.3g}"
    )
    # The fall began before it had reached its size.
    high = 0.8 * max(value for _, value in view.past("entropy", least=0, most=80))
    began = _onset(view, "entropy", high, is_rise=False)
    figures = {"entropy": entropy.level, "initial": entropy.base, "reward_gain": gain}
    return Evidence(words, figures, since if began is None else min(began, since))


def entropy_explosion(view: View) -> Evidence | None:
    """Entropy far above its start, and the reward did not rise with it."""
    entropy, reward = view.level("entropy"), view.level("reward")
    if not entropy.is_settled or entropy.level < 2.0 * entropy.base or entropy.level < entropy.base + 0.5:
        return None
    earlier = view.past("entropy", least=20, most=60)
    started = [mark for mark in earlier if mark[1] < 0.75 * entropy.level]
    if not started:
        return None
    then = _level_at(view.before.history, started[-1][0], "reward")
    if then is not None and reward.level - then > max(0.02 * reward_scale(view), reward.standard_error):
        return None
    words = f"entropy {entropy.level:.3g} > 2 x initial {entropy.base:.3g}, and reward did not rise with it"
    return Evidence(words, {"entropy": entropy.level, "initial": entropy.base}, started[-1][0])


def repetition(view: View) -> Evidence | None:
    """Completions repeat themselves, and did not at the start."""
    level, limit = view.level("rlstab/monitor/repetition"), view.config.repetition_frac
    if level.last <= limit or (level.is_settled and level.last <= level.base + 0.25):
        return None
    return Evidence(f"share of repeated n-grams {level.last:.2f} > {limit:g}", {"repetition": level.last})


# ---- KL, hacking -------------------------------------------------------------------------------------------------


def over_optimised(view: View) -> Evidence | None:
    """KL rises, reward falls, entropy falls."""
    evidence, entropy_ratio = _kl_rise_reward_fall(view)
    if evidence is None or entropy_ratio > 0.7:
        return None
    return Evidence(
        f"{evidence.words}; entropy at {entropy_ratio:.2f} of its level then",
        {**evidence.figures, "entropy_ratio": entropy_ratio},
        evidence.since,
    )


def reward_hacking(view: View) -> Evidence | None:
    """KL rises, reward falls (or one component falls while another rises), entropy holds."""
    evidence, entropy_ratio = _kl_rise_reward_fall(view)
    if evidence is None or not 0.8 <= entropy_ratio <= 1.4:
        return None
    return Evidence(
        f"{evidence.words}; entropy holds at {entropy_ratio:.2f} of its level then",
        {**evidence.figures, "entropy_ratio": entropy_ratio},
        evidence.since,
    )


def _kl_rise_reward_fall(view: View) -> tuple[Evidence | None, float]:
    kl, config = view.level("kl"), view.config
    if not kl.is_settled or kl.level < config.kl_floor:
        return None, 1.0
    # KL grows with time in every run, and fast at the very start: a rise counts only beyond a straight line, and not
    # from the first readings.
    now = view.reading.step + 1
    earlier = view.past("kl", least=5, most=80, since_reading=2 * BASE_READINGS)
    risen = [mark for mark in earlier if mark[1] * config.kl_ratio * now / (mark[0] + 1) < kl.level]
    if not risen:
        return None, 1.0
    since = risen[-1][0]
    fall = _reward_fall(view)
    if fall is None:
        return None, 1.0
    entropy = view.level("entropy")
    before = max((value for _, value in view.past("entropy", least=5, most=40)), default=entropy.level)
    ratio = entropy.level / before if before > 0 else 1.0
    words, figures = fall
    figures = {"kl": kl.level, "kl_before": risen[-1][1], **figures}
    return (
        Evidence(
            f"kl {kl.level:.3g} > {config.kl_ratio:g} x {risen[-1][1]:.3g} of step {since}; {words}", figures, since
        ),
        ratio,
    )


def _reward_fall(view: View) -> tuple[str, dict[str, float]] | None:
    """The total, or one component against another, fell from its recent best."""
    total = _fall(view, "reward", view.config.reward_drop_frac)
    if total is not None:
        return f"reward fell by {total:.3g} from its best", {"reward_fall": total}
    names = view.reward_names()
    for name in names:
        fall = _fall(view, name, view.config.reward_drop_frac)
        if fall is None:
            continue
        for other in names:
            level = view.level(other)
            past = view.past(other, least=10, most=60)
            if other != name and past and level.level - past[0][1] > max(0.05, 3.0 * level.standard_error):
                words = f"{name} fell by {fall:.3g} while {other} rose by {level.level - past[0][1]:.3g}"
                return words, {"component_fall": fall}
    return None


def _fall(view: View, name: str, share: float) -> float | None:
    level = view.level(name)
    past = view.past(name, least=5, most=100)
    if not level.is_settled or not past:
        return None
    fall = max(value for _, value in past) - level.level
    scale = max(abs(level.highest), level.highest - level.lowest)
    return fall if fall > max(share * scale, 4.0 * level.standard_error) else None


def held_out_gap(view: View) -> Evidence | None:
    """The held-out score fell from its best while the training reward rose.

    Averages of two or three evaluations in a row are compared, so that one lucky evaluation is no best, and the gap
    must open by far more than the scores' own noise.
    """
    scores = view.held_out()
    if len(scores) < 5 or scores is view.before.held_out:
        return None
    values = [score for _, score, _ in scores]
    # Standard deviation of one score; the median of steps, so that a real fall does not hide itself.
    noise = statistics.median(abs(after - before) for before, after in itertools.pairwise(values)) / 0.95
    scale = max(*map(abs, values), max(values) - min(values))
    reward = view.level("reward")
    for width in (2, 3):
        averages = [sum(part) / width for part in zip(*(values[start:] for start in range(width)), strict=False)]
        if len(averages) <= width:
            continue
        best = max(range(len(averages) - width), key=averages.__getitem__)
        fall = averages[best] - averages[-1]
        at, _, reward_then = scores[best + width - 1]
        gain = reward.level - reward_then
        is_fall = fall > max(view.config.held_out_drop_frac * scale, 2.0 * noise) and gain + fall > 7.0 * noise
        if is_fall and gain > max(0.1 * reward_scale(view), 3.0 * reward.standard_error):
            words = f"held-out score fell by {fall:.3g} since step {at} while training reward rose by {gain:.3g}"
            return Evidence(words, {"held_out_fall": fall, "training_gain": gain}, at)
    return None


def mismatch(view: View) -> Evidence | None:
    """Sampling and training log-probs differ by more than rounding."""
    gap, limit = view.level("sampling/sampling_logp_difference/mean"), view.config.mismatch_nats
    if gap.last <= limit or gap.level <= limit:
        return None
    return Evidence(f"mean log-prob gap {gap.level:.3g} > {limit:g} nats", {"gap": gap.level})


def reward_outlier(view: View) -> Evidence | None:
    """One reading's reward, and its spread within the batch, are far beyond everything before."""
    value, before = view.reading.values.get("reward", math.nan), view.before.signals.get("reward", _NO_LEVEL)
    if not math.isfinite(value) or not before.is_settled:
        return None
    scale = max(abs(before.highest), abs(before.lowest), before.highest - before.lowest)
    usual = view.before.signals.get("reward_std", _NO_LEVEL)
    spread = view.reading.values.get("reward_std", math.inf)
    is_far = abs(value - before.level) > max(5.0 * scale, 15.0 * before.noise)
    if not is_far or (0.0 <= value <= 1.0 and before.lowest >= 0.0) or not spread > 5.0 * usual.level:
        return None
    return Evidence(
        f"reward {value:.3g} is further than 5 x its scale {scale:.3g} from its level {before.level:.3g}",
        {"reward": value, "level": before.level},
    )


def reward_collapse(view: View) -> Evidence | None:
    """Reward lost more than half of its scale; of noisy rewards, nearly all of it."""
    level, fall = view.level("reward"), _fall(view, "reward", 0.5)
    if fall is None or view.before.readings < 30:
        return None
    is_almost_all = _fall(view, "reward", 0.8) is not None
    if fall <= (3.5 if is_almost_all else 6.0) * level.noise:
        return None
    past = view.past("reward", least=5, most=100)
    since = max(past, key=lambda mark: mark[1])[0]
    return Evidence(f"reward {level.level:.3g} fell by {fall:.3g} since step {since}", {"reward_fall": fall}, since)


# ---- idle --------------------------------------------------------------------------------------------------------


def all_truncated(view: View) -> Evidence | None:
    """Every completion is cut off, reading after reading, and the reward gains nothing."""
    clipped, reward = view.level("completions/clipped_ratio"), view.level("reward")
    if clipped.last < _ALL_TRUNCATED:
        return None
    if reward.is_settled and reward.level - reward.base > max(0.05 * reward_scale(view), 3.0 * reward.standard_error):
        past = view.past("reward", least=10, most=30)
        if past and reward.level >= past[0][1]:
            return None
    words = f"completions/clipped_ratio is {clipped.last:.3g}, reading after reading"
    return Evidence(words, {"clipped_ratio": clipped.last})


def no_signal(view: View) -> Evidence | None:
    """All groups without spread, and not because the task is solved."""
    flat, spread = view.level("frac_reward_zero_std"), view.level("reward_std")
    is_flat = flat.last >= 0.999 if flat.readings else spread.readings > 0 and spread.last == 0.0
    if not is_flat or is_solved(view):
        return None
    reward = view.level("reward")
    name = "frac_reward_zero_std is 1" if flat.readings else "reward_std is 0"
    return Evidence(f"{name}, reading after reading, at reward {reward.last:.3g}", {"reward": reward.last})


def stopped_schedule(view: View) -> Evidence | None:
    """The learning rate is exactly 0, not only at the very end or in warm-up."""
    rate = view.level("learning_rate")
    return None if rate.last != 0.0 else Evidence("learning_rate is exactly 0, reading after reading")


def frozen(view: View) -> Evidence | None:
    """The gradient is exactly 0 although groups have spread, or the weights never move."""
    if view.reading.values.get("grad_norm") == 0.0:
        flat = view.level("frac_reward_zero_std")
        is_spread = not flat.readings or flat.last < 0.999
        return Evidence("grad_norm is exactly 0 although groups have spread") if is_spread else None
    still = view.level("rlstab/monitor/weights_moved")
    if still.readings >= 2 and still.zeros == still.readings:
        return Evidence(f"no sampled weight moved in {still.readings} readings", {"readings": float(still.readings)})
    return None


def equal_lengths(view: View) -> Evidence | None:
    """Shortest equals longest from the first reading on, though nothing is cut off."""
    low, high = view.level("completions/min_length"), view.level("completions/max_length")
    clipped = view.level("completions/clipped_ratio")
    is_equal = low.readings > 0 and low.last == high.last and low.level == high.level
    if not is_equal or clipped.last >= 0.999 or low.readings > 2 * view.config.idle_readings:
        return None
    return Evidence(f"shortest and longest completion are both {low.last:g} tokens", {"length": low.last})


def restart_death(view: View) -> Evidence | None:
    """A hard failure soon after a restart of a run that had died."""
    start = view.before.restart_reading
    if start is None or not view.before.has_died or view.before.readings - start > view.config.restart_readings:
        return None
    for check in (nan_reward, _broken("entropy", "kl"), _broken("loss"), _broken("grad_norm"), gradient_spike):
        evidence = check(view)
        if evidence is not None:
            words = (
                f"{evidence.words}, {view.before.readings - start} readings after the restart of a run that had died"
            )
            return Evidence(words, evidence.figures)
    return None


# ---- shared ------------------------------------------------------------------------------------------------------


def reward_scale(view: View) -> float:
    """How large this task's rewards are: the largest level or range seen so far."""
    reward = view.level("reward")
    if not reward.readings:
        return 1.0
    return max(abs(reward.highest), abs(reward.base), reward.highest - reward.lowest, 1e-8)


def is_solved(view: View) -> bool:
    """The reward has risen to its best and stands there: at the ceiling of 0/1 rewards, else without spread."""
    reward = view.level("reward")
    if not reward.is_settled or reward.level < reward.highest - 0.1 * reward_scale(view):
        return False
    if reward.lowest >= 0.0 and reward.highest <= 1.0 + 1e-6:  # 0/1 rewards: the ceiling is known
        return reward.level >= 0.9 and reward.base < 0.9
    is_risen = reward.level - reward.base > 0.1 * reward_scale(view)
    return is_risen and view.level("frac_reward_zero_std").level > 0.8


def _level_at(history: tuple[Snapshot, ...], at: int, name: str) -> float | None:
    return next((snapshot.levels.get(name) for snapshot in history if snapshot.step == at), None)


def _onset(view: View, name: str, threshold: float, *, is_rise: bool) -> int | None:
    """The newest remembered step at which the level was still on the healthy side of the threshold."""
    marks = view.past(name, least=0, most=120)
    healthy = [at for at, value in marks if (value < threshold) == is_rise]
    return healthy[-1] if healthy else None


_LOGPROBS_BROKEN = _broken("entropy", "kl", "sampling/sampling_logp_difference/mean")

PROMPT_RULES: tuple[Rule, ...] = (
    Rule("restart_death", 1, restart_death),
    Rule("nan_reward", 1, nan_reward),
    Rule("nan_logprobs", 1, _LOGPROBS_BROKEN),
    Rule("nan_loss", 1, _broken("loss")),
    Rule("nan_gradient", 1, _broken("grad_norm")),
    Rule("gradient_spike", 1, gradient_spike, "grad_norm"),
    Rule("learning_rate_jump", 1, learning_rate_jump, "learning_rate"),
    Rule("reward_outlier", 1, reward_outlier, "reward"),
    Rule("skipping", 3, skipping, "rlstab/monitor/skipped_frac"),
    Rule("repetition", 1, repetition, "rlstab/monitor/repetition"),
    Rule("held_out_gap", 1, held_out_gap, "val/reward"),
    Rule("mismatch", 3, mismatch, "sampling/sampling_logp_difference/mean"),
    Rule("all_truncated", None, all_truncated, "completions/clipped_ratio"),
    Rule("no_signal", None, no_signal, "reward"),
    Rule("stopped_schedule", None, stopped_schedule, "learning_rate"),
    Rule("frozen", None, frozen, "grad_norm"),
    Rule("equal_lengths", None, equal_lengths, "completions/min_length"),
)
"""Asked at every reading, the more upstream causes first."""

TREND_RULES: tuple[Rule, ...] = (
    Rule("gradient_drift", 2, gradient_drift),
    Rule("over_optimised", 2, over_optimised),
    Rule("entropy_collapse", 3, entropy_collapse),
    Rule("entropy_explosion", 2, entropy_explosion),
    Rule("reward_hacking", 2, reward_hacking),
    Rule("reward_collapse", 4, reward_collapse),
)
"""Asked every ``TREND_READINGS`` readings."""
