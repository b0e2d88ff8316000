"""Which rows each rank samples from at each micro-batch, and where a resumed run goes on.

One *generation batch* is sampled once and then trained on for ``steps_per_generation * num_iterations`` micro-batches.
The train loader therefore yields the same ``PromptBatch`` that many times, numbered by ``cycle_step``. Ranks take
contiguous shares of whole groups, and all ranks see batches of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlstab.module.dataset_files import PromptRows
from lightning_rlstab.module.plan import RolloutPlan

__all__ = ["EvalPromptLoader", "PromptBatch", "TrainPromptLoader"]


class PromptBatch(NamedTuple):
    """The prompts that one rank handles at one micro-batch (a tuple, so ``len`` is its number of fields).

    Attributes:
        rows: One row per prompt, each with ``prompt`` and every other column of the data set.
        prompt_ids: The group id of each prompt. Counted over the whole run and over all ranks, so that the same row in
            another epoch is another group.
        row_ids: Position of each row in the data set.
        cycle_step: Micro-batch within this generation batch, from 0: sample at 0, slice the buffer afterwards.
        cycle_length: Number of micro-batches for which this generation batch is used.
        is_padding: True for rows repeated only to give every rank the same number; metrics leave them out.
    """

    rows: list[dict[str, Any]]
    prompt_ids: list[int]
    row_ids: list[int]
    cycle_step: int
    cycle_length: int
    is_padding: list[bool]


class TrainPromptLoader:
    """An endless, resumable stream of generation batches, cut into epochs.

    Epoch ``e`` visits the rows in a permutation drawn from ``(seed, e)`` alone; its last incomplete generation batch
    is dropped. The position is a plain count that advances when a batch is handed out, so iterating anew
    (Lightning does so a varying number of times around a resume) never loses or repeats a batch.

    Args:
        rows: The data set.
        plan: Sizes per rank.
        replicas: Number of data-parallel ranks.
        rank: This data-parallel rank.
        shuffle: Whether to permute the rows of each epoch.
        seed: Seed of the permutations, 0 to 2**31 - 1.
        max_batches: Micro-batches after which an epoch ends early; None for all.
        in_flight: Says how many batches were handed out but not finished; a saved position goes back before them.

    Example:
        >>> plan = RolloutPlan(num_generations=2, per_device_train_batch_size=2, steps_per_generation=2)
        >>> rows = [{"prompt": str(n)} for n in range(5)]
        >>> loader = TrainPromptLoader(rows, plan, shuffle=False)
        >>> [(batch.row_ids, batch.cycle_step) for batch in loader]
        [([0, 1], 0), ([0, 1], 1), ([2, 3], 0), ([2, 3], 1)]
    """

    def __init__(
        self,
        rows: PromptRows,
        plan: RolloutPlan,
        *,
        replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        max_batches: int | None = None,
        in_flight: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rows = rows
        self.plan = plan
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self._in_flight = in_flight
        self._global_prompts = plan.prompts_per_generation * replicas
        self._generations = len(rows) // self._global_prompts
        if self._generations == 0:
            raise ValueError(
                f"`train` must hold at least one generation batch of {self._global_prompts} prompts "
                f"({plan.per_device_train_batch_size} completions * {plan.steps_per_generation} steps "
                f"* {replicas} ranks / {plan.num_generations} generations), got {len(rows)} rows. Add rows or lower "
                "`per_device_train_batch_size` or `steps_per_generation`."
            )
        whole = self._generations * plan.cycle_length
        self._epoch_batches = whole if max_batches is None else max(1, min(whole, max_batches))
        self._epoch = 0
        self._batch = 0
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return self._generations * self.plan.cycle_length

    def __iter__(self) -> Iterator[PromptBatch]:
        while True:
            batch = self._current()
            self._batch += 1
            is_epoch_over = self._batch >= self._epoch_batches
            if is_epoch_over:
                self._epoch, self._batch = self._epoch + 1, 0
            yield batch
            if is_epoch_over:
                return

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, with the sizes it was counted in; the same on every rank."""
        epoch, batch = divmod(self._epoch * self._epoch_batches + self._batch - self._in_flight(), self._epoch_batches)
        return {"epoch": epoch, "batch": batch, **self._counted_in()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a saved position.

        With other sizes (another number of ranks, another batch) the stream goes on at the generation batch that holds
        the first prompt not yet sampled from, and says so. With other rows or another order the epoch starts again.
        """
        epoch, batch = int(state_dict["epoch"]), int(state_dict["batch"])
        now = self._counted_in()
        changed = {name: (state_dict[name], value) for name, value in now.items() if state_dict[name] != value}
        words = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changed.items())
        if changed.keys() & {"rows", "seed", "shuffle"}:
            rank_zero_warn(f"The training prompts changed since the checkpoint ({words}): epoch {epoch} starts anew.")
            batch = 0
        elif changed.keys() & {"prompts_per_generation", "cycle_length"}:
            prompts = batch // state_dict["cycle_length"] * state_dict["prompts_per_generation"]
            batch = prompts // self._global_prompts * self.plan.cycle_length
            rank_zero_warn(
                f"The generation batch changed since the checkpoint ({words}): going on at prompt "
                f"{batch // self.plan.cycle_length * self._global_prompts} of epoch {epoch}."
            )
        if batch >= self._epoch_batches:
            epoch, batch = epoch + 1, 0
        self._epoch, self._batch = epoch, batch

    def _counted_in(self) -> dict[str, Any]:
        return {
            "rows": len(self.rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts_per_generation": self._global_prompts,
            "cycle_length": self.plan.cycle_length,
        }

    def _current(self) -> PromptBatch:
        generation, cycle_step = divmod(self._batch, self.plan.cycle_length)
        share = self.plan.prompts_per_generation
        start = generation * self._global_prompts + self._rank * share
        row_ids = self._order(self._epoch)[start : start + share]
        first_id = self._epoch * self._generations * self._global_prompts + start
        return PromptBatch(
            rows=[dict(self.rows[row]) for row in row_ids],
            prompt_ids=list(range(first_id, first_id + share)),
            row_ids=row_ids,
            cycle_step=cycle_step,
            cycle_length=self.plan.cycle_length,
            is_padding=[False] * share,
        )

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self.rows)))
        # torch's CPU generator keeps 32 bits of a seed; the prime keeps (0, 1) and (1, 0) apart.
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**32)
        order: list[int] = torch.randperm(len(self.rows), generator=generator).tolist()
        return order


class EvalPromptLoader:
    """Held-out prompts in their given order, a contiguous share per rank, batches of equal size on every rank.

    The shares are evened out with repeated rows, marked in ``is_padding``: a rank with one batch more would wait for
    the others for ever in its next collective.

    Args:
        rows: The data set.
        prompts: Prompts per batch and rank.
        replicas: Number of data-parallel ranks.
        rank: This data-parallel rank.

    Example:
        >>> rows = [{"prompt": str(n)} for n in range(3)]
        >>> [(batch.row_ids, batch.is_padding) for batch in EvalPromptLoader(rows, 2, replicas=2, rank=1)]
        [([2, 0], [False, True])]
    """

    def __init__(self, rows: PromptRows, prompts: int, *, replicas: int = 1, rank: int = 0) -> None:
        self.rows = rows
        self._prompts = prompts
        self._share = math.ceil(len(rows) / replicas)
        self._first = rank * self._share

    def __len__(self) -> int:
        return math.ceil(self._share / self._prompts)

    def __iter__(self) -> Iterator[PromptBatch]:
        total = len(self.rows)
        for start in range(0, self._share, self._prompts):
            stop = min(start + self._prompts, self._share)
            positions = list(range(self._first + start, self._first + stop))
            row_ids = [position % total for position in positions]
            yield PromptBatch(
                rows=[dict(self.rows[row]) for row in row_ids],
                prompt_ids=positions,
                row_ids=row_ids,
                cycle_step=0,
                cycle_length=1,
                is_padding=[position >= total for position in positions],
            )
