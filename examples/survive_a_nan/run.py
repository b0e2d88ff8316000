"""A NaN in four places, each met by three runs: unprotected, with the step gate alone, and with the guards.

    python examples/survive_a_nan/run.py

The last line of output is one JSON object with every outcome.
"""

from __future__ import annotations

import copy
import json
import logging

import lightning as L
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import GEPO, OPEFO, FireDrill, GradLoc
from lightning_rlstab.callbacks.opefo import SnapshotConfig
from lightning_rlstab.demo.digits import addition_rows, digit_share
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, warm_start
from lightning_rlstab.strategies import RLStabSingleDevice

STEPS, FAULT_STEP = 12, 6

torch.set_num_threads(1)  # a model this small is slower on two
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # twelve runs would introduce themselves
tokenizer = digit_tokenizer()
warm = digit_policy(tokenizer)
warm_start(warm, tokenizer, max_steps=75)


def outcome(fault: str, *guards: L.Callback, skip_non_finite: bool = True) -> str:
    """Train a copy of the policy with one planted fault, and say how it ended."""
    L.seed_everything(0, verbose=False)
    module = GRPOModule(
        model=copy.deepcopy(warm),
        reward_funcs=[digit_share],
        processing_class=tokenizer,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=4,
        learning_rate=2e-4,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        # The step gate skips a non-finite gradient by itself; with that switched off, the optimizer takes it in.
        strategy=RLStabSingleDevice(skip_non_finite=skip_non_finite),
        callbacks=[FireDrill([{"kind": fault, "step": FAULT_STEP}]), *guards],
        max_steps=STEPS,
        default_root_dir="runs/survive_a_nan",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, PromptDataModule(addition_rows()))
    is_alive = all(bool(weight.isfinite().all()) for weight in module.policy.parameters())
    words = "alive" if is_alive else "dead, its weights are NaN"
    return f"{words}; {trainer.strategy.applied_steps} of {STEPS} steps applied"


outcomes = {}
for fault in ("gradient_nan", "loss_nan", "parameter_nan", "optimizer_state_nan"):
    outcomes[fault] = {
        "unprotected": outcome(fault, skip_non_finite=False),
        "gate alone": outcome(fault),
        "guarded": outcome(fault, GradLoc(), GEPO(), OPEFO(snapshots=SnapshotConfig(every_steps=3))),
    }

for fault, row in outcomes.items():
    print(f"\nNaN in the {fault.removesuffix('_nan').replace('_', ' ')} at step {FAULT_STEP}")
    for name, words in row.items():
        print(f"  {name:<12} {words}")
print(json.dumps(outcomes))
