"""Writes the pages that are read off the code: ``python docs/_generate.py``; a test fails when they are out of date."""

from __future__ import annotations

import ast
from pathlib import Path

from lightning_rlstab.report.scalars import markdown_table

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "lightning_rlstab"
ROOMS = {
    "core": "floor 0: formulas; tensors in, tensors out",
    "control": "floor 1: decisions with memory, and the protocols by which floor 2 meets",
    "gradloc": "floor 1: from a gradient spike to the token and the layer",
    "rollout": "floor 1: prompts, completions, groups and their rewards",
    "report": "floor 1: names, events, diagnosis, pictures",
    "module": "floor 2: the GRPO LightningModule and its data",
    "callbacks": "floor 2: the guards as Lightning callbacks",
    "strategies": "floor 2: the only room that touches `torch.distributed`",
    "demo": "floor 3: the tiny policy of the demonstration",
}


def first_line(path: Path) -> str:
    """First line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n", 1)[0].rstrip(".").replace("|", "&#124;")


def files_page() -> str:
    """Every file of the package with the first line of its docstring."""
    lines = ["# Every file in a line", ""]
    for room, what in ROOMS.items():
        lines += [f"## `{room}/`", "", f"{what[0].upper()}{what[1:]}.", "", "| file | what it holds |", "|---|---|"]
        paths = sorted((PACKAGE / room).glob("*.py"))
        lines += [f"| `{path.name}` | {first_line(path)} |" for path in paths if path.name != "__init__.py"]
        lines.append("")
    return "\n".join(lines)


def scalars_page() -> str:
    """Every scalar that a run logs."""
    return f"# What each curve means\n\n{markdown_table()}\n"


PAGES = {"files.md": files_page, "scalars.md": scalars_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
