"""Pages that are read off the code are up to date, and links inside the repository lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", "runs", "build", "dist", "node_modules"}
PAGES = [path for path in sorted(ROOT.rglob("*.md")) if not SKIPPED & set(path.relative_to(ROOT).parts)]


def generator() -> object:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["files.md", "scalars.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    page = generator().PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page, "run `python docs/_generate.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


def test_every_room_of_the_package_is_described() -> None:
    rooms = {path.name for path in (ROOT / "lightning_rlstab").iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(generator().ROOMS)
