"""GRPO with TRL.

    python examples/from_trl/trl_script.py

Side by side with ``lightning_twin.py``: what both take from ``sums.py`` is the same.
"""

from datasets import Dataset
from sums import config, model, reward_funcs, rows
from trl import GRPOTrainer

trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward_funcs,
    args=config,
    train_dataset=Dataset.from_list(rows),
)
trainer.train()
trainer.save_model("runs/from_trl/trl/policy")
