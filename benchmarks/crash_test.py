"""The crash test: every fault that FireDrill knows against TRL's GRPOTrainer, our bare GRPO, each guard alone, and all.

    python benchmarks/crash_test.py [--quick] [--jobs 2] [--seeds 5] [--out runs/crash_test] [--markdown F] [--json F]

A cell is one training run of 40 steps on the digits policy (32 completions per step, learning rate 3e-4) with one fault
at step 17, at FireDrill's default magnitude; ``repeated_output``, ``all_truncated`` and ``reward_hacking`` last four
steps, all others strike once. ``behavior_logprob_neg_inf`` runs with the correction for the sampler's log-probs and
``all_truncated`` with ``mask_truncated_completions``, on both sides, because nothing else reads what they spoil.
Finished cells are appended to ``cells.jsonl`` in ``--out``; a run that was stopped goes on there.

Set-ups: ``trl`` is TRL's trainer; ``bare`` our module on ``strategy="rlstab"`` without callbacks (its gate skips a
gradient that is not finite by itself, as the module does on Lightning's own strategies); ``gepo``, ``opefo``,
``quatro``, ``gradloc`` one guard; ``all`` the four of them in the order GradLoc, GEPO, OPEFO, QUATRO, no clips. All
have their defaults, but for OPEFO, whose rhythms are scaled to 40 steps (second moments every 10, snapshots every 5,
recovery over 5), and for the n-grams of QUATRO's filter, one token long for completions of at most four. ``beta`` is 0
as in TRL, so QUATRO's KL anchor is off.

Outcome of a cell, by greedy accuracy on 1,024 held-out additions after the last step:

- survived: accuracy >= mean - max(2 standard deviations, 0.05) of the clean runs of the same set-up over the seeds;
- dead: the run raised, or its weights are not finite at the end, or accuracy is below that and not above what the
  policy had before the first step;
- degraded: in between.

Steps lost: optimizer steps that a guard skipped or a rollback undid; for a run that raised or lost its weights also
those from that step to the end; for one that collapsed those from the fault to the end.

Bars: with ``all``, 95 % of the cells survive, and every cell of a fault that is not finite (``NON_FINITE``).

With ``--model DIR``, e.g. what ``examples/smollm2/fetch.py`` wrote: a short list of faults, TRL, bare and all, 8 steps
of 16 completions, fault at step 4, guards warmed up in 3 steps, a snapshot every step; held-out score on 32
questions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

CLEAN = "clean"
SETUPS = ("trl", "bare", "gepo", "opefo", "quatro", "gradloc", "all")
NON_FINITE = (
    "reward_nan",
    "behavior_logprob_neg_inf",
    "log_ratio_overflow",
    "gradient_nan",
    "gradient_inf",
    "loss_nan",
    "parameter_nan",
    "optimizer_state_nan",
)
SHORT_LIST = ("reward_nan", "token_mismatch", "loss_nan", "gradient_nan", "parameter_nan")
QUICK = ("loss_nan", "token_mismatch")
BAR = 0.95
LEAST_NOISE = 0.05

Cell = tuple[str, str, int]
Cells = dict[Cell, dict[str, Any]]


# Outcomes -------------------------------------------------------------------------------------------------------------


def survival_bound(accuracies: Sequence[float]) -> float:
    """Accuracy from which on a run counts as survived, from those of clean runs of the same set-up.

    Example:
        >>> round(survival_bound([0.5, 0.5, 0.5]), 3)
        0.45
    """
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return statistics.mean(accuracies) - max(2 * spread, LEAST_NOISE)


def outcome(run: dict[str, Any], bound: float) -> str:
    """``"survived"``, ``"degraded"`` or ``"dead"``."""
    accuracy = run["accuracy"]
    if run["error"] or accuracy is None:
        return "dead"
    if accuracy >= bound:
        return "survived"
    return "dead" if accuracy <= run["start_accuracy"] else "degraded"


def steps_lost(run: dict[str, Any], what: str) -> int:
    """Optimizer steps that did not help, by the rule of this file's docstring."""
    lost = set(run["lost_steps"])
    if what == "dead":
        began = run["fault_step"] if run["died_at"] is None else run["died_at"]
        lost |= set(range(began, run["steps"]))
    return len(lost)


def judged(cells: Cells) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Fault to set-up to the runs over the seeds, each with ``outcome`` and ``steps_lost``; clean runs included."""
    clean: dict[str, list[float]] = {}
    for (setup, fault, _), run in cells.items():
        if fault == CLEAN and run["accuracy"] is not None:
            clean.setdefault(setup, []).append(run["accuracy"])
    table: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (setup, fault, _), run in sorted(cells.items(), key=lambda item: item[0][2]):
        if setup in clean:
            what = outcome(run, survival_bound(clean[setup]))
            row = {**run, "outcome": what, "steps_lost": steps_lost(run, what)}
            table.setdefault(fault, {}).setdefault(setup, []).append(row)
    return table


def share(table: dict[str, dict[str, list[dict[str, Any]]]], setup: str, faults: Iterable[str]) -> float | None:
    """Share of a set-up's cells that survived; None without any."""
    runs = [run for fault in faults for run in table.get(fault, {}).get(setup, [])]
    return sum(run["outcome"] == "survived" for run in runs) / len(runs) if runs else None


def markdown(table: dict[str, dict[str, list[dict[str, Any]]]], setups: Sequence[str], faults: Sequence[str]) -> str:
    """The table, a row per fault; a cell says survived/degraded/dead and the median of the steps lost."""
    lines = ["| fault | " + " | ".join(setups) + " |", "|---" * (len(setups) + 1) + "|"]
    for fault in (*faults, CLEAN):
        cells = []
        for setup in setups:
            runs = table.get(fault, {}).get(setup, [])
            counts = [sum(run["outcome"] == what for run in runs) for what in ("survived", "degraded", "dead")]
            words = "/".join(map(str, counts))
            if fault == CLEAN and runs:
                words = f"{statistics.mean(run['accuracy'] or 0.0 for run in runs):.3f}"
            lost = statistics.median(run["steps_lost"] for run in runs) if runs else 0
            cells.append("" if not runs else f"{words}, {lost:g}" if lost else words)
        lines.append(f"| {'clean: accuracy' if fault == CLEAN else fault} | " + " | ".join(cells) + " |")
    shares = [share(table, setup, faults) for setup in setups]
    lines.append("| survived | " + " | ".join("" if s is None else f"{100 * s:.1f} %" for s in shares) + " |")
    return "\n".join(lines) + "\n"


# Runs -----------------------------------------------------------------------------------------------------------------


def _quiet() -> None:
    """Of every worker: one thread, and no output but the figures."""
    import logging

    import _twins
    import demo_runs

    demo_runs.quiet()
    _twins.quiet()
    logging.getLogger("lightning_rlstab").setLevel(logging.CRITICAL)


def _task(seed: int, out: Path, model: Path | None) -> tuple[Any, float]:
    """What is learnt, and the score before the first step, measured once."""
    from crash_runs import digits_task, words_task
    from transformers import AutoModelForCausalLM

    task = digits_task(seed, out / "policies") if model is None else words_task(seed, model)
    noted = out / "policies" / f"start-{'digits' if model is None else 'words'}-{seed}.json"
    if not noted.exists():
        policy = AutoModelForCausalLM.from_pretrained(task.model, local_files_only=True, dtype="float32")
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(json.dumps(task.accuracy(policy)))
    return task, json.loads(noted.read_text())


def _prepared(order: tuple[int, Path, Path | None]) -> int:
    _task(*order)
    return order[0]


def _finished(order: tuple[Cell, Path, Path | None, dict[str, Any]]) -> dict[str, Any]:
    from crash_runs import run_cell

    (setup, fault, seed), out, model, fields = order
    task, start = _task(seed, out, model)
    task = replace(task, fields={**task.fields, **fields})
    return asdict(run_cell(setup, fault, seed, task, start))


def read_cells(path: Path) -> Cells:
    """Finished cells; of a cell that was run again, the last one. A line that a kill cut short is passed over."""
    cells: Cells = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        cells[run["setup"], run["fault"], run["seed"]] = run
    return cells


def run_cells(
    wanted: Sequence[Cell],
    *,
    out: Path,
    jobs: int,
    model: Path | None = None,
    is_fresh: bool = False,
    **fields: Any,
) -> Cells:
    """Run what is not there yet, and give all wanted cells.

    Args:
        wanted: Set-up, fault and seed, in the order in which they are run.
        out: Folder of policies and finished cells.
        jobs: Processes.
        model: Directory of a chat model; None for the digits policy.
        is_fresh: Run cells that are there as well.
        **fields: Of ``GRPOConfig``, instead of the task's; cells of other fields are kept apart.
    """
    out.mkdir(parents=True, exist_ok=True)
    suffixes = ["model"] if model is not None else []
    suffixes += [f"{name}={value}" for name, value in sorted(fields.items())]
    path = out / ("_".join(["cells", *suffixes]) + ".jsonl")
    there = {} if is_fresh else read_cells(path)
    missing = [cell for cell in wanted if cell not in there]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(jobs, initializer=_quiet, maxtasksperchild=100) as pool, path.open("a") as stream:
        for _ in pool.imap_unordered(_prepared, [(seed, out, model) for seed in sorted({c[2] for c in missing})]):
            pass
        orders = [(cell, out, model, fields) for cell in missing]
        for number, run in enumerate(pool.imap_unordered(_finished, orders), 1):
            stream.write(json.dumps(run) + "\n")
            stream.flush()
            score = "none" if run["accuracy"] is None else f"{run['accuracy']:.3f}"
            print(
                f"{number}/{len(missing)} seed {run['seed']} {run['setup']} {run['fault']}: accuracy {score}, "
                f"lost {run['lost_steps']}, {run['acts']} {run['error'][:120]} ({run['seconds']} s)",
                flush=True,
            )
    done = read_cells(path)
    return {cell: done[cell] for cell in wanted if cell in done}


def main() -> None:
    """Run, write the tables, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two faults, TRL, bare and all, 1 seed")
    parser.add_argument("--faults", help="comma-separated; default every kind that FireDrill knows")
    parser.add_argument("--setups", help=f"comma-separated; default {','.join(SETUPS)}")
    parser.add_argument("--seeds", type=int, help="seeds 0 to N - 1; default 5")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/crash_test"), help="policies and finished cells")
    parser.add_argument("--fresh", action="store_true", help="run cells again that are finished in --out")
    parser.add_argument("--model", type=Path, help="directory of a chat model: the short list on it instead")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from _twins import versions

    from lightning_rlstab.callbacks.fire_drill_faults import FAULTS

    is_short = options.quick or options.model is not None
    usual = QUICK if options.quick else SHORT_LIST if options.model else tuple(FAULTS)
    faults = tuple(options.faults.split(",")) if options.faults else usual
    setups = tuple(options.setups.split(",")) if options.setups else ("trl", "bare", "all") if is_short else SETUPS
    for name, given, known in (("--faults", faults, tuple(FAULTS)), ("--setups", setups, SETUPS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise SystemExit(f"`{name}` must be among {', '.join(known)}, got {', '.join(unknown)}.")
    seeds = options.seeds or (1 if is_short else 5)
    wanted = [(setup, fault, seed) for seed in range(seeds) for fault in (CLEAN, *faults) for setup in setups]
    cells = run_cells(wanted, out=options.out, jobs=options.jobs, model=options.model, is_fresh=options.fresh)
    table = judged(cells)
    text = markdown(table, setups, faults)
    print(text)
    shares = {setup: share(table, setup, faults) for setup in setups}
    non_finite = {setup: share(table, setup, [f for f in faults if f in NON_FINITE]) for setup in setups}
    survived, survived_non_finite = shares.get("all"), non_finite.get("all")
    failed = [
        {key: run[key] for key in ("fault", "seed", "outcome", "accuracy", "steps_lost", "error")}
        for fault in faults
        for run in table.get(fault, {}).get("all", [])
        if run["outcome"] != "survived"
    ]
    figures = {
        "name": "crash_test",
        "value": survived,
        "bar": BAR,
        "ok": survived is not None and survived >= BAR and survived_non_finite in (None, 1.0),
        "what": "share of cells that survive with GradLoc, GEPO, OPEFO and QUATRO on; faults that are not finite: all",
        "cells": len(cells),
        "seeds": seeds,
        "survived": {setup: None if value is None else round(value, 4) for setup, value in shares.items()},
        "survived_non_finite": {s: None if value is None else round(value, 4) for s, value in non_finite.items()},
        "not_survived_with_all": failed,
        **versions(),
    }
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps({"figures": figures, "runs": table}, indent=1))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
