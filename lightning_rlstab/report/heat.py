"""Token heat strips and layers x tokens pictures, as HTML for the page and as pixels for TensorBoard."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlstab.report.events import number_from_json

__all__ = ["Strip", "layer_token_image", "strip_html", "strip_image", "strip_of"]

_LINE_PIXELS = 24
_WIDTH_PIXELS = 560  # TensorBoard shows pictures some 350 pixels wide
_MOST_TOKENS = 400


@dataclass(frozen=True)
class Strip:
    """One sequence's tokens with their weight in a spike.

    Attributes:
        texts: (time,) decoded tokens.
        weights: (time,) shares; may be negative or not finite.
        culprits: Positions in ``texts`` that are to blame.
        where: Words for the address.
    """

    texts: tuple[str, ...]
    weights: tuple[float, ...]
    culprits: frozenset[int]
    where: str


def strip_of(event: Mapping[str, Any]) -> Strip | None:
    """The strip of a ``spike`` event, None when it has none.

    Args:
        event: A record of ``events.jsonl`` whose ``strip`` holds ``texts`` and ``weights`` of the first culprit's
            sequence and whose ``culprits`` hold addresses.
    """
    strip, culprits = event.get("strip"), event.get("culprits") or []
    if not isinstance(strip, Mapping) or not strip.get("texts"):
        return None
    texts = tuple(str(text) for text in strip["texts"])
    given = list(strip.get("weights") or [])
    numbers = [number_from_json(value) for value in given[: len(texts)]]
    weights = [0.0 if number is None else number for number in numbers]
    weights += [0.0] * (len(texts) - len(weights))
    first = culprits[0] if culprits and isinstance(culprits[0], Mapping) else {}
    address = ("micro_batch", "rank", "sequence")
    same = [
        one for one in culprits if isinstance(one, Mapping) and all(one.get(key) == first.get(key) for key in address)
    ]
    tokens = frozenset(int(one["token"]) for one in same if isinstance(one.get("token"), int))
    where = ", ".join(f"{key.replace('_', '-')} {first[key]}" for key in address if key in first)
    return Strip(texts, tuple(weights), tokens, where)


def _strengths(weights: Iterable[float]) -> list[float]:
    """Weights as colour strength in [0, 1]: square root of the share of the largest; non-finite ones are 1."""
    sizes = [abs(weight) for weight in weights]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return [1.0 if not math.isfinite(size) else math.sqrt(size / largest) if largest > 0 else 0.0 for size in sizes]


def _window(strip: Strip) -> range:
    """The positions to show: all, or those around the first culprit of a very long sequence."""
    if len(strip.texts) <= _MOST_TOKENS:
        return range(len(strip.texts))
    centre = min(strip.culprits, default=0)
    start = max(0, min(centre - _MOST_TOKENS // 2, len(strip.texts) - _MOST_TOKENS))
    return range(start, start + _MOST_TOKENS)


def strip_html(strip: Strip) -> str:
    """The sequence as coloured words, culprits boxed, each token's share as its tooltip."""
    strengths = _strengths(strip.weights)
    parts = []
    for position in _window(strip):
        text = html.escape(_visible(strip.texts[position])) or "∅"
        kind = ' class="culprit"' if position in strip.culprits else ""
        colour = f"background:rgba(220,60,30,{0.85 * strengths[position]:.2f})"
        tip = f"token {position}: share {strip.weights[position]:.3g}"
        parts.append(f'<span{kind} style="{colour}" title="{tip}">{text}</span>')
    return f'<p class="strip">{"".join(parts)}</p>'


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")


def strip_image(strip: Strip) -> np.ndarray:
    """The strip as pixels.

    Returns:
        (height, width, 3) uint8; tokens flow over lines, culprits are boxed in black.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=16)
    strengths = _strengths(strip.weights)
    places, x, line = [], 4.0, 0
    for position in _window(strip):
        text = _visible(strip.texts[position]) or "∅"
        width = max(font.getlength(text), 4.0) + 4
        if x + width > _WIDTH_PIXELS - 4 and x > 4.0:
            x, line = 4.0, line + 1
        places.append((position, text, x, line, width))
        x += width
    used = math.ceil(max((left + width for _, _, left, _, width in places), default=0.0)) + 4
    image = Image.new("RGB", (max(used, 240), (line + 1) * (_LINE_PIXELS + 4) + 8), "white")
    draw = ImageDraw.Draw(image)
    for position, text, left, row, width in places:
        top = 4 + row * (_LINE_PIXELS + 4)
        box = (left, top, left + width - 1, top + _LINE_PIXELS)
        is_culprit = position in strip.culprits
        draw.rectangle(box, fill=_heat(strengths[position]), outline="black" if is_culprit else None, width=2)
        draw.text((left + 2, top + 3), text, fill="black", font=font)
    return np.asarray(image)


def layer_token_image(event: Mapping[str, Any]) -> np.ndarray | None:
    """Which layer carries which culprit: a picture of layers x tokens.

    Args:
        event: A ``spike`` record whose ``culprits`` hold ``layers`` as ``{"name", "share"}``.

    Returns:
        (height, width, 3) uint8, one column per culprit; None when no culprit has a layer profile.
    """
    from PIL import Image, ImageDraw, ImageFont

    columns = [one for one in event.get("culprits") or [] if isinstance(one, Mapping) and one.get("layers")][:24]
    if not columns:
        return None
    names = sorted({str(layer["name"]) for one in columns for layer in one["layers"]}, key=_layer_order)
    font = ImageFont.load_default(size=13)
    margin = int(max(font.getlength(name) for name in names)) + 16
    cell_width, cell_height = 96, 24
    size = (margin + cell_width * len(columns) + 8, cell_height * (len(names) + 2) + 8)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        draw.text((8, row * cell_height + 8), name, fill="black", font=font)
    for column, one in enumerate(columns):
        left = margin + column * cell_width
        shares = {str(layer["name"]): number_from_json(layer.get("share")) or 0.0 for layer in one["layers"]}
        strengths = dict(zip(shares, _strengths(shares.values()), strict=True))
        for row, name in enumerate(names):
            top = row * cell_height + 4
            box = (left, top, left + cell_width - 3, top + cell_height - 3)
            draw.rectangle(box, fill=_heat(strengths.get(name, 0.0)), outline="#cccccc")
            draw.text((left + 6, top + 4), f"{shares.get(name, 0.0):.0%}", fill="black", font=font)
        foot = len(names) * cell_height + 8
        draw.text((left + 6, foot), _visible(str(one.get("text", "")))[:10], fill="black", font=font)
        draw.text((left + 6, foot + 18), f"token {one.get('token', '?')}", fill="#555555", font=font)
    return np.asarray(image)


def _layer_order(name: str) -> tuple[tuple[int, str], ...]:
    """Natural order: ``layers.10`` after ``layers.9``."""
    parts: Sequence[str] = name.split(".")
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def _heat(strength: float) -> tuple[int, int, int]:
    """White to red."""
    return 255, round(255 - 175 * strength), round(255 - 205 * strength)
