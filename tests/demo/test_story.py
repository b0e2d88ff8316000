from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_the_narrator_says_means_over_the_steps_since_its_last_line():
    from lightning_rlstab.demo.narration import Narrator

    said: list[str] = []
    narrator = Narrator(said.append, every_n_steps=2)
    for step, reward in enumerate([1.0, 0.0, 1.0, 0.5], start=1):
        trainer = SimpleNamespace(global_step=step, callback_metrics={"reward": reward})
        narrator.on_train_batch_end(trainer, None, None, None, 0)
    assert said == ["  step    1   reward 1.000", "  step    2   reward 0.000", "  step    4   reward 0.750"]


def test_the_planted_fault_is_told_in_words(capsys):
    from lightning_rlstab.demo.__main__ import _drill, _say_what_was_found

    assert _drill(60) == []
    assert _drill(61)[0].endswith("demo_drill.yaml")
    _say_what_was_found([{"step": 60, "summary": "token 1 '4'; caused 102% of it; the token was removed"}])
    assert "token 1 '4'" in capsys.readouterr().out


@pytest.mark.slow
def test_gradloc_names_the_token_that_the_drill_spoilt(tmp_path):
    from lightning_rlstab.demo.__main__ import main
    from lightning_rlstab.report.events import read_events

    figures = main(["--steps", "62", "--warm-start-steps", "25", "--out", str(tmp_path)])
    events = read_events(Path(figures["log_dir"]) / "events.jsonl")
    (planted,) = [event for event in events if event["event"] == "fire_drill" and event["is_planted"]]
    (spike,) = [event for event in events if event["event"] == "spike"]
    culprit = spike["culprits"][0]
    assert figures["spikes_found"] == 1
    assert (spike["step"], spike["action"], spike["verdict"]) == (60, "removed", "tokens")
    assert [culprit[name] for name in ("micro_batch", "rank", "sequence", "token")] == [
        planted[name] for name in ("micro_batch", "rank", "sequence", "token")
    ]
