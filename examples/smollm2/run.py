"""Train SmolLM2-135M-Instruct on small sums: held-out score, GRPO, held-out score of the exported weights.

    python examples/smollm2/fetch.py
    python examples/smollm2/run.py [--steps 40] [--KEY VALUE of the command line ...]

The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from curves import mean_of_ends, read

from lightning_rlstab import RLStabCLI
from lightning_rlstab.cli import shelf


def held_out_scores(model: Path, extra: list[str]) -> dict[str, float]:
    """Scores of a model directory on the held-out questions, through ``lightning-rlstab validate``."""
    config = shelf("configs", "smollm2_arithmetic")
    arguments = ["validate", f"--config={config}", f"--model.model={model}", "--trainer.logger=false", *extra]
    cli = RLStabCLI(args=arguments)
    return {name: float(value) for name, value in cli.trainer.callback_metrics.items()}


def main() -> None:
    """Run the three parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2/base"), help="what fetch.py has written")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="folder for the run")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments, extra = parser.parse_known_args()
    torch.set_num_threads(arguments.threads)
    began = time.perf_counter()
    before = held_out_scores(arguments.model, extra)
    print(f"before: {before}", flush=True)
    fit = ["fit", f"--config={shelf('configs', 'smollm2_arithmetic')}", f"--model.model={arguments.model}"]
    fit += [f"--trainer.max_steps={arguments.steps}", f"--trainer.default_root_dir={arguments.out}", *extra]
    cli = RLStabCLI(args=fit)
    run = Path(str(cli.trainer.log_dir))
    del cli  # its weights and optimizer state are 2 GB
    after = held_out_scores(run / "policy", extra)
    curves, pace = read(run)
    reward_first, reward_last = mean_of_ends(curves["reward"])
    figures = {
        "held_out_before": round(before["val/reward"], 4),
        "held_out_after": round(after["val/reward"], 4),
        "train_reward_first_10": round(reward_first, 4),
        "train_reward_last_10": round(reward_last, 4),
        "steps": arguments.steps,
        "steps_per_minute": round(pace, 2),
        "seconds": round(time.perf_counter() - began, 1),
        "log_dir": str(run),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
