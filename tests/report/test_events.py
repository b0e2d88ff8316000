from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass

import pytest
import torch

from lightning_rlstab.report.events import (
    EVENT_KINDS,
    SCHEMA_VERSION,
    EventLog,
    EventTail,
    number_from_json,
    read_events,
)


@pytest.fixture
def log(tmp_path):
    return EventLog(tmp_path / "run" / "events.jsonl")


def test_an_event_is_on_disk_as_soon_as_write_returns(log):
    log.write("skip", step=7, norm=41.2, reason="norm")
    (event,) = read_events(log.path)
    assert event["event"] == "skip"
    assert event["step"] == 7
    assert event["norm"] == 41.2
    assert event["schema_version"] == SCHEMA_VERSION


def test_a_run_without_events_leaves_no_file(log):
    assert not log.path.exists()
    assert read_events(log.path) == []


def test_non_finite_numbers_stay_valid_json_and_come_back(log):
    log.write("spike", step=0, values=[math.nan, math.inf, -math.inf, 1.5], nested={"norm": math.nan})
    text = log.path.read_text()
    event = json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name} is not JSON"))
    assert event["values"] == ["nan", "inf", "-inf", 1.5]
    assert math.isnan(number_from_json(event["nested"]["norm"]))
    assert number_from_json("inf") == math.inf
    assert number_from_json(True) is None


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1.0), object(), {1, 2}])
def test_a_tensor_is_refused_by_name_and_writes_nothing(log, value):
    with pytest.raises(ValueError, match=r"`norms`.*plain data"):
        log.write("spike", step=1, norms=value)
    assert not log.path.exists()


def test_a_tensor_deep_inside_is_refused_with_its_place(log):
    with pytest.raises(ValueError, match=r"`tokens\[1\].norm`"):
        log.write("spike", step=1, tokens=[{"norm": 1.0}, {"norm": torch.tensor(1.0)}])


def test_dataclasses_are_written_as_objects(log):
    @dataclass(frozen=True)
    class Token:
        text: str
        share: float

    log.write("spike", step=1, tokens=(Token("therefore", 0.94), Token("so", math.inf)))
    (event,) = read_events(log.path)
    assert event["tokens"] == [{"text": "therefore", "share": 0.94}, {"text": "so", "share": "inf"}]


def test_an_unknown_kind_is_refused_with_the_nearest_name(log):
    with pytest.raises(ValueError, match="Did you mean 'rollback'"):
        log.write("rolback", step=1)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_that_is_no_step_is_refused(log, step):
    with pytest.raises(ValueError, match="`step`"):
        log.write("skip", step=step)


@pytest.mark.parametrize("name", ["time", "schema_version"])
def test_a_field_cannot_overwrite_the_record(log, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        log.write("skip", step=1, **{name: 3})


def test_a_torn_last_line_is_passed_over(log):
    for step in range(3):
        log.write("skip", step=step)
    text = log.path.read_bytes()
    for cut in range(1, 40):
        log.path.write_bytes(text[:-cut])
        assert [event["step"] for event in read_events(log.path)] == ([0, 1, 2] if cut == 1 else [0, 1])


def test_a_resumed_run_does_not_glue_its_first_line_to_a_torn_one(log):
    log.write("skip", step=0)
    log.write("skip", step=1)
    log.path.write_bytes(log.path.read_bytes()[:-5])
    log.write("rollback", step=2)
    assert [(event["event"], event["step"]) for event in read_events(log.path)] == [("skip", 0), ("rollback", 2)]


def test_a_damaged_line_in_the_middle_costs_only_itself(log):
    log.write("skip", step=0)
    with log.path.open("ab") as file:
        file.write(b"\xff\xfe\x00garbage\n[1, 2]\n\n")
    log.write("skip", step=1)
    assert [event["step"] for event in read_events(log.path)] == [0, 1]


def test_a_file_that_is_no_event_file_is_named(tmp_path):
    other = tmp_path / "events.jsonl"
    other.write_text("name,value\nloss,1\n")
    with pytest.raises(ValueError, match=r"events\.jsonl"):
        read_events(other)


def test_an_empty_file_is_a_run_without_events(tmp_path):
    path = tmp_path / "events.jsonl"
    path.touch()
    assert read_events(path) == []


def test_a_lone_surrogate_in_a_completion_does_not_break_the_log(log):
    log.write("spike", step=1, text="\ud800 broken by the decoder")
    log.write("skip", step=2)
    assert [event["step"] for event in read_events(log.path)] == [1, 2]


def test_a_writer_survives_pickling_and_appends(log):
    log.write("skip", step=1)
    again = pickle.loads(pickle.dumps(log))
    again.write("skip", step=2)
    assert [event["step"] for event in read_events(log.path)] == [1, 2]


def test_every_kind_has_a_meaning():
    assert all(len(meaning) > 10 for meaning in EVENT_KINDS.values())


def test_a_tail_gives_each_event_once_and_waits_for_an_unfinished_line(log):
    log.write("skip", step=0)
    tail = EventTail(log.path)
    assert tail.fresh() == []
    log.write("skip", step=1)
    log.write("spike", step=2)
    assert [event["step"] for event in tail.fresh()] == [1, 2]
    with log.path.open("ab") as file:
        file.write(b'{"event": "skip", "st')
    assert tail.fresh() == []
    with log.path.open("ab") as file:
        file.write(b'ep": 3}\n')
    assert [event["step"] for event in tail.fresh()] == [3]


def test_a_tail_may_be_there_before_the_file(log):
    tail = EventTail(log.path)
    assert tail.fresh() == []
    log.write("skip", step=5)
    assert [event["step"] for event in tail.fresh()] == [5]
