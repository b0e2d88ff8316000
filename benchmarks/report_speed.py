"""Time and memory to read and diagnose the event file of a 100,000-step run.

The file has the wire format of TensorBoard's writer: 40 scalars per step, one record each. It is encoded here in bulk
because the writer itself takes minutes; payload checksums, which the reader does not check, are left 0. The figure is
processor time of one thread, import of the package included: what the wall clock shows on a core of one's own.

Run: ``python benchmarks/report_speed.py [--quick] [--steps N]``.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

SECONDS_BAR = 20.0
MEGABYTES_BAR = 1024.0

NAMES = (
    "reward",
    "reward_std",
    "rewards/format/mean",
    "rewards/answer/mean",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean",
    "rlstab/monitor/repetition",
    "rlstab/monitor/skipped_frac",
    "epoch",
    *(f"rlstab/gepo/quantity_{index}" for index in range(20)),
)


def record(name: str, step: int, value: float) -> bytes:
    """One framed event, payload checksum 0."""
    event = Event(wall_time=1.7e9 + step, step=step)
    event.summary.value.add(tag=name, simple_value=value)
    payload = event.SerializeToString()
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc32c(length)) + payload + b"\0\0\0\0"


def curves(steps: int) -> dict[str, np.ndarray]:
    """A run that learns, and whose gradient spikes near its end."""
    time_axis = np.arange(steps) / steps
    rng = np.random.default_rng(0)
    found = {name: 0.3 + 0.01 * rng.normal(size=steps) for name in NAMES}
    found["reward"] = 0.2 + 0.6 * time_axis + 0.02 * rng.normal(size=steps)
    found["entropy"] = 1.5 - 0.6 * time_axis + 0.02 * rng.normal(size=steps)
    found["kl"] = 0.05 * time_axis + 1e-4
    found["grad_norm"] = 0.5 * np.exp(0.2 * rng.normal(size=steps))
    found["grad_norm"][int(0.9 * steps)] = 90.0
    found["learning_rate"] = np.full(steps, 1e-6)
    found["sampling/sampling_logp_difference/mean"] = np.full(steps, 0.01)
    found["completions/max_length"] = np.full(steps, 512.0)
    found["completions/clipped_ratio"] = np.full(steps, 0.05)
    return {name: curve.astype("<f4") for name, curve in found.items()}


def write_run(folder: Path, steps: int) -> Path:
    """Write the event file, a thousand steps at a time, by filling in steps and values of one pattern."""
    path = folder / "events.out.tfevents.1700000000.benchmark.1.0"
    values = curves(steps)
    with path.open("wb") as file:
        start = 0
        while start < steps:
            # Steps of one varint width have records of one length.
            end = min(steps, start + 1000, next((2 ** (7 * k) for k in range(1, 6) if 2 ** (7 * k) > start), steps))
            block = [record(name, max(start, 1), 0.0) for name in NAMES]
            offsets = np.cumsum([0, *map(len, block)])
            rows = np.tile(np.frombuffer(b"".join(block), dtype=np.uint8), (end - start, 1))
            at = np.maximum(np.arange(start, end), 1)
            width = max(1, (max(start, 1).bit_length() + 6) // 7)
            for index, name in enumerate(NAMES):
                place = offsets[index] + 12 + 10
                for byte in range(width):
                    more = 0x80 if byte < width - 1 else 0
                    rows[:, place + byte] = ((at >> (7 * byte)) & 0x7F) | more
                tail = offsets[index + 1] - 8
                rows[:, tail : tail + 4] = values[name][start:end].reshape(-1, 1).view(np.uint8)
            file.write(rows.tobytes())
            start = end
    return path


def measure(folder: Path) -> dict[str, float | int | str]:
    """Read and diagnose in this process; called in a fresh one so that the peak memory is its own."""
    began = time.process_time()
    wall = time.perf_counter()
    from lightning_rlstab.report.diagnosis import diagnose
    from lightning_rlstab.report.sources import read_run

    imported = time.process_time()
    run = read_run(folder)
    read = time.process_time()
    found = diagnose(run)
    ended = time.process_time()
    wall = time.perf_counter() - wall
    return {
        "import_seconds": round(imported - began, 2),
        "read_seconds": round(read - imported, 2),
        "diagnose_seconds": round(ended - read, 2),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "wall_seconds": round(wall, 2),
        "points": sum(len(curve) for curve in run.series.values()),
        "readings": found.readings,
        "cause": found.alarms[0].cause if found.alarms else "healthy",
        "alarm_step": found.alarms[0].alarm_step if found.alarms else -1,
    }


def main() -> None:
    """Print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the steps")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    steps = options.steps // 20 if options.quick else options.steps
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), steps)
        print(f"{steps:,} steps, {path.stat().st_size / 2**20:.0f} MB")
        child = subprocess.run(
            [sys.executable, __file__, "--measure", folder], check=True, capture_output=True, text=True
        )
    measured = json.loads(child.stdout.splitlines()[-1])
    seconds = measured["import_seconds"] + measured["read_seconds"] + measured["diagnose_seconds"]
    is_right = measured["cause"] == "gradient_spike" and measured["alarm_step"] == int(0.9 * steps)
    is_ok = seconds < SECONDS_BAR and measured["peak_megabytes"] < MEGABYTES_BAR and is_right
    bar = f"under {SECONDS_BAR:g} s and {MEGABYTES_BAR:g} MB, and the planted spike found"
    print(json.dumps({"name": "report_speed", "value": round(seconds, 2), "bar": bar, "ok": is_ok, **measured}))


if __name__ == "__main__":
    main()
