"""The report as one self-contained HTML page: no script, no network, readable on paper and on a phone."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rlstab.report.causes import CAUSES
from lightning_rlstab.report.charts import Marker, line_chart
from lightning_rlstab.report.comparison import Row
from lightning_rlstab.report.diagnosis import Diagnosis
from lightning_rlstab.report.events import number_from_json
from lightning_rlstab.report.heat import strip_html, strip_of
from lightning_rlstab.report.layout import GROUPS, chart_names
from lightning_rlstab.report.run import Run
from lightning_rlstab.report.scalars import declared
from lightning_rlstab.report.words import event_words, figure, interventions, silence, steps_words

__all__ = ["comparison_page", "page"]

_MOST_SPIKES = 30
_MOST_EVENTS = 400
_MARKED = ("spike", "skip", "rollback", "alarm", "quarantine", "fire_drill", "clip", "stop")

_STYLE = """
:root{--bg:#fff;--fg:#1c1f24;--mute:#667;--line:#dde1e7;--card:#f6f7f9;--ok:#2e7d3218;--c0:#1f5fbf;--c1:#d9730d;
--c2:#2b8a3e;--c3:#9c36b5;--c4:#0b7285;--c5:#868e96;--error:#c92a2a;--warning:#b35900;--notice:#5c6b7a}
@media(prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e8eb;--mute:#9aa4b2;--line:#2c323b;--card:#1c2027;
--ok:#69db7c1c;--c0:#74a9ff;--c1:#ffa94d;--c2:#69db7c;--c3:#da77f2;--c4:#66d9e8;--c5:#adb5bd;--error:#ff6b6b;
--warning:#ffa94d;--notice:#adb5bd}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1440px;padding:24px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 10px;
border-bottom:1px solid var(--line);padding-bottom:4px}h3{font-size:15px;margin:18px 0 6px}p{margin:6px 0}
.mute,small{color:var(--mute)}code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
.card{background:var(--card);border-left:4px solid var(--line);border-radius:6px;padding:10px 14px;margin:10px 0}
.card.error{border-color:var(--error)}.card.warning{border-color:var(--warning)}.card.notice{border-color:var(--notice)}
.card.healthy{border-color:var(--c2)}.badge{font-size:12px;text-transform:uppercase;letter-spacing:.05em}
.error .badge{color:var(--error)}.warning .badge{color:var(--warning)}.notice .badge{color:var(--notice)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:6px 0 0}dt{color:var(--mute)}dd{margin:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:14px}
figure{margin:0;min-width:0;background:var(--card);border-radius:6px;padding:10px}figcaption small{display:block}
svg{width:100%;height:auto;display:block}svg text{font:10px system-ui,sans-serif;fill:var(--mute)}
svg .g{stroke:var(--line);stroke-width:1}svg .ok{fill:var(--ok)}svg polyline{fill:none;stroke-width:1.5}
svg .bad{fill:var(--error);font-size:14px;font-weight:700}svg .m{stroke:var(--mute);stroke-width:1;stroke-dasharray:3 3}
svg .m.spike,svg .m.stop{stroke:var(--error)}svg .m.skip,svg .m.quarantine{stroke:var(--c1)}
svg .m.rollback{stroke:var(--c3)}
svg .m.alarm{stroke:var(--error);stroke-dasharray:none}svg .m.fire_drill{stroke:var(--c4)}
.c0{stroke:var(--c0);color:var(--c0)}.c1{stroke:var(--c1);color:var(--c1)}.c2{stroke:var(--c2);color:var(--c2)}
.c3{stroke:var(--c3);color:var(--c3)}.c4{stroke:var(--c4);color:var(--c4)}.c5{stroke:var(--c5);color:var(--c5)}
svg circle{fill:currentColor;stroke:none}
.k{display:inline-block;margin-left:10px;font-size:12px;overflow-wrap:anywhere}.k:before{content:"● "}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}th,td{text-align:left;padding:4px 8px;
border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--mute);font-weight:600}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.strip{font:13px/2 ui-monospace,monospace;background:#fff;color:#111;border-radius:6px;padding:8px;
overflow-wrap:anywhere;max-height:22em;overflow-y:auto}.strip span{padding:2px 2px;margin:0 1px;white-space:pre-wrap}
.strip .culprit{outline:2px solid #111;border-radius:2px;font-weight:700}
.bar{display:inline-block;height:9px;background:var(--c0);border-radius:2px;vertical-align:middle;margin-right:6px}
details{margin:8px 0}summary{cursor:pointer}
"""


def page(run: Run, diagnosis: Diagnosis) -> str:
    """The report of one run.

    Args:
        run: The run.
        diagnosis: Its diagnosis.

    Returns:
        A whole HTML document in UTF-8.
    """
    title = f"rlstab report: {run.path.name or run.path}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="mute">{diagnosis.readings:,} steps with readings, last step {run.last_step:,} · '
        f"{html.escape(str(run.path))}</p>",
        *(f'<p class="mute">{html.escape(note)}</p>' for note in run.notes),
        "<h2>Diagnosis</h2>",
        _findings(diagnosis),
        _spikes(run),
        _curves(run, diagnosis),
        _events(run),
    ]
    return _document(title, body)


def comparison_page(first: Run, second: Run, rows: Sequence[Row], labels: tuple[str, str]) -> str:
    """Two runs over each other.

    Args:
        first: Run A.
        second: Run B.
        rows: From ``comparison.compared``.
        labels: What to call them.
    """
    title = f"rlstab report: {labels[0]} against {labels[1]}"
    head = (
        f"<tr><th>quantity</th><th>{html.escape(labels[0])}</th><th>{html.escape(labels[1])}</th><th>change</th></tr>"
    )
    lines = [
        f"<tr><td>{html.escape(row.name)}</td>"
        f'<td class="n">{html.escape(row.first)}</td><td class="n">{html.escape(row.second)}</td>'
        f'<td class="n">{html.escape(row.change)}</td></tr>'
        for row in rows
    ]
    body = [f"<h1>{html.escape(title)}</h1>", f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>']
    for group in GROUPS:
        charts = []
        for chart in group.charts:
            for name in chart_names(chart, {*first.series, *second.series}):
                pair = {
                    label: run.series[name]
                    for label, run in zip(labels, (first, second), strict=True)
                    if name in run.series
                }
                charts.append(line_chart(name, pair, caption=_meaning(name), healthy=_healthy(name)))
        if charts:
            body.append(f'<h2>{html.escape(group.title)}</h2><div class="charts">{"".join(charts)}</div>')
    return _document(title, body)


def _document(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _findings(diagnosis: Diagnosis) -> str:
    if not diagnosis.readings:
        return '<div class="card notice">No metrics to judge.</div>'
    if not diagnosis.is_conclusive:
        return f'<div class="card notice">{html.escape(silence(diagnosis).capitalize())}.</div>'
    if not diagnosis.findings:
        return '<div class="card healthy"><b>Healthy.</b> No rule found anything.</div>'
    cards = []
    for number, finding in enumerate(diagnosis.findings, start=1):
        cause = CAUSES[finding.cause]
        when = f"{steps_words(finding.first_step, finding.last_step)}, recognised at {finding.alarm_step}"
        rows = (("when", when), ("rule", finding.rule), ("suspect", cause.suspect), ("next", cause.action))
        told = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows)
        cards.append(
            f'<div class="card {cause.severity}"><span class="badge">{cause.severity}</span> '
            f"<b>{number}. {html.escape(cause.title)}</b><dl>{told}</dl></div>"
        )
    return "".join(cards)


def _curves(run: Run, diagnosis: Diagnosis) -> str:
    markers = [
        Marker(event["step"], event["event"], event_words(event)) for event in run.events if event["event"] in _MARKED
    ]
    if not any(marker.kind == "alarm" for marker in markers):
        markers += [Marker(found.alarm_step, "alarm", CAUSES[found.cause].title) for found in diagnosis.alarms]
    markers = markers[:_MOST_EVENTS]
    span = (min((int(curve.steps[0]) for curve in run.series.values() if len(curve)), default=0), run.last_step)
    parts, drawn = [], set()
    for group in GROUPS:
        charts = []
        for chart in group.charts:
            names = chart_names(chart, run.series)
            drawn.update(names)
            names = [name for name in names if not name.startswith("rlstab/events/")]  # drawn as vertical lines
            if names:
                curves = {name: run.series[name] for name in names}
                one = names[0] if len(names) == 1 or chart.names[0] == names[0] else ""
                charts.append(
                    line_chart(
                        chart.title, curves, markers=markers, span=span, caption=_meaning(one), healthy=_healthy(one)
                    )
                )
        if charts:
            parts.append(f'<h2>{html.escape(group.title)}</h2><div class="charts">{"".join(charts)}</div>')
    no_curve = {"epoch", "step", "hp_metric"}
    rest = [name for name in sorted(run.series) if name not in drawn | no_curve and not name.startswith("final/")]
    if rest:
        charts = [line_chart(name, {name: run.series[name]}, span=span, caption=_meaning(name)) for name in rest[:200]]
        parts.append(
            f'<details><summary>{len(rest)} more curves</summary><div class="charts">{"".join(charts)}</div></details>'
        )
    return "".join(parts)


def _meaning(name: str) -> str:
    row = declared(name)
    return f"{row.meaning} ({row.unit})" if row is not None else ""


def _healthy(name: str) -> tuple[float | None, float | None] | None:
    row = declared(name)
    return row.healthy if row is not None else None


def _spikes(run: Run) -> str:
    spikes = [event for event in run.events if event["event"] == "spike"]
    if not spikes:
        return ""
    parts = [_spike(event) for event in spikes[:_MOST_SPIKES]]
    if len(spikes) > _MOST_SPIKES:
        parts.append(f'<p class="mute">and {len(spikes) - _MOST_SPIKES} more in events.jsonl</p>')
    return f"<h2>Spikes</h2>{''.join(parts)}"


def _spike(event: Mapping[str, Any]) -> str:
    parts = [f"<h3>Step {event['step']}: {html.escape(event_words(event))}</h3>"]
    culprits = [one for one in event.get("culprits") or [] if isinstance(one, Mapping)]
    if culprits:
        heads = ("micro_batch", "rank", "sequence", "token", "text", "share", "grad_norm", "importance_ratio", "cause")
        head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in heads)
        rows = ["".join(_value_cell(one.get(name), name) for name in heads) for one in culprits[:12]]
        parts.append(
            f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'
        )
    strip = strip_of(event)
    if strip is not None:
        parts.append(
            f'<p class="mute">{html.escape(strip.where)}: each token by its share of the gradient</p>'
            f"{strip_html(strip)}"
        )
    layers = [one for one in event.get("layers") or [] if isinstance(one, Mapping)]
    if layers:
        rows = []
        for layer in layers:
            share = number_from_json(layer.get("share")) or 0.0
            width = 220 * min(max(share, 0.0), 1.0)
            rows.append(
                f"<tr><td>{html.escape(str(layer.get('name')))}</td>"
                f'<td><span class="bar" style="width:{width:.0f}px"></span>{share:.1%}</td></tr>'
            )
        parts.append(
            '<div class="scroll"><table><tr><th>layer</th><th>share of the spike</th></tr>'
            f"{''.join(rows)}</table></div>"
        )
    return f'<div class="card">{"".join(parts)}</div>'


def _value_cell(value: Any, name: str) -> str:
    if name in {"share", "grad_norm", "importance_ratio"}:
        return f'<td class="n">{figure(value)}</td>'
    text = "-" if value is None else str(value)
    return f"<td><code>{html.escape(text)}</code></td>" if name == "text" else f"<td>{html.escape(text)}</td>"


def _events(run: Run) -> str:
    events = interventions(run)
    if not events:
        return ""
    rows = [
        f'<tr><td class="n">{event["step"]}</td><td>{html.escape(event["event"])}</td>'
        f"<td>{html.escape(event_words(event))}</td></tr>"
        for event in events[:_MOST_EVENTS]
    ]
    more = f'<p class="mute">and {len(events) - _MOST_EVENTS} more</p>' if len(events) > _MOST_EVENTS else ""
    table = f"<table><tr><th>step</th><th>event</th><th>what</th></tr>{''.join(rows)}</table>"
    return f'<h2>Interventions</h2><div class="scroll">{table}</div>{more}'
