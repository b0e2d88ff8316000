"""The slow twins, as a module object: tests do not import from each other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def twin() -> ModuleType:
    path = Path(__file__).parents[1] / "reference" / "loss.py"
    spec = importlib.util.spec_from_file_location("rlstab_reference_loss", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
