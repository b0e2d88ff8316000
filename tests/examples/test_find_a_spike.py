from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlstab.report.events import read_events


@pytest.mark.slow
def test_the_spike_event_names_the_rank_micro_batch_sequence_and_token_that_were_planted(run_example, capsys):
    names = run_example("find_a_spike/run.py")
    events = read_events(Path(names["trainer"].log_dir) / "events.jsonl")
    (planted,) = [event for event in events if event["event"] == "fire_drill"]
    (spike,) = [event for event in events if event["event"] == "spike"]
    culprit = spike["culprits"][0]
    assert names["PLANTED"].keys() == {"micro_batch", "rank", "sequence", "token"}
    for name, value in names["PLANTED"].items():
        assert culprit[name] == planted[name] == value, name
    assert spike["step"] == planted["step"] == 15
    assert spike["grad_norm"] > spike["threshold"] > spike["remaining_norm"]
    assert (spike["action"], culprit["cause"]) == ("removed", "token_mismatch")
    assert names["trainer"].strategy.applied_steps == 20  # the step went on without the token
    printed = capsys.readouterr().out
    assert spike["summary"] in printed
    assert printed.rstrip().endswith(str(names["PLANTED"]))
