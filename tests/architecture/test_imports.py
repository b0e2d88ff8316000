"""The floors hold, and importing the package stays cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = [
    "lightning",
    "pytorch_lightning",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "torchmetrics",
    "tensorboard",
]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return set(json.loads(printed.splitlines()[-1]))


def test_importing_the_package_loads_torch_and_no_framework() -> None:
    loaded = modules_after("import lightning_rlstab")
    assert "torch" in loaded
    assert not loaded & set(FRAMEWORKS)


@pytest.mark.parametrize("room", ["core", "control", "gradloc", "rollout", "report"])
def test_the_lower_floors_load_no_framework(room: str) -> None:
    files = [path.stem for path in (ROOT / "lightning_rlstab" / room).glob("*.py") if not path.stem.startswith("__")]
    statement = "\n".join(f"import lightning_rlstab.{room}.{name}" for name in files)
    assert not modules_after(statement) & {"lightning", "pytorch_lightning", "transformers", "trl", "peft", "datasets"}


def test_public_names_resolve_and_unknown_ones_do_not() -> None:
    import lightning_rlstab
    import lightning_rlstab.callbacks
    import lightning_rlstab.strategies

    for package in (lightning_rlstab, lightning_rlstab.callbacks, lightning_rlstab.strategies):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="nonsense"):
            package.nonsense  # noqa: B018


def test_import_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
