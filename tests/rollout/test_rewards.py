"""TRL's reward contract, in the process itself."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlstab.core.advantages import group_advantages
from lightning_rlstab.rollout.rewards import RewardError, RewardSuite, RewardTable, load_reward, reward_name


def scored(suite: RewardSuite, completions: list[Any] | None = None, **columns: list[Any]) -> RewardTable:
    texts = ["a", "bb", "ccc", "dddd"] if completions is None else completions
    ids = [[index] for index in range(len(texts))]
    return suite.score(
        prompts=["p"] * len(texts), completions=texts, completion_ids=ids, columns=columns, trainer_state="state"
    )


def returning(*values: Any) -> Any:
    def fixed(completions: list[Any], **_: Any) -> list[Any]:
        return list(values)

    return fixed


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_a_function_gets_trls_keywords_and_every_column_as_a_list() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    scored(RewardSuite(spy), answer=[1, 2, 3, 4], prompt=["dropped"] * 4)
    assert seen["prompts"] == ["p"] * 4
    assert seen["completion_ids"] == [[0], [1], [2], [3]]
    assert seen["answer"] == [1, 2, 3, 4]
    assert seen["trainer_state"] == "state"
    assert callable(seen["log_extra"])
    assert callable(seen["log_metric"])
    assert "prompt" not in seen


def test_fr_126_a_narrow_signature_gets_only_what_it_takes() -> None:
    def narrow(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    assert scored(RewardSuite(narrow), answer=[1] * 4).weighted.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_fr_126_a_parameter_that_nothing_fills_is_named_at_set_up() -> None:
    def needs(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="`needs` must take only what there is, got a parameter 'solution'"):
        RewardSuite(needs).check(["answer"])
    RewardSuite(needs).check(["solution"])


def test_positional_only_parameters_are_filled_by_name() -> None:
    def positional(completions: list[str], answer: list[int], /) -> list[float]:
        return [float(value) for value in answer]

    assert scored(RewardSuite(positional), answer=[4, 3, 2, 1]).weighted.tolist() == [4.0, 3.0, 2.0, 1.0]


def test_a_column_may_not_take_a_reserved_name() -> None:
    with pytest.raises(RewardError, match="`prompts` must not be a dataset column"):
        scored(RewardSuite(returning(0, 0, 0, 0)), prompts=[1] * 4)


def test_fr_121_an_abstention_leaves_the_other_advantages_finite_and_is_counted() -> None:
    table = scored(RewardSuite(returning(1, None, 0, 1)))
    assert table.missing.tolist() == [1]
    assert math.isnan(table.weighted[1])
    advantages = group_advantages(table.weighted, torch.zeros(4, dtype=torch.long)).advantages
    assert advantages.isfinite().all()
    assert advantages[1] == 0
    assert (advantages[[0, 2, 3]] != 0).all()


@pytest.mark.usefixtures("quiet")
def test_fr_128_nan_and_inf_are_no_value_and_counted_apart() -> None:
    table = scored(RewardSuite(returning(math.nan, math.inf, -math.inf, 1e300)))
    assert table.per_func.isnan().all()
    assert (table.missing.tolist(), table.nan.tolist(), table.inf.tolist()) == ([0], [1], [3])
    table = scored(RewardSuite(returning(1, None, math.nan, 10**400)))
    assert table.per_func[0] == 1
    assert (table.missing.tolist(), table.nan.tolist(), table.inf.tolist()) == ([1], [1], [1])


def test_non_finite_rewards_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    scored(RewardSuite(returning(math.nan, 1, 1, math.inf), names=["shaky"]))
    assert "'shaky' returned 1 NaN and 1 inf" in caplog.text


def test_fr_140_the_reward_respects_the_weights() -> None:
    suite = RewardSuite([returning(1, 1, 1, None), returning(0, 0, None, None)], weights=[0.7, 0.3])
    table = scored(suite)
    assert table.weighted[:3].tolist() == pytest.approx([0.7, 0.7, 0.7])
    assert math.isnan(table.weighted[3])


def test_weights_default_to_one() -> None:
    table = scored(RewardSuite([returning(1, 2, 3, 4), returning(1, None, 1, 1)]))
    assert table.weighted.tolist() == [2.0, 2.0, 4.0, 5.0]
    assert table.weights == (1.0, 1.0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, float("nan")], [1.0, "2"], [1.0, True]])
def test_weights_that_do_not_fit_are_refused(weights: list[Any]) -> None:
    with pytest.raises(ValueError, match="reward_weights"):
        RewardSuite([returning(1), returning(1)], weights=weights)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.0, 0.0, 2.0, -0.0]),
        torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.bfloat16),
        np.array([1, 0, 2, 0]),
        (1, 0, 2, 0),
        [torch.tensor(1.0), np.float32(0), torch.tensor([2]), False],
        [True, False, np.int8(2), 0],
    ],
)
def test_tensors_arrays_and_bools_are_numbers(values: Any) -> None:
    def fixed(**_: Any) -> Any:
        return values

    assert scored(RewardSuite(fixed)).weighted.tolist() == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("values", "words", "row"),
    [
        ([1.0], "must return 4 rewards, one per completion, got 1", None),
        ([0.0, "0.5", 0.0, 0.0], r"got '0.5' \(str\) for row 1", 1),
        ([0.0, 0.0, 1j, 0.0], "for row 2", 2),
        ([0.0, 0.0, 0.0, [1.0]], "for row 3", 3),
        ([0.0, 0.0, 0.0, torch.zeros(2)], "for row 3", 3),
        (1.0, "one number or None per completion", None),
        ("abcd", "one number or None per completion", None),
        (None, "one number or None per completion", None),
    ],
)
def test_a_broken_answer_names_function_row_and_value(values: Any, words: str, row: int | None) -> None:
    def broken(**_: Any) -> Any:
        return values

    with pytest.raises(RewardError, match=words) as caught:
        scored(RewardSuite(broken))
    assert "`broken`" in str(caught.value)
    assert (caught.value.function, caught.value.row) == ("broken", row)
    assert isinstance(caught.value, ValueError)


def test_an_exception_names_the_row_and_keeps_its_cause() -> None:
    def fragile(completions: list[str], **_: Any) -> list[float]:
        return [1.0 / (len(text) - 3) for text in completions]

    with pytest.raises(RewardError, match=r"`fragile` must not raise, got ZeroDivisionError.*row 2.*'ccc'") as caught:
        scored(RewardSuite(fragile))
    assert (caught.value.row, caught.value.value) == (2, "ccc")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_on_no_single_row_says_so() -> None:
    def crowded(completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(RewardError, match="whole batch") as caught:
        scored(RewardSuite(crowded))
    assert caught.value.row is None


def test_async_functions_run_at_the_same_time_on_a_loop_that_lasts() -> None:
    loops = []
    meeting: dict[str, asyncio.Event] = {}

    async def first(completions: list[str], **_: Any) -> list[float]:
        meeting.setdefault("here", asyncio.Event()).set()
        await meeting.setdefault("there", asyncio.Event()).wait()
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def second(completions: list[str], **_: Any) -> list[float]:
        meeting.setdefault("there", asyncio.Event()).set()
        await meeting.setdefault("here", asyncio.Event()).wait()
        return [2.0] * len(completions)

    suite = RewardSuite([first, second, returning(0, 0, 0, 0)])
    assert scored(suite).weighted.tolist() == [3.0] * 4
    assert scored(suite).weighted.tolist() == [3.0] * 4
    assert loops[0] is loops[1]
    suite.close()


def test_async_objects_and_partials_are_awaited_and_work_inside_a_running_loop() -> None:
    class Judge:
        async def __call__(self, completions: list[str], bonus: float = 0.0, **_: Any) -> list[float]:
            return [bonus] * len(completions)

    suite = RewardSuite([Judge(), functools.partial(Judge(), bonus=2.0)])

    async def inside() -> RewardTable:
        return scored(suite)

    assert asyncio.run(inside()).weighted.tolist() == [2.0] * 4
    assert suite.names == ("Judge", "Judge_2")
    suite.close()


def test_an_async_exception_names_its_row() -> None:
    async def fragile(completions: list[str], **_: Any) -> list[float]:
        if "bb" in completions:
            raise KeyError("bb")
        return [0.0] * len(completions)

    suite = RewardSuite(fragile)
    with pytest.raises(RewardError, match="row 1") as caught:
        scored(suite)
    assert isinstance(caught.value.__cause__, KeyError)
    suite.close()


def test_closing_ends_the_loop_thread_and_the_suite_can_be_used_again() -> None:
    async def one(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    suite = RewardSuite(one)
    for _ in range(2):
        assert scored(suite).weighted.tolist() == [1.0] * 4
        running = [thread for thread in threading.enumerate() if thread.name == "reward-loop"]
        suite.close()
        for thread in running:
            thread.join(5)
            assert not thread.is_alive()


def test_logged_columns_and_metrics_reach_the_table() -> None:
    def chatty(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("length", [len(text) for text in completions])
        for text in completions:
            log_extra("first", [text[0]])
        log_metric("parsed", 0.5)
        log_metric("parsed", torch.tensor(1.0))
        return [0.0] * len(completions)

    table = scored(RewardSuite(chatty))
    assert table.extra_columns == {"length": [1, 2, 3, 4], "first": ["a", "b", "c", "d"]}
    assert table.metrics == {"parsed": [0.5, 1.0]}


def test_a_logged_column_of_wrong_length_is_refused() -> None:
    def short(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("length", [1])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="`short` must log 4 values in column 'length', got 1"):
        scored(RewardSuite(short))


def test_two_functions_may_not_log_the_same_column() -> None:
    def same(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("note", completions)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="`same_2` must log columns of its own, got 'note'"):
        scored(RewardSuite([same, same]))


def test_conversational_completions_go_through_as_they_are() -> None:
    def content(completions: list[Any], **_: Any) -> list[float]:
        return [float(turns[0]["content"]) for turns in completions]

    turns = [[{"role": "assistant", "content": str(value)}] for value in range(4)]
    assert scored(RewardSuite(content), turns).weighted.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("path", ["math.sqrt", "math:sqrt", "os.path.join", "collections:OrderedDict.fromkeys"])
def test_import_paths_find_the_function(path: str) -> None:
    assert callable(load_reward(path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("math.sqroot", "Did you mean 'sqrt'"),
        ("no_such_module.reward", "name an importable module"),
        ("accuracy", "import path such as"),
        ("math.pi", "name a function"),
        ("org/reward-model", "ClassifierReward"),
        (3, "callables or import paths"),
    ],
)
def test_a_wrong_import_path_is_refused_with_advice(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_reward(spec)


def test_a_package_missing_inside_the_users_module_is_not_called_a_wrong_path(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_with_a_gap.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_reward("rewards_with_a_gap.reward")


def test_names_are_trls() -> None:
    assert reward_name(math.sqrt) == "sqrt"
    assert reward_name(functools.partial(functools.partial(math.pow, 2))) == "pow"
    assert reward_name("org/reward-model") == "reward-model"
    assert reward_name("my_rewards.accuracy") == "accuracy"
    assert RewardSuite([math.sqrt, math.sqrt]).names == ("sqrt", "sqrt_2")
    assert RewardSuite([math.sqrt], names=["root"]).names == ("root",)


def test_no_functions_and_wrong_numbers_of_names_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one function"):
        RewardSuite([])
    with pytest.raises(ValueError, match="`names` must have one entry"):
        RewardSuite([math.sqrt], names=["a", "b"])


def test_every_row_without_a_value_is_counted_once() -> None:
    table = scored(RewardSuite([returning(1, None, 2, None), returning(None, None, 0, 0)]))
    empty = table.per_func.isnan().sum(0)
    assert torch.equal(empty, table.missing + table.nan + table.inf + table.timed_out.sum(0))


def test_a_function_that_never_has_a_value_is_named_once(caplog):
    suite = RewardSuite(lambda completions, **_: [None] * len(completions), names=["silent"])
    for _ in range(2):
        suite.score(prompts=["a"], completions=["b"], completion_ids=[[1]], columns={})
    assert caplog.text.count("'silent' returned None for all 1 completions") == 1
