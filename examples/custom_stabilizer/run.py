"""A run with the stabilizer of ``mismatch_brake.py``: it learns what is usual, and skips the step that is not.

python examples/custom_stabilizer/run.py
"""

from __future__ import annotations

import lightning as L
import torch
from mismatch_brake import MismatchBrake

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import FireDrill
from lightning_rlstab.demo.digits import addition_rows, digit_share
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, warm_start

FAULT_STEP = 8

torch.set_num_threads(1)  # a model this small is slower on two
L.seed_everything(0)
tokenizer = digit_tokenizer()
policy = digit_policy(tokenizer)
warm_start(policy, tokenizer, max_steps=75)

# In one step the sampler reports every token twenty times less likely than training finds it.
drill = FireDrill([{"kind": "systematic_mismatch", "step": FAULT_STEP, "magnitude": 20.0}])
brake = MismatchBrake()
module = GRPOModule(
    model=policy,
    reward_funcs=[digit_share],
    processing_class=tokenizer,
    num_generations=8,
    per_device_train_batch_size=32,
    max_completion_length=4,
    learning_rate=2e-4,
)
trainer = L.Trainer(
    accelerator="cpu",
    strategy="rlstab",
    callbacks=[drill, brake],
    max_steps=12,
    log_every_n_steps=1,  # Lightning's default of 50 would leave a short run without curves
    default_root_dir="runs/custom_stabilizer",
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(module, PromptDataModule(addition_rows()))
trainer.save_checkpoint("runs/custom_stabilizer/last.ckpt")

print(f"\n{trainer.strategy.applied_steps} steps applied, {trainer.strategy.skipped_steps} skipped")
print(f"what the checkpoint keeps of it: {brake.state_dict()}")
