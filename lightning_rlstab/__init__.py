"""Stable, explainable GRPO training of language models on PyTorch Lightning.

The names below are loaded on first use, so that importing the package costs no more than importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401

if TYPE_CHECKING:
    from lightning_rlstab.cli import RLStabCLI
    from lightning_rlstab.module.data import PromptDataModule
    from lightning_rlstab.module.grpo import GRPOModule

__all__ = ["GRPOModule", "PromptDataModule", "RLStabCLI", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "GRPOModule": "lightning_rlstab.module.grpo",
    "PromptDataModule": "lightning_rlstab.module.data",
    "RLStabCLI": "lightning_rlstab.cli",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    importlib.import_module("lightning_rlstab.strategies")  # registers "rlstab", "rlstab_ddp" and "rlstab_fsdp"
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
