from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 20


@pytest.fixture(scope="module")
def parity_run() -> Any:
    """The benchmark of the same name, loaded by its path."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("parity_run", BENCHMARKS / "parity_run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.mark.parametrize("case", ["plain", "kl", "two_iterations", "kl_two_iterations_accumulated", "grpo_clipped"])
def test_twenty_steps_give_the_losses_and_weights_of_trl(parity_run: Any, case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of TRL, Lightning and torch about each other
        figures = parity_run.difference(case, steps=STEPS)
    assert figures["loss"] <= 1e-4
    assert figures["weights"] <= 1e-4
    # The comparison would mean nothing if nothing had been learnt.
    assert figures["moved"] > 20 * figures["weights"]
    assert figures["largest_loss"] > 1e-2
