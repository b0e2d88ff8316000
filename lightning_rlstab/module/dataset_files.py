"""Where prompts come from: files, ``datasets`` directories and hub names, import paths, and rows given in Python.

Rows keep TRL's format: ``prompt`` is text or a list of messages, every other column reaches the reward functions
untouched. JSON is read with the standard library, so a column may hold another type in every row; Parquet and CSV are
read with Arrow, and everything else with ``datasets``. Nothing here writes a cache for a local file.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from lightning_rlstab.core.checks import nearest_name, refusal

__all__ = ["PromptRows", "PromptSource", "is_hub_name", "prompt_rows"]

PromptSource: TypeAlias = "str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Callable[..., Any] | Any"

_FILE_TYPES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
# A name with one of these endings is meant as a file, never as the name of a hub dataset.
_OTHER_FILE_TYPES = (
    ".txt",
    ".tsv",
    ".xlsx",
    ".xls",
    ".arrow",
    ".feather",
    ".gz",
    ".zst",
    ".zip",
    ".yaml",
    ".yml",
    ".pkl",
)
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SOURCE_KEYS = {
    "file": ("path",),
    "function": ("path", "kwargs"),
    "directory": ("path", "split"),
    "hub": ("path", "name", "split", "revision", "data_dir", "data_files"),
}


class PromptRows(Protocol):
    """Rows by position; a list of dicts and a ``datasets.Dataset`` both are."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """One row, by position from 0."""
        ...


def prompt_rows(field: str, source: PromptSource) -> PromptRows:
    """The rows that a user-given source names, checked.

    Args:
        field: The argument the source was given for, used in every error.
        source: One of
            a path to a ``.jsonl``, ``.ndjson``, ``.json``, ``.parquet`` or ``.csv`` file;
            a directory written by ``datasets.Dataset.save_to_disk``, or one with data files;
            the name of a hub dataset;
            an import path ``"package.module:function"`` of a function that returns rows (it runs in every process, so
            it must return the same rows in all of them);
            a mapping ``{"path": <any of these>, ...}`` with ``kwargs`` for a function, ``split`` for a directory, or
            ``name``, ``split``, ``revision``, ``data_dir`` and ``data_files`` for a hub name;
            a function, a list of rows, or a ``datasets.Dataset``.

    Returns:
        At least one row; each has a ``prompt`` that is non-empty text or a non-empty list of messages.

    Raises:
        ValueError: Naming the field, the rule and the value.

    Example:
        >>> rows = prompt_rows("train", [{"prompt": "2+2=", "answer": 4}])
        >>> rows[0]["answer"]
        4
    """
    rows = _loaded(field, source)
    if len(rows) == 0:
        raise ValueError(
            f"`{field}` must hold at least one row, got none from {_shown(source)}. Check the file or split."
        )
    _check_prompts(field, rows)
    return rows


def is_hub_name(source: PromptSource) -> bool:
    """Whether reading ``source`` may download something, so that one process should do it first."""
    path = source.get("path") if isinstance(source, Mapping) else source
    return isinstance(path, str) and _kind(path) == "hub"


def _loaded(field: str, source: PromptSource) -> PromptRows:
    if isinstance(source, str | Path):
        return _from_path(field, str(source), {})
    if isinstance(source, Mapping):
        options = dict(source)
        path = options.pop("path", None)
        if not isinstance(path, str | Path):
            keys = list(source)
            raise refusal(
                field, "name its source under `path` when given as a mapping", keys, "Put a single row into a list"
            )
        return _from_path(field, str(path), options)
    if callable(source) and not hasattr(source, "__getitem__"):
        return _from_function(field, source, {})
    return _from_rows(field, source)


def _from_path(field: str, path: str, options: dict[str, Any]) -> PromptRows:
    kind = _kind(path)
    if kind == "unknown":
        raise refusal(field, f"be a {', '.join(_FILE_TYPES)} file", path, "Convert it to JSON lines: one row per line")
    if kind == "missing":
        raise refusal(
            field, "name an existing file or directory", path, f"The working directory is {str(Path.cwd())!r}"
        )
    for key in options:
        if key not in _SOURCE_KEYS[kind]:
            close = nearest_name(key, _SOURCE_KEYS[kind])
            allowed = ", ".join(f"`{name}`" for name in _SOURCE_KEYS[kind])
            hint = f" Did you mean `{close}`?" if close else ""
            raise ValueError(f"`{field}` must have only the keys {allowed} for {path!r}, got `{key}`.{hint}")
    if kind == "file":
        return _from_file(field, Path(path).expanduser())
    if kind == "function":
        module, _, name = path.partition(":")
        try:
            function = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise refusal(field, "name an importable function", path, f"Python says: {error}") from error
        return _from_function(field, function, dict(options.get("kwargs") or {}))
    return _from_datasets(field, path, options, is_directory=kind == "directory")


def _kind(path: str) -> str:
    if _IMPORT_PATH.fullmatch(path):
        return "function"
    place = Path(path).expanduser()
    if place.is_dir():
        return "directory"
    suffix = place.suffix.lower()
    if place.is_file():
        return "file" if suffix in _FILE_TYPES else "unknown"
    if suffix in _OTHER_FILE_TYPES:
        return "unknown"
    if suffix in _FILE_TYPES or not _HUB_NAME.fullmatch(path):
        return "missing"
    return "hub"


def _from_file(field: str, path: Path) -> PromptRows:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        from pyarrow import parquet

        return _from_arrow(parquet.read_table(path))
    if suffix == ".csv":
        from pyarrow import csv

        # Prompts may hold line breaks inside quotes.
        return _from_arrow(csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True)))
    text = path.read_text(encoding="utf-8")
    if suffix == ".json":
        # `datasets` writes JSON lines under this ending too; a single one of them is a whole document.
        with suppress(json.JSONDecodeError):
            whole = json.loads(text)
            return _from_rows(field, [whole] if isinstance(whole, Mapping) else whole)
    return _from_json_lines(field, path, text)


def _from_json_lines(field: str, path: Path, text: str) -> PromptRows:
    rows = []
    # Only "\n" ends a row: `str.splitlines` would also cut at U+2028 inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"`{field}` must hold one JSON object per line, got {_shown(line)} in line {number} of {str(path)!r}. "
                f"Python says: {error}."
            ) from error
    return _from_rows(field, rows)


def _from_arrow(table: Any) -> PromptRows:
    from datasets import Dataset

    return cast(PromptRows, Dataset(table))


def _from_function(field: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> PromptRows:
    if not callable(function):
        raise refusal(field, "name a function that returns rows", _shown(function))
    return _from_rows(field, function(**kwargs))


def _from_datasets(field: str, path: str, options: dict[str, Any], *, is_directory: bool) -> PromptRows:
    import datasets

    split = options.pop("split", None)
    is_saved = is_directory and any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(path) if is_saved else datasets.load_dataset(path, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        rule = "be a file, a directory or the name of a hub dataset that can be read"
        raise refusal(field, rule, path, f"datasets says: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _split(field, loaded, split)
    elif split is not None:
        raise refusal(field, f"leave out `split`, {path!r} holds a single one", split)
    return _from_rows(field, loaded)


def _split(field: str, splits: Mapping[str, Any], split: str | None) -> Any:
    wanted = [split] if split is not None else [field, *(["test"] if field == "validation" else [])]
    for name in wanted:
        if name in splits:
            return splits[name]
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    raise refusal(field, f"name one of the splits {', '.join(map(repr, splits))}", wanted[0], "Set `split`")


def _from_rows(field: str, rows: Any) -> PromptRows:
    if hasattr(rows, "column_names"):
        if not hasattr(rows, "__len__"):
            raise refusal(field, "have a length", "a streaming dataset", "Use `.take(n)` and give a list of its rows")
        return cast(PromptRows, rows)  # a datasets.Dataset: kept memory-mapped
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise refusal(field, "be a list of rows, each a mapping", _shown(rows))
    listed = list(rows)
    for index, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise refusal(f"{field}[{index}]", "be a mapping from column to value", _shown(row))
    return listed


def _check_prompts(field: str, rows: PromptRows) -> None:
    columns = getattr(rows, "column_names", None)
    if columns is not None:
        if "prompt" not in columns:
            raise _missing_prompt(field, columns)
        prompts: Iterable[Any] = cast(Any, rows)["prompt"]
    else:
        prompts = _listed_prompts(field, rows)
    is_text: bool | None = None
    for index, prompt in enumerate(prompts):
        if is_text is not None and isinstance(prompt, str) != is_text and _is_prompt(prompt):
            kind = "text" if is_text else "a list of messages"
            raise refusal(f"{field}[{index}]['prompt']", f"be {kind} like the rows before it", _shown(prompt))
        is_text = isinstance(prompt, str)
        if not _is_prompt(prompt):
            raise refusal(
                f"{field}[{index}]['prompt']",
                "be non-empty text or a non-empty list of messages, each with `role` and `content`",
                _shown(prompt),
            )


def _listed_prompts(field: str, rows: PromptRows) -> Iterable[Any]:
    for index in range(len(rows)):
        row = rows[index]
        if "prompt" not in row:
            raise _missing_prompt(f"{field}[{index}]", list(row))
        yield row["prompt"]


def _missing_prompt(name: str, columns: Sequence[str]) -> ValueError:
    close = nearest_name("prompt", columns)
    hint = f"Rename {close!r} to 'prompt'" if close else "Rename the column that holds the task"
    return refusal(name, "have a column `prompt`", list(columns), hint)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        return False
    return all(isinstance(m, Mapping) and "role" in m and ("content" in m or "tool_calls" in m) for m in prompt)


class _Shown(str):
    """Text that is its own ``repr``, for values already shortened."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> _Shown:
    return _Shown(reprlib.repr(value))
