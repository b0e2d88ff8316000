"""Every YAML file of the repository parses, and everything it names can be built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from lightning_rlstab.cli import RLStabCLI

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
FRAGMENTS = sorted((ROOT / "callbacks").glob("*.yaml"))
NEEDED = """
model: {model: policy, reward_funcs: [lightning_rlstab.demo.digits.exact_sum], num_generations: 2}
data: {train: rows.jsonl}
"""


@pytest.fixture(autouse=True)
def _bare_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-rlstab"])
    monkeypatch.chdir(tmp_path)
    # Configs name strategies for several processes; one process is enough to build everything.
    (tmp_path / "one_process.yaml").write_text("trainer: {accelerator: cpu, devices: 1, strategy: auto, num_nodes: 1}")
    (tmp_path / "needed.yaml").write_text(NEEDED)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_a_config_says_what_hardware_and_how_long_in_its_first_line(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("#")
    assert any(word in first for word in ("CPU", "GPU", "Hardware", "fragment", "Fragment", "Stack"))


@pytest.mark.parametrize("path", [*CONFIGS, *FRAGMENTS], ids=name)
def test_callbacks_are_appended_never_replaced(path: Path) -> None:
    trainer = (yaml.safe_load(path.read_text()) or {}).get("trainer", {})
    assert "callbacks" not in trainer


@pytest.mark.parametrize("path", [*CONFIGS, *FRAGMENTS], ids=name)
def test_everything_a_file_names_can_be_built(path: Path) -> None:
    arguments = ["--config", "needed.yaml", "--config", str(path), "--config", "one_process.yaml"]
    cli = RLStabCLI(args=arguments, run=False)
    assert cli.trainer.callbacks
