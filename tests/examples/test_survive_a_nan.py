from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlstab.report.events import read_events

FAULTS = {"gradient_nan", "loss_nan", "parameter_nan", "optimizer_state_nan"}


def kinds(events):
    return {event["event"] for event in events} | {event["kind"] for event in events if event["event"] == "fire_drill"}


@pytest.mark.slow
def test_every_nan_kills_the_unprotected_run_and_none_the_guarded_one(run_example):
    outcomes = run_example("survive_a_nan/run.py")["outcomes"]
    assert outcomes.keys() == FAULTS
    for row in outcomes.values():
        assert row["unprotected"].startswith("dead")
        assert row["guarded"].startswith("alive")
    # What the README says of the step gate alone: it holds a gradient back, and knows nothing of weights and moments.
    alive_by_gate = {fault for fault, row in outcomes.items() if row["gate alone"].startswith("alive")}
    assert alive_by_gate == {"gradient_nan", "loss_nan"}

    runs = [read_events(path) for path in sorted(Path("runs/survive_a_nan").rglob("events.jsonl"))]
    assert len(runs) == 12
    said = {fault: set() for fault in FAULTS}
    for events in runs:
        (fault,) = {event["kind"] for event in events if event["event"] == "fire_drill"}
        said[fault] |= {event["event"] for event in events}
    assert {"spike", "skip"} <= said["gradient_nan"]
    assert "spike" in said["loss_nan"]
    assert "rollback" in said["parameter_nan"]
    assert "rollback" in said["optimizer_state_nan"]

    (spoilt,) = [events for events in runs if {"spike", "loss_nan"} <= kinds(events)]
    (planted,) = [event for event in spoilt if event["event"] == "fire_drill"]
    (spike,) = [event for event in spoilt if event["event"] == "spike"]
    for name in ("micro_batch", "rank", "sequence", "token"):
        assert spike["culprits"][0][name] == planted[name], name
