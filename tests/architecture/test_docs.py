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


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a heading is called in an address, by the rule of GitHub: lower case, hyphens for spaces, no punctuation."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def test_anchors_are_named_as_github_names_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `make` it, now!\n## A\n## A\n```bash\n# no heading\n```\n### FSDP2, HSDP: a_b\n")
    assert anchors(page) == {"make-it-now", "a", "a-1", "fsdp2-hsdp-a_b"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor[1:] in anchors(file), f"{target}{anchor}"


def test_every_page_is_reachable_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index.read_text("utf-8"))}
    assert set((ROOT / "docs").rglob("*.md")) - listed == {index}


def test_every_room_of_the_package_is_described() -> None:
    rooms = {path.name for path in (ROOT / "lightning_rlstab").iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(generator().ROOMS)
