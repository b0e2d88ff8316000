"""One configuration, two trainers: ours and TRL's from the same weights, rows, rewards and ``GRPOConfig``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Rows = list[dict[str, str]]


def quiet() -> None:
    """Leave the output to the figures."""
    import lightning.pytorch  # noqa: F401  # sets its loggers' level on import
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def grpo_config(output_dir: str, **changes: Any) -> Any:
    """A ``GRPOConfig`` for the CPU in float32 that logs every step to nowhere and keeps the rows' order."""
    from trl import GRPOConfig

    fields = {
        "output_dir": output_dir,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "model_init_kwargs": {"dtype": "float32"},
        **changes,
    }
    return GRPOConfig(**fields)


def even_share(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that spreads within every group: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def trl_trainer(
    config: Any,
    model: str,
    tokenizer: Any,
    rows: Rows,
    *,
    rollout_func: Callable[..., Any] | None = None,
    reward: Callable[..., list[float]] = even_share,
    trainer_class: type[Any] | None = None,
) -> Any:
    """TRL's trainer, or a subclass of it, on the weights of a directory."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    trainer = (trainer_class or GRPOTrainer)(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def our_trainer(
    config: Any,
    model: str,
    tokenizer: Any,
    rows: Rows,
    *,
    callbacks: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
    reward: Callable[..., list[float]] = even_share,
    **arguments: Any,
) -> tuple[Any, Any, Any]:
    """A Lightning Trainer, our module from the same ``GRPOConfig`` and weights, and a data module."""
    from lightning.pytorch import Trainer

    from lightning_rlstab import GRPOModule, PromptDataModule

    module = GRPOModule.from_trl(config, model=model, reward_funcs=[reward], processing_class=tokenizer, **arguments)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=config.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=config.gradient_accumulation_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **dict(options or {}),
    )
    return trainer, module, PromptDataModule(rows, shuffle=False)


def versions() -> dict[str, str]:
    """Of the packages that decide the figures."""
    import lightning
    import transformers
    import trl

    return {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
    }
