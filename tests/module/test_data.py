"""Sharding, order, position and errors of the prompt loaders, with a real Trainer where Lightning has a say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_rlstab.module.data import PromptBatch, PromptDataModule, RolloutPlan
from lightning_rlstab.module.prompt_loaders import EvalPromptLoader, TrainPromptLoader

pytestmark = [
    # Lightning 2.6.6 on torch 2.13.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    # Runs are kept in folders of their own here, so that none finds the other's files.
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"task {number}", "answer": number} for number in range(count)]


def plan(**sizes: Any) -> RolloutPlan:
    return RolloutPlan(**{"num_generations": 2, "per_device_train_batch_size": 4, **sizes})


class TestPlan:
    def test_fr_001_a_batch_that_groups_do_not_divide_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"`num_generations` \(4\).*got 2 \* 1 = 2\. Make the product 4"):
            RolloutPlan(num_generations=4, per_device_train_batch_size=2)

    def test_fr_008_a_group_of_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`num_generations` must be a whole number of at least 2, got 1"):
            RolloutPlan(num_generations=1, per_device_train_batch_size=4)

    @pytest.mark.parametrize("value", [0, -1, 2.0, True, "4", float("nan"), None])
    @pytest.mark.parametrize(
        "field", ["num_generations", "per_device_train_batch_size", "steps_per_generation", "num_iterations"]
    )
    def test_fr_012_odd_sizes_are_refused_by_name(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"`{field}` must be a whole number"):
            plan(**{field: value})

    def test_a_group_may_span_the_micro_batches_of_one_generation(self) -> None:
        assert plan(num_generations=8, steps_per_generation=4).prompts_per_generation == 2

    def test_a_held_out_batch_is_counted_in_completions(self) -> None:
        assert plan(per_device_eval_batch_size=12, num_generations_eval=3).eval_prompts == 4
        assert plan(num_generations_eval=1).eval_prompts == 2
        with pytest.raises(ValueError, match=r"`per_device_eval_batch_size` must be divisible by .*held-out prompt"):
            plan(per_device_eval_batch_size=7)


class TestTrainLoader:
    def test_a_generation_batch_is_handed_out_for_every_micro_batch_of_its_cycle(self) -> None:
        loader = TrainPromptLoader(rows(4), plan(steps_per_generation=2, num_iterations=3))
        batches = list(loader)
        assert [batch.cycle_step for batch in batches] == [0, 1, 2, 3, 4, 5]
        assert {batch.cycle_length for batch in batches} == {6}
        assert all(batch.rows == batches[0].rows for batch in batches)
        assert len(loader) == 6

    def test_every_row_is_visited_once_per_epoch_in_a_new_order(self) -> None:
        loader = TrainPromptLoader(rows(8), plan())
        epochs = [[row for batch in loader for row in batch.row_ids] for _ in range(3)]
        assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]

    def test_the_order_depends_on_the_seed_alone(self) -> None:
        def order(seed: int) -> list[int]:
            return [row for batch in TrainPromptLoader(rows(8), plan(), seed=seed) for row in batch.row_ids]

        torch.manual_seed(5)
        first = order(3)
        torch.manual_seed(6)
        assert order(3) == first
        assert order(4) != first

    def test_the_second_epoch_of_one_seed_is_not_the_first_of_the_next(self) -> None:
        one, two = TrainPromptLoader(rows(16), plan(), seed=0), TrainPromptLoader(rows(16), plan(), seed=1)
        list(one)
        assert [batch.row_ids for batch in one] != [batch.row_ids for batch in two]

    def test_without_shuffling_the_given_order_is_kept(self) -> None:
        batches = TrainPromptLoader(rows(5), plan(), shuffle=False)
        assert [batch.row_ids for batch in batches] == [[0, 1], [2, 3]]

    def test_every_column_reaches_the_batch_and_the_data_set_is_safe_from_changes(self) -> None:
        source = rows(2)
        batch = next(iter(TrainPromptLoader(source, plan(), shuffle=False)))
        assert batch.rows == source
        batch.rows[0]["answer"] = "changed"
        assert source[0]["answer"] == 0

    @settings(max_examples=50, deadline=None)
    @given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
    def test_fr_022_and_fr_025_group_ids_are_unique_over_ranks_epochs_and_positions(
        self, replicas: int, prompts: int, steps: int, extra: int
    ) -> None:
        sizes = plan(per_device_train_batch_size=2 * prompts, steps_per_generation=steps)
        count = replicas * prompts * steps + extra
        loaders = [TrainPromptLoader(rows(count), sizes, replicas=replicas, rank=rank) for rank in range(replicas)]
        seen: list[int] = []
        for _ in range(2):
            for batches in zip(*loaders, strict=True):
                if batches[0].cycle_step == 0:
                    seen += [group for batch in batches for group in batch.prompt_ids]
        assert len(seen) == len(set(seen)) > 0

    def test_ranks_share_one_generation_batch_contiguously_and_as_one_rank_would(self) -> None:
        one = TrainPromptLoader(rows(16), plan(per_device_train_batch_size=8), seed=2)
        two = [TrainPromptLoader(rows(16), plan(), replicas=2, rank=rank, seed=2) for rank in range(2)]
        for whole, first, second in zip(one, *two, strict=True):
            assert whole.row_ids == first.row_ids + second.row_ids
            assert whole.prompt_ids == first.prompt_ids + second.prompt_ids

    def test_too_few_rows_for_one_generation_batch_are_refused_with_the_sum(self) -> None:
        with pytest.raises(
            ValueError, match=r"one generation batch of 8 prompts \(4 completions \* 2 steps \* 2 ranks"
        ):
            TrainPromptLoader(rows(7), plan(steps_per_generation=2), replicas=2)


class TestPosition:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 20), st.integers(1, 3), st.integers(0, 2))
    def test_a_saved_position_goes_on_with_the_next_batch(self, taken: int, steps: int, idle_iterators: int) -> None:
        def stream(loader: TrainPromptLoader, count: int) -> list[PromptBatch]:
            batches: list[PromptBatch] = []
            while len(batches) < count:
                for batch in loader:
                    batches.append(batch)
                    if len(batches) == count:
                        break
            return batches

        sizes = plan(steps_per_generation=steps)
        whole = stream(TrainPromptLoader(rows(13), sizes, seed=4), taken + 9)
        before, after = TrainPromptLoader(rows(13), sizes, seed=4), TrainPromptLoader(rows(13), sizes, seed=4)
        assert stream(before, taken) == whole[:taken]
        after.load_state_dict(before.state_dict())
        for _ in range(idle_iterators):  # Lightning makes iterators that it never advances
            iter(after)
        assert stream(after, 9) == whole[taken:]

    def test_a_position_is_plain_numbers(self) -> None:
        state = TrainPromptLoader(rows(4), plan()).state_dict()
        assert all(type(value) in (int, bool) for value in state.values())

    def test_a_batch_that_was_handed_out_but_not_finished_is_handed_out_again(self) -> None:
        loader = TrainPromptLoader(rows(4), plan(), in_flight=lambda: 1)
        batches = list(loader)
        again = TrainPromptLoader(rows(4), plan())
        again.load_state_dict(loader.state_dict())
        assert next(iter(again)) == batches[-1]

    def test_fr_114_another_number_of_ranks_goes_on_where_prompts_are_left(self) -> None:
        two = TrainPromptLoader(rows(32), plan(), replicas=2, shuffle=False)
        for _ in zip(range(3), two, strict=False):
            pass
        one = TrainPromptLoader(rows(32), plan(), shuffle=False)
        with pytest.warns(UserWarning, match=r"prompts_per_generation 4 -> 2\): going on at prompt 12 of epoch 0"):
            one.load_state_dict(two.state_dict())
        assert next(iter(one)).row_ids == [12, 13]

    def test_another_data_set_starts_its_epoch_anew_and_says_so(self) -> None:
        old = TrainPromptLoader(rows(8), plan(), shuffle=False)
        next(iter(old))
        new = TrainPromptLoader(rows(9), plan(), shuffle=False)
        with pytest.warns(
            UserWarning, match=r"prompts changed since the checkpoint \(rows 8 -> 9\): epoch 0 starts anew"
        ):
            new.load_state_dict(old.state_dict())
        assert next(iter(new)).row_ids == [0, 1]


class TestEvalLoader:
    @settings(max_examples=80, deadline=None)
    @given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4))
    def test_fr_100_every_rank_has_as_many_batches_and_each_row_counts_once(
        self, count: int, prompts: int, replicas: int
    ) -> None:
        loaders = [EvalPromptLoader(rows(count), prompts, replicas=replicas, rank=rank) for rank in range(replicas)]
        per_rank = [list(loader) for loader in loaders]
        assert {len(batches) for batches in per_rank} == {len(loaders[0])}
        for together in zip(*per_rank, strict=True):
            assert len({len(batch.rows) for batch in together}) == 1
        flat = [item for batches in per_rank for b in batches for item in zip(b.row_ids, b.is_padding, strict=True)]
        assert [row for row, is_padding in flat if not is_padding] == list(range(count))
        groups = [group for batches in per_rank for batch in batches for group in batch.prompt_ids]
        assert len(set(groups)) == len(groups)


class Recorder(pl.LightningModule):
    """Learns a number from the rows it sees, so that weights tell which rows were seen and in which order."""

    def __init__(self, sizes: RolloutPlan, *, dies_at: int | None = None) -> None:
        super().__init__()
        self.rollout_plan = sizes
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[list[int], list[int], int]] = []
        self.held_out: list[list[int]] = []
        self.dies_at = dies_at

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        if self.dies_at == len(self.seen):
            raise RuntimeError("killed")
        self.seen.append((batch.row_ids, batch.prompt_ids, batch.cycle_step))
        return (self.weight - float(sum(row["answer"] for row in batch.rows))) ** 2

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.held_out.append(batch.row_ids)

    test_step = validation_step

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[int]:
        return batch.row_ids

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(tmp_path: Path, *callbacks: Callback, **options: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(callbacks),
        "default_root_dir": tmp_path,
        "max_epochs": 3,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


SIZES = RolloutPlan(num_generations=2, per_device_train_batch_size=2, steps_per_generation=2)
ROWS = 9  # 4 generation batches of 2 prompts, 8 micro-batches an epoch; one row is left over


class TestUnderATrainer:
    @pytest.mark.parametrize("accumulation", [1, 2, 3])
    @pytest.mark.parametrize("dies_at", [3, 4, 7, 8, 9, 15, 16, 17])
    def test_fr_120_a_run_killed_anywhere_goes_on_with_the_next_prompt(
        self, tmp_path: Path, dies_at: int, accumulation: int
    ) -> None:
        def run(module: Recorder, folder: str, **fit: Any) -> Recorder:
            saver = ModelCheckpoint(tmp_path / folder, save_last=True, every_n_train_steps=1, save_top_k=0)
            trainer(tmp_path / folder, saver, accumulate_grad_batches=accumulation).fit(
                module, PromptDataModule(rows(ROWS), seed=7), **fit
            )
            return module

        whole, killed = run(Recorder(SIZES), "whole"), Recorder(SIZES, dies_at=dies_at)
        assert len(whole.seen) == 24
        with pytest.raises(RuntimeError, match="killed"):
            run(killed, "killed")
        resumed = run(Recorder(SIZES), "resumed", ckpt_path=tmp_path / "killed" / "last.ckpt", weights_only=True)
        start = len(whole.seen) - len(resumed.seen)
        assert dies_at - accumulation < start <= dies_at
        assert resumed.seen == whole.seen[start:]
        assert torch.equal(resumed.weight, whole.weight)

    @pytest.mark.parametrize("epochs", [1, 2])
    def test_fr_120_a_run_that_stopped_at_an_epoch_end_goes_on_with_the_next_epoch(
        self, tmp_path: Path, epochs: int
    ) -> None:
        def run(max_epochs: int, folder: str, **fit: Any) -> Recorder:
            module = Recorder(SIZES)
            saver = ModelCheckpoint(tmp_path / folder, save_last=True, save_top_k=1, save_on_train_epoch_end=True)
            trainer(tmp_path / folder, saver, max_epochs=max_epochs).fit(module, PromptDataModule(rows(ROWS)), **fit)
            return module

        whole = run(3, "whole")
        first = run(epochs, "first")
        second = run(3, "second", ckpt_path=tmp_path / "first" / "last.ckpt", weights_only=True)
        assert first.seen + second.seen == whole.seen
        assert torch.equal(second.weight, whole.weight)

    def test_a_run_resumed_after_validation_in_mid_epoch_goes_on_with_the_next_prompt(self, tmp_path: Path) -> None:
        def run(module: Recorder, folder: str, **fit: Any) -> Recorder:
            saver = ModelCheckpoint(tmp_path / folder, save_last=True, every_n_epochs=1, save_on_train_epoch_end=False)
            trainer(tmp_path / folder, saver, val_check_interval=3, num_sanity_val_steps=0).fit(
                module, PromptDataModule(rows(ROWS), rows(2)), **fit
            )
            return module

        whole, killed = run(Recorder(SIZES), "whole"), Recorder(SIZES, dies_at=13)
        with pytest.raises(RuntimeError, match="killed"):
            run(killed, "killed")
        resumed = run(Recorder(SIZES), "resumed", ckpt_path=tmp_path / "killed" / "last.ckpt", weights_only=True)
        start = len(whole.seen) - len(resumed.seen)
        assert start == 11
        assert resumed.seen == whole.seen[start:]

    def test_a_checkpoint_written_while_a_step_fails_repeats_that_step(self, tmp_path: Path) -> None:
        class SaveOnException(Callback):
            def on_exception(
                self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
            ) -> None:
                trainer.save_checkpoint(tmp_path / "dying.ckpt")

        def run(module: Recorder, folder: str, **fit: Any) -> Recorder:
            trainer(tmp_path / folder, SaveOnException()).fit(module, PromptDataModule(rows(ROWS)), **fit)
            return module

        whole, killed = run(Recorder(SIZES), "whole"), Recorder(SIZES, dies_at=5)
        with pytest.raises(RuntimeError, match="killed"):
            run(killed, "killed")
        resumed = run(Recorder(SIZES), "resumed", ckpt_path=tmp_path / "dying.ckpt", weights_only=True)
        assert killed.seen + resumed.seen == whole.seen

    @pytest.mark.parametrize(("limit", "cycle_steps"), [(3, [0, 1, 0]), (0.5, [0, 1, 0, 1])])
    def test_a_limited_epoch_resumes_too(self, tmp_path: Path, limit: int | float, cycle_steps: list[int]) -> None:
        def run(module: Recorder, folder: str, **fit: Any) -> Recorder:
            saver = ModelCheckpoint(tmp_path / folder, save_last=True, every_n_train_steps=1, save_top_k=0)
            trainer(tmp_path / folder, saver, limit_train_batches=limit).fit(
                module, PromptDataModule(rows(ROWS)), **fit
            )
            return module

        whole, killed = run(Recorder(SIZES), "whole"), Recorder(SIZES, dies_at=7)
        with pytest.raises(RuntimeError, match="killed"):
            run(killed, "killed")
        resumed = run(Recorder(SIZES), "resumed", ckpt_path=tmp_path / "killed" / "last.ckpt", weights_only=True)
        assert killed.seen + resumed.seen == whole.seen
        assert torch.equal(resumed.weight, whole.weight)
        assert [step for _, _, step in whole.seen] == cycle_steps * 3

    def test_overfitting_sees_the_same_prompts_in_every_epoch(self, tmp_path: Path) -> None:
        module = Recorder(SIZES)
        trainer(tmp_path, overfit_batches=2, max_epochs=2).fit(module, PromptDataModule(rows(ROWS)))
        assert [ids for ids, _, _ in module.seen] == [[0, 1]] * 4

    def test_fit_goes_on_without_held_out_prompts_and_validate_names_what_is_missing(self, tmp_path: Path) -> None:
        module = Recorder(SIZES)
        trainer(tmp_path, max_epochs=1).fit(module, PromptDataModule(rows(ROWS)))
        assert module.held_out == []
        runner = trainer(tmp_path, max_epochs=1)
        runner.fit(module, PromptDataModule(rows(ROWS)))
        runner.validate(module, PromptDataModule(validation=rows(1)), verbose=False)
        assert module.held_out == [[0]]
        with pytest.raises(ValueError, match=r"`validation` must be given, got None. .*built with \['train'\]"):
            runner.validate(module, PromptDataModule(rows(ROWS)), verbose=False)

    def test_validate_test_and_predict_see_every_held_out_row(self, tmp_path: Path) -> None:
        module, data = Recorder(SIZES), PromptDataModule(validation=rows(5), test=rows(3))
        trainer(tmp_path).validate(module, data, verbose=False)
        trainer(tmp_path).test(module, data, verbose=False)
        assert module.held_out == [[0, 1], [2, 3], [4], [0, 1], [2]]
        assert trainer(tmp_path).predict(module, data) == [[0, 1], [2, 3], [4]]

    def test_the_share_follows_the_data_parallel_rank_not_the_world(self) -> None:
        data = PromptDataModule(rows(8), rows(8), shuffle=False)
        data.setup()
        data.trainer = SimpleNamespace(  # 8 processes: 4 shards of the model for each of 2 replicas
            distributed_sampler_kwargs={"num_replicas": 2, "rank": 1},
            world_size=8,
            global_rank=7,
            limit_train_batches=1.0,
            overfit_batches=0.0,
            lightning_module=SimpleNamespace(rollout_plan=SIZES),
            state=SimpleNamespace(fn="fit"),
        )
        assert next(iter(data.train_dataloader())).row_ids == [2, 3]
        assert [batch.row_ids for batch in data.val_dataloader()] == [[4, 5], [6, 7]]

    def test_a_module_without_a_plan_is_refused(self, tmp_path: Path) -> None:
        module = Recorder(SIZES)
        module.rollout_plan = None
        with pytest.raises(TypeError, match="`model` must have a `rollout_plan`"):
            trainer(tmp_path).fit(module, PromptDataModule(rows(ROWS)))


class TestOptions:
    def test_held_out_rows_are_drawn_once_and_never_trained_on(self) -> None:
        def drawn(size: int | float) -> tuple[list[int], list[int]]:
            data = PromptDataModule(rows(10), validation_size=size, seed=1)
            data.setup()
            return [row["answer"] for row in data.train_rows], [row["answer"] for row in data.validation_rows]

        train, held = drawn(3)
        assert sorted(train + held) == list(range(10))
        assert len(held) == 3
        assert drawn(3) == (train, held) == drawn(0.3)

    @pytest.mark.parametrize("size", [0, -1, 1.0, 0.0, float("nan"), True, "0.1"])
    def test_fr_147_odd_held_out_sizes_are_refused(self, size: Any) -> None:
        with pytest.raises(ValueError, match="`validation_size` must be"):
            PromptDataModule(rows(4), validation_size=size)

    def test_holding_out_everything_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`validation_size` must leave at least one of the 4 rows"):
            PromptDataModule(rows(4), validation_size=4).setup()

    @pytest.mark.parametrize(("field", "value"), [("shuffle", 1), ("seed", -1), ("seed", 2**31), ("seed", True)])
    def test_odd_options_are_refused(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"`{field}` must be"):
            PromptDataModule(rows(4), **{field: value})
