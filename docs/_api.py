"""Writes the API reference as HTML from the docstrings: ``python docs/_api.py [FOLDER]``; needs the extra ``docs``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A package that names its public names stands for all its files; of the others pdoc takes every module.
MODULES = [
    "lightning_rlstab",
    "lightning_rlstab.callbacks",
    "lightning_rlstab.callbacks.fire_drill_faults",
    "lightning_rlstab.strategies",
    "lightning_rlstab.module",
    "lightning_rlstab.report",
    "lightning_rlstab.rollout",
    "lightning_rlstab.gradloc",
    "lightning_rlstab.control",
    "lightning_rlstab.core",
    "!lightning_rlstab.report.__main__",
]


def main(folder: Path) -> None:
    """Write the pages; a warning of pdoc, such as an annotation that cannot be resolved, is an error.

    Args:
        folder: Made when it is missing; older pages in it are written over.
    """
    import pdoc

    import lightning_rlstab

    for name in lightning_rlstab.__all__:  # loaded on first use, which pdoc does not know how to ask for
        vars(lightning_rlstab)[name] = getattr(lightning_rlstab, name)
    warnings.filterwarnings("error", module="pdoc")
    # pdoc 16 shows an annotation that it cannot evaluate as it is written, which is right for these two: an alias that
    # is text, so that the command line takes it for Any, and the constructors that Python makes for named tuples.
    for start in ("PromptSource", "ForwardRef"):
        warnings.filterwarnings("ignore", message=f"Error parsing type annotation {start}", module="pdoc")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)
    sys.stdout.write(f"{folder / 'index.html'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "api")
