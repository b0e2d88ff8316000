"""Every source of prompts gives the same rows; a bad one gives an error that names field, rule and value."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import jsonargparse
import pytest

from lightning_rlstab.module.data import PromptDataModule
from lightning_rlstab.module.dataset_files import prompt_rows

MESSAGES = [{"role": "user", "content": "What is 2+2?\u2028Say it."}]
ROWS = [
    {"prompt": "1+1=", "answer": 2, "note": None},
    {"prompt": 'say "x",\nthen stop', "answer": 3, "note": "two\nlines"},
]
TALKS = [{"prompt": MESSAGES, "answer": 4}]


def listed(source: Any, field: str = "train") -> list[dict[str, Any]]:
    rows = prompt_rows(field, source)
    return [dict(rows[index]) for index in range(len(rows))]


@pytest.fixture
def puzzles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("puzzles_for_tests")

    def sums(size: int = 2) -> Iterator[dict[str, Any]]:
        return ({"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(size))

    module.sums = sums
    module.nothing = lambda: []
    module.constant = 3
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class TestReading:
    @pytest.mark.parametrize("rows", [ROWS, TALKS])
    @pytest.mark.parametrize(
        "kind", ["jsonl", "json", "json lines", "parquet", "directory", "dataset", "rows", "function"]
    )
    def test_every_kind_of_source_gives_the_same_rows(
        self, tmp_path: Path, rows: list[dict[str, Any]], kind: str
    ) -> None:
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
        source: Any = tmp_path / f"prompts.{kind.partition(' ')[0]}"
        if kind in ("jsonl", "json lines"):
            source.write_text(lines, encoding="utf-8")
        elif kind == "json":
            source.write_text(json.dumps(rows), encoding="utf-8")
        elif kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(source)
        elif kind == "directory":
            datasets.Dataset.from_list(rows).save_to_disk(source)
        elif kind == "dataset":
            source = datasets.Dataset.from_list(rows)
        else:
            source = rows if kind == "rows" else lambda: iter(rows)
        assert listed(source) == rows
        if isinstance(source, Path):
            assert listed(str(source)) == rows
            assert listed({"path": str(source)}) == rows

    def test_csv_keeps_line_breaks_inside_quotes(self, tmp_path: Path) -> None:
        (tmp_path / "p.csv").write_text('prompt,answer\n1+1=,2\n"say ""x"",\nthen stop",3\n')
        assert listed(tmp_path / "p.csv") == [{key: row[key] for key in ("prompt", "answer")} for row in ROWS]

    def test_json_lines_may_mix_types_in_a_column(self, tmp_path: Path) -> None:
        rows = [{"prompt": "a", "meta": {"x": 1}}, {"prompt": "b", "meta": "text", "extra": [1, "2"]}]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert listed(tmp_path / "p.jsonl") == rows

    def test_a_split_is_taken_by_name_or_by_the_field_it_is_for(self, tmp_path: Path) -> None:
        splits = {"train": ROWS[:1], "test": ROWS[1:]}
        datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
            tmp_path / "saved"
        )
        assert listed(tmp_path / "saved") == ROWS[:1]
        assert listed(tmp_path / "saved", "validation") == ROWS[1:]
        assert listed({"path": str(tmp_path / "saved"), "split": "test"}) == ROWS[1:]
        with pytest.raises(ValueError, match="`train` must name one of the splits 'train', 'test', got 'tset'"):
            listed({"path": str(tmp_path / "saved"), "split": "tset"})

    def test_a_function_is_named_by_its_import_path_with_arguments(self, puzzles: ModuleType) -> None:
        assert len(listed("puzzles_for_tests:sums")) == 2
        assert listed({"path": "puzzles_for_tests:sums", "kwargs": {"size": 3}})[2] == {"prompt": "2+2=", "answer": 4}

    def test_yaml_can_name_every_source(self, puzzles: ModuleType, tmp_path: Path) -> None:
        parser = jsonargparse.ArgumentParser()
        parser.add_subclass_arguments(PromptDataModule, "data")
        config = tmp_path / "data.yaml"
        name = "lightning_rlstab.module.data.PromptDataModule"
        (tmp_path / "v.jsonl").write_text(json.dumps(ROWS[0]))
        config.write_text(
            f"class_path: {name}\ninit_args:\n"
            "  train: {path: 'puzzles_for_tests:sums', kwargs: {size: 5}}\n"
            f"  validation: {tmp_path / 'v.jsonl'}\n"
            "  test: [{prompt: '1+1=', answer: 2}]\n"
        )
        data = parser.instantiate(parser.parse_args(["--data", str(config)])).data
        data.setup()
        assert (len(data.train_rows), len(data.validation_rows)) == (5, 1)


class TestRefusals:
    @pytest.mark.parametrize("field", ["train", "validation", "test", "predict"])
    def test_an_empty_data_set_names_its_field(self, field: str) -> None:
        with pytest.raises(ValueError, match=rf"`{field}` must hold at least one row, got none from \[\]"):
            PromptDataModule(**{field: []}).setup()

    def test_empty_files_and_functions_are_refused(self, tmp_path: Path, puzzles: ModuleType) -> None:
        (tmp_path / "p.jsonl").write_text("\n")
        for source in (tmp_path / "p.jsonl", "puzzles_for_tests:nothing"):
            with pytest.raises(ValueError, match="`train` must hold at least one row"):
                listed(source)

    def test_a_missing_prompt_column_names_the_columns_and_the_nearest(self) -> None:
        with pytest.raises(
            ValueError, match=r"`train\[1\]` must have a column `prompt`, got \['promt', 'x'\]. Rename 'promt'"
        ):
            listed([{"prompt": "a"}, {"promt": "b", "x": 1}])
        with pytest.raises(
            ValueError, match=r"`train` must have a column `prompt`, got \['question'\]. Rename the column"
        ):
            listed(datasets.Dataset.from_list([{"question": "a"}]))

    @pytest.mark.parametrize(
        "prompt", [None, 7, "", [], ["text"], [{"role": "user"}], [{"content": "x"}], {"a": 1}, b"x"]
    )
    def test_a_prompt_that_is_neither_text_nor_messages_names_its_row(self, prompt: Any) -> None:
        with pytest.raises(
            ValueError, match=r"`train\[1\]\['prompt'\]` must be non-empty text or a non-empty list of mess"
        ):
            listed([{"prompt": "fine"}, {"prompt": prompt}])

    def test_a_long_value_is_shortened(self) -> None:
        with pytest.raises(ValueError, match=r"`prompt`|'prompt'") as error:
            listed([{"prompt": [{"content": "x" * 10_000}]}])
        assert len(str(error.value)) < 300

    @pytest.mark.parametrize("name", ["prompts.txt", "prompts.xlsx"])
    def test_an_unknown_file_type_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("x")
        for source in (tmp_path / name, name):
            with pytest.raises(ValueError, match=r"`train` must be a .jsonl, .ndjson, .json, .parquet, .csv file, got"):
                listed(source)

    @pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/place", "a/b/c"])
    def test_a_missing_file_is_refused_without_asking_the_network(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"`train` must name an existing file or directory, got '{name}'"):
            listed(name)

    def test_an_unreachable_hub_name_names_its_field(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(path: str, **options: Any) -> Any:
            raise ConnectionError(f"no network for {path} {options}")

        monkeypatch.setattr(datasets, "load_dataset", offline)
        with pytest.raises(
            ValueError, match=r"name of a hub dataset that can be read, got 'org/data'. datasets says: no net"
        ):
            listed({"path": "org/data", "name": "main", "split": "train"})

    def test_a_hub_data_set_is_downloaded_before_the_ranks_read_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, dict[str, Any]]] = []

        def load(path: str, **options: Any) -> Any:
            asked.append((path, options))
            return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

        monkeypatch.setattr(datasets, "load_dataset", load)
        data = PromptDataModule({"path": "org/data", "name": "main"}, [{"prompt": "x"}])
        data.prepare_data()
        assert asked == [("org/data", {"name": "main"})]
        data.setup()
        assert len(data.train_rows) == 2

    def test_a_misspelt_option_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(
            ValueError, match=r"`train` must have only the keys `path`, `name`.*got `spilt`. Did you mean `split`"
        ):
            listed({"path": "org/data", "spilt": "train"})

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("no_such_module_here:rows", "No module named"),
            ("json:no_such_function", "has no attribute"),
        ],
    )
    def test_a_function_that_cannot_be_imported_says_why(self, name: str, words: str) -> None:
        with pytest.raises(ValueError, match=rf"`train` must name an importable function, got '{name}'. .*{words}"):
            listed(name)

    def test_what_is_no_function_or_returns_no_rows_is_refused(self, puzzles: ModuleType) -> None:
        with pytest.raises(ValueError, match="`train` must name a function that returns rows, got 3"):
            listed("puzzles_for_tests:constant")
        with pytest.raises(ValueError, match="`train` must be a list of rows, each a mapping, got 'text'"):
            listed(lambda: "text")

    def test_a_broken_line_names_its_number(self, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
        with pytest.raises(ValueError, match=r"`train` must hold one JSON object per line, got .* in line 3 of"):
            listed(tmp_path / "p.jsonl")

    def test_a_row_that_is_no_mapping_names_its_number(self) -> None:
        with pytest.raises(ValueError, match=r"`train\[1\]` must be a mapping from column to value, got 'b'"):
            listed([{"prompt": "a"}, "b"])

    def test_a_single_row_is_not_taken_for_a_source(self) -> None:
        with pytest.raises(
            ValueError, match=r"`train` must name its source under `path`.*Put a single row into a list"
        ):
            listed({"prompt": "a"})

    def test_a_streaming_data_set_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`train` must have a length"):
            listed(datasets.Dataset.from_list(ROWS).to_iterable_dataset())

    def test_what_was_not_given_is_named_when_it_is_needed(self) -> None:
        data = PromptDataModule(validation=ROWS)
        data.setup()
        with pytest.raises(ValueError, match=r"`train` must be given, got None. .*built with \['validation'\]"):
            _ = data.train_rows
