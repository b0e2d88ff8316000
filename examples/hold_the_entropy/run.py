"""Provoke an entropy collapse by a high learning rate, then hold the entropy with QUATRO's floor.

    python examples/hold_the_entropy/run.py

The last line of output is one JSON object.
"""

from __future__ import annotations

import copy
import json
import logging

import lightning as L
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import GEPO, QUATRO
from lightning_rlstab.callbacks.quatro import EntropyFloorConfig
from lightning_rlstab.demo.digits import addition_rows, exact_sum
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, greedy_accuracy, warm_start

STEPS = 60
FLOOR = EntropyFloorConfig(
    floor_frac=0.8,  # of the mean entropy of the first five steps
    baseline_steps=5,
    lead_frac=0.25,  # the bonus begins 25 % above the floor; the default of 15 % is late for a fall this fast
)

torch.set_num_threads(1)  # a model this small is slower on two
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
tokenizer = digit_tokenizer()
warm = digit_policy(tokenizer)
warm_start(warm, tokenizer)


class Entropies(L.Callback):
    """The mean token entropy of every step, in nats, as the module logs it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        """Note one step."""
        self.values.append(float(trainer.callback_metrics["entropy"]))


def entropies_and_accuracy(entropy_floor: EntropyFloorConfig | bool) -> tuple[list[float], float]:
    """Train a copy of the policy; the entropy of every step, and the greedy accuracy on held-out additions."""
    L.seed_everything(0, verbose=False)
    module = GRPOModule(
        model=copy.deepcopy(warm),
        reward_funcs=[exact_sum],
        processing_class=tokenizer,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=4,
        learning_rate=5e-4,  # two and a half times that of the demo: this is what makes it collapse
        lr_scheduler_type="constant",
        seed=0,
    )
    entropies = Entropies()
    # GEPO bounds the steps in both runs. QUATRO's other three mechanisms are off: only the floor differs.
    quatro = QUATRO(replay=False, kl=False, filter=False, entropy=entropy_floor)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="rlstab",
        callbacks=[GEPO(), quatro, entropies],
        max_steps=STEPS,
        max_epochs=-1,
        default_root_dir="runs/hold_the_entropy",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, PromptDataModule(addition_rows()))
    return entropies.values, greedy_accuracy(module.policy, tokenizer, addition_rows(512, split="held_out"))


without, accuracy_without = entropies_and_accuracy(False)
held, accuracy_held = entropies_and_accuracy(FLOOR)
floor = FLOOR.floor_frac * sum(without[: FLOOR.baseline_steps]) / FLOOR.baseline_steps

print(f"\nEntropy in nats, mean over ten steps; the floor is {floor:.3f}")
print("  steps     without   with the floor")
for first in range(0, STEPS, 10):
    means = [sum(values[first : first + 10]) / 10 for values in (without, held)]
    print(f"  {first:2d} to {first + 9:2d}   {means[0]:.3f}     {means[1]:.3f}")
figures = {
    "floor": floor,
    "last_20_without": sum(without[-20:]) / 20,
    "last_20_with": sum(held[-20:]) / 20,
    "accuracy_before": greedy_accuracy(warm, tokenizer, addition_rows(512, split="held_out")),
    "accuracy_without": accuracy_without,
    "accuracy_with": accuracy_held,
}
print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
