from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from lightning_rlstab.gradloc.finding import Culprit, Finding
from lightning_rlstab.gradloc.oracle import TokenAddress
from lightning_rlstab.gradloc.wording import event_fields, spike_sentence
from lightning_rlstab.report.events import EventLog, read_events

WORDS = ["so", "we", "add", "therefore", "42", "."]
CULPRIT = Culprit(
    address=TokenAddress(3, 0, 1, 3),
    token_id=3,
    share=0.94,
    grad_norm=40.8,
    importance_ratio=54.6,
    cause="token_mismatch",
    layers=(("model.layers.31", 0.4), ("model.layers.30", 0.31), ("lm_head", 0.29)),
)
FINDING = Finding(
    verdict="tokens",
    culprits=(CULPRIT,),
    tier=1,
    grad_norm=41.2,
    threshold=3.1,
    remaining_norm=0.58,
    completeness=0.9997,
    effective_tokens=1.1,
    strip=(0.0, 0.01, 0.02, 0.94, 0.03, 0.0),
    cost_sweeps=0.41,
)


def decode(ids) -> str:
    return " ".join(WORDS[index % len(WORDS)] for index in ids)


def signals(oracle_of):
    mask = torch.ones((4, 1, 4, 6), dtype=torch.bool)
    mask[3, 0, 1, 5] = False
    oracle = oracle_of(shape=(4, 1, 4, 6), mask=mask)
    ids = torch.arange(6).expand(4, 1, 4, 6)
    return dataclasses.replace(oracle.signals, token_ids=ids)


def test_the_sentence_says_where_what_why_and_what_was_done() -> None:
    words = spike_sentence(FINDING, action="removed", decode=decode)
    assert words == (
        "gradient norm 41.2 (threshold 3.1): micro-batch 3, rank 0, sequence 1, token 3 'therefore'; caused 94% of it; "
        "importance ratio 54.6; token_mismatch; model.layers.31 and model.layers.30 carry 71%. "
        "The token was removed and the step applied without, at norm 0.58."
    )


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("diffuse", "no token dominates"),
        ("systematic", "disagree on every token"),
        ("layer", "layers exploded"),
        ("numeric", "comes from no token"),
    ],
)
def test_with_nobody_to_blame_the_sentence_says_so(verdict, words) -> None:
    blameless = dataclasses.replace(FINDING, verdict=verdict, culprits=())
    assert words in spike_sentence(blameless, action="skipped", decode=decode)


def test_an_event_holds_every_promised_field_and_survives_the_log(oracle_of, tmp_path) -> None:
    fields = event_fields(FINDING, signals(oracle_of), action="removed", decode=decode, context_tokens=2)
    log = EventLog(tmp_path / "events.jsonl")
    log.write("spike", step=412, **fields)
    (event,) = read_events(log.path)
    promised = {
        "step",
        "grad_norm",
        "threshold",
        "action",
        "tier",
        "completeness",
        "cost_sweeps",
        "verdict",
        "culprits",
    }
    assert promised <= set(event)
    (culprit,) = event["culprits"]
    assert culprit["context"] == "we add[[therefore]]42"  # the closed slot after it is not shown
    assert culprit["text"] == "therefore"
    assert culprit["layers"][0] == {"name": "model.layers.31", "share": 0.4}
    assert event["strip"]["texts"] == WORDS[:5]
    assert event["strip"]["weights"][3] == 0.94
    assert "41.2" in event["summary"]


def test_non_finite_figures_stay_valid_json(oracle_of, tmp_path) -> None:
    broken = dataclasses.replace(FINDING, grad_norm=math.nan, threshold=math.inf, strip=())
    fields = event_fields(broken, signals(oracle_of), action="skipped", decode=decode, context_tokens=2)
    log = EventLog(tmp_path / "events.jsonl")
    log.write("spike", step=1, **fields)
    line = json.loads(log.path.read_text())
    assert (line["grad_norm"], line["threshold"], line["strip"]) == ("nan", "inf", None)
