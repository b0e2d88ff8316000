"""Scalars out of TensorBoard event files, fast enough for a run of 100,000 steps.

An event file is a TFRecord stream of ``Event`` messages. Writers emit a scalar always in the same few wire bytes, so
records of one length are decoded together as columns of a byte matrix; every other record goes through TensorBoard's
own protobuf. The stream is read in blocks, so memory holds little more than the numbers.

Format of a record: length (uint64), masked CRC of the length (uint32), payload, masked CRC of the payload (uint32), all
little-endian.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EventScalars", "read_event_file"]

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 12
_FRAME_BYTES = 16
_BLOCK_BYTES = 1 << 24
_VARINT_BYTES_OF_STEPS = range(1, 6)  # steps under 2**35

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Record index (int64), step (int64), value (float32), each (points,)."""


@dataclass
class EventScalars:
    """Scalars of one event file, in the order in which they were written.

    Attributes:
        path: The file.
        columns: Tag to ``(steps, values)``, int64 and float64, each (points,).
        damage: Empty, or what could not be read and where.
    """

    path: Path
    columns: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    damage: str = ""


def read_event_file(path: Path) -> EventScalars:
    """Read one event file as far as it goes.

    Args:
        path: A ``*tfevents*`` file; it may still be growing or be cut off.

    Returns:
        Its scalars; ``damage`` says where a broken file stopped, and is empty for a whole one or one whose last
        record is merely unfinished.
    """
    found = EventScalars(path)
    chunks: dict[str, list[Columns]] = {}
    first_index = 0
    for block, starts, lengths in _record_blocks(path, found):
        is_left = np.ones(len(starts), dtype=bool)
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            matrix = block[starts[rows, None] + np.arange(length)]
            for tag, where, steps, values in _plain_scalars(matrix):
                is_left[rows[where]] = False
                chunks.setdefault(tag, []).append((rows[where] + first_index, steps, values))
        for row in np.flatnonzero(is_left).tolist():
            payload = block[starts[row] : starts[row] + lengths[row]].tobytes()
            for tag, step, value in _message_scalars(payload, found):
                point = (np.array([row + first_index]), np.array([step]), np.array([value], dtype=np.float32))
                chunks.setdefault(tag, []).append(point)
        first_index += len(starts)
    found.columns = {tag: _in_order(parts) for tag, parts in chunks.items()}
    return found


def _in_order(parts: list[Columns]) -> tuple[np.ndarray, np.ndarray]:
    index, steps, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(index, kind="stable")
    return steps[order].astype(np.int64), values[order].astype(np.float64)


def _record_blocks(path: Path, found: EventScalars) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of the file with starts and lengths of the whole payloads in them; stops at damage and notes it."""
    offset = 0
    rest = b""
    with path.open("rb") as file:
        while True:
            fresh = file.read(_BLOCK_BYTES)
            data = rest + fresh
            positions, end = _walk(data)
            block = np.frombuffer(data, dtype=np.uint8)
            header = block[positions[:, None] + np.arange(_HEADER_BYTES)]
            lengths = np.ascontiguousarray(header[:, :8]).view("<u8").reshape(-1)
            damaged = np.flatnonzero(~_is_intact(lengths, header[:, 8:]))
            if len(damaged):
                found.damage = f"is damaged at byte {offset + int(positions[damaged[0]]):,}: read up to there"
                positions, lengths = positions[: damaged[0]], lengths[: damaged[0]]
            is_whole = positions + _FRAME_BYTES + lengths.astype(np.int64) <= len(data)
            positions, lengths = positions[is_whole], lengths[is_whole].astype(np.int64)
            yield block, positions + _HEADER_BYTES, lengths
            if found.damage or not fresh:
                return
            rest = data[end:]
            offset += end


def _walk(data: bytes) -> tuple[np.ndarray, int]:
    """Positions of all record headers in the block, the unfinished last one included, and where the rest begins."""
    positions: list[int] = []
    note = positions.append
    unpack = _LENGTH.unpack_from
    position, last = 0, len(data) - _HEADER_BYTES
    while position <= last:
        note(position)
        position += unpack(data, position)[0] + _FRAME_BYTES
    if position > len(data):
        position = positions[-1]
    return np.array(positions, dtype=np.int64), position


def _is_intact(lengths: np.ndarray, crcs: np.ndarray) -> np.ndarray:
    distinct, inverse = np.unique(lengths, return_inverse=True)
    expected = np.array([_length_crc(int(length)) for length in distinct.tolist()], dtype="<u4")
    is_right: np.ndarray = np.ascontiguousarray(crcs).view("<u4").reshape(-1) == expected[inverse]
    return is_right


@functools.lru_cache(maxsize=4096)
def _length_crc(length: int) -> int:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return int(masked_crc32c(_LENGTH.pack(length)))


def _plain_scalars(matrix: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Scalars among payloads of one length: tag, row numbers, steps, values.

    The bytes are ``09 wall_time(8) 10 step(k) 2a n 0a n 0a n tag 15 value(4)`` with one-byte lengths n.
    """
    length = matrix.shape[1]
    for width in _VARINT_BYTES_OF_STEPS:
        tag_bytes = length - 21 - width
        if not 1 <= tag_bytes < 128 - 9:
            continue
        head = 10 + width
        pattern = {0: 0x09, 9: 0x10, head: 0x2A, head + 1: tag_bytes + 9, head + 2: 0x0A, head + 3: tag_bytes + 7}
        pattern |= {head + 4: 0x0A, head + 5: tag_bytes, length - 5: 0x15}
        columns = list(pattern)
        is_scalar = (matrix[:, columns] == np.array(list(pattern.values()), dtype=np.uint8)).all(axis=1)
        varint = matrix[:, 10:head]
        is_scalar &= (varint[:, :-1] >= 0x80).all(axis=1) & (varint[:, -1] < 0x80)
        rows = np.flatnonzero(is_scalar)
        if not len(rows):
            continue
        steps = ((varint[rows].astype(np.int64) & 0x7F) << (7 * np.arange(width))).sum(axis=1)
        values = np.ascontiguousarray(matrix[rows, -4:]).view("<f4").reshape(-1)
        tags = np.ascontiguousarray(matrix[rows, head + 6 : head + 6 + tag_bytes])
        for tag, where in _grouped(tags):
            yield tag, rows[where], steps[where], values[where]


def _grouped(tags: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of equal bytes, (rows, bytes) uint8, as (text, row numbers)."""
    # Sorting one 64-bit key per row is far cheaper than sorting strings; the comparison below makes it exact.
    weights = np.random.default_rng(0).integers(1, 2**63, size=tags.shape[1], dtype=np.uint64) | np.uint64(1)
    keys = (tags.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    for rows in np.split(order, edges):
        while len(rows):
            is_same = (tags[rows] == tags[rows[0]]).all(axis=1)
            yield tags[rows[0]].tobytes().decode("utf-8", errors="replace"), rows[is_same]
            rows = rows[~is_same]  # noqa: PLW2901


def _message_scalars(payload: bytes, found: EventScalars) -> Iterator[tuple[str, int, float]]:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        event = Event.FromString(payload)
    except DecodeError:
        found.damage = found.damage or "holds damaged records: left out"
        return
    for value in event.summary.value:
        if value.HasField("simple_value"):
            yield value.tag, event.step, value.simple_value
        elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in {"scalars", ""}:
            number = _tensor_scalar(value.tensor)
            if number is not None:
                yield value.tag, event.step, number


def _tensor_scalar(tensor: Any) -> float | None:
    from tensorboard.util.tensor_util import make_ndarray

    try:
        numbers = np.asarray(make_ndarray(tensor))
    except (TypeError, ValueError):
        return None
    return float(numbers.reshape(())) if numbers.size == 1 and numbers.dtype.kind in "fiu" else None
