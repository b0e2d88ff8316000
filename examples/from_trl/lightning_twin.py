"""The same GRPO with Lightning.

    python examples/from_trl/lightning_twin.py

Side by side with ``trl_script.py``: what both take from ``sums.py`` is the same.
"""

import lightning as L
from sums import config, model, reward_funcs, rows

from lightning_rlstab import GRPOModule, PromptDataModule

module = GRPOModule.from_trl(
    config,
    model=model,
    reward_funcs=reward_funcs,
)
trainer = L.Trainer(
    accelerator="cpu",
    max_steps=config.max_steps,
    accumulate_grad_batches=config.gradient_accumulation_steps,
    log_every_n_steps=int(config.logging_steps),
    default_root_dir="runs/from_trl/lightning",
    enable_checkpointing=False,
)
trainer.fit(module, PromptDataModule(rows))
module.save_pretrained("runs/from_trl/lightning/policy")
