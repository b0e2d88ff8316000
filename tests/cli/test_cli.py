"""The command line as a user types it: stacked YAML, saved config, exported policy, typos, resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlstab.cli import RLStabCLI, main, shelf

BASE = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  default_root_dir: {root}
  callbacks+:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
model:
  model: {policy}
  reward_funcs: [tests_reward.length]
  num_generations: 2
  per_device_train_batch_size: 4
  max_completion_length: 4
  learning_rate: 1.0e-3
data:
  train: {rows}
  validation_size: 2
"""
FRAGMENT = """
trainer:
  callbacks+:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: "%s", every_n_train_steps: 1, save_top_k: -1, filename: "{step}"}
"""


@pytest.fixture
def work(tmp_path: Path, tiny_policy: Callable[..., Any], byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_policy().save_pretrained(tmp_path / "policy")
    byte_tokenizer.save_pretrained(tmp_path / "policy")
    rows = [json.dumps({"prompt": f"{number}+1="}) for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "tests_reward.py").write_text(
        "def length(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    text = BASE.format(root=tmp_path / "runs", policy=tmp_path / "policy", rows=tmp_path / "rows.jsonl")
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "checkpoints.yaml").write_text(FRAGMENT % (tmp_path / "checkpoints"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["lightning-rlstab"])
    return tmp_path


def test_fit_stacks_configs_saves_the_merged_one_and_exports_the_policy(work: Path) -> None:
    from transformers import AutoModelForCausalLM

    cli = RLStabCLI(args=["fit", "--config", f"{work}/base.yaml", "--config", f"{work}/checkpoints.yaml"])
    run = Path(cli.trainer.log_dir)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in saved["trainer"]["callbacks"]]
    assert names == ["LearningRateMonitor", "ModelCheckpoint"]
    assert saved["model"]["num_generations"] == 2
    assert saved["model"]["reward_funcs"] == ["tests_reward.length"]
    assert list(run.glob("events.out.tfevents.*"))
    AutoModelForCausalLM.from_pretrained(run / "policy", local_files_only=True)


def test_the_saved_config_runs_again(work: Path) -> None:
    first = RLStabCLI(args=["fit", "--config", f"{work}/base.yaml"])
    again = RLStabCLI(args=["fit", "--config", f"{first.trainer.log_dir}/config.yaml"])
    assert again.trainer.global_step == first.trainer.global_step == 2


def test_the_order_of_base_and_fragment_does_not_matter(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stacked = ["--config", f"{work}/checkpoints.yaml", "--config", f"{work}/base.yaml"]
    with pytest.raises(SystemExit):
        RLStabCLI(args=["fit", *stacked, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in config["trainer"]["callbacks"]]
    assert names == ["ModelCheckpoint", "LearningRateMonitor"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_fit_goes_on_from_a_checkpoint_given_on_the_command_line_fr_149(work: Path) -> None:
    stacked = ["fit", "--config", f"{work}/base.yaml", "--config", f"{work}/checkpoints.yaml"]
    RLStabCLI(args=[*stacked, "--trainer.max_steps", "1"])
    cli = RLStabCLI(args=[*stacked, "--ckpt_path", f"{work}/checkpoints/step=1.ckpt"])
    assert cli.trainer.global_step == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.num_generation", "4"], "num_generations"),
        (["--model.lerning_rate", "1e-5"], "Did you mean 'learning_rate'?"),
        (["--trainer.max_stepss", "1"], "Did you mean 'max_steps'?"),
        (["--config", "misspelt.yaml"], "Did you mean 'beta'?"),
        (["--config", "configs/nope.yaml"], "demo.yaml"),
        (["--model.loss_type", "dapoo"], "dapo"),
        (["--model.num_generations", "1"], "`num_generations` must be a whole number of at least 2, got 1"),
        (["--model.epsilon", ".nan"], "`epsilon`"),
        (["--model.beta", "-1"], "`beta`"),
        (["--model.temperature", "5x"], "temperature"),
        (["--data.trian", "x"], "train"),
        (["--trainer.maxx_steps", "3"], "max_steps"),
    ],
)
def test_misspelt_keys_and_odd_values_are_refused_by_name_fr_147(
    work: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "misspelt.yaml").write_text("model: {betta: 1}")
    with pytest.raises((SystemExit, ValueError, FileNotFoundError)) as caught:
        RLStabCLI(args=["fit", "--config", f"{work}/base.yaml", *arguments])
    assert words in capsys.readouterr().err + str(caught.value)


def test_packaged_files_are_found_by_name_and_unknown_ones_list_what_exists() -> None:
    assert shelf("configs", "demo").is_file()
    with pytest.raises(FileNotFoundError, match=r"demo\.yaml"):
        shelf("configs", "nonsense")


@pytest.mark.slow
def test_the_console_script_runs_in_a_process_of_its_own(work: Path) -> None:
    command = [sys.executable, "-m", "lightning_rlstab.cli", "fit", "--config", "base.yaml", "--print_config"]
    printed = subprocess.run(command, cwd=work, capture_output=True, text=True, check=True).stdout
    config = yaml.safe_load(printed)
    assert config["model"]["epsilon"] == 0.2
    assert config["trainer"]["max_steps"] == 2


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_auto_resumes_from_the_newest_snapshot_of_any_run_folder(work: Path) -> None:
    (work / "opefo.yaml").write_text(
        "trainer:\n  callbacks+:\n    - class_path: OPEFO\n      init_args: {snapshots: {every_steps: 1}}\n"
    )
    stacked = ["fit", "--config", f"{work}/base.yaml", "--config", f"{work}/opefo.yaml", "--ckpt_path", "auto"]
    first = RLStabCLI(args=stacked)  # nothing to resume from: a fresh start
    assert first.trainer.global_step == 2
    again = RLStabCLI(args=[*stacked, "--trainer.max_steps", "3"])
    assert again.trainer.ckpt_path == str(Path(first.trainer.log_dir) / "snapshots" / "step=000000002.ckpt")
    assert again.trainer.global_step == 3


@pytest.mark.slow
def test_ablate_trains_every_variant_in_a_process_and_prints_the_table(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)  # where the child finds the reward function
    arguments = ["ablate", "--config", "base.yaml", "--only", "all_on", "without_quatro", "--out", "ablation"]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--trainer.max_steps", "2", "--trainer.accelerator", "cpu"])
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err + "".join(log.read_text() for log in work.glob("ablation/*/log.txt"))
    rows = [line.split("|")[1].strip() for line in printed.out.splitlines()]
    assert rows[2:] == ["all_on", "without_quatro"]
    assert (work / "ablation" / "all_on" / "version_0" / "events.jsonl").exists()
