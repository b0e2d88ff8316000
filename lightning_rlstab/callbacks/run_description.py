"""What a run is, in plain data: its callbacks with their settings, and the flat table of hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import lightning.pytorch as pl

__all__ = ["callback_settings", "hyper_parameters", "run_description"]

_PACKAGE = __name__.partition(".")[0]
_LAYERS = (
    "GEPO",
    "OPEFO",
    "QUATRO",
    "GradLoc",
    "TokenClip",
    "SeqClip",
    "LayerClip",
    "StabilityMonitor",
    "FireDrill",
)
_NO_SETTINGS = {"state", "needs_token_signals"}
_MISSING = object()


def run_description(trainer: pl.Trainer) -> dict[str, Any]:
    """The fields of a run's ``config`` event.

    Args:
        trainer: The Trainer, at the start of training.

    Returns:
        Callbacks in the Trainer's order, ours with their settings, and what else decides how a step is made.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {
        "callbacks": [{"name": type(one).__name__, **callback_settings(one)} for one in callbacks],
        "strategy": type(trainer.strategy).__name__,
        "processes": trainer.world_size,
        "precision": str(trainer.precision),
        "max_steps": trainer.max_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "text": ", ".join(type(one).__name__ for one in callbacks),
    }


def callback_settings(callback: pl.Callback) -> dict[str, Any]:
    """The public settings of one of the package's callbacks as plain data; of any other callback nothing.

    Example:
        >>> from lightning_rlstab.callbacks import SeqClip
        >>> callback_settings(SeqClip())
        {'low': 0.5, 'high': 2.0, 'mode': 'mask'}
    """
    if not type(callback).__module__.startswith(f"{_PACKAGE}."):
        return {}
    chosen = {name: value for name, value in vars(callback).items() if name[0] != "_" and name not in _NO_SETTINGS}
    plain = {name: _plain(value) for name, value in chosen.items()}
    return {name: value for name, value in plain.items() if value is not _MISSING}


def hyper_parameters(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, int | float | str]:
    """The module's settings and which layers are on: the same names in every run, as a table needs.

    Args:
        trainer: The Trainer.
        pl_module: The module; its ``settings`` record is taken where it has one.
    """
    settings = getattr(pl_module, "settings", None)
    fields = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else {}
    found = {name: _cell(value) for name, value in fields.items()}
    present = {type(callback).__name__ for callback in trainer.callbacks}  # type: ignore[attr-defined]
    others = {"max_steps": trainer.max_steps, "accumulate_grad_batches": trainer.accumulate_grad_batches}
    return {**found, **others, **{layer: "on" if layer in present else "off" for layer in _LAYERS}}


def _cell(value: Any) -> int | float | str:
    """Numbers as they are; TensorBoard's writer would take a bool for one."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """Plain data as it is, records as mappings, functions by name; ``_MISSING`` for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return _all_plain(value.keys(), value.values())
    if isinstance(value, list | tuple):
        items = _all_plain(range(len(value)), value)
        return items if items is _MISSING else list(items.values())
    return getattr(value, "__name__", _MISSING) if callable(value) else _MISSING


def _all_plain(keys: Iterable[Any], values: Iterable[Any]) -> Any:
    found = {str(key): _plain(value) for key, value in zip(keys, values, strict=True)}
    return _MISSING if any(value is _MISSING for value in found.values()) else found
