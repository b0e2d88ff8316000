"""``lightning-rlstab fit|validate|test|predict|ablate``: LightningCLI that knows every room of the package."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

import lightning_rlstab.callbacks  # makes their short names known to YAML files
import lightning_rlstab.strategies  # noqa: F401  # registers "rlstab", "rlstab_ddp", "rlstab_fsdp"
from lightning_rlstab.control.snapshots import newest_of_runs
from lightning_rlstab.core.checks import nearest_name
from lightning_rlstab.module.data import PromptDataModule
from lightning_rlstab.module.grpo import GRPOModule
from lightning_rlstab.report.ablation import ablate

__all__ = ["RLStabCLI", "main", "shelf"]

_PACKAGE = Path(__file__).parent
_ROOT = "runs"
_ABLATE = "`lightning-rlstab ablate --config FILE` runs one layer switched off at a time and prints the table."


def shelf(kind: str, name: str) -> Path:
    """A YAML file that comes with the package.

    Args:
        kind: ``"configs"`` (whole runs) or ``"callbacks"`` (fragments to stack).
        name: File name, with or without ``.yaml``, e.g. ``"demo"`` or ``"stages/1_baseline"``.

    Returns:
        The path inside the installed package, or inside the repository for an editable install.

    Raises:
        FileNotFoundError: If there is no such file, naming those that exist.
    """
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    roots = [_PACKAGE / "shelf" / kind, _PACKAGE.parent / kind]
    for root in roots:
        if (root / file).is_file():
            return root / file
    known = sorted({str(path.relative_to(root)) for root in roots if root.is_dir() for path in root.rglob("*.yaml")})
    raise FileNotFoundError(f"`{kind}` must hold {file!r}, got only: {', '.join(known) or 'nothing'}.")


def _packaged(path: str) -> str:
    """``configs/demo.yaml`` as the file that comes with the package, unless the working directory has such a file."""
    kind, _, name = path.partition("/")
    if Path(path).is_file() or kind not in ("configs", "callbacks") or not name:
        return path
    return str(shelf(kind, name))


def _with_packaged_configs(arguments: Sequence[str]) -> list[str]:
    resolved: list[str] = []
    for argument in arguments:
        flag, equals, attached = argument.partition("=")
        if resolved and resolved[-1] in ("--config", "-c"):
            resolved.append(_packaged(argument))
        elif equals and flag in ("--config", "-c"):
            resolved.append(f"{flag}={_packaged(attached)}")
        else:
            resolved.append(argument)
    return resolved


class _Parser(LightningArgumentParser):
    """Answers a misspelt key with the nearest one that exists."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(f"{message}{self._suggestion(message)}", ex)

    def _suggestion(self, message: str) -> str:
        unknown = re.search(
            r"(?:does not accept (?:option|nested key)|[Kk]ey|[Oo]ption) '([\w.+-]+)'"
            r"|[Uu]nrecognized arguments: --([\w.+-]+)"
            r"|No action for key \"?([\w.+-]+)",
            message,
        )
        if unknown is None:
            return ""
        name = next(group for group in unknown.groups() if group)
        close = nearest_name(name.split(".")[-1], {key.split(".")[-1] for key in self._known_keys()})
        return f"\nDid you mean {close!r}?" if close else ""

    def _known_keys(self) -> Iterator[str]:
        parsers: list[Any] = [self]
        while parsers:
            parser = parsers.pop()
            for action in parser._actions:
                if isinstance(action.dest, str):
                    yield action.dest
                choices = getattr(action, "choices", None)
                if isinstance(choices, dict):
                    parsers.extend(choice for choice in choices.values() if hasattr(choice, "_actions"))


class RLStabCLI(LightningCLI):
    """LightningCLI around :class:`GRPOModule` and :class:`PromptDataModule`.

    Fragments stack: ``fit --config configs/base.yaml --config callbacks/gepo.yaml``; a config or fragment that comes
    with the package is found by that name from any directory. The merged configuration is saved as ``config.yaml`` in
    the run folder, and after ``fit`` the policy lies there in Hugging Face format under ``policy/``.

    Args:
        model_class: A subclass of :class:`GRPOModule`, or None for itself.
        datamodule_class: A data module class, or None for :class:`PromptDataModule`.
        args: Command line; None for ``sys.argv``.
        run: Whether to run the subcommand; False only builds the objects.
        **kwargs: Further arguments of ``LightningCLI``.
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        *,
        args: ArgsType = None,
        run: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model_class or GRPOModule,
            datamodule_class or PromptDataModule,
            save_config_callback=kwargs.pop("save_config_callback", SaveConfigCallback),
            save_config_kwargs={"overwrite": True, **kwargs.pop("save_config_kwargs", {})},
            auto_configure_optimizers=False,
            trainer_defaults={
                # A first forward under inference mode breaks later training on sharded weights.
                "inference_mode": False,
                "log_every_n_steps": 1,
                **kwargs.pop("trainer_defaults", {}),
            },
            args=args,
            run=run,
            **kwargs,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """The parser, with answers to misspelt keys."""
        header = [f"lightning-rlstab {self._version()}"]
        parser = _Parser(**{"dump_header": header, "epilog": _ABLATE, **kwargs})
        parser.add_argument("-c", "--config", action="config", help="Path to a configuration file; may be repeated.")
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, with packaged files found by name.

        Args:
            parser: The parser.
            args: Command line; None for ``sys.argv``.
        """
        if args is None:
            self.config = parser.parse_args(_with_packaged_configs(sys.argv[1:]))
        else:
            super().parse_arguments(parser, _with_packaged_configs(args) if isinstance(args, list | tuple) else args)

    def before_instantiate_classes(self) -> None:
        """Put the newest snapshot of the runs under the Trainer's root in the place of ``--ckpt_path auto``."""
        chosen = self.config.get(self.subcommand) if self.subcommand else None
        if chosen is None or chosen.get("ckpt_path") != "auto":
            return
        root = chosen.trainer.default_root_dir or _ROOT
        newest = newest_of_runs(root)
        rank_zero_info("Resuming from %s.", newest) if newest else rank_zero_info("No snapshot under %s.", root)
        chosen.ckpt_path = None if newest is None else str(newest)

    @staticmethod
    def _version() -> str:
        from lightning_rlstab import __version__

        return __version__

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """The Trainer; logs to ``runs/`` and shows a rich progress bar where rich is there, unless told otherwise."""
        trainer = self._get(self.config_init, "trainer", default={})
        if trainer.get("logger") is None and "logger" not in kwargs:
            root = trainer.get("default_root_dir") or _ROOT
            kwargs["logger"] = TensorBoardLogger(save_dir=root, name=None, default_hp_metric=False)
        if self._wants_rich(trainer):
            given = kwargs.get("callbacks", trainer.get("callbacks")) or []
            kwargs["callbacks"] = [*(given if isinstance(given, list) else [given]), RichProgressBar(leave=True)]
        return super().instantiate_trainer(**kwargs)

    @staticmethod
    def _wants_rich(trainer: Any) -> bool:
        has_bar = any(isinstance(item, RichProgressBar) for item in trainer.get("callbacks") or [])
        return (
            trainer.get("enable_progress_bar") is not False
            and not has_bar
            and find_spec("rich") is not None
            and sys.stdout.isatty()
        )

    def after_fit(self) -> None:
        """Write the trained policy and its tokenizer into the run folder."""
        if self.trainer.log_dir is not None and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.model.save_pretrained(Path(self.trainer.log_dir) / "policy")


def main(args: ArgsType = None) -> None:
    """Entry point of the console script.

    Args:
        args: Command line; None for ``sys.argv``.
    """
    # Lightning 2.6.6 makes tree specs in a way that torch 2.13 has deprecated; nothing a user could act on.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
    arguments = sys.argv[1:] if args is None else args
    if isinstance(arguments, list | tuple) and list(arguments[:1]) == ["ablate"]:
        raise SystemExit(ablate([str(argument) for argument in arguments[1:]], configs=shelf("configs", "base").parent))
    RLStabCLI(args=args)


if __name__ == "__main__":
    main()
