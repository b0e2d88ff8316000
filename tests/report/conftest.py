from __future__ import annotations

import math

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_rlstab.report.memory import MonitorConfig, MonitorState
from lightning_rlstab.report.monitor import step
from lightning_rlstab.report.run import Reading


@pytest.fixture
def quiet_run():
    """Values of a run that learns, at one step: a function of the step and what to change."""

    def values(at: int, **changes: float) -> dict[str, float]:
        wave = math.sin(1.7 * at)
        found = {
            "reward": 0.3 + 0.3 * (1 - math.exp(-at / 80)) + 0.02 * wave,
            "rewards/format/mean": 0.6 + 0.02 * wave,
            "rewards/answer/mean": 0.3 + 0.02 * wave,
            "reward_std": 0.4,
            "frac_reward_zero_std": 0.2 + 0.05 * wave,
            "entropy": 1.2 - 0.3 * (1 - math.exp(-at / 80)) + 0.03 * wave,
            "kl": 0.02 * (1 - math.exp(-at / 80)) + 1e-4,
            "loss": 0.001 * wave,
            "grad_norm": 0.6 + 0.1 * wave,
            "learning_rate": 1e-6,
            "completions/min_length": 12.0,
            "completions/max_length": 80.0,
            "completions/clipped_ratio": 0.05,
        }
        return {**found, **{name.replace("__", "/"): value for name, value in changes.items()}}

    return values


@pytest.fixture
def watched(quiet_run):
    """Run the monitor over ``steps`` steps; ``sick(step)`` gives the changed values, None removes one."""

    def run(sick=lambda at: {}, steps: int = 150, state: MonitorState | None = None, first: int = 0, **config):
        state = state or MonitorState()
        alarms = []
        for at in range(first, steps):
            values = quiet_run(at)
            for name, value in sick(at).items():
                values.pop(name, None) if value is None else values.update({name: value})
            state, fresh = step(MonitorConfig(**config), state, Reading(at, values))
            alarms += [(found.cause, at) for found in fresh if found.is_alarm]
        return state, alarms

    return run


@pytest.fixture
def event_run(tmp_path, quiet_run):
    """A run folder with a TensorBoard file of ``steps`` steps; ``sick(step)`` changes values."""

    def make(steps: int = 60, sick=lambda at: {}, folder=None, first: int = 0):
        folder = folder or tmp_path / "run"
        writer = SummaryWriter(str(folder))
        for at in range(first, steps):
            for name, value in {**quiet_run(at), **sick(at)}.items():
                writer.add_scalar(name, value, at)
        writer.add_text("completions", "not a scalar", 1)
        writer.add_histogram("advantages", np.arange(5.0), 1)
        writer.close()
        return folder

    return make
