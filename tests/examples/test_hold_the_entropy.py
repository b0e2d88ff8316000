from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_rlstab.report.events import read_events


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_entropy_collapses_without_the_floor_and_is_held_with_it(run_example, capsys):
    names = run_example("hold_the_entropy/run.py")
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    floor, without, held = figures["floor"], figures["last_20_without"], figures["last_20_with"]
    assert without < 0.9 * floor
    assert held > 0.95 * floor
    assert held > 1.15 * without
    assert len(names["without"]) == len(names["held"]) == names["STEPS"]
    # Until the floor first acts, the two runs are the same run.
    assert names["without"][:5] == names["held"][:5]
    # Both learn, and the README gives both accuracies: the floor is no promise of a better one.
    assert min(figures["accuracy_without"], figures["accuracy_with"]) > figures["accuracy_before"]

    bouts = [
        event
        for path in sorted(Path("runs/hold_the_entropy").rglob("events.jsonl"))
        for event in read_events(path)
        if event["event"] == "controller" and event["source"] == "quatro"
    ]
    assert bouts
