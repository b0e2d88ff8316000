from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy


@pytest.fixture
def finished(tmp_path):
    """``finished(*command)``: what a command printed, run where the example's files are written."""
    root = Path(__file__).parents[2]
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(root)}

    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=270,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_and_yaml_train_the_same_weights_and_both_ranks_hold_half_of_them(finished, examples, tmp_path):
    folder = examples / "fsdp_two_processes"
    tokenizer = digit_tokenizer()
    # As prepare.py does, without its warm start: an untrained policy is as good to compare two ways of starting.
    save_policy(digit_policy(tokenizer), tokenizer, tmp_path / "runs" / "fsdp_two_processes" / "model")

    printed = finished("torch.distributed.run", "--nproc-per-node", 2, folder / "train.py")
    lines = re.findall(r"rank (\d): holds (\d+) of (\d+) weights, reward ([\d.]+), weights (\w+)", printed)
    ranks, own, whole, rewards, digests = zip(*sorted(lines), strict=True)
    assert ranks == ("0", "1")
    assert sum(map(int, own)) == int(whole[0]) == int(whole[1])
    assert max(map(int, own)) < 0.6 * int(whole[0])
    assert len(set(rewards)) == len(set(digests)) == 1

    finished("lightning_rlstab.cli", "fit", "--config", folder / "run.yaml")
    from transformers import AutoModelForCausalLM

    runs = tmp_path / "runs" / "fsdp_two_processes"
    (by_yaml,) = runs.glob("yaml/*/policy")
    torchrun, yaml, start = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (runs / "torchrun/policy", by_yaml, runs / "model")
    )
    assert all(torch.equal(torchrun[name], yaml[name]) for name in start)
    assert any(not torch.equal(torchrun[name], weight) for name, weight in start.items())
