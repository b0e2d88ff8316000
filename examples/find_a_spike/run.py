"""Spoil one token on purpose, and let GradLoc find it.

    python examples/find_a_spike/run.py

The last line of output is the culprit's address, as GradLoc found it.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch

from lightning_rlstab import GRPOModule, PromptDataModule
from lightning_rlstab.callbacks import FireDrill, GradLoc
from lightning_rlstab.demo.digits import addition_rows, digit_share
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, warm_start
from lightning_rlstab.report.events import read_events

torch.set_num_threads(1)  # a model this small is slower on two
L.seed_everything(0)

# A policy of 0.43 M parameters that has seen a few additions: its answers have digits, few of them right.
tokenizer = digit_tokenizer()
policy = digit_policy(tokenizer)
warm_start(policy, tokenizer, max_steps=75)

# The fault: in step 15 the training forward finds one token 5000 times likelier than the sampler said it was, and the
# loss weighs it by that ratio. A broken inference engine does this to you without asking.
PLANTED = {"micro_batch": 1, "rank": 0, "sequence": 5, "token": 1}
drill = FireDrill([{"kind": "token_mismatch", "step": 15, "magnitude": 5000.0, **PLANTED}])

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
    callbacks=[drill, GradLoc()],  # faults first, so that every guard sees them
    max_steps=20,
    accumulate_grad_batches=2,  # two micro-batches of 32 completions make a step
    log_every_n_steps=1,  # Lightning's default of 50 would leave a short run without curves
    default_root_dir="runs/find_a_spike",
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(module, PromptDataModule(addition_rows()))

# What happened stands in the run folder, one JSON line per event.
for event in read_events(Path(trainer.log_dir) / "events.jsonl"):
    if event["event"] != "spike":
        continue
    culprit = event["culprits"][0]
    print(f"\nStep {event['step']}: {event['summary']}\n")
    print(f"its text         {culprit['context']}   (the culprit in double brackets)")
    print(f"gradient norm    {event['grad_norm']:.1f} against a threshold of {event['threshold']:.2f}")
    print(f"after {event['action']:<10} {event['remaining_norm']:.2f}")
    print(f"the search cost  {event['cost_sweeps']:.2f} of one forward and backward over the step")
    print({name: culprit[name] for name in PLANTED})
