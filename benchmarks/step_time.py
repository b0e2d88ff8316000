"""One GRPO step of ours against one of TRL's GRPOTrainer: time and peak memory, same everything else.

    python benchmarks/step_time.py [--quick] [--model DIR]

Both sides run their real training loop, each in a process of its own, from one ``GRPOConfig``: same weights, prompts,
batch, optimizer, reward, Hugging Face ``generate`` as the engine, and completions forced to the same length. The two
processes take turns in blocks of steps, so that whatever else the machine does falls on both; the time figure is the
median over rounds of the ratio of a block of ours to the neighbouring block of TRL's. Time is the process's own (what
the clock shows on a core of one's own; the clock's ratio is printed beside it). Memory is each process's peak resident
set over the whole run. One thread, CPU, float32. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BAR = 1.0
SIDES = ("ours", "trl")


class Turn:
    """One side's end of the line to the process that hands out the turns.

    Args:
        line: Gets ``True`` to run a block; answers with the seconds that it took, the process's own and the clock's.
        block: Steps per turn.
        turns: Turns to report; what is trained after them is not measured.
    """

    def __init__(self, line: Connection, *, block: int, turns: int) -> None:
        self._line = line
        self._block = block
        self._turns_left = turns
        self._steps = 0
        self._began = (0.0, 0.0)

    def wait(self) -> None:
        """Sleep until it is this side's turn."""
        self._line.recv()
        self._began = (time.process_time(), time.perf_counter())

    def step_ended(self) -> None:
        """Count a step; at the end of a block report its seconds and wait for the next turn."""
        self._steps += 1
        if self._steps % self._block == 0 and self._turns_left:
            self._turns_left -= 1
            own, clock = self._began
            self._line.send((time.process_time() - own, time.perf_counter() - clock))
            self.wait()


def peak_megabytes() -> float:
    """Peak resident set of this process since it started, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _rows(length: int, count: int) -> list[dict[str, str]]:
    """Distinct prompts of about ``length`` characters that any tokenizer with digits can read."""
    return [
        {"prompt": "+".join(str((index * 37 + place * 11) % 90 + 10) for place in range(length // 3)) + "="}
        for index in range(count)
    ]


def run_side(side: str, line: Connection, model: str, fields: dict[str, Any], plan: dict[str, int]) -> None:
    """Train on one side in this process, a block per turn, and send the memory figures last."""
    import torch

    torch.set_num_threads(1)
    from _twins import grpo_config, our_trainer, quiet, trl_trainer
    from transformers import AutoTokenizer

    quiet()
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, padding_side="left")
    rows = _rows(plan["prompt_length"], 64)
    turn = Turn(line, block=plan["block"], turns=plan["turns"])
    with tempfile.TemporaryDirectory() as scratch:
        config = grpo_config(scratch, **fields)
        before = peak_megabytes()
        if side == "trl":
            from transformers import TrainerCallback

            class Block(TrainerCallback):
                def on_train_begin(self, *_: Any, **__: Any) -> None:
                    turn.wait()

                def on_step_end(self, *_: Any, **__: Any) -> None:
                    turn.step_ended()

            trainer = trl_trainer(config, model, tokenizer, rows)
            trainer.add_callback(Block())
            trainer.train()
        else:
            from lightning.pytorch import Callback

            class Block(Callback):
                def on_train_start(self, *_: Any) -> None:
                    turn.wait()

                def on_train_batch_end(self, *_: Any, **__: Any) -> None:
                    turn.step_ended()

            trainer, module, data = our_trainer(config, model, tokenizer, rows, callbacks=[Block()])
            trainer.fit(module, data)
    line.send({"peak_mb": peak_megabytes(), "before_training_mb": before})


def compared(model: str, *, rounds: int, block: int, batch: int, prompt_length: int, length: int) -> dict[str, Any]:
    """Both sides in turns on one model.

    Args:
        model: Directory of the model.
        rounds: Pairs of blocks; one more pair goes before them unmeasured.
        block: Steps per block.
        batch: Completions per step, 8 per prompt.
        prompt_length: Characters per prompt.
        length: Tokens per completion, all alike.

    Returns:
        ``time_ratio``, ``memory_ratio`` and what they are made of.
    """
    fields = {
        # One step more than is reported: the last turn only lets both sides run out.
        "max_steps": (rounds + 1) * block + 1,
        "per_device_train_batch_size": batch,
        "num_generations": 8,
        "max_completion_length": length,
        "generation_kwargs": {"min_new_tokens": length},
        "learning_rate": 1e-6,
    }
    plan = {"block": block, "turns": rounds + 1, "prompt_length": prompt_length}
    spawn = multiprocessing.get_context("spawn")
    lines, workers = {}, {}
    for side in SIDES:
        lines[side], far = spawn.Pipe()
        workers[side] = spawn.Process(target=run_side, args=(side, far, model, fields, plan), daemon=True)
        workers[side].start()
        far.close()
    blocks: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            lines[side].send(True)
            blocks[side].append(lines[side].recv())
    memory = {}
    for side in SIDES:
        lines[side].send(True)
        memory[side] = lines[side].recv()
        workers[side].join()
    pairs = list(zip(blocks["ours"][1:], blocks["trl"][1:], strict=True))
    ratios = [ours[0] / trl[0] for ours, trl in pairs]
    return {
        "time_ratio": round(statistics.median(ratios), 3),
        "memory_ratio": round(memory["ours"]["peak_mb"] / memory["trl"]["peak_mb"], 3),
        "time_ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "clock_ratio": round(statistics.median(ours[1] / trl[1] for ours, trl in pairs), 3),
        "step_seconds": {
            side: round(statistics.median(own for own, _ in blocks[side][1:]) / block, 4) for side in SIDES
        },
        "peak_mb": {side: round(memory[side]["peak_mb"]) for side in SIDES},
        "before_training_mb": {side: round(memory[side]["before_training_mb"]) for side in SIDES},
        "rounds": rounds,
        "steps_per_block": block,
        "completions_per_step": batch,
        "tokens_per_completion": length,
    }


def main() -> None:
    """Compare on the tiny model, and on a model of the user's where one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model only, few rounds")
    parser.add_argument(
        "--model", type=Path, help="directory of a further model, e.g. what examples/smollm2/fetch.py wrote"
    )
    parser.add_argument("--rounds", type=int, help="pairs of blocks")
    arguments = parser.parse_args()
    from _twins import quiet, versions

    from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy

    quiet()
    models: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = digit_tokenizer()
        save_policy(digit_policy(tokenizer, seed=0), tokenizer, Path(scratch))
        rounds = arguments.rounds or (4 if arguments.quick else 12)
        models["tiny"] = compared(scratch, rounds=rounds, block=5, batch=64, prompt_length=12, length=16)
    print(json.dumps(models["tiny"]), flush=True)
    if arguments.model is not None and not arguments.quick:
        rounds = arguments.rounds or 5
        models["given"] = compared(str(arguments.model), rounds=rounds, block=1, batch=16, prompt_length=48, length=32)
        print(json.dumps(models["given"]), flush=True)
    worst = max(max(figures["time_ratio"], figures["memory_ratio"]) for figures in models.values())
    figures = {
        "name": "step_time",
        "value": worst,
        "bar": BAR,
        "ok": worst <= BAR,
        "what": "worst of time and peak memory of one of our steps over one of TRL's GRPOTrainer",
        "models": models,
        **versions(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
