"""Records of completions: cutting, joining, trimming, saving."""

from __future__ import annotations

import collections
import datetime
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlstab.rollout.records import Rollout, concatenated, rollout_from, state_of, trimmed

Make = Callable[..., Rollout]


def test_selected_rows_keep_every_field_together(make_rollout: Make) -> None:
    rollout = make_rollout(policy_step=7, advantages=torch.arange(4.0))
    picked = rollout.select([3, 0, 3])
    assert picked.prompts == ["b", "a", "b"]
    assert picked.completions == ["z", "w", "z"]
    assert picked.columns == {"answer": [2, 1, 2]}
    assert picked.completion_lengths.tolist() == [4, 1, 4]
    assert picked.advantages is not None
    assert picked.advantages.tolist() == [3.0, 0.0, 3.0]
    assert picked.policy_steps.tolist() == [7, 7, 7]
    assert torch.equal(picked.completion_ids, rollout.completion_ids[[3, 0, 3]])


def test_selecting_by_tensor_and_by_slice_agree(make_rollout: Make) -> None:
    rollout = make_rollout()
    assert rollout.select(torch.tensor([1, 2])).completions == rollout.select(slice(1, 3)).completions == ["x", "y"]


def test_a_bool_mask_is_no_list_of_rows(make_rollout: Make) -> None:
    with pytest.raises(ValueError, match="`indices` must be row numbers"):
        make_rollout().select(torch.tensor([True, False, True, False]))


def test_slices_are_neighbouring_rows_of_equal_size(make_rollout: Make) -> None:
    parts = make_rollout(num_items=10.0).slices(2)
    assert [part.completions for part in parts] == [["w", "x"], ["y", "z"]]
    assert all(part.num_items == 10.0 for part in parts)


def test_rows_that_cannot_be_shared_out_are_refused(make_rollout: Make) -> None:
    with pytest.raises(ValueError, match="`count` must divide the number of completions, 4, got 3"):
        make_rollout().slices(3)


def test_joining_pads_prompts_on_the_left_and_completions_on_the_right(make_rollout: Make) -> None:
    rollout = make_rollout()
    short = trimmed(rollout.select([0, 1]))
    assert short.prompt_ids.shape == (2, 2)
    assert short.completion_ids.shape == (2, 2)
    joined = concatenated([short, rollout.select([2, 3])])
    whole = make_rollout()
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "behavior_logprobs", "group_ids"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert joined.completions == whole.completions
    assert joined.columns == whole.columns


def test_joined_batches_with_different_normalisers_have_none(make_rollout: Make) -> None:
    first, second = make_rollout(num_items=10.0), make_rollout(num_items=12.0)
    assert concatenated([first, first]).num_items == 10.0
    assert concatenated([first, second]).num_items is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"columns": {}}, "columns"),
        ({"advantages": torch.zeros(4)}, "advantages"),
        ({"pad_token_id": 3}, "pad_token_id"),
    ],
)
def test_records_that_do_not_fit_are_refused_by_field(make_rollout: Make, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}` must"):
        concatenated([make_rollout(), make_rollout(**changes)])


def test_joining_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        concatenated([])


def test_trimming_drops_only_columns_that_are_padding_in_every_row(make_rollout: Make) -> None:
    rollout = make_rollout()
    assert trimmed(rollout) is rollout
    narrow = trimmed(rollout.select([1]))
    assert narrow.prompt_ids.tolist() == [rollout.prompt_ids[1, 1:].tolist()]
    assert narrow.completion_ids.tolist() == [rollout.completion_ids[1, :2].tolist()]
    assert narrow.behavior_logprobs is not None
    assert narrow.behavior_logprobs.shape == (1, 2)


def test_masking_a_row_out_of_the_loss_leaves_its_length_alone(make_rollout: Make) -> None:
    masked = make_rollout().replace(completion_mask=torch.zeros(4, 4, dtype=torch.bool))
    assert masked.completion_lengths.tolist() == [1, 2, 3, 4]
    assert trimmed(masked).completion_ids.shape == (4, 4)


def test_fr_033_completions_of_5_and_50_tokens_have_mask_sums_5_and_50(make_rollout: Make) -> None:
    mask = torch.arange(50) < torch.tensor([[5], [50], [5], [50]])
    rollout = make_rollout(
        completion_ids=torch.zeros(4, 50, dtype=torch.long), completion_mask=mask, behavior_logprobs=None
    )
    assert rollout.completion_lengths.tolist() == [5, 50, 5, 50]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("completion_mask", torch.ones(4, 3, dtype=torch.bool)),
        ("prompt_mask", torch.ones(3, 3, dtype=torch.bool)),
        ("advantages", torch.zeros(4, 1)),
        ("completions", ["w"]),
    ],
)
def test_a_field_of_another_shape_is_refused_by_name(make_rollout: Make, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must have"):
        make_rollout(**{name: value})


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


def test_a_saved_rollout_comes_back_equal_through_weights_only_loading(make_rollout: Make) -> None:
    rollout = make_rollout(
        prompts=[[{"role": "user", "content": "a"}]] * 4,
        rewards_per_func=torch.tensor([[1.0, torch.nan]] * 4),
        num_items=10.0,
        policy_step=torch.tensor([1, 1, 2, 2]),
    )
    back = rollout_from(_through_a_file(state_of(rollout)))
    assert back.prompts == rollout.prompts
    assert back.columns == rollout.columns
    assert back.num_items == 10.0
    assert back.policy_steps.tolist() == [1, 1, 2, 2]
    assert back.old_logprobs is None
    for name in ("completion_ids", "completion_mask", "completion_lengths", "rewards_per_func", "behavior_logprobs"):
        assert torch.equal(getattr(back, name).nan_to_num(7), getattr(rollout, name).nan_to_num(7)), name


def test_columns_are_saved_as_the_plain_types_they_stand_for(make_rollout: Make) -> None:
    odd = [np.float64(0.5), np.int64(3), np.str_("x"), collections.OrderedDict(a=np.bool_(True))]
    state = _through_a_file(state_of(make_rollout(columns={"odd": odd})))
    assert state["columns"]["odd"] == [0.5, 3, "x", {"a": True}]
    assert json.loads(json.dumps(state["columns"])) == state["columns"]


def test_a_column_that_cannot_be_saved_is_named(make_rollout: Make) -> None:
    with pytest.raises(ValueError, match=r"`when` must hold only .* got 'datetime.date'"):
        state_of(make_rollout(columns={"when": [datetime.date(2024, 1, 1)] * 4}))


def test_a_saved_state_does_not_share_memory_with_the_record(make_rollout: Make) -> None:
    rollout = make_rollout()
    state = state_of(rollout)
    rollout.completion_ids.zero_()
    assert state["completion_ids"].any()


def test_a_state_of_another_version_is_refused(make_rollout: Make) -> None:
    with pytest.raises(ValueError, match="`version` must be 1"):
        rollout_from({**state_of(make_rollout()), "version": 99})
