from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.slow
def test_the_demo_runs_from_a_foreign_directory_and_ends_with_its_figures(tmp_path):
    command = [sys.executable, "-m", "lightning_rlstab.demo", "--steps", "3", "--warm-start-steps", "10", "--seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps"] == 3
    assert figures["seed"] == 1
    assert figures["seconds"] > 0
    assert 0 <= figures["accuracy_before"] <= 1
    assert 0 <= figures["accuracy_after"] <= 1
    run = tmp_path / Path(figures["log_dir"])
    assert {"config.yaml", "events.jsonl", "policy"} <= {path.name for path in run.iterdir()}
    curves = EventAccumulator(str(run))
    curves.Reload()
    rewards = curves.Scalars("reward")
    assert len(rewards) == 3
    assert all(math.isfinite(event.value) for event in rewards)
