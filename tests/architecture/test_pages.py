"""What the pages say about settings, curves and commands is what the code has; every code block can be used."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rlstab.callbacks import FireDrill, GradLoc, LayerClip, SeqClip, StabilityMonitor, TokenClip
from lightning_rlstab.callbacks.fire_drill_faults import FAULTS, Fault
from lightning_rlstab.callbacks.gepo import LogprobBoundsConfig, RobustAdvantagesConfig, StepGuardConfig
from lightning_rlstab.callbacks.opefo import ErrorFeedbackConfig, SecondMomentConfig, SnapshotConfig
from lightning_rlstab.callbacks.quatro import EntropyFloorConfig, KLAnchorConfig, ReplayConfig, RolloutFilterConfig
from lightning_rlstab.cli import RLStabCLI, shelf
from lightning_rlstab.gradloc.finding import VerdictWord
from lightning_rlstab.report.events import EVENT_KINDS
from lightning_rlstab.report.memory import MonitorConfig
from lightning_rlstab.report.scalars import SCALARS, declared

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SKIPPED = {"runs", "build", "dist", "node_modules"}
PAGES = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
]


def label(value: Any) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


# Settings -------------------------------------------------------------------------------------------------------------

# Page and heading (None for the whole page): how the names of its settings begin, and what takes them.
SETTINGS: dict[tuple[str, str | None], dict[str, Callable[..., Any]]] = {
    ("gepo.md", None): {
        "advantages.": RobustAdvantagesConfig,
        "guard.": StepGuardConfig,
        "bounds.": LogprobBoundsConfig,
    },
    ("opefo.md", None): {
        "second_moment.": SecondMomentConfig,
        "error_feedback.": ErrorFeedbackConfig,
        "snapshots.": SnapshotConfig,
    },
    ("quatro.md", None): {
        "replay.": ReplayConfig,
        "kl.": KLAnchorConfig,
        "entropy.": EntropyFloorConfig,
        "filter.": RolloutFilterConfig,
    },
    ("gradloc.md", None): {"": GradLoc},
    ("clips.md", "TokenClip"): {"": TokenClip},
    ("clips.md", "SeqClip"): {"": SeqClip},
    ("clips.md", "LayerClip"): {"": LayerClip},
    ("stability_monitor.md", None): {"thresholds.": MonitorConfig, "": StabilityMonitor},
    ("fire_drill.md", None): {"": Fault},
}
REQUIRED: dict[Any, dict[str, Any]] = {Fault: {"kind": "loss_nan", "step": 5}}


def section(page: str, heading: str | None) -> str:
    text = (DOCS / "methods" / page).read_text(encoding="utf-8")
    if heading is None:
        return text
    return re.split(r"\n## ", text.split(f"\n## {heading}\n", 1)[1], maxsplit=1)[0]


def documented(page: str, heading: str | None) -> dict[str, tuple[str, str]]:
    """Setting to (default, range), from the tables whose first column is `setting`."""
    found: dict[str, tuple[str, str]] = {}
    is_table = False
    for line in section(page, heading).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| setting | default | range |"):
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table and cells[0].startswith("`"):
            found[cells[0].strip("`")] = (cells[1], cells[2])
    return found


def defaults(kind: Callable[..., Any]) -> Mapping[str, Any]:
    return {name: one.default for name, one in inspect.signature(kind).parameters.items()}


CASES = [
    pytest.param(page, heading, prefix, kind, id=f"{page}-{getattr(kind, '__name__', kind)}")
    for (page, heading), kinds in SETTINGS.items()
    for prefix, kind in kinds.items()
]


def belonging(page: str, heading: str | None, prefix: str) -> dict[str, tuple[str, str]]:
    others = [other for other in SETTINGS[page, heading] if other and other != prefix]
    return {
        name.removeprefix(prefix): row
        for name, row in documented(page, heading).items()
        if name.startswith(prefix) and not any(name.startswith(other) for other in others)
    }


@pytest.mark.parametrize(("page", "heading", "prefix", "kind"), CASES)
def test_a_method_page_lists_every_setting_with_its_default(
    page: str, heading: str | None, prefix: str, kind: Callable[..., Any]
) -> None:
    rows, real = belonging(page, heading, prefix), defaults(kind)
    assert rows.keys() == real.keys()
    for name, (default, _) in rows.items():
        if real[name] is inspect.Parameter.empty:
            assert default == "required", name
            continue
        said = yaml.safe_load(default.strip("`"))
        assert (tuple(said) if isinstance(said, list) else said) == real[name], name
        assert type(said) is type(real[name]) or isinstance(said, list), name


def outside(words: str) -> Iterator[Any]:
    """Values that the words of a range cell rule out."""
    for word in words.split(", "):
        bound = re.fullmatch(r"(?:each |or )?(above|at least|below|at most) (-?[\d.]+)(?: and at most 1)?", word)
        if word == "whole":
            yield from (0.5, True, "5")
        elif word == "true or false":
            yield from (3, "yes")
        elif word.startswith("`") and word.count("`") == 2 and " " not in word:
            yield "nonsense"
        elif bound is not None:
            limit = float(bound[2])
            number = int(limit) if limit.is_integer() else limit
            yield {
                "above": number,
                "at least": number - 1,
                "below": number,
                "at most": number + 1,
            }[bound[1]]


@pytest.mark.parametrize(("page", "heading", "prefix", "kind"), CASES)
def test_a_value_outside_the_range_that_a_page_gives_is_refused(
    page: str, heading: str | None, prefix: str, kind: Callable[..., Any]
) -> None:
    given = REQUIRED.get(kind, {})
    count = 0
    for name, (_, words) in belonging(page, heading, prefix).items():
        is_list = words.startswith("each")
        for value in outside(words):
            with pytest.raises(ValueError, match=r"must"):
                kind(**{**given, name: [value, 1.0 - value] if is_list else value})
            count += 1
    assert count


@pytest.mark.parametrize(("page", "heading", "prefix", "kind"), CASES)
def test_a_bound_that_a_page_includes_is_taken(
    page: str, heading: str | None, prefix: str, kind: Callable[..., Any]
) -> None:
    for name, (_, words) in belonging(page, heading, prefix).items():
        if words.startswith("each") or "`" in words.replace("`staging`", "") or "filter." in words:
            continue  # a list, a choice, or bound to another setting
        for limit in re.findall(r"(?:at least|at most) (-?[\d.]+)", words):
            value = int(limit) if "whole" in words else float(limit)
            if (kind, name) not in TIED:
                assert type(kind(**{**REQUIRED.get(kind, {}), name: value})) is kind


# Settings whose bound is refused by the default of another one.
TIED = {(RolloutFilterConfig, "window"), (RolloutFilterConfig, "max_idle_rollouts")}


def test_every_kind_of_fault_stands_on_its_page_and_on_its_card() -> None:
    for page in (DOCS / "methods" / "fire_drill.md", ROOT / "callbacks" / "fire_drill.md"):
        text = page.read_text(encoding="utf-8")
        assert [kind for kind in FAULTS if f"`{kind}`" not in text] == []


def test_every_verdict_of_a_spike_has_its_row() -> None:
    text = (DOCS / "read_a_spike.md").read_text(encoding="utf-8")
    assert [word for word in VerdictWord.__args__ if f"\n| `{word}` |" not in text] == []  # type: ignore[attr-defined]


def test_a_fault_of_a_drill_is_what_the_table_describes() -> None:
    assert FireDrill([{"kind": "loss_nan", "step": 1}]).faults[0] == Fault(kind="loss_nan", step=1)
    assert [one.name for one in dataclasses.fields(Fault)] == list(documented("fire_drill.md", None))


# Curves and events ----------------------------------------------------------------------------------------------------


def code_spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_a_curve_that_a_page_names_is_declared(page: Path) -> None:
    texts = ("rlstab/gradloc/spike",)  # a text panel, not a curve
    for name in code_spans(page.read_text(encoding="utf-8")):
        if name.startswith("rlstab/") and not name.endswith(("*", "/", "...")) and name not in texts:
            assert name in SCALARS or declared(name) is not None, name


@pytest.mark.parametrize(
    ("page", "room"),
    [(f"{room}.md", room) for room in ("gepo", "opefo", "quatro", "gradloc", "clips")]
    + [("stability_monitor.md", "monitor")],
)
def test_a_method_page_names_every_curve_of_its_method(page: str, room: str) -> None:
    text = (DOCS / "methods" / page).read_text(encoding="utf-8")
    assert [name for name in SCALARS if name.startswith(f"rlstab/{room}/") and f"`{name}`" not in text] == []


def test_the_events_of_the_method_pages_exist() -> None:
    for page in sorted((DOCS / "methods").glob("*.md")):
        for paragraph in re.findall(r"\nEvents?[^\n]*?: (.*?)\n\n", page.read_text(encoding="utf-8"), re.DOTALL):
            listed = re.sub(r"\([^)]*\)", "", paragraph).split(". ")[0]
            names = re.findall(r"`(\w+)`", listed.replace("`source: ", ""))
            assert names
            assert set(names) <= EVENT_KINDS.keys() | KIND_FIELDS, page.name


KIND_FIELDS = {"gepo", "kind", "magnitude", "meaning", "is_planted"}


# Code blocks ----------------------------------------------------------------------------------------------------------


def blocks(*languages: str) -> list[Any]:
    found = []
    for page in PAGES:
        matches = re.findall(r"^ *```(\w+)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for number, (language, code) in enumerate(matches):
            if language in languages:
                found.append(pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_block_parses_and_its_imports_from_the_package_resolve(code: str) -> None:
    tree = ast.parse(textwrap.dedent(code).replace(", ...)", ")"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_rlstab"):
            names: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), "page", "exec"), names)
            assert {alias.asname or alias.name for alias in node.names} <= names.keys()


NEEDED = """
seed_everything: 0
model: {model: policy, reward_funcs: [lightning_rlstab.demo.digits.exact_sum]}
data: {train: rows.jsonl}
"""


@pytest.mark.parametrize("code", blocks("yaml"))
def test_a_yaml_block_is_one_that_the_command_line_takes(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-rlstab"])
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load(code)
    assert "callbacks" not in values.get("trainer", {}), "write callbacks+, so that files stack"
    if "model" in values:  # reward functions of the reader's own are not here
        values["model"].pop("reward_funcs", None)
    (tmp_path / "needed.yaml").write_text(NEEDED)
    (tmp_path / "block.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "one_process.yaml").write_text("trainer: {accelerator: cpu, devices: 1, strategy: auto, num_nodes: 1}")
    arguments = [word for name in ("needed", "block", "one_process") for word in ("--config", f"{name}.yaml")]
    cli = RLStabCLI(args=arguments, run=False)
    assert cli.trainer.callbacks


def commands() -> list[Any]:
    found = []
    for one in blocks("bash"):
        for line in one.values[0].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(pytest.param(words, id=f"{one.id}-{len(found)}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_a_command_names_files_and_modules_that_exist(words: list[str]) -> None:
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith(("configs/", "callbacks/")) and word.endswith(".yaml"):
            assert shelf(*word.split("/", 1)).is_file()
        elif before == "-m" and word.startswith("lightning_rlstab"):
            path = ROOT / word.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        elif word.startswith(("examples/", "benchmarks/", "docs/")) and word.endswith(".py"):
            assert (ROOT / word).is_file()
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets)


def test_the_table_of_memory_and_traffic_is_what_its_code_prints() -> None:
    text = (DOCS / "scaling_out.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().count("\n") >= 7
    assert printed.getvalue() in text
