"""``lightning-rlstab ablate``: one base, one layer switched off at a time (or the stages in turn), one table.

Each variant is a process of its own with a folder of its own. What has run is not run again as long as its command and
its files are the same, so an ablation that was broken off goes on where it stopped.

Exit codes: 0 every variant ran to its end, 1 a variant died, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlstab.report.comparison import ablation_markdown, outcome
from lightning_rlstab.report.diagnosis import Diagnosis, diagnose
from lightning_rlstab.report.run import Run, RunReadError
from lightning_rlstab.report.sources import read_run

__all__ = ["Variant", "ablate", "table_row"]

_FINISHED, _DIED, _USAGE = 0, 1, 2
_MARK = "finished.json"
_LOG = "log.txt"

Launch = Callable[[Sequence[str], Path], int]
"""Runs a command with its output in a file and returns its exit code."""


@dataclass(frozen=True)
class Variant:
    """One run of the ablation.

    Attributes:
        name: Of its row and folder.
        config: The fragment stacked on the base.
    """

    name: str
    config: Path


def ablate(arguments: Sequence[str], *, configs: Path, launch: Launch | None = None) -> int:
    """Run the variants and print the table.

    Args:
        arguments: Command line after ``ablate``.
        configs: Folder that holds ``ablations/`` and ``stages/``.
        launch: Runs one variant; None for a process of its own.

    Returns:
        The exit code.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    variants = _variants(options, configs)
    known = {variant.name for variant in variants}
    unknown = sorted(set(options.only or ()) - known)
    if unknown or not variants:
        _tell(f"no variant {', '.join(unknown)}. Choose among {', '.join(sorted(known)) or 'none'}.")
        return _USAGE
    chosen = [variant for variant in variants if not options.only or variant.name in options.only]
    rows, has_died = [], False
    for variant in chosen:
        folder = options.out / variant.name
        command = _command(options.config, variant, folder, rest)
        code = _run(command, variant, folder, launch or _launch)
        has_died = has_died or code != 0
        rows.append((variant.name, table_row(folder, code)))
    table = ablation_markdown(rows)
    sys.stdout.write(table)
    (options.out / "ablation.md").write_text(table, encoding="utf-8")
    return _DIED if has_died else _FINISHED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-rlstab ablate",
        description="Run one base with one layer switched off at a time, or stage by stage, and print the table.",
        epilog="Further arguments go to every `lightning-rlstab fit`, e.g. --trainer.max_steps 200. "
        "Exit codes: 0 every variant ran to its end, 1 a variant died, 2 wrong usage.",
    )
    parser.add_argument("-c", "--config", action="append", required=True, metavar="FILE", help="base; may be repeated")
    parser.add_argument("--stages", action="store_true", help="the four stages in turn instead of the ablations")
    parser.add_argument("--variants", type=Path, metavar="DIR", help="a folder of fragments of your own instead")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants alone")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), metavar="DIR", help="a folder per variant")
    return parser


def _variants(options: argparse.Namespace, configs: Path) -> list[Variant]:
    folder = options.variants or configs / ("stages" if options.stages else "ablations")
    # The stages are numbered; what lies beside them is a reference and no run.
    pattern = "[0-9]*.yaml" if options.stages and options.variants is None else "*.yaml"
    return [Variant(file.stem, file) for file in sorted(folder.glob(pattern))]


def _command(bases: Sequence[str], variant: Variant, folder: Path, rest: Sequence[str]) -> list[str]:
    stacked = [part for config in (*bases, str(variant.config)) for part in ("--config", config)]
    return [
        *(sys.executable, "-m", "lightning_rlstab.cli", "fit", *stacked),
        *("--trainer.default_root_dir", str(folder)),
        *rest,
    ]


def _run(command: list[str], variant: Variant, folder: Path, launch: Launch) -> int:
    print_of = _fingerprint(command)
    mark = folder / _MARK
    finished = _marked(mark)
    if finished.get("fingerprint") == print_of:
        _tell(f"{variant.name} has run already")
        return int(finished["exit_code"])
    if (folder / _LOG).exists():  # of an earlier try of ours
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _tell(variant.name)
    code = launch(command, folder / _LOG)
    mark.write_text(json.dumps({"fingerprint": print_of, "exit_code": code, "command": command}), encoding="utf-8")
    if code:
        _tell(f"{variant.name} died with exit code {code}, see {folder / _LOG}")
    return code


def _tell(words: str) -> None:
    sys.stderr.write(f"ablate: {words}\n")


def _marked(mark: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "exit_code" in found else {}


def _fingerprint(command: Sequence[str]) -> str:
    """Of the command and the text of every file that it names."""
    digest = hashlib.sha256("\0".join(command).encode())
    for part in command[1:]:
        if part.endswith((".yaml", ".yml")) and Path(part).is_file():
            digest.update(Path(part).read_bytes())
    return digest.hexdigest()


def _launch(command: Sequence[str], log: Path) -> int:
    with log.open("w", encoding="utf-8") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def table_row(folder: Path, exit_code: int) -> dict[str, float | str]:
    """One variant's row: what it came to, how it ended, and what was done to it.

    Args:
        folder: The variant's folder.
        exit_code: Of its process.
    """
    try:
        run = read_run(folder)
    except RunReadError:
        return {"death": f"exit code {exit_code} before the first step" if exit_code else "no metrics"}
    diagnosis = diagnose(run)
    figures = outcome(run, diagnosis)
    row: dict[str, float | str] = {"steps": float(run.last_step + 1)}
    if "val/reward" in run.series:
        row["final held-out reward"] = float(run.series["val/reward"].values[-1])
        row["best held-out reward"] = figures["best held-out reward"]
    row["reward, last tenth"] = figures.get("reward, last tenth", "-")
    row["death"] = _death(run, diagnosis, exit_code)
    for kind, label in (("skip", "skips"), ("spike", "spikes"), ("rollback", "rollbacks"), ("alarm", "alarms")):
        row[label] = figures[f"{kind} events"]
    row["first cause"] = figures["first cause"]
    return row


def _death(run: Run, diagnosis: Diagnosis, exit_code: int) -> str:
    stops = [event for event in run.events if event["event"] == "stop"]
    if not exit_code and not stops:
        return "no"
    at = stops[-1]["step"] if stops else run.last_step
    cause = diagnosis.alarms[0].cause if diagnosis.alarms else f"exit code {exit_code}"
    return f"step {at}: {cause}"
