"""Line charts as inline SVG: many points, few bytes, no script, no network."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlstab.report.run import Series

__all__ = ["Marker", "line_chart", "thinned"]

_WIDTH, _HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 24
_MOST_POINTS = 400
_LOG_SPREAD = 100.0


@dataclass(frozen=True)
class Marker:
    """A vertical line where something happened."""

    step: int
    kind: str
    words: str


@dataclass(frozen=True)
class _Scale:
    """Data to pixels."""

    first: float
    last: float
    low: float
    high: float
    is_log: bool

    def x(self, step: float) -> float:
        span = max(self.last - self.first, 1.0)
        return _LEFT + (step - self.first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        if self.is_log:
            value = math.log10(max(value, self.low))
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        part = (value - low) / (high - low)
        return _TOP + (1.0 - min(max(part, 0.0), 1.0)) * (_HEIGHT - _TOP - _BOTTOM)


def thinned(series: Series, most: int = _MOST_POINTS) -> Series:
    """A curve of about ``2 * most`` points at most that keeps each bucket's smallest and largest value and each break.

    Args:
        series: Any curve.
        most: Buckets.

    Returns:
        A curve that looks the same; NaN and infinities stay, once per bucket.
    """
    count = len(series)
    if count <= 2 * most:
        return series
    keep: set[int] = {0, count - 1}
    is_finite = np.isfinite(series.values)
    edges = np.linspace(0, count, most + 1).astype(int)
    for start, end in itertools.pairwise(edges.tolist()):
        finite = np.flatnonzero(is_finite[start:end]) + start
        if len(finite):
            values = series.values[finite]
            keep.update((int(finite[values.argmin()]), int(finite[values.argmax()])))
        if len(finite) < end - start:
            keep.add(int(np.flatnonzero(~is_finite[start:end])[0]) + start)
    rows = np.array(sorted(keep))
    return Series(series.steps[rows], series.values[rows])


def line_chart(
    title: str,
    curves: Mapping[str, Series],
    *,
    markers: Sequence[Marker] = (),
    healthy: tuple[float | None, float | None] | None = None,
    span: tuple[int, int] | None = None,
    caption: str = "",
) -> str:
    """One chart.

    Args:
        title: Shown above.
        curves: Label to curve; the first colours are the strongest.
        markers: Vertical lines.
        healthy: Band drawn behind the curves.
        span: First and last step of the axis; None to fit the curves.
        caption: One line under the title: what the curve means.

    Returns:
        A ``<figure>`` element. Non-finite values are red crosses at the top.
    """
    shown = {label: thinned(curve) for label, curve in curves.items() if len(curve)}
    steps = [int(value) for curve in shown.values() for value in (curve.steps[0], curve.steps[-1])]
    first, last = span or ((min(steps), max(steps)) if steps else (0, 1))
    finite = [curve.values[np.isfinite(curve.values)] for curve in shown.values()]
    values = np.concatenate(finite) if finite else np.empty(0)
    scale = _scaled(first, last, values)
    parts = [_band(scale, healthy), _axes(scale)]
    parts += [_marker(scale, marker) for marker in markers if first <= marker.step <= last]
    parts += [_curve(scale, curve, f"c{index % 6}") for index, curve in enumerate(shown.values())]
    names = _short_names(list(shown)) if len(shown) > 1 else []
    legend = "".join(f'<span class="k c{index % 6}">{html.escape(name)}</span>' for index, name in enumerate(names))
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    note = f"<small>{html.escape(caption)}</small>" if caption else ""
    return f"<figure><figcaption><b>{html.escape(title)}</b>{legend}{note}</figcaption>{svg}</figure>"


def _short_names(labels: list[str]) -> list[str]:
    """Labels without the path that they all share.

    Example:
        >>> _short_names(["clip/low_mean", "clip/high_mean"])
        ['low_mean', 'high_mean']
    """
    paths = [label.split("/") for label in labels]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return ["/".join(path[shared:]) for path in paths]


def _scaled(first: int, last: int, values: np.ndarray) -> _Scale:
    if not len(values):
        return _Scale(first, last, 0.0, 1.0, is_log=False)
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    is_log = len(positive) > 0.9 * len(values) and high > _LOG_SPREAD * max(float(np.median(positive)), 1e-30)
    if is_log:
        low = float(positive.min())
        return _Scale(first, last, low * 0.8, high * 1.25, is_log=True)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return _Scale(first, last, low - margin if low != 0.0 else 0.0 - margin / 3, high + margin, is_log=False)


def _band(scale: _Scale, healthy: tuple[float | None, float | None] | None) -> str:
    if healthy is None:
        return ""
    low, high = healthy
    top = scale.y(min(high, scale.high) if high is not None else scale.high)
    bottom = scale.y(max(low, scale.low) if low is not None else scale.low)
    if bottom - top < 0.5:
        return ""
    width = _WIDTH - _LEFT - _RIGHT
    return f'<rect class="ok" x="{_LEFT}" y="{top:.1f}" width="{width}" height="{bottom - top:.1f}"/>'


def _axes(scale: _Scale) -> str:
    parts = []
    for tick in _ticks(scale):
        y = scale.y(tick)
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.3g}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = scale.first + part * (scale.last - scale.first)
        parts.append(f'<text x="{scale.x(at):.1f}" y="{_HEIGHT - 7}" text-anchor="{anchor}">{at:,.0f}</text>')
    return "".join(parts)


def _ticks(scale: _Scale) -> list[float]:
    if scale.is_log:
        low, high = math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high))
        stride = max(1, (high - low) // 4)
        found = [10.0**power for power in range(low, high + 1, stride)]
        return found or [math.sqrt(scale.low * scale.high)]
    rough = (scale.high - scale.low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    start = math.ceil(scale.low / spacing)
    ticks = [index * spacing for index in range(start, math.floor(scale.high / spacing) + 1)]
    return [0.0 if abs(tick) < spacing * 1e-9 else tick for tick in ticks]


def _marker(scale: _Scale, marker: Marker) -> str:
    x = scale.x(marker.step)
    words = html.escape(f"step {marker.step}, {marker.kind}: {marker.words}")
    return (
        f'<line class="m {html.escape(marker.kind)}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        f"<title>{words}</title></line>"
    )


def _curve(scale: _Scale, curve: Series, colour: str) -> str:
    strokes: list[list[str]] = [[]]
    crosses = []
    for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
        if math.isfinite(value):
            strokes[-1].append(f"{scale.x(step):.1f},{scale.y(value):.1f}")
        else:
            crosses.append((scale.x(step), value))
            if strokes[-1]:
                strokes.append([])
    parts = []
    for points in strokes:
        if len(points) == 1:
            left, top = points[0].split(",")
            parts.append(f'<circle class="{colour}" cx="{left}" cy="{top}" r="2"/>')
        elif points:
            parts.append(f'<polyline class="{colour}" points="{" ".join(points)}"/>')
    # A run that is NaN to its end needs one cross, not thousands.
    for x, value in crosses[:: max(1, len(crosses) // 40)]:
        parts.append(
            f'<text class="bad" x="{x:.1f}" y="{_TOP + 8}" text-anchor="middle">x<title>{value}</title></text>'
        )
    return "".join(parts)
