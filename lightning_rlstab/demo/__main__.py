"""``python -m lightning_rlstab.demo``: the whole story on two cores; the last line of output is one JSON object."""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_rlstab.core.checks import integer
from lightning_rlstab.demo.digits import addition_rows, forgetful_sum
from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, greedy_accuracy, save_policy, warm_start
from lightning_rlstab.report.events import read_events

__all__ = ["main"]


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lightning_rlstab.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, examples, prompts and samples")
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps")
    parser.add_argument("--warm-start-steps", type=int, default=400, help="most supervised steps before GRPO")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the policy and the run")
    arguments = parser.parse_args(given)
    integer("--seed", arguments.seed, at_least=0)
    integer("--steps", arguments.steps, at_least=1)
    integer("--warm-start-steps", arguments.warm_start_steps, at_least=1)
    return arguments


def _warm_started(directory: Path, *, seed: int, max_steps: int) -> float:
    """Chapter 1: teach a new policy, save it, and give its greedy accuracy on the held-out additions."""
    tokenizer = digit_tokenizer()
    policy = digit_policy(tokenizer, seed=seed)
    size = sum(parameter.numel() for parameter in policy.parameters())
    _say(
        f"1. Warm start: a policy of {size / 1e6:.2f} M parameters learns to add from a teacher that forgets to carry."
    )
    steps = warm_start(
        policy,
        tokenizer,
        seed=seed,
        max_steps=max_steps,
        on_check=lambda step, agreement: _say(f"  step {step:4d}   agrees with the teacher {agreement:.3f}"),
    )
    save_policy(policy, tokenizer, directory)
    accuracy = greedy_accuracy(policy, tokenizer, addition_rows(split="held_out"))
    row = addition_rows(1, seed=seed, split="held_out")[0]
    mistaken = forgetful_sum(row["prompt"])
    _say(f"  {steps} steps; '{row['prompt']}' is {row['answer']}, the teacher mostly says {mistaken}.")
    return accuracy


def _trained(policy: Path, out: Path, *, seed: int, steps: int, stacked: Sequence[str] = ()) -> Path:
    """Chapter 2: GRPO through the command line's own path.

    Args:
        policy: Directory of the warm-started policy.
        out: Folder under which the run folder is made.
        seed: Seed of prompts and samples.
        steps: Optimizer steps.
        stacked: Further fragments, in order, stacked on ``configs/demo.yaml``.

    Returns:
        The run folder.
    """
    from lightning_rlstab.cli import RLStabCLI, shelf
    from lightning_rlstab.demo.narration import Narrator

    config = shelf("configs", "demo")
    _say(f"2. GRPO: {steps} steps of configs/{config.name}, one point for an exact sum, none for anything else.")
    if stacked:
        _say("  configs/demo_drill.yaml will spoil one token on purpose; GradLoc is on watch.")
    arguments = ["fit", f"--config={config}", *(f"--config={fragment}" for fragment in stacked)]
    arguments += [f"--seed_everything={seed}", f"--model.seed={seed}", f"--data.seed={seed}", f"--model.model={policy}"]
    arguments += [f"--trainer.max_steps={steps}", f"--trainer.default_root_dir={out}"]
    cli = RLStabCLI(args=arguments, trainer_defaults={"callbacks": [Narrator(_say)]})
    return Path(str(cli.trainer.log_dir))


_FAULT_STEP = 60
"""Of ``configs/demo_drill.yaml``; a shorter run leaves the fault out."""


def _drill(steps: int) -> list[str]:
    from lightning_rlstab.cli import shelf

    return [str(shelf("configs", "demo_drill"))] if steps > _FAULT_STEP else []


def _say_what_was_found(spikes: Sequence[Mapping[str, Any]]) -> None:
    """Chapter 4: the planted fault in GradLoc's own words."""
    for spike in spikes:
        _say(f"4. Step {spike['step']}, one token was spoilt on purpose. GradLoc found, and did:")
        _say(f"  {spike['summary']}")


def _exported_accuracy(directory: Path) -> float:
    """Chapter 3: the exported weights, loaded by transformers, on the held-out additions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return greedy_accuracy(policy, tokenizer, addition_rows(split="held_out"))


def _quiet() -> None:
    """Leave the output to the story: no tips, no bars, no notices of libraries about each other."""
    import lightning.pytorch  # noqa: F401  # sets its loggers' level on import
    from transformers.utils import logging as transformers_logging

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"lightning\.pytorch|jsonargparse")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.pytorch|torch\.utils")


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Tell the story and print its figures as the last line.

    Args:
        given: Command line; None for ``sys.argv``.

    Returns:
        ``accuracy_before``, ``accuracy_after`` (greedy, on the held-out additions), ``steps``, ``seconds`` and
        ``log_dir``, with the seconds of each chapter and the number of ``spikes_found``.
    """
    arguments = _arguments(given)
    torch.set_num_threads(1)  # matrices this small are slower on two threads, and one thread repeats bit for bit
    _quiet()
    began = time.perf_counter()
    policy = arguments.out / "warm_start"
    before = _warm_started(policy, seed=arguments.seed, max_steps=arguments.warm_start_steps)
    warm = time.perf_counter()
    _say(f"  accuracy on {len(addition_rows(split='held_out'))} held-out additions: {before:.3f}")
    log_dir = _trained(
        policy, arguments.out, seed=arguments.seed, steps=arguments.steps, stacked=_drill(arguments.steps)
    )
    trained = time.perf_counter()
    after = _exported_accuracy(log_dir / "policy")
    _say(f"3. The exported policy, loaded by transformers: {after:.3f} on the same additions (before: {before:.3f}).")
    spikes = [event for event in read_events(log_dir / "events.jsonl") if event["event"] == "spike"]
    _say_what_was_found(spikes)
    _say(f"  tensorboard --logdir {log_dir}")
    figures = {
        "accuracy_before": round(before, 4),
        "accuracy_after": round(after, 4),
        "steps": arguments.steps,
        "seconds": round(time.perf_counter() - began, 1),
        "log_dir": str(log_dir),
        "warm_start_seconds": round(warm - began, 1),
        "grpo_seconds": round(trained - warm, 1),
        "spikes_found": len(spikes),
        "seed": arguments.seed,
    }
    _say(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
