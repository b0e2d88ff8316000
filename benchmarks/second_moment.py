"""The second-moment floor over 100 M elements: time against one AdamW step, extra memory, and accuracy of the floor.

    python benchmarks/second_moment.py [--quick]

The bar: a whole look (histogram, share of tiny values, floor, lifting) takes at most as long as one AdamW step on the
same elements, needs at most 64 MB more, and its floor is within 1 % of ``numpy.percentile``. Both are timed in turn,
on one thread; AdamW in the form torch picks by default on this device, its fused form beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from lightning_rlstab.core.histogram import log_histogram
from lightning_rlstab.core.opefo import lift_, lifted_count, second_moment_floor, tiny_frac

EPS = 1e-8
PERCENTILE = 10.0


def peak_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def look(moments: list[torch.Tensor]) -> float:
    """What OPEFO does when a group has too many tiny second moments."""
    histogram = log_histogram(moments)
    assert float(tiny_frac(histogram, EPS)) >= 0
    floor = float(second_moment_floor(histogram, eps=EPS, percentile=PERCENTILE))
    lift_(moments, floor)
    assert lifted_count(histogram, floor) > 0
    return floor


def timed(act: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 M elements, 3 rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors, rounds = (10, 3) if options.quick else (100, 5)
    source = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(1_000_000, generator=source)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn(1_000_000, generator=source) * 1e-4
    default = torch.optim.AdamW(parameters, lr=1e-6, eps=EPS)
    default.step()
    moments = [default.state[parameter]["exp_avg_sq"] for parameter in parameters]
    before = peak_mb()  # nothing larger has been held yet, so whatever the look needs shows as a new peak
    look(moments)
    extra_mb = peak_mb() - before
    mixed = [10 ** (torch.rand(1_000_000, generator=source) * 14 - 17) for _ in range(tensors)]
    exact = float(np.percentile(torch.cat(mixed).numpy(), PERCENTILE))
    for moment, values in zip(moments, mixed, strict=True):
        moment.copy_(values)
    floor = look(moments)
    looks, steps = [], []
    for _ in range(rounds):
        for moment, values in zip(moments, mixed, strict=True):
            moment.copy_(values)  # so that every look has values to lift
        looks.append(timed(lambda: look(moments)))
        steps.append(timed(default.step))
    del mixed
    fused = torch.optim.AdamW(parameters, lr=1e-6, eps=EPS, fused=True)
    fused.load_state_dict(default.state_dict())
    fused_seconds = statistics.median(timed(fused.step) for _ in range(rounds))
    ratio = statistics.median(looks) / statistics.median(steps)
    error = abs(floor / exact - 1)
    figures = {
        "name": "second_moment",
        "value": round(ratio, 3),
        "bar": 1.0,
        "ok": ratio <= 1.0 and extra_mb <= 64 and error <= 0.01,
        "what": "seconds of one look with lifting over seconds of one default AdamW step, same elements, one thread",
        "elements": tensors * 1_000_000,
        "look_seconds": round(statistics.median(looks), 4),
        "adamw_seconds": round(statistics.median(steps), 4),
        "fused_adamw_seconds": round(fused_seconds, 4),
        "extra_mb": round(extra_mb, 1),
        "extra_mb_bar": 64,
        "floor_relative_error": round(error, 5),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
