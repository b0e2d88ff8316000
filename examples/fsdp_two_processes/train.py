"""Sharded training in two processes, started by torchrun.

    torchrun --nproc-per-node 2 examples/fsdp_two_processes/train.py

Every process runs this file. Each holds half of every weight; the two of them train one policy.
"""

import hashlib

import lightning as L
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.demo.digits import addition_rows, digit_share

torch.set_num_threads(1)  # a model this small is slower on two
L.seed_everything(0)
module = GRPOModule(
    model="runs/fsdp_two_processes/model",
    reward_funcs=[digit_share],
    num_generations=8,
    per_device_train_batch_size=16,  # completions per process: 32 in all
    max_completion_length=4,
    learning_rate=2e-4,
    lr_scheduler_type="constant",
)
trainer = L.Trainer(
    accelerator="cpu",  # on GPUs: "gpu"
    devices=2,  # as many as torchrun's --nproc-per-node
    strategy="rlstab_fsdp",
    max_steps=5,
    inference_mode=False,  # a first forward under inference mode breaks later training on sharded weights
    default_root_dir="runs/fsdp_two_processes/torchrun",
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(module, PromptDataModule(addition_rows()))

# Every call below is collective: both processes make it.
whole = torch.cat([weight.full_tensor().detach().flatten() for weight in module.policy.parameters()])
own = sum(weight.to_local().numel() for weight in module.policy.parameters())
digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]
reward = float(trainer.callback_metrics["reward"])
module.save_pretrained("runs/fsdp_two_processes/torchrun/policy")  # process 0 writes
print(f"rank {trainer.global_rank}: holds {own} of {whole.numel()} weights, reward {reward:.6f}, weights {digest}")
