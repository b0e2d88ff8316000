"""One chart with logarithmic axes as an SVG file: what the benchmarks draw, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#8a5a00")
_TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'
_LEFT, _TOP, _WIDTH, _HEIGHT = 78, 46, 500, 330


def log_chart(
    title: str,
    x_label: str,
    y_label: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    bar: tuple[float, str] | None = None,
    dots: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> str:
    """Curves of positive numbers over positive numbers, both axes logarithmic.

    Args:
        title: Shown above.
        x_label: Under the horizontal axis.
        y_label: Beside the vertical axis.
        curves: Name to points (x, y).
        bar: A height to draw as a dashed line, and its words.
        dots: Name of a curve to points drawn on it; None for every point of every curve.

    Returns:
        The SVG document.
    """
    points = [point for curve in curves.values() for point in curve]
    x_low, x_high = _decades([x for x, _ in points])
    y_low, y_high = _decades([y for _, y in points] + ([bar[0]] if bar else []))

    def across(value: float) -> float:
        return _LEFT + (math.log10(value) - x_low) / (x_high - x_low) * _WIDTH

    def down(value: float) -> float:
        return _TOP + (y_high - math.log10(value)) / (y_high - y_low) * _HEIGHT

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 440" role="img">',
        '<rect width="800" height="440" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" {_TEXT} font-weight="bold">{title}</text>',
    ]
    for value in _ticks(x_low, x_high):
        at = across(value)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{at:.1f}" y="{_TOP + _HEIGHT + 20}" text-anchor="middle" {_TEXT}>{value:,.10g}</text>')
    for value in _ticks(y_low, y_high):
        at = down(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" {_TEXT}>{value:,.10g}</text>')
    parts.append(
        f'<text x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 44}" text-anchor="middle" {_TEXT}>{x_label}</text>'
    )
    place = f"translate(18 {_TOP + _HEIGHT / 2}) rotate(-90)"
    parts.append(f'<text transform="{place}" text-anchor="middle" {_TEXT}>{y_label}</text>')
    if bar is not None:
        at = down(bar[0])
        line = f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}"'
        parts.append(f'{line} stroke="#888" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{_LEFT + _WIDTH + 10}" y="{at + 4:.1f}" {_TEXT}>{bar[1]}</text>')
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        ordered = sorted(curve)
        line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in ordered)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        shown = ordered if dots is None else dots.get(name, ())
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="4" fill="{colour}"/>' for x, y in shown]
        end = ordered[-1]
        words = _TEXT.replace("#222", colour)
        parts.append(f'<text x="{across(end[0]) + 10:.1f}" y="{down(end[1]) - 8:.1f}" {words}>{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The axis in powers of ten, in halves, with every value inside."""
    low, high = math.floor(2 * math.log10(min(values))) / 2, math.ceil(2 * math.log10(max(values))) / 2
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    steps = [m * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
    inside = [value for value in steps if low - 1e-9 <= math.log10(value) <= high + 1e-9]
    return inside if len(inside) <= 8 else [value for value in inside if f"{value:e}".startswith("1")]
