"""What both scripts share: the model, the rows, the reward functions and TRL's own config object."""

from __future__ import annotations

from pathlib import Path

import torch
from trl import GRPOConfig

from lightning_rlstab.demo.digits import addition_rows, digit_share, exact_sum
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy, warm_start

torch.set_num_threads(1)  # a model this small is slower on two

# A model directory in Hugging Face format, as any other; made once.
model = "runs/from_trl/model"
if not Path(model).exists():
    tokenizer = digit_tokenizer()
    policy = digit_policy(tokenizer)
    warm_start(policy, tokenizer, max_steps=75)
    save_policy(policy, tokenizer, Path(model))

rows = addition_rows(512)  # {"prompt": "12+30=", "answer": "42"}
reward_funcs = [exact_sum, digit_share]

config = GRPOConfig(
    output_dir="runs/from_trl/trl",
    max_steps=10,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=2,
    num_generations=8,
    max_completion_length=4,
    num_iterations=2,
    beta=0.02,
    epsilon_high=0.28,
    loss_type="dapo",
    reward_weights=[1.0, 0.5],
    learning_rate=2e-4,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    seed=0,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
