from __future__ import annotations

import json
import math
import os
import struct

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from lightning_rlstab.report.diagnosis import diagnose
from lightning_rlstab.report.event_files import read_event_file
from lightning_rlstab.report.events import EventLog
from lightning_rlstab.report.names import canonical_name
from lightning_rlstab.report.run import RunReadError
from lightning_rlstab.report.sources import read_run


def only_event_file(folder):
    (file,) = folder.glob("*tfevents*")
    return file


# ---- TensorBoard -------------------------------------------------------------------------------------------------


def test_every_scalar_that_tensorboard_reads_is_read_with_its_step_and_value(event_run):
    file = only_event_file(event_run(steps=200))
    expected: dict[str, list[tuple[int, float]]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars" or value.HasField("simple_value"):
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                expected.setdefault(value.tag, []).append((event.step, number))
    found = read_event_file(file)
    assert found.damage == ""
    assert found.columns.keys() == expected.keys()
    for tag, points in expected.items():
        steps, values = found.columns[tag]
        assert steps.tolist() == [step for step, _ in points]
        assert values.tolist() == [value for _, value in points]


def test_large_steps_long_names_and_new_style_scalars_are_read(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    name = "rewards/" + "x" * 150 + "/mean"
    for step in (0, 1, 127, 128, 16384, 2**31):
        writer.add_scalar("reward", step / 7, step)
        writer.add_scalar(name, 0.5, step)
        writer.add_scalar("new", 0.25, step, new_style=True)
        writer.add_scalar("wide", 0.125, step, new_style=True, double_precision=True)
    writer.close()
    run = read_run(tmp_path)
    assert run.series["reward"].steps.tolist() == [0, 1, 127, 128, 16384, 2**31]
    np.testing.assert_allclose(run.series["reward"].values, run.series["reward"].steps / 7, rtol=1e-6)
    assert set(run.series[name].values) == {0.5}
    assert set(run.series["new"].values) == {0.25}
    assert set(run.series["wide"].values) == {0.125}


def test_non_finite_values_survive_the_event_file(event_run):
    run = read_run(event_run(sick=lambda at: {"grad_norm": math.nan} if at == 30 else {"loss": math.inf}))
    assert math.isnan(run.series["grad_norm"].values[30])
    assert math.isinf(run.series["loss"].values[0])


def test_a_cut_off_file_is_read_up_to_its_last_whole_record(event_run):
    file = only_event_file(event_run(steps=100))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    run = read_run(file.parent)
    assert 40 <= run.last_step <= 60
    assert run.notes == ()


def test_a_damaged_record_stops_the_reading_there_and_says_so(event_run):
    file = only_event_file(event_run(steps=100))
    data = bytearray(file.read_bytes())
    position = 0
    for _ in range(700):
        position += struct.unpack_from("<Q", data, position)[0] + 16
    data[position : position + 8] = b"\xff" * 8
    file.write_bytes(bytes(data))
    run = read_run(file.parent)
    assert 40 <= run.last_step <= 60
    assert file.name in run.notes[0]
    assert f"damaged at byte {position:,}" in run.notes[0]


def test_damage_across_block_borders_does_not_lose_or_repeat_records(event_run, monkeypatch):
    file = only_event_file(event_run(steps=50))
    expected = read_event_file(file).columns
    for size in (64, 997, 4096):
        monkeypatch.setattr("lightning_rlstab.report.event_files._BLOCK_BYTES", size)
        found = read_event_file(file).columns
        assert {tag: [part.tolist() for part in columns] for tag, columns in found.items()} == {
            tag: [part.tolist() for part in columns] for tag, columns in expected.items()
        }


def test_a_restart_replaces_what_it_repeats_and_both_lives_are_kept(tmp_path, event_run):
    folder = event_run(steps=50)
    first = only_event_file(folder)
    first.rename(folder / "events.out.tfevents.1000.host.1.0")
    event_run(steps=70, folder=folder, first=40, sick=lambda at: {"reward": 0.9})
    run = read_run(folder)
    assert [(life.first_step, life.last_step) for life in run.lives] == [(0, 49), (40, 69)]
    reward = run.series["reward"]
    assert reward.steps.tolist() == list(range(70))
    assert reward.values[39] != pytest.approx(0.9)
    np.testing.assert_allclose(reward.values[40:], 0.9, rtol=1e-6)


def test_the_newest_of_several_runs_is_read_and_the_others_are_named(tmp_path, event_run):
    event_run(steps=10, folder=tmp_path / "lightning_logs" / "version_0")
    event_run(steps=20, folder=tmp_path / "lightning_logs" / "version_1")
    run = read_run(tmp_path)
    assert run.last_step == 19
    assert "version_0" in run.notes[0]


# ---- other trainers ----------------------------------------------------------------------------------------------


def test_lightning_csv_with_empty_cells_is_read(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,grad_norm,step,val/reward\n0,0.5,0,\n0,nan,1,\n0,,1,0.25\n")
    run = read_run(tmp_path)
    assert run.series["grad_norm"].steps.tolist() == [0, 1]
    assert math.isnan(run.series["grad_norm"].values[1])
    assert run.series["val/reward"].values.tolist() == [0.25]


def test_a_trl_trainer_state_is_read(tmp_path):
    history = [
        {"step": 1, "loss": 0.0, "grad_norm": 0.4, "reward": 0.1, "rewards/accuracy/mean": 0.1, "entropy": 1.0},
        {"step": 2, "loss": 0.1, "grad_norm": float("nan"), "reward": 0.2, "completions/clipped_ratio": 0.5},
        {"step": 2, "eval_reward": 0.3, "eval_rewards/accuracy/mean": 0.4, "eval_runtime": 3.0},
        {"train_runtime": 12.0, "step": 2},
    ]
    for number in (1, 2):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history[: 2 * number]}))
    run = read_run(tmp_path)
    assert run.last_step == 2
    assert math.isnan(run.series["grad_norm"].values[1])
    assert run.series["val/reward"].values.tolist() == [0.3]
    assert run.series["val/rewards/accuracy/mean"].values.tolist() == [0.4]


def test_a_verl_json_lines_log_is_read_by_its_own_names(tmp_path):
    rows = [
        {
            "step": step,
            "data": {
                "actor/grad_norm": 0.3,
                "actor/entropy": 0.9,
                "actor/kl_loss": 0.01,
                "critic/score/mean": 0.1 * step,
                "response_length/mean": 100.0,
                "response_length/clip_ratio": 0.2,
                "val-core/gsm8k/reward/mean@1": 0.5,
                "perf/mfu": 0.4,
            },
        }
        for step in range(5)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 5, "da')
    run = read_run(tmp_path)
    wanted = {"grad_norm", "entropy", "kl", "reward", "completions/mean_length", "completions/clipped_ratio"}
    assert wanted | {"val/reward", "perf/mfu"} == set(run.series)
    assert run.series["reward"].values[4] == pytest.approx(0.4)
    assert "1 damaged line" in run.notes[0]


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("train/reward", "reward"),
        ("train/completions/mean_length", "completions/mean_length"),
        ("train/policy_loss", "loss"),
        ("train/act_grad_norm", "grad_norm"),
        ("train/kl", "kl"),
        ("train/response_length", "completions/mean_length"),
        ("actor/entropy_loss", "entropy"),
        ("actor/ppo_kl", "actor/ppo_kl"),
        ("eval/rewards/format/mean", "val/rewards/format/mean"),
        ("eval_math500_pass1", "val/pass@1"),
        ("grad_norm", "grad_norm"),
    ],
)
def test_names_of_other_trainers_are_translated(logged, name):
    assert canonical_name(logged) == name


def test_of_two_names_for_one_quantity_the_better_is_kept(tmp_path):
    rows = [{"step": step, "critic/rewards/mean": 0.1, "critic/score/mean": 0.7} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_run(tmp_path).series["reward"].values.tolist() == [0.7] * 3


# ---- damage ------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(RunReadError, match=r"nowhere: no such file"):
        read_run(tmp_path / "nowhere")


def test_an_empty_folder_says_that_it_is_empty(tmp_path):
    with pytest.raises(RunReadError, match=r"no metrics found \(it is empty\)"):
        read_run(tmp_path)


def test_a_folder_of_other_files_lists_them(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(RunReadError, match=r"model\.bin"):
        read_run(tmp_path)


def test_an_empty_event_file_is_named(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").touch()
    with pytest.raises(RunReadError, match=r"events\.out\.tfevents\.1\.host is empty"):
        read_run(tmp_path)


def test_an_event_file_without_scalars_is_named(tmp_path):
    SummaryWriter(str(tmp_path)).close()
    with pytest.raises(RunReadError, match=r"tfevents.* holds no scalar"):
        read_run(tmp_path)


def test_random_bytes_under_the_name_of_an_event_file_are_named_as_damaged(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(bytes(range(256)) * 8)
    with pytest.raises(RunReadError, match=r"damaged at byte 0"):
        read_run(tmp_path)


def test_an_unknown_kind_of_file_is_named(tmp_path):
    file = tmp_path / "run.pkl"
    file.write_bytes(b"x")
    with pytest.raises(RunReadError, match=r"run\.pkl: unknown kind of file"):
        read_run(file)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.csv", "a,b\n1,2\n", "no step column"),
        ("metrics.csv", "", "is empty"),
        ("metrics.csv", "step,reward\n", "no row with a step"),
        ("metrics.jsonl", "not json\n", "no row with a step"),
        ("trainer_state.json", '{"log_history": [', "not whole JSON"),
        ("trainer_state.json", '{"epoch": 1}', "no `log_history`"),
    ],
)
def test_a_useless_file_is_refused_by_name_with_the_reason(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(RunReadError, match=words) as refused:
        read_run(tmp_path)
    assert name in str(refused.value)


def test_events_are_found_beside_and_above_the_metrics(tmp_path, event_run):
    folder = event_run(steps=5, folder=tmp_path / "logs" / "version_0")
    log = EventLog(tmp_path / "events.jsonl")
    log.write("skip", step=3)
    assert [event["step"] for event in read_run(tmp_path).events] == [3]
    EventLog(folder / "events.jsonl").write("skip", step=4)
    assert [event["step"] for event in read_run(tmp_path).events] == [4]
    assert [event["step"] for event in read_run(folder).events] == [4]


def test_a_run_with_events_only_can_be_read(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("stop", step=3, reason="NaN")
    run = read_run(tmp_path)
    assert run.series == {}
    assert len(run.events) == 1


def test_fr_144_events_of_skips_spikes_and_rollbacks_are_there_with_the_right_step(tmp_path, event_run):
    folder = event_run(steps=20)
    log = EventLog(folder / "events.jsonl")
    for kind, step in (("skip", 7), ("spike", 9), ("rollback", 11)):
        log.write(kind, step=step)
    assert [(event["event"], event["step"]) for event in read_run(folder).events] == [
        ("skip", 7),
        ("spike", 9),
        ("rollback", 11),
    ]


# ---- resumed runs ------------------------------------------------------------------------------------------------


def test_a_resume_in_a_new_folder_is_read_as_one_run_and_its_second_death_is_named(tmp_path, event_run):
    versions = [tmp_path / "logs" / f"version_{number}" for number in range(2)]
    event_run(steps=43, folder=versions[0], sick=lambda at: {"grad_norm": math.nan} if at >= 40 else {})
    EventLog(versions[0] / "events.jsonl").write("stop", step=42, reason="NaN")
    event_run(steps=48, first=35, folder=versions[1], sick=lambda at: {"grad_norm": math.nan} if at >= 45 else {})
    EventLog(versions[1] / "events.jsonl").write("start", step=35)
    for number, folder in enumerate(versions):
        os.utime(only_event_file(folder), (1000 + number, 1000 + number))
    run = read_run(tmp_path)
    assert [(life.first_step, life.last_step) for life in run.lives] == [(0, 42), (35, 47)]
    assert [event["event"] for event in run.events] == ["stop", "start"]
    assert "version_0" in run.notes[0]
    assert "as one run" in run.notes[0]
    assert diagnose(run).alarms[0].cause == "restart_death"


@pytest.mark.parametrize("first", [0, 60])
def test_a_folder_that_continues_nothing_is_read_alone(tmp_path, event_run, first):
    versions = [tmp_path / f"version_{number}" for number in range(2)]
    event_run(steps=40, folder=versions[0])
    event_run(steps=first + 20, first=first, folder=versions[1])
    for number, folder in enumerate(versions):
        os.utime(only_event_file(folder), (1000 + number, 1000 + number))
    run = read_run(tmp_path)
    assert len(run.lives) == 1
    assert run.last_step == first + 19


def test_trl_writes_null_for_a_reward_that_is_nan_everywhere_and_it_is_read_as_nan(tmp_path):
    rows = [{"step": at, "grad_norm": 0.4, "reward": 0.1, "rewards/a/mean": None} for at in range(1, 4)]
    rows[-1]["reward"] = None
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    run = read_run(tmp_path)
    assert math.isnan(run.series["reward"].values[-1])
    assert "rewards/a/mean" not in run.series
    assert diagnose(run).alarms[0].cause == "nan_reward"
