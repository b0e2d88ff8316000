from __future__ import annotations

import json
import logging
import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_rlstab.callbacks.fire_drill import FireDrill
from lightning_rlstab.callbacks.seq_clip import SeqClip
from lightning_rlstab.callbacks.stability_monitor import StabilityMonitor
from lightning_rlstab.callbacks.stability_monitor_board import FINAL_SCORES
from lightning_rlstab.report.diagnosis import diagnose
from lightning_rlstab.report.memory import MonitorConfig
from lightning_rlstab.report.scalars import undeclared
from lightning_rlstab.report.sources import read_run


class Break(pl.Callback):
    """Spoils a gradient in step ``at``; ``then`` raises right after."""

    def __init__(self, at: int, *, value: float = math.nan, then: bool = False) -> None:
        self.at, self.value, self.then = at, value, then

    def on_after_backward(self, trainer, pl_module) -> None:
        if trainer.global_step == self.at:
            parameter = next(p for p in pl_module.parameters() if p.grad is not None)
            parameter.grad.view(-1)[0] = self.value
            if self.then:
                raise RuntimeError("device-side assert")


def causes(run) -> list[tuple[str, int]]:
    return [(event["cause"], event["alarm_step"]) for event in run.events("alarm")]


def test_a_healthy_run_stays_silent(grpo_run, caplog):
    with caplog.at_level(logging.WARNING, logger="lightning_rlstab.callbacks.stability_monitor"):
        run = grpo_run(StabilityMonitor(), max_steps=12)
    assert causes(run) == []
    assert [record for record in caplog.records if "StabilityMonitor" in record.message] == []
    assert "No rule found anything" in (run.folder / "diagnosis.md").read_text()


def test_the_monitor_changes_nothing_in_training(grpo_run):
    bare = grpo_run(max_steps=6)
    seen = grpo_run(StabilityMonitor(rollouts_every_n_steps=1, histograms_every_n_steps=1), max_steps=6)
    assert torch.equal(bare.weights, seen.weights)


def test_a_nan_gradient_is_named_in_the_very_step(grpo_run, caplog):
    with caplog.at_level(logging.WARNING):
        run = grpo_run(StabilityMonitor(), Break(3), max_steps=6)
    assert causes(run)[0] == ("nan_gradient", 3)
    assert any("step 3" in record.message and "gradient is NaN" in record.message for record in caplog.records)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_rewards_are_named_in_the_very_step(grpo_run, value):
    calls = []

    def flaky(completions, **columns):
        calls.append(1)
        rewards = [float(len(set(completion))) for completion in completions]
        return [value, *rewards[1:]] if len(calls) == 3 else rewards

    run = grpo_run(StabilityMonitor(), settings={"reward_funcs": [flaky]}, max_steps=5)
    assert causes(run)[0] == ("nan_reward", 2)


def test_fr_143_a_reward_function_that_abstains_raises_no_alarm(grpo_run):
    calls = []

    def abstaining(completions, **columns):
        calls.append(1)
        return [None if len(calls) == 3 else 1.0 * len(completion) for completion in completions]

    def other(completions, **columns):
        return [float(len(set(completion))) for completion in completions]

    run = grpo_run(StabilityMonitor(), settings={"reward_funcs": [abstaining, other]}, max_steps=5)
    assert causes(run) == []
    assert all(math.isfinite(value) for points in run.curves.values() for _, value in points)


def test_an_alarm_is_raised_once_and_the_hook_is_called_with_it(grpo_run):
    heard = []
    monitor = StabilityMonitor(on_alarm=heard.append)
    run = grpo_run(monitor, Break(2), Break(4), max_steps=7)
    assert [finding.cause for finding in heard].count("nan_gradient") == 1
    assert len(run.events("alarm")) == len(heard)
    assert monitor.state.findings["nan_gradient"].last_step == 4


def test_an_alarm_event_holds_evidence_and_one_next_action(grpo_run):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=4)
    (alarm,) = run.events("alarm", cause="nan_gradient")
    assert (alarm["first_step"], alarm["alarm_step"]) == (2, 2)
    assert "grad_norm is nan" in alarm["rule"]
    assert alarm["figures"] == {"grad_norm": "nan"}
    assert alarm["action"]
    assert alarm["severity"] == "error"


def test_the_strategys_own_skip_is_written_down_with_its_step(grpo_run):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=4)
    (skip,) = run.events("skip")
    assert skip["step"] == 2
    assert "not finite" in skip["reason"]


def test_stop_on_error_ends_the_run_after_the_step(grpo_run):
    run = grpo_run(StabilityMonitor(stop_on="error"), Break(2), max_steps=20)
    assert run.trainer.global_step == 3
    (stop,) = run.events("stop")
    assert stop["is_exception"] is False


def test_a_run_that_dies_of_an_exception_leaves_a_diagnosis_that_names_the_nan_gradient(grpo_run, tmp_path):
    with pytest.raises(RuntimeError, match="device-side assert"):
        grpo_run(StabilityMonitor(), Break(2, then=True), max_steps=5)
    (file,) = tmp_path.rglob("diagnosis.md")
    text = file.read_text()
    assert "gradient is NaN or inf" in text
    assert "RuntimeError: device-side assert" in text
    assert "Non-finite gradient in policy." in text
    events = [json.loads(line) for line in (file.parent / "events.jsonl").read_text().splitlines()]
    stop = events[-1]
    assert stop["event"] == "stop"
    assert stop["is_exception"] is True
    assert stop["non_finite_gradients"]
    assert [event["cause"] for event in events if event["event"] == "alarm"] == ["nan_gradient"]


@pytest.mark.filterwarnings("ignore:Step 2 was skipped:UserWarning")
def test_a_run_without_a_gate_is_watched_as_well(grpo_run):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=4, strategy="auto")
    assert causes(run)[0] == ("nan_gradient", 2)


@pytest.mark.parametrize("strategy", [None, "auto"])
def test_the_norm_is_taken_before_a_guard_behind_it_cleans_the_gradient(grpo_run, strategy):
    class Clean(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                parameter.grad.mul_(1e-9)

    monitor, flags = StabilityMonitor(), {} if strategy is None else {"strategy": strategy}
    run = grpo_run(monitor, Clean(), max_steps=4, **flags)
    norms = [
        value for name, series in run.curves.items() if name.startswith("rlstab/layer_norm/") for _, value in series
    ]
    assert max(norms) > 1e-5


@pytest.mark.filterwarnings("ignore:Step 2 was skipped:UserWarning")
def test_the_report_reads_the_same_diagnosis_from_the_files(grpo_run):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=5, strategy="auto")
    found = diagnose(read_run(run.folder))
    assert found.alarms[0].cause == "nan_gradient"
    assert found.alarms[0].alarm_step == 2


def test_every_logged_scalar_is_declared(grpo_run):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=12)
    assert {"rlstab/monitor/alarms", "rlstab/monitor/weights_moved", "rlstab/monitor/skipped_frac"} <= set(run.curves)
    assert undeclared(run.curves) == []


def test_memory_survives_a_resume_and_an_alarm_is_not_raised_again(grpo_run, tmp_path):
    first = grpo_run(StabilityMonitor(), Break(2), max_steps=4)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    second = StabilityMonitor()
    run = grpo_run(second, Break(5), max_steps=7, ckpt_path=tmp_path / "last.ckpt")
    assert second.state.readings == 7
    assert second.state.findings["nan_gradient"].first_step == 2
    assert ("nan_gradient", 5) not in causes(run)
    assert ("restart_death", 5) in causes(run)


def test_memory_is_made_of_plain_types_that_survive_json(grpo_run):
    monitor = StabilityMonitor()
    grpo_run(monitor, Break(2, value=math.inf), max_steps=12)
    again = StabilityMonitor()
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.state == monitor.state


def test_weights_that_never_move_are_reported(grpo_run):
    run = grpo_run(
        StabilityMonitor(thresholds=MonitorConfig(idle_readings=2)),
        settings={"learning_rate": 1e-45, "weight_decay": 0.0},
        max_steps=22,
    )
    assert "frozen" in [cause for cause, _ in causes(run)]


def test_fr_058_weights_without_any_gradient_are_listed_by_name(grpo_run, caplog):
    class Detached(pl.Callback):
        def on_after_backward(self, trainer, pl_module):
            for parameter in pl_module.parameters():
                parameter.grad = None

    monitor = StabilityMonitor(thresholds=MonitorConfig(idle_readings=3))
    run = grpo_run(Detached(), monitor, max_steps=5)
    (alarm,) = run.events("alarm", cause="frozen")
    trainable = [name for name, one in run.module.named_parameters() if one.requires_grad]
    assert alarm["without_gradient"] == trainable[:50]
    assert any(trainable[0] in record.getMessage() for record in caplog.records)


def test_fr_138_looping_completions_raise_an_alarm_in_the_same_step(grpo_run, byte_tokenizer):
    class Peeee(pl.Callback):
        def on_rollout_ready(self, trainer, pl_module, rollout):
            if trainer.global_step < 3:
                return rollout
            return rollout.replace(completions=["P" + "e" * 80] * len(rollout))

    run = grpo_run(Peeee(), StabilityMonitor(), max_steps=5)
    assert ("repetition", 3) in causes(run)


def test_held_out_scores_and_their_gap_are_taken_in_once_per_evaluation(grpo_module, tmp_path):
    from lightning_rlstab import PromptDataModule

    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(24)]
    monitor = StabilityMonitor()
    trainer = pl.Trainer(
        max_steps=9,
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path, name=None),
        log_every_n_steps=1,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[monitor],
    )
    trainer.fit(grpo_module(), PromptDataModule(rows, rows[:4]))
    assert len(monitor.state.held_out) == 3
    curves = EventAccumulator(trainer.log_dir).Reload()
    assert len(curves.Scalars("rlstab/monitor/held_out_gap")) == 2


def test_tensorboard_gets_layout_histograms_rollouts_and_spike_pictures(grpo_run):
    from lightning_rlstab.report.events import EventLog

    class Spike(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step == 2:
                EventLog(f"{trainer.log_dir}/events.jsonl").write(
                    "spike",
                    step=2,
                    summary="token 1 did it",
                    grad_norm=41.2,
                    culprits=[
                        {
                            "micro_batch": 0,
                            "rank": 0,
                            "sequence": 1,
                            "token": 1,
                            "text": "b",
                            "share": 0.9,
                            "layers": [{"name": "layers.0", "share": 0.7}, {"name": "layers.10", "share": 0.3}],
                        }
                    ],
                    strip={"texts": ["a", "b", "c"], "weights": [0.0, 0.9, "nan"]},
                )

    run = grpo_run(StabilityMonitor(), Spike(), max_steps=5)
    tags = EventAccumulator(str(run.folder), size_guidance={"tensors": 0, "images": 0}).Reload().Tags()
    assert {"spike/tokens", "spike/layers_and_tokens"} <= set(tags["images"])
    assert {"spike/card/text_summary", "rollouts/best_and_worst/text_summary"} <= set(tags["tensors"])
    wanted = {"histogram/advantages", "histogram/token_entropy", "histogram/log_importance_ratio"}
    assert wanted <= set(tags["histograms"])
    assert "custom_scalars__config__" in tags["tensors"]
    needle = run.curves["rlstab/events/spike"]
    assert [step for step, _ in needle] == [1, 2, 3, 4]
    assert [value > 0 for _, value in needle] == [False, True, False, False]
    assert any(name.startswith("rlstab/layer_norm/") for name in run.curves)


def test_a_run_without_tensorboard_is_watched_as_well(grpo_run, tmp_path):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=4, logger=False, default_root_dir=tmp_path)
    assert causes(run)[0] == ("nan_gradient", 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_on", "sometimes"),
        ("rollouts_every_n_steps", -1),
        ("shown_rollouts", 0),
        ("histograms_every_n_steps", 2.5),
        ("repetition_samples", True),
        ("has_pictures", "yes"),
        ("on_alarm", "no.such.module"),
        ("on_alarm", "math.pi"),
    ],
)
def test_a_senseless_setting_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"`{field}`"):
        StabilityMonitor(**{field: value})


@pytest.mark.parametrize("value", [math.nan, -1.0, "5x", True, 0.0])
def test_a_senseless_threshold_is_refused_by_name(value):
    with pytest.raises(ValueError, match="`spike_ratio`"):
        MonitorConfig(spike_ratio=value)


def test_the_hook_may_be_given_by_its_import_path():
    assert StabilityMonitor(on_alarm="builtins.print").on_alarm is print


@pytest.mark.parametrize(("kind", "value"), [("reward_nan", "nan"), ("reward_outlier", "inf")])
def test_a_reward_that_is_lost_after_scoring_is_named_in_the_very_step(grpo_run, kind, value):
    class Lost(pl.Callback):
        def on_rollout_scored(self, trainer, pl_module, rollout):
            if trainer.global_step != 2:
                return rollout
            spoiled = rollout.rewards_per_func.clone()
            spoiled[0, 0] = float(value)
            return rollout.replace(rewards_per_func=spoiled, rewards=spoiled[:, 0])

    lost = FireDrill([{"kind": kind, "step": 2}]) if value == "nan" else Lost()
    run = grpo_run(lost, StabilityMonitor(), max_steps=4)
    assert causes(run)[0] == ("nan_reward", 2)


def test_the_run_says_at_its_start_which_callbacks_it_has_and_how_they_are_set(grpo_run):
    run = grpo_run(Break(9), StabilityMonitor(stop_on="error"), SeqClip(low=0.25), max_steps=2)
    (line,) = run.events("config")
    named = {callback["name"]: callback for callback in line["callbacks"]}
    assert list(named)[:3] == ["Break", "StabilityMonitor", "SeqClip"]
    assert set(named["Break"]) == {"name"}
    assert (named["SeqClip"]["low"], named["SeqClip"]["mode"]) == (0.25, "mask")
    assert named["StabilityMonitor"]["stop_on"] == "error"
    assert named["StabilityMonitor"]["config"]["spike_ratio"] == 5.0
    assert line["strategy"] == "RLStabSingleDevice"


def test_hyper_parameters_stand_beside_the_final_scores(grpo_run):
    run = grpo_run(StabilityMonitor(), Break(2), max_steps=5)
    final = {name: points[-1] for name, points in run.curves.items() if name.startswith("final/")}
    assert final["final/steps_applied"] == (5, 4.0)
    assert final["final/steps_skipped"] == (5, 1.0)
    assert final["final/alarms"] == (5, 1.0)
    assert final["final/reward"][1] == pytest.approx(run.curves["reward"][-1][1])
    assert set(final) <= set(FINAL_SCORES)
    assert "final/held_out_reward" not in final  # nothing was held out
    reader = EventAccumulator(str(run.folder)).Reload()
    tables = reader.PluginTagToContent("hparams")
    experiment = HParamsPluginData.FromString(tables["_hparams_/experiment"]).experiment
    assert [info.name.tag for info in experiment.metric_infos] == list(FINAL_SCORES)
    columns = {info.name for info in experiment.hparam_infos}
    assert {"learning_rate", "beta", "num_generations", "GEPO", "StabilityMonitor", "max_steps"} <= columns
    row = HParamsPluginData.FromString(tables["_hparams_/session_start_info"]).session_start_info
    assert row.hparams["StabilityMonitor"].string_value == "on"
    assert row.hparams["GEPO"].string_value == "off"
    assert row.hparams["learning_rate"].number_value == 1e-3


def test_a_run_that_dies_has_its_scores_as_well(grpo_run, tmp_path):
    with pytest.raises(RuntimeError, match="device-side assert"):
        grpo_run(StabilityMonitor(), Break(2, then=True), max_steps=5)
    (file,) = tmp_path.rglob("*tfevents*")
    assert EventAccumulator(str(file)).Reload().Scalars("final/steps_applied")[-1].value == 2


def test_counts_of_steps_and_the_best_score_survive_a_resume(grpo_run, tmp_path):
    first = grpo_run(StabilityMonitor(), Break(2), max_steps=4)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    run = grpo_run(StabilityMonitor(), max_steps=7, ckpt_path=tmp_path / "last.ckpt")
    assert run.curves["final/steps_applied"][-1][1] == 6
    assert run.curves["final/steps_skipped"][-1][1] == 1
