from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from lightning_rlstab.report.__main__ import main
from lightning_rlstab.report.charts import Marker, line_chart, thinned
from lightning_rlstab.report.comparison import ablation_markdown, compared, outcome
from lightning_rlstab.report.diagnosis import diagnose
from lightning_rlstab.report.events import EventLog
from lightning_rlstab.report.heat import layer_token_image, strip_html, strip_image, strip_of
from lightning_rlstab.report.layout import GROUPS, Chart, chart_names, custom_scalars
from lightning_rlstab.report.page import page
from lightning_rlstab.report.run import Series
from lightning_rlstab.report.scalars import declared
from lightning_rlstab.report.sources import read_run
from lightning_rlstab.report.words import diagnosis_markdown, diagnosis_text, event_words, rollouts_markdown, spike_card

SPIKE = {
    "event": "spike",
    "step": 41,
    "summary": "gradient norm 41.2 (threshold 3.1): micro-batch 3, rank 5, sequence 1, token 17 'therefore'",
    "grad_norm": 41.2,
    "threshold": 3.1,
    "remaining_norm": 0.6,
    "verdict": "tokens",
    "action": "removed",
    "tier": 1,
    "completeness": 1.0003,
    "cost_sweeps": 0.67,
    "culprits": [
        {
            "micro_batch": 3,
            "rank": 5,
            "sequence": 1,
            "token": 2,
            "text": "<script>",
            "context": "a | b\n[[therefore]]",
            "share": 0.94,
            "grad_norm": 40.9,
            "importance_ratio": "inf",
            "cause": "token_mismatch",
            "layers": [{"name": "layers.10", "share": 0.71}, {"name": "layers.9", "share": 0.29}],
        },
        {"micro_batch": 3, "rank": 5, "sequence": 2, "token": 0, "text": "so", "share": 0.05},
    ],
    "layers": [{"name": "layers.10", "share": 0.7}],
    "strip": {"texts": ["We", " see\n", "<script>", "\x00"], "weights": [0.01, "nan", 0.94, -0.02]},
    "notes": ["the check held"],
}


@pytest.fixture
def sick_folder(event_run):
    folder = event_run(steps=90, sick=lambda at: {"grad_norm": 41.2} if at == 41 else {})
    fields = {name: value for name, value in SPIKE.items() if name not in {"event", "step"}}
    log = EventLog(folder / "events.jsonl")
    log.write("spike", step=41, **fields)
    log.write("skip", step=41, reason="norm 41.2 is above the limit of 3.1")
    return folder


# ---- whole runs --------------------------------------------------------------------------------------------------


def test_a_healthy_run_is_diagnosed_as_healthy(event_run):
    found = diagnose(read_run(event_run(steps=90)))
    assert found.findings == ()
    assert found.is_healthy
    assert found.readings == 90
    assert found.missing == ("val/reward",)


def test_each_life_of_a_run_is_judged_and_the_second_death_is_named(event_run, tmp_path):
    folder = event_run(steps=64, sick=lambda at: {"grad_norm": math.nan, "loss": math.nan} if at >= 62 else {})
    (first,) = folder.glob("*tfevents*")
    first.rename(folder / "events.out.tfevents.1000.host.1.0")
    event_run(steps=72, folder=folder, first=50, sick=lambda at: {"grad_norm": math.nan} if at >= 70 else {})
    found = diagnose(read_run(folder))
    assert found.alarms[0].cause == "restart_death"
    assert found.alarms[0].alarm_step == 70


def test_a_run_that_logged_nothing_to_judge_is_not_called_healthy(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", step=0)
    assert not diagnose(read_run(tmp_path)).is_healthy


@pytest.mark.parametrize(("steps", "is_long"), [(19, False), (20, True)])
def test_silence_about_a_short_run_is_not_taken_for_health(event_run, capsys, tmp_path, steps: int, is_long: bool):
    """Ten quiet steps say nothing about entropy or reward."""
    page = tmp_path / "page.html"
    folder = event_run(steps=steps)
    assert main([str(folder), "--html", str(page)]) == 0
    told = capsys.readouterr().out
    assert ("healthy:" in told) == ("Healthy." in page.read_text()) == is_long
    assert ("too few for trends" in told) == ("too few for trends" in page.read_text()) == (not is_long)
    found = diagnose(read_run(folder))
    assert found.as_dict()["is_conclusive"] == is_long
    assert ("too few" in diagnosis_markdown(found)) == (not is_long)


def test_a_short_run_with_an_alarm_is_conclusive(event_run):
    assert diagnose(read_run(event_run(steps=6, sick=lambda at: {"loss": math.nan} if at == 5 else {}))).is_conclusive


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_returns_zero_for_a_healthy_run(event_run, capsys):
    assert main([str(event_run(steps=60))]) == 0
    assert "healthy" in capsys.readouterr().out


def test_the_command_returns_one_and_names_cause_rule_and_next_action(sick_folder, capsys):
    assert main([str(sick_folder)]) == 1
    told = capsys.readouterr().out
    assert "1. [warning] gradient norm jumps far above its usual level" in told
    assert "grad_norm 41.2 > 5 x usual" in told
    assert "next     " in told
    assert "1 spike, 1 skip" in told
    assert "step 41: gradient norm 41.2" in told


def test_the_command_returns_two_and_names_the_file_it_cannot_read(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_json_output_is_one_valid_object_even_with_nan_in_the_evidence(event_run, capsys):
    folder = event_run(steps=40, sick=lambda at: {"grad_norm": math.nan} if at == 30 else {})
    assert main([str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert told["findings"][0]["cause"] == "nan_gradient"
    assert told["findings"][0]["figures"] == {"grad_norm": "nan"}
    assert told["is_healthy"] is False


def test_two_runs_are_compared_in_one_table(event_run, tmp_path, capsys):
    first = event_run(steps=60, folder=tmp_path / "base" / "logs")
    second = event_run(steps=60, folder=tmp_path / "without" / "logs", sick=lambda at: {"reward": 0.9})
    page_file = tmp_path / "out" / "compare.html"
    assert main(["--compare", str(first), str(second), "--html", str(page_file)]) == 0
    told = capsys.readouterr().out
    assert "base/logs" in told
    assert "without/logs" in told
    row = next(line for line in told.splitlines() if line.startswith("reward, last tenth"))
    assert "0.9" in row
    assert "<svg" in page_file.read_text()


def test_compare_and_a_run_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--compare", "a", "b"])
    assert ended.value.code == 2
    capsys.readouterr()


def test_an_ablation_table_has_a_row_per_run(event_run, tmp_path):
    rows = []
    for label in ("all", "without GEPO"):
        run = read_run(event_run(steps=40, folder=tmp_path / label))
        rows.append((label, outcome(run, diagnose(run))))
    lines = ablation_markdown(rows).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| all |")
    assert lines[0].count("|") == lines[3].count("|")
    assert "healthy" in lines[3]


def test_a_comparison_of_runs_with_different_metrics_leaves_gaps(event_run, tmp_path):
    first = read_run(event_run(steps=30, folder=tmp_path / "a"))
    second = read_run(event_run(steps=30, folder=tmp_path / "b", sick=lambda at: {"val/reward": 0.5}))
    rows = {row.name: row for row in compared(first, second, (diagnose(first), diagnose(second)))}
    assert rows["best held-out reward"].first == "-"
    assert rows["best held-out reward"].second == "0.5"


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_without_network_or_script(sick_folder):
    run = read_run(sick_folder)
    text = page(run, diagnose(run))
    for forbidden in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert forbidden not in text.lower()
    assert text.startswith("<!doctype html>")


def test_the_page_shows_diagnosis_curves_spikes_tokens_and_interventions(sick_folder):
    run = read_run(sick_folder)
    text = page(run, diagnose(run))
    for expected in (
        "gradient norm jumps far above",
        "Gradient norm and interventions",
        "<h2>Spikes</h2>",
        'class="culprit"',
        "layers.10",
        "<h2>Interventions</h2>",
        "norm 41.2 is above the limit of 3.1",
        'class="m spike"',
    ):
        assert expected in text


def test_text_from_completions_cannot_break_out_of_the_page(sick_folder):
    run = read_run(sick_folder)
    assert "<script>" not in page(run, diagnose(run))
    assert "&lt;script&gt;" in page(run, diagnose(run))


def test_a_page_of_a_run_without_metrics_still_stands(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("stop", step=3, reason="out of memory")
    run = read_run(tmp_path)
    text = page(run, diagnose(run))
    assert "No metrics to judge" in text
    assert "out of memory" in text


def test_damaged_spike_events_do_not_break_the_page(event_run):
    folder = event_run(steps=30)
    log = EventLog(folder / "events.jsonl")
    log.write("spike", step=3)
    log.write("spike", step=4, culprits=["text", {"token": "x"}], strip={"texts": [1, 2], "weights": ["a"]}, layers=[1])
    log.write("spike", step=5, strip={"texts": []}, culprits=None, notes=None)
    run = read_run(folder)
    assert page(run, diagnose(run)).count("<h3>Step") == 3
    for event in run.events:
        assert spike_card(event)


# ---- charts ------------------------------------------------------------------------------------------------------


def series(values):
    import numpy as np

    return Series(np.arange(len(values)), np.array(values, dtype=float))


def test_a_long_curve_keeps_its_peaks_and_its_breaks():
    values = [0.5] * 100_000
    values[54_321], values[70_000] = 99.0, math.nan
    thin = thinned(series(values))
    assert len(thin) < 2000
    assert 99.0 in thin.values
    assert 70_000 in thin.steps[~(thin.values == thin.values)]
    assert len(line_chart("x", {"a": series(values)})) < 30_000


def test_a_curve_breaks_at_nan_and_marks_it():
    chart = line_chart("x", {"a": series([1.0, 2.0, math.nan, 1.0, 2.0])})
    assert chart.count("<polyline") == 2
    assert '<text class="bad"' in chart


def test_a_curve_of_one_point_or_of_nan_only_is_still_a_chart():
    assert "<circle" in line_chart("x", {"a": series([1.0])})
    assert "nan" in line_chart("x", {"a": series([math.nan] * 5)})
    assert "<svg" in line_chart("x", {"a": series([])})


@pytest.mark.parametrize(
    "values", [[0.0] * 5, [7.0] * 5, [1e-8, 1e9], [-3.0, 4.0], [1e300, 1e-300], [1e-12] * 50 + [1.0]]
)
def test_any_range_of_values_gives_finite_coordinates(values):
    chart = line_chart("x", {"a": series(values)}, healthy=(0.0, 1.0))
    assert "nan" not in chart
    assert "inf" not in chart


def test_markers_outside_the_axis_are_left_out_and_words_are_escaped():
    markers = [Marker(2, "spike", "<b>"), Marker(99, "skip", "late")]
    chart = line_chart("x", {"a": series([1.0] * 5)}, markers=markers)
    assert "&lt;b&gt;" in chart
    assert "late" not in chart


# ---- strips, cards, tables ---------------------------------------------------------------------------------------


def test_the_strip_holds_all_tokens_and_boxes_the_culprit_of_its_own_sequence_only():
    strip = strip_of(SPIKE)
    assert strip is not None
    assert strip.culprits == {2}
    assert strip.where == "micro-batch 3, rank 5, sequence 1"
    assert math.isnan(strip.weights[1])
    text = strip_html(strip)
    assert text.count("<span") == 4
    assert text.count('class="culprit"') == 1


def test_the_strip_of_a_very_long_sequence_shows_the_culprit():
    event = {
        "strip": {"texts": ["w"] * 20_000, "weights": [0.0] * 20_000},
        "culprits": [{"micro_batch": 0, "rank": 0, "sequence": 0, "token": 15_000}],
    }
    text = strip_html(strip_of(event))
    assert text.count("<span") == 400
    assert 'class="culprit"' in text


def test_pictures_are_arrays_that_tensorboard_takes():
    image = strip_image(strip_of(SPIKE))
    assert image.dtype.name == "uint8"
    assert image.shape[2] == 3
    assert (image < 10).all(axis=2).any()  # the culprit's black box
    layers = layer_token_image(SPIKE)
    assert layers.dtype.name == "uint8"
    assert layers.shape[2] == 3
    assert layer_token_image({"culprits": [{"token": 1}]}) is None


def test_a_spike_card_says_everything_and_keeps_its_table_whole():
    card = spike_card(SPIKE)
    for expected in (
        "Step 41",
        "norm 41.2",
        "threshold 3.1",
        "shares of all tokens sum to 1",
        "token\\_mismatch",
        "the check held",
    ):
        assert expected in card
    table = [line for line in card.splitlines() if line.startswith("| ")]
    assert len({line.replace("\\|", "").count("|") for line in table[:4]}) == 1


def test_best_and_worst_rollouts_stand_side_by_side_with_length_repetition_and_format_counts():
    best = [{"prompt": "1+1=", "completion": "2", "reward": 1.0, "length": 2, "repetition": 0.0}]
    worst = [{"prompt": "1+1=", "completion": "<a><b>\n77", "reward": -1.0, "length": 9, "repetition": 0.5}]
    text = rollouts_markdown(50, best, worst)
    assert "reward 1, 2 tokens, repetition 0, 0 letters, 1 digits, 0 tags, 0 line breaks" in text
    assert "2 tags, 1 line breaks" in text
    assert len({line.count("|") - line.count("\\|") for line in text.splitlines()[2:]}) == 1


def test_any_event_has_words():
    assert event_words({"event": "skip", "step": 1, "norm": "inf", "level": 0.5}) == "norm inf, level 0.5"
    assert event_words({"event": "rollback", "step": 1}) == "Weights and optimizer state went back to a snapshot"


def test_the_text_lists_what_could_not_be_judged(event_run):
    run = read_run(event_run(steps=20))
    assert "not logged, so not judged: val/reward" in diagnosis_text(run, diagnose(run))


# ---- layout ------------------------------------------------------------------------------------------------------


def test_every_name_in_the_layout_is_declared():
    for group in GROUPS:
        for chart in group.charts:
            for name in chart.names:
                assert declared(name.replace("*", "x")) is not None or "clip/" in name, name


def test_the_layout_has_no_panel_that_would_stay_empty():
    layout = custom_scalars(["reward", "grad_norm", "rewards/a/mean"])
    assert list(layout) == ["Hard collapse", "Silent failure"]
    assert layout["Silent failure"]["Rewards by function"] == ["Multiline", ["^rewards/.*/mean$"]]
    assert list(layout["Hard collapse"]) == ["Gradient norm and interventions"]


def test_a_panel_also_takes_names_that_are_logged_later():
    patterns = custom_scalars(["grad_norm"])["Hard collapse"]["Gradient norm and interventions"][1]
    assert {"^grad_norm$", "^rlstab/gepo/grad_norm_limit$", "^rlstab/events/.*$"} <= set(patterns)


def test_a_chart_of_names_finds_them_in_its_own_order():
    assert chart_names(Chart("", ("b", "a/*")), ["a/2", "a/1", "b", "c"]) == ["b", "a/1", "a/2"]


# ---- labelled runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labelled():
    path = Path(__file__).parents[2] / "benchmarks" / "diagnosis.py"
    spec = importlib.util.spec_from_file_location("benchmark_diagnosis", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_labelled_runs_are_read_right_quietly_and_in_time(labelled):
    runs = [labelled.synthetic_run(None, 2 * seed) for seed in range(12)]
    runs += [labelled.synthetic_run(cause, 2 * seed) for cause in labelled.SICK for seed in range(2)]
    measured = labelled.figures([labelled.watch(run) for run in runs])
    assert measured["right_cause_first"] >= 0.9
    assert measured["false_alarm_runs"] <= 0.1
    assert measured["median_delay_steps"] <= 25


# ---- events beside the curves ------------------------------------------------------------------------------------


def test_a_spike_that_a_guard_cleaned_is_still_diagnosed_from_its_event(event_run):
    folder = event_run(steps=60)
    EventLog(folder / "events.jsonl").write("spike", step=40, grad_norm=23.1)
    EventLog(folder / "events.jsonl").write("skip", step=50, scope="step", norm=math.nan)
    EventLog(folder / "events.jsonl").write("skip", step=55, scope="micro-batch", norm=math.inf)
    found = diagnose(read_run(folder))
    assert [(one.cause, one.alarm_step, one.last_step) for one in found.alarms] == [
        ("gradient_spike", 40, 40),
        ("nan_gradient", 50, 50),
    ]


def test_what_the_runs_own_monitor_raised_counts_as_found(event_run):
    folder = event_run(steps=60)
    log = EventLog(folder / "events.jsonl")
    log.write("alarm", step=31, cause="repetition", rule="share 0.9 > 0.7", figures={"repetition": 0.9}, first_step=30)
    log.write("alarm", step=32, cause="something a later version knows")
    (found,) = diagnose(read_run(folder)).alarms
    assert (found.cause, found.first_step, found.alarm_step) == ("repetition", 30, 31)
    assert found.rule == "share 0.9 > 0.7"


def test_a_legend_leaves_out_the_path_that_all_names_share():
    chart = line_chart("x", {"clip/low": series([1.0]), "clip/high": series([2.0])})
    assert ">low<" in chart
    assert ">high<" in chart
