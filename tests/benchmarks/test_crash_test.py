"""The crash test judges by its own rules, goes on where it stopped, and plants the same fault on both sides."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """Imports a benchmark by its name."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in {"crash_test", "crash_runs", "clean_runs", "demo_runs", "_twins"} - before:
        sys.modules.pop(name, None)


def run_record(setup: str, fault: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "setup": setup,
        "fault": fault,
        "seed": seed,
        "accuracy": 0.5,
        "start_accuracy": 0.25,
        "died_at": None,
        "error": "",
        "lost_steps": [],
        "steps": 40,
        "fault_step": 15,
        **changes,
    }


def test_the_bound_is_two_deviations_below_the_clean_mean_but_at_least_five_points(benchmark: Any) -> None:
    bound = benchmark("crash_test").survival_bound
    assert bound([0.5, 0.5]) == pytest.approx(0.45)
    assert bound([0.4, 0.6]) == pytest.approx(0.5 - 2 * 0.02**0.5)


@pytest.mark.parametrize(
    ("changes", "what", "lost"),
    [
        ({"accuracy": 0.46}, "survived", 0),
        ({"accuracy": 0.46, "lost_steps": [15, 16]}, "survived", 2),
        ({"accuracy": 0.44}, "degraded", 0),
        ({"accuracy": 0.25}, "dead", 25),
        ({"accuracy": None, "died_at": 20, "lost_steps": [15]}, "dead", 21),
        ({"accuracy": None, "died_at": 16, "error": "RuntimeError: stop"}, "dead", 24),
    ],
)
def test_a_cell_is_judged_by_its_set_ups_clean_runs(
    benchmark: Any, changes: dict[str, Any], what: str, lost: int
) -> None:
    cells = {("all", "clean", 0): run_record("all", "clean"), ("all", "loss_nan", 0): run_record("all", "loss_nan")}
    cells["all", "loss_nan", 0] |= changes
    (run,) = benchmark("crash_test").judged(cells)["loss_nan"]["all"]
    assert (run["outcome"], run["steps_lost"]) == (what, lost)


def test_the_table_counts_outcomes_and_steps_lost(benchmark: Any) -> None:
    crash_test = benchmark("crash_test")
    cells = {("bare", "clean", seed): run_record("bare", "clean", seed) for seed in range(2)}
    cells["bare", "loss_nan", 0] = run_record("bare", "loss_nan", lost_steps=[15])
    cells["bare", "loss_nan", 1] = run_record("bare", "loss_nan", 1, accuracy=None, died_at=15)
    table = crash_test.judged(cells)
    text = crash_test.markdown(table, ("bare",), ("loss_nan",))
    assert "| loss_nan | 1/0/1, 13 |" in text
    assert "| clean: accuracy | 0.500 |" in text
    assert "| survived | 50.0 % |" in text


def test_finished_cells_are_read_back_and_a_line_cut_short_is_run_again(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    first, again = run_record("bare", "clean"), run_record("bare", "clean", accuracy=0.6)
    cut = json.dumps(run_record("all", "clean"))[:30]
    path.write_text("\n".join([json.dumps(first), json.dumps(again), cut]))
    assert benchmark("crash_test").read_cells(path) == {("bare", "clean", 0): again}


def test_the_interval_is_students(benchmark: Any) -> None:
    low, high = benchmark("clean_runs").interval([0.0, 0.02])
    assert (low, high) == (pytest.approx(0.01 - 12.706 * 0.01), pytest.approx(0.01 + 12.706 * 0.01))


@pytest.mark.slow
def test_a_spoilt_loss_kills_trls_run_at_its_step_and_not_the_guarded_one(benchmark: Any, tmp_path: Path) -> None:
    from lightning_rlstab.demo.digits import addition_rows, exact_sum
    from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of TRL, Lightning and torch about each other
        crash_runs = benchmark("crash_runs")
        tokenizer = digit_tokenizer()
        save_policy(digit_policy(tokenizer), tokenizer, tmp_path / "policy")
        task = crash_runs.Task(
            model=str(tmp_path / "policy"),
            tokenizer=tokenizer,
            rows=addition_rows(8),
            reward=exact_sum,
            accuracy=lambda policy: 0.5,
            fields={"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4},
            steps=4,
            fault_step=2,
        )
        trl, bare, clean = (
            crash_runs.run_cell(*cell, 0, task, 0.0)
            for cell in (("trl", "loss_nan"), ("bare", "loss_nan"), ("trl", "clean"))
        )
    assert (trl.died_at, trl.accuracy) == (2, None)
    assert (bare.died_at, bare.accuracy, bare.lost_steps) == (None, 0.5, [2])
    assert (clean.died_at, clean.accuracy) == (None, 0.5)
