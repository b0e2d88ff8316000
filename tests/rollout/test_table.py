"""The completions table in its three forms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_rlstab.rollout.records import Rollout
from lightning_rlstab.rollout.rewards import RewardTable
from lightning_rlstab.rollout.table import append_jsonl, completion_rows, markdown_table, write_parquet

Make = Callable[..., Rollout]


@pytest.fixture
def table() -> RewardTable:
    per_func = torch.tensor([[1.0, 0.0], [0.5, math.nan], [0.0, 1.0], [math.nan, math.nan]])
    counts = torch.zeros(2, dtype=torch.long)
    return RewardTable(
        per_func=per_func,
        weighted=per_func.nansum(1),
        names=("accuracy", "format"),
        weights=(1.0, 1.0),
        extra_columns={"parsed": ["1", None, "3", {"odd": 1}]},
        missing=counts,
        nan=counts,
        inf=counts,
        timed_out=per_func.isinf(),
    )


def test_rows_have_trls_columns_in_trls_order(make_rollout: Make, table: RewardTable) -> None:
    rows = completion_rows(make_rollout(advantages=torch.tensor([1.0, -1.0, 0.5, 0.0])), table, step=7)
    assert list(rows[0]) == ["step", "prompt", "completion", "accuracy", "format", "parsed", "advantage"]
    assert list(rows[1].values()) == [7, "a", "x", 0.5, None, None, -1.0]


def test_jsonl_is_appended_as_strict_json(make_rollout: Make, table: RewardTable, tmp_path: Path) -> None:
    path = tmp_path / "completions" / "rows.jsonl"
    for step in (1, 2):
        append_jsonl(path, completion_rows(make_rollout(), table, step=step))
    append_jsonl(path, [{"value": math.inf, "path": tmp_path, "nested": [(math.nan,)]}])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows[:-1]] == [1] * 4 + [2] * 4
    assert rows[0]["advantage"] is None
    assert rows[-1] == {"value": None, "path": str(tmp_path), "nested": [[None]]}


def test_parquet_holds_messages_as_structures_and_odd_columns_as_json(
    make_rollout: Make, table: RewardTable, tmp_path: Path
) -> None:
    from pyarrow import parquet

    messages = [[{"role": "user", "content": text}] for text in "abcd"]
    path = tmp_path / "completions" / "completions_00007.parquet"
    write_parquet(path, completion_rows(make_rollout(prompts=messages), table, step=7))
    read = parquet.read_table(path).to_pydict()
    assert read["prompt"] == messages
    assert read["format"] == [0.0, None, 1.0, None]
    assert [json.loads(value) for value in read["parsed"]] == ["1", None, "3", {"odd": 1}]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_markdown_keeps_cells_whatever_the_text_holds() -> None:
    rows = [{"prompt": "a|b\n`c` <script>", "reward": 0.123456}, {"prompt": "x" * 50, "reward": None}]
    lines = markdown_table(rows, max_characters=20).splitlines()
    assert lines[2] == "| a&#124;b<br>&#96;c&#96; &lt;script&gt; | 0.1235 |"
    assert lines[3] == f"| {'x' * 10} … {'x' * 10} |  |"


def test_markdown_shows_messages_by_role_and_says_how_many_rows_are_missing() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 3
    text = markdown_table(rows, max_rows=2)
    assert "| user: hi<br>assistant: ho |" in text
    assert text.endswith("1 more rows")
    assert markdown_table([]) == ""
