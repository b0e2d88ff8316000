"""The table of completions in the run folder and in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_rlstab.control.ranks import Ranks
from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.rewards import RewardTable
from lightning_rlstab.rollout.table import append_jsonl, completion_rows, markdown_table

__all__ = ["log_completions"]


def log_completions(
    trainer: Any, ranks: Ranks, rollout: Rollout, table: RewardTable, *, shown: int | None = None
) -> None:
    """Append a rollout of all ranks to ``completions.jsonl`` and show it as text in TensorBoard; collective.

    Args:
        trainer: The Trainer; its ``log_dir`` is the run folder.
        ranks: The ranks to gather over.
        rollout: This rank's completions, with advantages.
        table: Their rewards.
        shown: Rows shown in TensorBoard; None for all.
    """
    step = trainer.global_step
    rows = [row for part in ranks.gathered_objects(completion_rows(rollout, table, step=step)) for row in part]
    log_dir = trainer.log_dir  # a broadcast: on every rank
    if not trainer.is_global_zero:
        return
    if log_dir is not None:
        append_jsonl(Path(log_dir) / "completions.jsonl", rows)
    text = markdown_table(rows, max_rows=len(rows) if shown is None else shown)
    for logger in trainer.loggers:
        add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
        if add_text is not None:
            add_text("completions", text, step)
