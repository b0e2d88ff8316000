"""``rlstab-report RUN_DIR``: read a run, say what is wrong with it, and draw it.

Exit codes, for use in scripts: 0 healthy, 1 something was found, 2 the run could not be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rlstab.report.comparison import compared
from lightning_rlstab.report.diagnosis import Diagnosis, diagnose
from lightning_rlstab.report.page import comparison_page, page
from lightning_rlstab.report.run import Run, RunReadError
from lightning_rlstab.report.sources import read_run
from lightning_rlstab.report.words import diagnosis_text

__all__ = ["main"]

_HEALTHY, _SICK, _UNREADABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Args:
        arguments: Command line without the program's name; None for the process's own.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.compare:
            return _compare(options)
        return _report(options)
    except (RunReadError, OSError) as error:
        print(f"rlstab-report: {error}", file=sys.stderr)
        return _UNREADABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlstab-report",
        description="Diagnose a training run from its TensorBoard files, CSV, JSON lines or trainer_state.json.",
        epilog="Exit codes: 0 healthy, 1 something was found, 2 the run could not be read.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR", help="run folder, or one metrics file")
    what.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="set two runs side by side")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def _report(options: argparse.Namespace) -> int:
    run = read_run(options.run)
    diagnosis = diagnose(run)
    _print(
        options, {"run": str(run.path), **diagnosis.as_dict(), "notes": list(run.notes)}, diagnosis_text(run, diagnosis)
    )
    if options.html:
        _write(options.html, page(run, diagnosis))
    return _exit_code(diagnosis)


def _compare(options: argparse.Namespace) -> int:
    runs: list[Run] = [read_run(path) for path in options.compare]
    diagnoses = (diagnose(runs[0]), diagnose(runs[1]))
    rows = compared(runs[0], runs[1], diagnoses)
    labels = _labels(options.compare)
    width = max(len(row.name) for row in rows)
    columns = [
        max(len(label), *(len(text) for text in texts))
        for label, texts in ((labels[0], [row.first for row in rows]), (labels[1], [row.second for row in rows]))
    ]
    lines = [f"{'':{width}}  {labels[0]:>{columns[0]}}  {labels[1]:>{columns[1]}}  change"]
    lines += [
        f"{row.name:{width}}  {row.first:>{columns[0]}}  {row.second:>{columns[1]}}  {row.change}" for row in rows
    ]
    payload = {
        "runs": [str(path) for path in options.compare],
        "rows": [vars(row) for row in rows],
        "findings": [diagnosis.as_dict() for diagnosis in diagnoses],
    }
    _print(options, payload, "\n".join(lines))
    if options.html:
        _write(options.html, comparison_page(runs[0], runs[1], rows, labels))
    return max(_exit_code(diagnosis) for diagnosis in diagnoses)


def _labels(paths: Sequence[Path]) -> tuple[str, str]:
    """The shortest endings of the two paths that differ."""
    first, second = (path.resolve().parts for path in paths)
    for depth in range(1, max(len(first), len(second)) + 1):
        names = "/".join(first[-depth:]), "/".join(second[-depth:])
        if names[0] != names[1]:
            return names
    return "A", "B"


def _exit_code(diagnosis: Diagnosis) -> int:
    return _SICK if diagnosis.alarms else _HEALTHY


def _print(options: argparse.Namespace, payload: dict[str, Any], text: str) -> None:
    print(json.dumps(_finite(payload)) if options.json else text)


def _finite(value: Any) -> Any:
    """NaN and infinities as text: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
