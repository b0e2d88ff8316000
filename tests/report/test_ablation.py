from __future__ import annotations

import math
import sys

import pytest

from lightning_rlstab.report.ablation import ablate
from lightning_rlstab.report.events import EventLog


@pytest.fixture
def configs(tmp_path):
    """A ``configs`` folder with three ablations, two stages and a reference beside them."""
    for name in ("ablations/all_on", "ablations/without_gepo", "ablations/without_quatro"):
        _file(tmp_path / "configs" / f"{name}.yaml", name)
    for name in ("stages/1_baseline", "stages/2_gepo_opefo", "stages/reference_7b_14b"):
        _file(tmp_path / "configs" / f"{name}.yaml", name)
    _file(tmp_path / "base.yaml", "base")
    return tmp_path / "configs"


def _file(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def trained(event_run, tmp_path):
    """Stands in for the training process: leaves a run in the folder that the command names."""
    commands = []

    def launch(command, log):
        commands.append(command)
        log.write_text("trained")
        folder = log.parent
        is_dying = folder.name == "without_gepo"
        event_run(
            steps=40,
            folder=folder / "version_0",
            sick=lambda at: {
                **({"val/reward": 0.3 + at / 100} if at % 10 == 0 else {}),
                **({"grad_norm": math.nan} if is_dying and at >= 39 else {}),
            },
        )
        events = EventLog(folder / "version_0" / "events.jsonl")
        events.write("skip", step=5)
        if is_dying:
            events.write("stop", step=39, reason="RuntimeError", is_exception=True)
        return int(is_dying)

    def run(*arguments, configs):
        out = ["--out", str(tmp_path / "out"), "--config", str(tmp_path / "base.yaml")]
        return ablate([*out, *arguments], configs=configs, launch=launch)

    run.commands = commands
    return run


def _cells(table, name):
    header, row = (
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (table.splitlines()[0], next(line for line in table.splitlines() if f"| {name} " in line))
    )
    return dict(zip(header, row, strict=True))


def test_the_table_says_for_each_layer_that_was_off_what_the_run_came_to_and_what_it_died_of(
    trained, configs, capsys, tmp_path
):
    assert trained(configs=configs) == 1
    table = capsys.readouterr().out
    assert table == (tmp_path / "out" / "ablation.md").read_text()
    whole, without = _cells(table, "all_on"), _cells(table, "without_gepo")
    assert whole["final held-out reward"] == "0.6"
    assert (whole["death"], without["death"]) == ("no", "step 39: nan_gradient")
    assert (whole["skips"], whole["spikes"], whole["steps"]) == ("1", "0", "40")
    assert (whole["first cause"], without["first cause"]) == ("healthy", "nan_gradient")


def test_base_variant_folder_and_further_arguments_make_the_command(trained, configs, tmp_path):
    assert trained("--only", "all_on", "--trainer.max_steps", "7", configs=configs) == 0
    (command,) = trained.commands
    assert command[:4] == [sys.executable, "-m", "lightning_rlstab.cli", "fit"]
    assert command[4:8] == [
        "--config",
        str(tmp_path / "base.yaml"),
        "--config",
        str(configs / "ablations" / "all_on.yaml"),
    ]
    assert command[8:] == [
        "--trainer.default_root_dir",
        str(tmp_path / "out" / "all_on"),
        "--trainer.max_steps",
        "7",
    ]


def test_what_has_run_is_not_run_again_until_its_command_or_a_file_changes(trained, configs, tmp_path):
    trained("--only", "all_on", configs=configs)
    trained("--only", "all_on", "without_quatro", configs=configs)
    assert [command[9].rpartition("/")[2] for command in trained.commands] == ["all_on", "without_quatro"]
    (tmp_path / "base.yaml").write_text("another base")
    trained("--only", "all_on", configs=configs)
    trained("--only", "all_on", "--trainer.max_steps", "9", configs=configs)
    assert len(trained.commands) == 4
    assert len(list((tmp_path / "out" / "all_on" / "version_0").glob("*tfevents*"))) == 1


def test_a_run_that_was_broken_off_is_made_anew(trained, configs, tmp_path):
    _file(tmp_path / "out" / "all_on" / "log.txt", "broken off")
    _file(tmp_path / "out" / "all_on" / "version_0" / "half.txt", "half")
    trained("--only", "all_on", configs=configs)
    assert len(trained.commands) == 1
    assert not (tmp_path / "out" / "all_on" / "version_0" / "half.txt").exists()


def test_a_folder_that_an_ablation_did_not_make_keeps_its_files(trained, configs, tmp_path):
    _file(tmp_path / "out" / "all_on" / "precious.txt", "mine")
    trained("--only", "all_on", configs=configs)
    assert (tmp_path / "out" / "all_on" / "precious.txt").read_text() == "mine"


def test_the_stages_are_the_numbered_files_in_turn(trained, configs):
    trained("--stages", configs=configs)
    assert [command[9].rpartition("/")[2] for command in trained.commands] == ["1_baseline", "2_gepo_opefo"]


def test_an_unknown_variant_is_refused_with_those_that_exist(trained, configs, capsys):
    assert trained("--only", "without_everything", configs=configs) == 2
    assert "all_on, without_gepo, without_quatro" in capsys.readouterr().err
    assert trained.commands == []


def test_a_variant_that_leaves_no_metrics_has_a_row_all_the_same(configs, tmp_path, capsys):
    def launch(command, log):
        log.write_text("error: bad config")
        return 2

    arguments = ["--config", str(tmp_path / "base.yaml"), "--out", str(tmp_path / "out"), "--only", "all_on"]
    assert ablate(arguments, configs=configs, launch=launch) == 1
    printed = capsys.readouterr()
    assert _cells(printed.out, "all_on")["death"] == "exit code 2 before the first step"
    assert "log.txt" in printed.err


def test_a_base_is_needed(configs, capsys):
    with pytest.raises(SystemExit) as left:
        ablate([], configs=configs)
    assert left.value.code == 2
    assert "--config" in capsys.readouterr().err
