"""Runs an example's script as a newcomer would, in a folder of its own, and gives its names."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """``run_example("find_a_spike/run.py")``: the script's globals after it has run to its end."""

    def run(name: str) -> dict[str, Any]:
        script = EXAMPLES / name
        monkeypatch.syspath_prepend(script.parent)  # as `python script` does
        monkeypatch.setattr(sys, "argv", [str(script)])
        return runpy.run_path(str(script))

    lightning = logging.getLogger("lightning.pytorch")
    level, environment, loaded = lightning.level, dict(os.environ), set(sys.modules)
    yield run
    lightning.setLevel(level)
    for variable in set(os.environ) - set(environment):  # `seed_everything` leaves its seed there
        del os.environ[variable]
    for module in set(sys.modules) - loaded:  # a script's neighbours are imported by their bare names
        if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[module]
