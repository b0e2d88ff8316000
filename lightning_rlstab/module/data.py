"""Prompts for GRPO from files, ``datasets``, functions or rows, served to a Lightning Trainer rank by rank."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from lightning_rlstab.core.checks import flag, integer, number, refusal
from lightning_rlstab.module.dataset_files import PromptRows, PromptSource, is_hub_name, prompt_rows
from lightning_rlstab.module.plan import RolloutPlan
from lightning_rlstab.module.prompt_loaders import EvalPromptLoader, PromptBatch, TrainPromptLoader

__all__ = ["PromptBatch", "PromptDataModule", "RolloutPlan"]


class PromptDataModule(LightningDataModule):
    """Prompts for training and held-out prompts for ``validate``, ``test`` and ``predict``.

    The sizes come from the module's ``rollout_plan``; ranks and their number from the trainer, so that the ranks of one
    tensor-parallel group see the same prompts. The loaders do their own sharding: Lightning never replaces their order.

    Args:
        train: Where training prompts come from: a JSONL, JSON, Parquet or CSV file, a ``datasets`` directory or hub
            name, an import path ``"package.module:function"``, a mapping ``{"path": ..., "split": ...,
            "kwargs": ...}``, rows, a ``datasets.Dataset`` or a function (see ``dataset_files.prompt_rows``).
        validation: Held-out prompts, named likewise; None for none.
        test: Prompts for ``trainer.test``; None for those of ``validation``.
        predict: Prompts for ``trainer.predict``; None for those of ``validation``.
        validation_size: Without ``validation``: how many rows (a whole number) or which share of them (below 1) to hold
            out of ``train``, drawn with ``seed``.
        shuffle: Whether each epoch visits the training prompts in a new order.
        seed: Seed of the order and of the held-out draw, 0 to 2**31 - 1.

    Raises:
        ValueError: At construction for bad options, at set-up for bad data, naming the field.

    Example:
        >>> data = PromptDataModule([{"prompt": "1+1="}, {"prompt": "1+2="}], validation_size=1)
        >>> data.setup("fit")
        >>> len(data.train_rows), len(data.validation_rows)
        (1, 1)
    """

    def __init__(
        self,
        train: PromptSource | None = None,
        validation: PromptSource | None = None,
        *,
        test: PromptSource | None = None,
        predict: PromptSource | None = None,
        validation_size: int | float | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._sources = {"train": train, "validation": validation, "test": test, "predict": predict}
        self._validation_size = validation_size
        self._shuffle = flag("shuffle", shuffle)
        self._seed = integer("seed", seed, at_least=0, at_most=2**31 - 1)
        self._rows: dict[str, PromptRows] = {}
        self._train_loader: TrainPromptLoader | None = None
        self._restored: dict[str, Any] | None = None
        self._validation_limit: int | float | None = None
        if validation_size is not None:
            if validation is not None:
                raise refusal("validation_size", "be left out when `validation` is given", validation_size)
            if isinstance(validation_size, float):
                number("validation_size", validation_size, above=0, below=1)
            else:
                integer("validation_size", validation_size, at_least=1)

    @property
    def train_rows(self) -> PromptRows:
        """The training rows; after ``setup``."""
        return self._needed("train")

    @property
    def validation_rows(self) -> PromptRows:
        """The held-out rows; after ``setup``."""
        return self._needed("validation")

    def prepare_data(self) -> None:
        """Download hub data sets in one process, before every process reads them."""
        for field, source in self._sources.items():
            if is_hub_name(source):
                prompt_rows(field, source)

    def setup(self, stage: str | None = None) -> None:
        """Read and check the rows of every given source, once; without held-out prompts ``fit`` runs no validation."""
        if not self._rows:
            self._rows = self._read()
        if stage == "fit" and self.trainer is not None and "validation" not in self._rows:
            # A loader of length 0 would make Lightning warn, and there is no empty form that it takes for "none".
            self._validation_limit = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0

    def teardown(self, stage: str | None = None) -> None:
        """Leave the trainer's validation limit as it was."""
        if stage == "fit" and self.trainer is not None and self._validation_limit is not None:
            self.trainer.limit_val_batches = self._validation_limit
            self._validation_limit = None

    def train_dataloader(self) -> TrainPromptLoader:
        """The training stream of this rank, at the position of the checkpoint where one was loaded."""
        rows, plan, trainer = self._needed("train"), self._plan(), self._attached()
        loader = TrainPromptLoader(
            rows,
            plan,
            **self._place(),
            # Overfitting on a few batches needs the same ones in every epoch.
            shuffle=self._shuffle and not trainer.overfit_batches,
            seed=self._seed,
            max_batches=_limit(trainer.limit_train_batches, len(rows), plan, self._place()["replicas"]),
            in_flight=lambda: _unfinished_batches(trainer),
        )
        if self._restored is not None:
            loader.load_state_dict(self._restored)
            self._restored = None
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> EvalPromptLoader:
        """The held-out prompts of this rank."""
        return self._eval_loader("validation")

    def test_dataloader(self) -> EvalPromptLoader:
        """The prompts of ``test``, or the held-out ones."""
        return self._eval_loader("test" if "test" in self._rows else "validation")

    def predict_dataloader(self) -> EvalPromptLoader:
        """The prompts of ``predict``, or the held-out ones."""
        return self._eval_loader("predict" if "predict" in self._rows else "validation")

    def state_dict(self) -> dict[str, Any]:
        """The training position; saved here too because Lightning restores loaders only when resuming mid-epoch."""
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the position for the train loader that ``fit`` is about to ask for."""
        self._restored = state_dict.get("train")

    def _read(self) -> dict[str, PromptRows]:
        rows = {field: prompt_rows(field, source) for field, source in self._sources.items() if source is not None}
        if self._validation_size is not None:
            if "train" not in rows:
                raise refusal("validation_size", "be left out without `train`", self._validation_size)
            rows["train"], rows["validation"] = _held_out(rows["train"], self._validation_size, self._seed)
        return rows

    def _eval_loader(self, field: str) -> EvalPromptLoader:
        return EvalPromptLoader(self._needed(field), self._plan().eval_prompts, **self._place())

    def _needed(self, field: str) -> PromptRows:
        if field not in self._rows:
            given = [name for name, source in self._sources.items() if source is not None]
            raise refusal(field, "be given", None, f"This data module was built with {given or 'no prompts at all'}")
        return self._rows[field]

    def _attached(self) -> Any:
        if self.trainer is None:
            raise RuntimeError("`PromptDataModule` must be attached to a trainer before its loaders are used.")
        return self.trainer

    def _plan(self) -> RolloutPlan:
        module = self._attached().lightning_module
        plan = getattr(module, "rollout_plan", None)
        if not isinstance(plan, RolloutPlan):
            raise TypeError(
                f"`model` must have a `rollout_plan` (a RolloutPlan), got a {type(module).__name__} without one. "
                "Use GRPOModule, or set the attribute."
            )
        return plan

    def _place(self) -> dict[str, int]:
        # Not the world size: ranks that share one model replica must see the same prompts.
        place = self._attached().distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return {"replicas": place["num_replicas"], "rank": place["rank"]}


def _held_out(rows: PromptRows, size: int | float, seed: int) -> tuple[PromptRows, PromptRows]:
    total = len(rows)
    count = size if isinstance(size, int) else max(1, round(total * size))
    if count >= total:
        raise refusal("validation_size", f"leave at least one of the {total} rows for training", size)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    held, kept = sorted(order[:count]), sorted(order[count:])
    select = getattr(rows, "select", None)
    if select is not None:
        return select(kept), select(held)
    return [rows[index] for index in kept], [rows[index] for index in held]


def _limit(limit: int | float, rows: int, plan: RolloutPlan, replicas: int) -> int | None:
    """Lightning's ``limit_train_batches`` as a number of micro-batches."""
    if isinstance(limit, int):
        return limit
    whole = rows // (plan.prompts_per_generation * replicas) * plan.cycle_length
    return int(whole * limit)


def _unfinished_batches(trainer: Any) -> int:
    """1 while a training step runs: a checkpoint written on an exception must not skip the batch that raised."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.ready - progress.processed)
