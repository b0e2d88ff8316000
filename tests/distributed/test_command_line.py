"""``configs/fsdp.yaml`` from the command line: a second process starts, shards train, whole weights come out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from lightning_rlstab.demo.policy import digit_policy, digit_tokenizer, save_policy

ROOT = Path(__file__).parents[2]


def test_the_sharded_config_trains_in_two_processes_and_exports_whole_weights(tmp_path):
    tokenizer = digit_tokenizer()
    save_policy(digit_policy(tokenizer), tokenizer, tmp_path / "policy")
    # the untrained policy earns nothing from an exact sum
    (tmp_path / "spread.py").write_text("def kinds(completions, **_):\n    return [len(set(c)) for c in completions]\n")
    launched = {name for name in os.environ if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "lightning_rlstab.cli", "fit", "--config", str(ROOT / "configs" / "fsdp.yaml")]
    options = [
        f"--model.model={tmp_path / 'policy'}",
        f"--trainer.default_root_dir={tmp_path / 'run'}",
        "--model.reward_funcs=[spread.kinds]",
        "--model.per_device_train_batch_size=16",
        "--trainer.max_steps=3",
        "--trainer.strategy.init_args.survivors=rescale",
    ]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (exported,) = (tmp_path / "run").rglob("policy/model.safetensors")
    assert next((tmp_path / "run").rglob("config.yaml")).is_file()

    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    after = AutoModelForCausalLM.from_pretrained(exported.parent).state_dict()
    assert before.keys() == after.keys()
    assert all(after[name].shape == weight.shape for name, weight in before.items())
    with safe_open(exported, "pt") as file:
        stored = set(file.keys())
    assert "lm_head.weight" not in stored  # tied to the embedding
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())
