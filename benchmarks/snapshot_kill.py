"""kill -9 while snapshots are being written: is the newest one whole, and does the run resume from it?

    python benchmarks/snapshot_kill.py [--quick] [--kills 50]

Each trial forks a process that trains the demo's policy with a snapshot after every step, kills it at a random instant
between its first snapshot and two seconds later, and resumes from the newest snapshot in another fork for one step. The
bar: every trial finds a whole snapshot, resumes from it and goes on to the next step with finite weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from demo_runs import quiet

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks.opefo import OPEFO, SnapshotConfig
from lightning_rlstab.control.snapshots import newest_snapshot
from lightning_rlstab.demo.digits import addition_rows, exact_sum
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer
from lightning_rlstab.strategies import RLStabSingleDevice


def fit(policy: Any, tokenizer: Any, folder: Path, steps: int, resume: Path | None) -> GRPOModule:
    """Train with a snapshot after every step."""
    opefo = OPEFO(second_moment=False, snapshots=SnapshotConfig(every_steps=1, folder=str(folder)))
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        strategy=RLStabSingleDevice(),
        callbacks=[opefo],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        default_root_dir=folder.parent,
    )
    module = GRPOModule(
        copy.deepcopy(policy),
        [exact_sum],
        processing_class=tokenizer,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=2,
    )
    trainer.fit(module, PromptDataModule(addition_rows(64)), ckpt_path=resume)
    return module


def forked(work: Any) -> int:
    """Run ``work`` in a fork that ends with it; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        is_fine = bool(work())
    except BaseException as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
        is_fine = False
    os._exit(0 if is_fine else 1)


def trial(policy: Any, tokenizer: Any, source: random.Random) -> tuple[bool, bool, bool]:
    """Whether the kill came while a snapshot was half written, whether a snapshot was found, and whether it resumed."""
    root = Path(tempfile.mkdtemp())
    folder = root / "snapshots"
    victim = forked(lambda: fit(policy, tokenizer, folder, 10_000, None))
    deadline = time.monotonic() + 60
    while newest_snapshot(folder) is None and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    select.select([], [], [], source.uniform(0.0, 2.0))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    is_torn = any(folder.glob("*.partial"))
    newest = newest_snapshot(folder)

    def resumed() -> bool:
        assert newest is not None
        step = int(torch.load(newest, weights_only=True)["global_step"])
        module = fit(policy, tokenizer, folder, step + 1, newest)
        return module.trainer.global_step == step + 1 and all(bool(p.isfinite().all()) for p in module.parameters())

    is_resumed = newest is not None and os.waitstatus_to_exitcode(os.waitpid(forked(resumed), 0)[1]) == 0
    shutil.rmtree(root)
    return is_torn, newest is not None, is_resumed


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 kills")
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    quiet()
    tokenizer = digit_tokenizer()
    policy = digit_policy(tokenizer)
    kills = 5 if options.quick else options.kills
    source = random.Random(0)
    outcomes = [trial(policy, tokenizer, source) for _ in range(kills)]
    resumed = sum(is_resumed for _, _, is_resumed in outcomes)
    figures = {
        "name": "snapshot_kill",
        "value": resumed,
        "bar": kills,
        "ok": resumed == kills,
        "what": "runs killed at a random instant that resumed from a whole snapshot",
        "kills": kills,
        "found_whole": sum(found for _, found, _ in outcomes),
        "killed_while_writing": sum(torn for torn, _, _ in outcomes),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
