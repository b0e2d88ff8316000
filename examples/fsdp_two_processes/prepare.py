"""Write the policy that both ways of starting begin from.

    python examples/fsdp_two_processes/prepare.py

An untrained policy would do; a short warm start leaves it something to improve on.
"""

from pathlib import Path

import torch

from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy, warm_start

torch.set_num_threads(1)  # a model this small is slower on two
tokenizer = digit_tokenizer()
policy = digit_policy(tokenizer)
warm_start(policy, tokenizer, max_steps=75)
save_policy(policy, tokenizer, Path("runs/fsdp_two_processes/model"))
