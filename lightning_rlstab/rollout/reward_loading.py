"""Find a reward function by what the user wrote, and name it."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from lightning_rlstab.core.checks import nearest_name, refusal

__all__ = ["is_model_spec", "load_reward", "reward_name"]


def is_model_spec(spec: Any) -> bool:
    """Whether a string names a sequence classifier: a hub id or path with a slash, or an existing directory.

    Example:
        >>> is_model_spec("org/reward-model"), is_model_spec("my_rewards.accuracy")
        (True, False)
    """
    return isinstance(spec, str) and ("/" in spec or os.path.isdir(spec))


def load_reward(spec: Any) -> Callable[..., Any]:
    """The reward function behind a callable or an import path.

    Args:
        spec: A callable, or a string such as ``"package.module.function"`` or ``"package.module:function"``.

    Returns:
        The callable.

    Raises:
        ValueError: If nothing can be called there; the nearest name of the module is given.

    Example:
        >>> load_reward("math:sqrt")(4.0)
        2.0
    """
    if callable(spec):
        return spec  # type: ignore[no-any-return]
    if not isinstance(spec, str):
        raise refusal("reward_funcs", "be callables or import paths", spec)
    if is_model_spec(spec):
        advice = "Sequence classifiers are loaded by ClassifierReward of the module room"
        raise refusal("reward_funcs", "be an import path here", spec, advice)
    module_name, _, attributes = spec.partition(":") if ":" in spec else spec.rpartition(".")
    if not module_name or not attributes:
        raise refusal("reward_funcs", "be an import path such as 'my_rewards.accuracy'", spec)
    found = _imported(module_name, spec)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            public = [name for name in dir(found) if not name.startswith("_")]
            close = nearest_name(attribute, public)
            advice = f"Did you mean {close!r}" if close else f"{module_name} has no {attribute!r}"
            raise refusal("reward_funcs", f"name something inside {module_name!r}", spec, advice)
        found = getattr(found, attribute)
    if not callable(found):
        raise refusal("reward_funcs", "name a function", spec, f"It is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _imported(module_name: str, spec: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing package inside the user's own module is that module's error, not a wrong path.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        advice = "Check the spelling and that its folder is on PYTHONPATH"
        raise refusal("reward_funcs", "name an importable module", spec, advice) from error


def reward_name(func: Any) -> str:
    """The name a function's metrics carry: its ``__name__``, a model's id without the owner, or its class.

    Example:
        >>> reward_name(functools.partial(len))
        'len'
    """
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, str):
        return func.rstrip("/").replace(":", ".").split("/")[-1].split(".")[-1] or func
    return str(getattr(func, "__name__", type(func).__name__))
